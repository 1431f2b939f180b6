"""Memory and time of distillation over the whole vocabulary, forward and backward.

The models and rows of ``bench_loss.py`` (vocabulary 151,936, 4 rows of 256 tokens), a teacher like
the student: ``OnPolicyDistillationLoss`` over the vocabulary beside the divergence of TRL's
``GKDTrainer`` (beta 1) on all logits of both. Each side runs in a process of its own, in turn; what
counts is the peak above models and gradients. Both must find the same divergence. TRL takes about
6 GB. Needs trl.

    python test/benchmarks/bench_distillation.py [rounds [tokens a row]]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from bench_loss import PROMPT, make_model, make_rows
from harness import peak_memory
from tensordict import TensorDict


def make_teacher() -> torch.nn.Module:
    """Like the student, with other weights and without gradients."""
    teacher = make_model().requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.grad = None
        parameter.mul_(1.1)
    return teacher


def ours(length: int) -> Callable[[], object]:
    from torchrl_llm.modules.backends.token_scorer import CausalScorer
    from torchrl_llm.objectives import OnPolicyDistillationLoss

    loss_module = OnPolicyDistillationLoss(
        CausalScorer(make_model()),
        estimator="full_vocabulary",
        teachers=CausalScorer(make_teacher()),
    )
    loss_module(make_rows(3, 1)).total_loss().backward()
    rows = make_rows(length)

    def run() -> None:
        output = loss_module(rows)
        output.total_loss().backward()
        print(f"ours: divergence {output.kl_to_teacher.item():.6f}", file=sys.stderr)

    return run


def trl_side(length: int) -> Callable[[], object]:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = make_model(), make_teacher()

    def loss_of(rows: TensorDict, prompt: int) -> torch.Tensor:
        ids = torch.stack([row["tokens", "full"] for row in rows.unbind(0)])
        logits = student(ids, use_cache=False).logits[:, prompt - 1 : -1]
        with torch.no_grad():
            wanted = teacher(ids, use_cache=False).logits[:, prompt - 1 : -1]
        return GKDTrainer.generalized_jsd_loss(logits, wanted, labels=ids[:, prompt:], beta=1)

    loss_of(make_rows(3, 1), 1).backward()
    rows = make_rows(length)

    def run() -> None:
        loss = loss_of(rows, PROMPT)
        loss.backward()
        print(f"TRL: divergence {loss.item():.6f}", file=sys.stderr)

    return run


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    length = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    sides = {"ours": ours, "TRL": trl_side}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            results[name].append(peak_memory(partial(side, length)))
    medians = {
        name: [statistics.median(column) for column in zip(*values, strict=True)]
        for name, values in results.items()
    }
    print(f"4 x {length} tokens, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, (peak, seconds) in medians.items():
        print(
            f"{name:8}{peak:8.0f} MiB ({peak / medians['TRL'][0]:.3f} of TRL)"
            f"{seconds:8.1f} CPU s ({seconds / medians['TRL'][1]:.2f} of TRL)"
        )
    print("aim: a quarter of the memory and no more time")


if __name__ == "__main__":
    main()
