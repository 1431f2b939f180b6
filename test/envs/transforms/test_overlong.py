"""The punishment of overlong responses, in an environment and in a buffer."""

from __future__ import annotations

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from tensordict import TensorDict

from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import OverlongPenalty
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.rewards import RewardParser


def row(length, *, prompt=2, group=0, reward=1.0, done=True, traj=0):
    full = torch.arange(prompt + length)
    return TensorDict(
        tokens={"prompt": full[:prompt], "response": full[prompt:], "full": full},
        masks={"all_assistant_mask": torch.arange(prompt + length) >= prompt},
        next={"reward": torch.full((1, 1), reward), "done": torch.tensor([done])},
        group_id=torch.tensor(group),
        traj_id=torch.tensor(traj),
    )


def rewards(rows):
    return [reward.flatten().tolist() for reward in read_rows(rows, ("next", "reward"))]


def test_credit_that_was_appended_before_sees_the_punished_reward():
    buffer = ReplayBuffer()
    buffer.append_transform(JoinTurns())
    buffer.append_transform(MCAdvantage(grpo_size=2, normalize="none"))
    buffer.append_transform(OverlongPenalty(max_length=10, cache=4))
    given = [row(6, traj=1), row(9, traj=2)]
    buffer.extend(given)
    # Penalties 0 and (6 - 9) / 4 = -0.75: returns 1 and 0.25, mean 0.625.
    assert rewards(buffer[:]) == [[1.0], [0.25]]
    assert [r["advantage"].item() for r in buffer[:].unbind(0)] == [0.375, -0.375]
    assert [r["next", "overlong_penalty"].shape for r in buffer[:].unbind(0)] == [(1, 1)] * 2
    assert given[1]["next", "reward"].item() == 1.0


def test_rewards_that_are_whole_numbers_are_punished_like_others():
    whole = row(9)
    whole["next", "reward"] = torch.ones(1, 1, dtype=torch.int64)
    assert rewards(OverlongPenalty(max_length=10, cache=4)(lazy_rows([whole]))) == [[0.25]]


def test_reading_from_the_buffer_punishes_nothing_again():
    buffer = ReplayBuffer(batch_size=1)
    buffer.append_transform(OverlongPenalty(max_length=10, cache=4))
    buffer.append_transform(torch.nn.Identity())  # makes the buffer run all of its transforms
    buffer.extend([row(9)])
    assert rewards(buffer.sample()) == [[0.25]]
    assert rewards(buffer.sample()) == [[0.25]]


def test_only_the_tokens_of_the_turn_count():
    buffer = ReplayBuffer(transform=OverlongPenalty(max_length=4, cache=2))
    second = row(3, prompt=20)
    second["masks", "all_assistant_mask"] = torch.ones(23).bool()
    tool = row(10)
    tool["trace"] = TensorDict({"source": torch.tensor([1] * 2 + [3] * 2 + [2] * 7 + [3])})
    buffer.extend([second])
    buffer.extend([tool])
    # 3 sampled tokens in each: (2 - 3) / 2 = -0.5.
    assert rewards(buffer[:]) == [[0.5], [0.5]]


def test_of_rewards_per_token_the_last_is_punished_and_the_factor_counts():
    per_token = row(4)
    per_token["next", "reward"] = torch.ones(4, 1)
    rows = OverlongPenalty(max_length=4, cache=2, coeff=0.5)(per_token)
    assert rows["next", "reward"].flatten().tolist() == [1, 1, 1, 0.5]


class Constant(RewardParser):
    def score(self, response, answer):
        return 1.0


def make_env(*transforms):
    data = [{"query": "a", "answer": ""}, {"query": "b", "answer": ""}]
    env = DatasetChatEnv(dataset=data, num_envs=2, shuffle=False)
    for transform in transforms:
        env.append_transform(transform)
    return env


def test_in_an_environment_the_reward_of_the_step_is_punished(tokenizer):
    env = make_env(Constant(set_done_if_answer=False), OverlongPenalty(max_length=4, cache=4))
    td = env.rollout(2, AnsweringPolicy(tokenizer=tokenizer))
    for turn in range(2):
        lengths = [len(r) for r in read_rows(td[:, turn], ("tokens", "response"))]
        expected = [max(1 - length / 4, 0.0) for length in lengths]
        assert td["next", "reward"][:, turn].flatten().tolist() == expected
    assert td["next", "overlong_penalty"].shape == (2, 2, 1, 1)


def test_before_the_reward_is_written_there_is_nothing_to_punish(tokenizer):
    env = make_env(OverlongPenalty(max_length=4, cache=2), Constant())
    with pytest.raises(DataError, match="after the transform that writes it"):
        env.rollout(1, AnsweringPolicy(tokenizer=tokenizer))


def test_a_cache_longer_than_the_response_may_be_is_refused():
    with pytest.raises(ConfigError, match="cache"):
        OverlongPenalty(max_length=4, cache=5)
