"""A program is answered by a real vLLM engine, and trains it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from recipes.grpo_helper import column, run_script

pytestmark = pytest.mark.vllm
PROGRAM = Path(__file__).parents[2] / "docs/source/howto/programs/openai_calculator.py"


def test_a_calculator_agent_of_openais_client_is_trained_with_an_engine(tmp_path, monkeypatch):
    rows = run_script(
        monkeypatch,
        tmp_path,
        "env=calculator",
        f"agent.program={PROGRAM}:run",
        "inference_model.backend=vllm",
        "train.max_steps=6",
        "train.prompts_per_batch=16",
        "env.repeats=8",
        "inference_model.max_tokens=40",
        "optimizer.lr=4e-4",
        "eval.interval=6",
        "eval.num_prompts=64",
    )
    assert column(rows, "train/env_errors") == []
    before, *_, after = column(rows, "eval/accuracy")
    assert before < 0.6
    assert after > 0.8
