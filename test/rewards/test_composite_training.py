"""Components on their way to the loss: collector, wire, buffer, advantages per token."""

from __future__ import annotations

import pytest
import torch
from rewards.scorers import Constant, Fails, PerToken

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import StepCounter
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.rewards import Component, CompositeReward, Scorer, TokenRewards


class FirstIs(Scorer):
    """One where the response's length is even."""

    def score(self, sample):
        return float(sample.num_tokens % 2 == 0)


def collected(components, tokenizer, turns=1):
    rows = [{"query": f"question {n}", "answer": "a"} for n in range(4)]
    env = DatasetChatEnv(
        dataset=rows, shuffle=False, num_envs=4, repeats=2, group_repeats=True, seed=0
    )
    reward = CompositeReward(components, set_done_if_answer=False)
    env.append_transform(reward)
    env.append_transform(StepCounter(max_steps=turns))
    policy = FakeWrapper(tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6})
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4 * turns)
    return split_rollout(next(iter(collector)))


def test_components_survive_the_collector_the_wire_and_the_buffer(tokenizer):
    parts = {"task": Constant(1.0), "seen": Component(Fails(), weight=0.5)}
    rows = collected(parts, tokenizer)
    again = pack_rows(rows).unpack()
    buffer = ReplayBuffer()
    buffer.extend(again)
    for row in (*rows.unbind(0), *again.unbind(0), *(buffer[n] for n in range(4))):
        part = row["next", "rewards", "seen"]
        assert part["value"].tolist() == [[1.0]]
        assert part["valid"].item()
        assert part["error"] == ""
        assert part["seconds"].item() >= 0
        assert row["next", "reward"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("turns", [1, 2])
def test_rewards_per_token_become_advantages_per_token(tokenizer, turns):
    rows = collected({"task": Constant(1.0), "each": PerToken()}, tokenizer, turns)
    expected = [row.clone() for row in read_rows(rows, ("next", "token_reward", "total"))]
    buffer = ReplayBuffer()
    buffer.append_transform(JoinTurns())
    buffer.append_transform(MCAdvantage(grpo_size=2))
    buffer.append_transform(TokenRewards())
    index = buffer.extend(rows)
    assert len(index) == 4
    joined = [buffer[n] for n in range(4)]
    total = sum(values.sum().item() for values in expected)
    assert sum(row["next", "reward"].sum().item() for row in joined) == pytest.approx(total)
    for row in joined:
        length = row["tokens", "response"].shape[0]
        assert row["next", "reward"].shape == (length, 1)
        assert row["advantage"].shape[0] in (1, row["tokens", "full"].shape[0])
        assert bool(torch.isfinite(row["advantage"]).all())


def test_a_scorer_of_lengths_counts_the_tokens_that_were_sampled(tokenizer):
    rows = collected({"even": FirstIs()}, tokenizer)
    for row in rows.unbind(0):
        even = row["tokens", "response"].shape[0] % 2 == 0
        assert row["next", "reward"].item() == float(even)
