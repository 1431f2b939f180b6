"""A run in two parts has the weights of a run in one, bit for bit, with deterministic kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes.grpo_helper import weights

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
torch.use_deterministic_algorithms(True)
from torchrl_llm import GRPO
device, *runs = sys.argv[1:]
for run in runs:
    folder, steps = run.split(":")
    GRPO(
        folder=folder,
        train={"max_steps": int(steps), "prompts_per_batch": 4, "device": device,
               "optim_batch_size": 8},
        **{"env.repeats": 4},
        eval={"num_prompts": 0},
        optimizer={"scheduler": "constant", "warmup_steps": 0},
        logging={"progress": False, "samples": None},
        checkpoint={"resume": "auto"},
    ).train()
"""


def start(device, *runs):
    """Begin runs, or go on with them, one after the other in a process of their own."""
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, device.type, *runs]
    return subprocess.Popen(
        command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def end(process):
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 0, said[-2000:]


@pytest.mark.timeout(150)
def test_three_steps_and_three_more_are_six_steps(device, tmp_path):
    whole, cut = (f"{tmp_path / name}:" for name in ("whole", "cut"))
    if device.type == "cpu":  # a rehearsal need not import three times
        end(start(device, whole + "6", cut + "3", cut + "6"))
    else:
        alone = start(device, whole + "6")
        end(start(device, cut + "3"))
        end(start(device, cut + "6"))
        end(alone)
    expected, got = weights(tmp_path / "whole", 6), weights(tmp_path / "cut", 6)
    assert expected.keys() == got.keys()
    different = [name for name in expected if not torch.equal(expected[name], got[name])]
    assert different == []
    before = weights(tmp_path / "cut", 3)
    assert any(not torch.equal(before[name], got[name]) for name in got)
