"""Environments and policies for the tests of collectors: small, exact, and quick to build."""

from __future__ import annotations

import threading

import torch
from torchrl.data import Unbounded
from torchrl.envs import Transform

from torchrl_llm.data.history import History
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.modules import FakeWrapper

QUESTIONS = [{"query": f"question {i}", "turns": 1 + i % 3} for i in range(40)]


class Ending(Transform):
    """Ends a conversation after as many turns as its row says (or ``turns``), reward 1 a turn.

    With ``tool`` it appends a tool message after every turn that is not the last.
    """

    def __init__(self, turns: int | None = None, tool: str | None = None) -> None:
        super().__init__()
        self.turns, self.tool = turns, tool

    def _step(self, tensordict, next_tensordict):
        wanted = tensordict["turns"] if self.turns is None else None
        turn = next_tensordict["turn"]
        done = turn >= (torch.tensor(wanted) if wanted is not None else self.turns)
        next_tensordict.set("reward", torch.ones(*turn.shape, 1, 1))
        for name in ("done", "terminated"):
            next_tensordict.set(name, done.unsqueeze(-1))
        if self.tool is not None:
            chats = next_tensordict["history"].prompt.chats
            message = {"role": "tool", "content": self.tool}
            next_tensordict["history"].prompt = History.of(
                [c if d else c + [message] for c, d in zip(chats, done.tolist(), strict=True)]
            )
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(*self.parent.batch_size, 1, 1))
        return reward_spec


def make_env(num_envs=3, turns=None, tool=None, **options):
    env = DatasetChatEnv(dataset=QUESTIONS, shuffle=False, num_envs=num_envs, **options)
    return env.append_transform(Ending(turns, tool))


def make_policy(tokenizer, **options):
    return FakeWrapper(tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}, **options)


class Failing:
    """Answers like another policy until its n-th call, which raises."""

    def __init__(self, policy, after: int, error: BaseException | None = None) -> None:
        self.policy, self.after = policy, after
        self.error = error or ValueError("the policy is broken")

    def __call__(self, td):
        self.after -= 1
        if self.after < 0:
            raise self.error
        return self.policy(td)


class Gated:
    """A policy that waits for a permit before each call."""

    def __init__(self, policy) -> None:
        self.policy = policy
        self.permits = threading.Semaphore(0)
        self.waiting = threading.Event()

    def __call__(self, td):
        self.waiting.set()
        assert self.permits.acquire(timeout=30)
        self.waiting.clear()
        return self.policy(td)
