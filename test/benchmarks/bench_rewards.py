"""The GSM8K reward of 64 answers against TorchRL's, and components at once against one by one.

    python test/benchmarks/bench_rewards.py

Both sides of the first row get the same conversations, made beforehand, and write their rewards
into the same tensordict. The other rows are wall-clock seconds: 64 scores that wait 50 ms each, one
after another and in 64 threads, and 16 that keep a CPU busy, one after another and in two
processes.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import statistics
import time
import warnings

import torch
from harness import Ratio, compare, report
from tensordict import NonTensorStack, TensorDict, set_list_to_stack

warnings.filterwarnings("ignore")
logging.disable(logging.INFO)

BATCH = 64
CHATS = [
    [
        {"role": "user", "content": f"What is {n} + {n + 1}?"},
        {
            "role": "assistant",
            "content": f"<think>{n} + {n + 1}</think><answer>{2 * n + 1}</answer>",
        },
    ]
    for n in range(BATCH)
]
TRUTHS = [f"#### {2 * n + 1}" for n in range(BATCH)]


def ours():
    from torchrl_llm.data.column import Column
    from torchrl_llm.data.history import History
    from torchrl_llm.data.views import ChatHistory
    from torchrl_llm.envs import GSM8KRewardParser

    history = ChatHistory(full=History.from_chats(CHATS), batch_size=[BATCH])
    td = TensorDict(history=history, answer=Column.of(TRUTHS), batch_size=[BATCH])
    reward = GSM8KRewardParser(input_mode="history")

    def work():
        next_td = reward._step(td, TensorDict(batch_size=[BATCH]))
        assert next_td["success"].all()

    return work


def torchrls():
    from torchrl.data.llm import History
    from torchrl.envs.llm import GSM8KRewardParser
    from torchrl.modules.llm.policies.common import ChatHistory

    history = ChatHistory(full=History.from_chats(CHATS), batch_size=[BATCH])
    td = TensorDict(history=history, batch_size=[BATCH])
    answers = NonTensorStack(*TRUTHS)
    reward = GSM8KRewardParser(in_keys=[("history", "full"), "answer"], input_mode="history")

    def work():
        # It looks for the answers in the next step, where its environment puts them.
        next_td = reward._step(td, TensorDict(answer=answers, batch_size=[BATCH]))
        assert next_td["success"].all()

    return work


def wait(sample):
    time.sleep(0.05)
    return 1.0


def spin(sample):
    return float(sum(n * n for n in range(400_000)) > 0)


def at_once(name, size, aim, one_by_one, concurrent) -> Ratio:
    """Wall-clock seconds of a component over ``size`` rows, both ways."""
    from torchrl_llm.rewards import Sample

    samples = [Sample("x")] * size
    pool = concurrent.make_pool()
    concurrent.outcomes(samples[:2], pool)  # threads and processes are up
    pairs = []
    for _ in range(3):
        times = []
        for component, its_pool in ((concurrent, pool), (one_by_one, None)):
            start = time.perf_counter()
            outcomes = component.outcomes(samples, its_pool)
            times.append(time.perf_counter() - start)
            assert not any(outcome.error for outcome in outcomes)
        pairs.append(times)
    if pool is not None:
        pool.close()
    ours_s, other_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Ratio(name, ours_s, other_s, statistics.median(a / b for a, b in pairs), aim)


def main() -> list[Ratio]:
    from bench_rewards import spin as importable_spin

    from torchrl_llm.rewards import Component

    torch.set_num_threads(1)
    # TorchRL's side refuses to run without this flag; ours does not depend on it.
    with set_list_to_stack(True):
        rows = [
            compare(
                "GSM8K reward of 64 answers",
                ours(),
                torchrls(),
                aim="other/ours >= 10",
                repeats=10,
                pairs=9,
            )
        ]
    rows.append(
        at_once(
            "64 scores that wait 50 ms, at once / one by one (wall)",
            64,
            "other/ours >= 8",
            Component(wait),
            Component(wait, run="threads", num_workers=64),
        )
    )
    rows.append(
        at_once(
            "16 scores that keep a CPU busy, two processes (wall)",
            16,
            "(none)",
            Component(spin),
            Component(importable_spin, run="processes", num_workers=2),
        )
    )
    report(rows)
    return rows


if __name__ == "__main__":
    main()
