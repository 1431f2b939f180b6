"""Rows into a replay buffer through group advantages, and batches out of it, against TorchRL.

512 ragged one-step trajectories in groups of 8 are written in one ``extend`` through
``MCAdvantage(8)`` into a ``LazyStackStorage``, then 16 batches of 32 are sampled.

    python test/benchmarks/bench_buffer.py

In the second row each call also builds the rows from their tensors, as a user's own loop does. The
public constructor, which is the same on both sides, is most of that row on our side.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import torch
from harness import compare, report
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer
from torchrl.objectives.llm import MCAdvantage as TorchRLMCAdvantage

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.objectives.credit import MCAdvantage

ROWS, GROUP, SAMPLES, BATCH = 512, 8, 16, 32


def make_tensors() -> list[dict[str, Any]]:
    """What is in rows as a collector makes them: tokens, log-probs, masks and trace."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(ROWS):
        prompt, response = torch.randint(16, 64, (2,), generator=generator).tolist()
        full = torch.randint(0, 1000, (prompt + response,), generator=generator)
        done = torch.ones(1, dtype=torch.bool)
        rows.append(
            {
                "tokens": {
                    "prompt": full[:prompt].clone(),
                    "response": full[prompt:].clone(),
                    "full": full,
                },
                "log_probs": {"full": torch.randn(len(full), generator=generator)},
                "masks": {
                    "all_attention_mask": torch.ones(len(full), dtype=torch.bool),
                    "all_assistant_mask": torch.arange(len(full)) >= prompt,
                },
                "trace": {"source": torch.zeros(len(full), dtype=torch.int8)},
                "query": f"question {i // GROUP}",
                "group_id": torch.tensor(i // GROUP),
                "next": {
                    "reward": torch.randn(1, 1, generator=generator),
                    "done": done,
                    "terminated": done,
                },
            }
        )
    return rows


def build(rows: list[dict[str, Any]]) -> list[TensorDict]:
    """Rows by the public constructor, a container a node."""
    return [
        TensorDict({k: TensorDict(v) if isinstance(v, dict) else v for k, v in row.items()})
        for row in rows
    ]


def main() -> None:
    """Print the table."""
    tensors = make_tensors()
    rows = build(tensors)
    single_steps = _single_steps(rows)

    def ours(rows: list[TensorDict]) -> None:
        buffer = ReplayBuffer(transform=MCAdvantage(GROUP))
        buffer.extend(lazy_rows(rows))
        for _ in range(SAMPLES):
            buffer.sample(BATCH)
        assert len(buffer) == ROWS

    def theirs(single_steps: LazyStackedTensorDict) -> None:
        buffer = TorchRLReplayBuffer(
            storage=LazyStackStorage(), transform=TorchRLMCAdvantage(GROUP, prompt_key="query")
        )
        buffer.extend(single_steps)
        for _ in range(SAMPLES):
            buffer.sample(BATCH)
        assert len(buffer) == ROWS

    report(
        [
            compare(
                "extend 512 with MCAdvantage(8), sample 16 x 32",
                lambda: ours(rows),
                lambda: theirs(single_steps),
                aim="12 x less",
                pairs=5,
            ),
            compare(
                "the same, rows built by TensorDict(...) in it",
                lambda: ours(build(tensors)),
                lambda: theirs(_single_steps(build(tensors))),
                aim="0.12",
                pairs=5,
            ),
        ]
    )


def _single_steps(rows: list[TensorDict]) -> LazyStackedTensorDict:
    return lazy_stack([lazy_stack([row]) for row in rows])


if __name__ == "__main__":
    main()
