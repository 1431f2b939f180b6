"""The kernels of the chunked head, run on a CPU by triton's interpreter, and the tiles of a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_llm.functional.head_tiles import logits_bytes

# Triton reads TRITON_INTERPRET when it is imported, so this is a process of its own.
SCRIPT = """
import torch
from torchrl_llm.functional import chunked_log_probs, head_kernels

torch.manual_seed(0)
hidden, weight = 2 * torch.randn(9, 6), 2 * torch.randn(45, 6)
targets, upstream = torch.randint(0, 45, (9,)), torch.linspace(-1, 1, 9)
head_kernels._BLOCK = 16

def run(by_kernels, chunk_size, temperature):
    head_kernels.available = lambda device, dtype: by_kernels
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    scores = chunked_log_probs(
        *leaves, targets, entropy=True, chunk_size=chunk_size, temperature=temperature
    )
    first, second = (scores.log_probs * upstream).sum(), (scores.entropy * upstream.flip(0)).sum()
    totals = first, second, first + second
    grads = [torch.autograd.grad(total, leaves, retain_graph=True) for total in totals]
    bare = chunked_log_probs(*leaves, targets, chunk_size=chunk_size, temperature=temperature)
    grads.append(torch.autograd.grad(bare.log_probs.sum(), leaves))
    return [*scores, bare.log_probs, *(part for pair in grads for part in pair)]

# Tiles of 10 entries and 9 tokens, of 20 and 2, of all at once.
for chunk_size in (90, 40, 405):
    for temperature in (1.0, torch.linspace(0.5, 2, 9)):
        expected = run(False, chunk_size, temperature)
        got = run(True, chunk_size, temperature)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
"""


def test_kernels_give_the_values_and_gradients_of_torchs_operations():
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_on_a_gpu_a_tile_has_2048_entries_of_8192_tokens():
    held = logits_bytes(20_000, 151_936, kind="cuda")
    assert held == 8192 * 2048 * (4 + 2)
    # 2 ** 24 / 3000 = 5592, cut to a multiple of 128.
    assert logits_bytes(3000, 151_936, kind="cuda") == 3000 * 5504 * (4 + 2)
