"""Chat environments against TorchRL's: reset and step of 64 conversations with one user turn.

    python test/benchmarks/bench_env.py

Both sides get the same queries and the same answers, made beforehand, or, in the rows that say so,
by ``TensorDict(...)`` and ``History.from_chats`` in each call, as a user's own loop does. GSM8K has
the data set, the reward and the turn limit; TorchRL's needs the hub for its rows, so its chat
environment with a ``DataLoadingPrimer``, its reward parser and its step counter stands in for it.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harness import Ratio, compare, report
from tensordict import TensorDict, set_list_to_stack

warnings.filterwarnings("ignore")
logging.disable(logging.INFO)

BATCH = 64
SYSTEM = "You are a helpful assistant."
QUERIES = [f"What is {n} + {n + 1}?" for n in range(BATCH)]
ANSWERS = [f"<think>{n} + {n + 1}</think><answer>{2 * n + 1}</answer>" for n in range(BATCH)]
ROWS = [{"query": query, "answer": f"#### {2 * n + 1}"} for n, query in enumerate(QUERIES)]
CHATS = [
    [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": query},
        {"role": "assistant", "content": answer},
    ]
    for query, answer in zip(QUERIES, ANSWERS, strict=True)
]


def _queries() -> TensorDict:
    return TensorDict({"query": list(QUERIES)}, batch_size=(BATCH,))


def ours_bare():
    from torchrl_llm.data.history import History
    from torchrl_llm.envs import ChatEnv

    env = ChatEnv(batch_size=(BATCH,), system_prompt=SYSTEM)
    queries, full = _queries(), History.from_chats(CHATS)

    def work():
        td = env.reset(queries.select("query"))
        td["history"].full = full
        env.step(td)

    return work


def torchrl_bare():
    from torchrl.data.llm import History
    from torchrl.envs.llm import ChatEnv

    env = ChatEnv(batch_size=(BATCH,), system_prompt=SYSTEM)
    queries, full = _queries(), History.from_chats(CHATS)

    def work():
        td = env.reset(queries.select("query"))
        td["history"].full = full
        env.step(td)

    return work


def built_by_user(env_class: Any, history_class: Any, size: int) -> Callable[[], None]:
    """Reset and step of a side's environment, whose containers are made in each call."""
    env = env_class(batch_size=(size,), system_prompt=SYSTEM)

    def work():
        td = env.reset(TensorDict({"query": QUERIES[:size]}, batch_size=(size,)))
        td["history"].full = history_class.from_chats(CHATS[:size])
        env.step(td)

    return work


def _user_row(size: int) -> Ratio:
    from torchrl.data.llm import History as TorchRLHistory
    from torchrl.envs.llm import ChatEnv as TorchRLChatEnv

    from torchrl_llm.data.history import History
    from torchrl_llm.envs import ChatEnv

    return compare(
        f"the same, built by the user, batch {size}",
        built_by_user(ChatEnv, History, size),
        built_by_user(TorchRLChatEnv, TorchRLHistory, size),
        aim="0.3",
        repeats=320 // size,
    )


def ours_task():
    from torchrl_llm.data.history import History
    from torchrl_llm.envs import DatasetChatEnv, GSM8KRewardParser
    from torchrl_llm.envs.transforms import StepCounter

    env = DatasetChatEnv(dataset=ROWS, shuffle=False, num_envs=BATCH, system_prompt=SYSTEM)
    env.append_transform(StepCounter(max_steps=1))
    env.append_transform(GSM8KRewardParser())
    full = History.from_chats(CHATS)

    def work():
        td = env.reset()
        td["history"].full = full
        td = env.step(td)
        assert td["next", "reward"].mean() == 1

    return work


def torchrl_task():
    from torchrl.data.llm import History
    from torchrl.envs import StepCounter
    from torchrl.envs.llm import ChatEnv, GSM8KRewardParser
    from torchrl.envs.llm.transforms import DataLoadingPrimer

    loader = torch.utils.data.DataLoader(ROWS, batch_size=BATCH)
    env = ChatEnv(batch_size=(BATCH,), system_prompt=SYSTEM)
    env = env.append_transform(DataLoadingPrimer(loader, batch_size=(BATCH,)))
    env = env.append_transform(StepCounter(max_steps=1))
    env = env.append_transform(GSM8KRewardParser(input_mode="history"))
    full = History.from_chats(CHATS)

    def work():
        td = env.reset()
        td["history"].full = full
        td = env.step(td)
        assert td["next", "success"].all()

    return work


def main() -> list[Ratio]:
    torch.set_num_threads(1)
    # TorchRL's side refuses to run without this flag; ours does not depend on it.
    with set_list_to_stack(True):
        rows = [
            compare(
                "ChatEnv, history mode, batch 64: reset + step",
                ours_bare(),
                torchrl_bare(),
                aim="other/ours >= 5",
                repeats=5,
            ),
            _user_row(64),
            _user_row(1),
            compare(
                "data set, turn limit and GSM8K reward, batch 64: reset + step",
                ours_task(),
                torchrl_task(),
                aim="(none)",
                repeats=2,
            ),
        ]
    report(rows)
    return rows


if __name__ == "__main__":
    main()
