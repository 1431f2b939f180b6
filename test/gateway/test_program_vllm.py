"""A program is answered by a real vLLM engine, and trains it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from modules.backends.vllm.engine_helper import small_backend
from recipes.grpo_helper import column, run_script
from waiting import wait_until

from torchrl_llm.gateway.calls import Call
from torchrl_llm.gateway.policy_engine import PolicyEngine
from torchrl_llm.gateway.session import Formatters, GatewaySession
from torchrl_llm.modules import vLLMWrapper

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


def test_a_client_that_leaves_frees_the_engine_before_its_next_step(tokenizer, monkeypatch):
    backend = small_backend()
    inner, reached, go_on = backend.engine.llm_engine, threading.Event(), threading.Event()
    step, steps = inner.step, iter(range(1, 1000))

    def held():
        if next(steps) == 5:
            reached.set()
            assert go_on.wait(60)
        return step()

    monkeypatch.setattr(inner, "step", held)
    policy = vLLMWrapper(backend, generate_kwargs={"max_new_tokens": 200, "ignore_eos": True})
    call = Call(messages=({"role": "user", "content": "What is 2 + 2?"},))

    async def leave(session):
        task = asyncio.create_task(session.answer(call))
        await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()

    with PolicyEngine(policy) as engine:
        asyncio.run(leave(GatewaySession(engine, Formatters(tokenizer))))
        wait_until(lambda: backend.num_unfinished == 0)
    assert next(steps) == 6
