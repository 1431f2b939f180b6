"""The kernels of the chunked head, run on a CPU by triton's interpreter, and the tiles of a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrl_llm.functional import head_kernels
from torchrl_llm.functional.head_tiles import logits_bytes

# Triton reads TRITON_INTERPRET when it is imported, so this is a process of its own.
SCRIPT = """
import torch
from torchrl_llm.functional import chunked_log_probs, head_kernels

torch.manual_seed(0)
hidden, weight = 2 * torch.randn(9, 6), 2 * torch.randn(45, 6)
targets, upstream = torch.randint(0, 45, (9,)), torch.linspace(-1, 1, 9)
head_kernels._BLOCK = 16
assert head_kernels.works(torch.device("cpu"), torch.bfloat16)

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


def test_kernels_compile_for_a_hopper_gpu():
    pytest.importorskip("triton")
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    float32 = ["tile", "tops", "totals", "moments", "picked", "log_sums", "entropies"]
    pointers = dict.fromkeys(float32, "*fp32")
    pointers |= {"targets": "*i64", "grad_log_probs": "*fp32", "grad_entropies": "*fp32"}
    types = {**pointers, "result": "*bf16", "first": "i32", "width": "i32"}
    for function in (head_kernels._fold, head_kernels._gradient):
        kernel = head_kernels._compiled(function)
        flags = [name for name in kernel.arg_names if name not in types]
        for value in (True, False):
            constants = {**dict.fromkeys(flags, value), "BLOCK": 2048}
            signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants)
            assert build(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_kernels_that_do_not_run_are_not_used_and_that_is_said(monkeypatch):
    def broken(*args, **settings):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(head_kernels, "fold", broken)
    head_kernels.works.cache_clear()
    with pytest.warns(UserWarning, match="do not run: no C compiler; torch's operations take over"):
        assert not head_kernels.works(torch.device("cpu"), torch.bfloat16)
    head_kernels.works.cache_clear()


def test_on_a_gpu_a_tile_has_2048_entries_of_8192_tokens():
    held = logits_bytes(20_000, 151_936, kind="cuda")
    assert held == 8192 * 2048 * (4 + 2)
    # 2 ** 24 / 3000 = 5592, cut to a multiple of 128.
    assert logits_bytes(3000, 151_936, kind="cuda") == 3000 * 5504 * (4 + 2)
