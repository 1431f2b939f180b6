"""CompositeReward: every component beside the sum, and a failure never a zero."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from rewards.scorers import Batch, Constant, Fails, Meets, PerToken, Scripted
from tensordict import TensorDict
from torchrl.envs import Transform
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import lazy_rows, ragged_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.errors import ConfigError, DataError, RewardError
from torchrl_llm.rewards import (
    Component,
    CompositeReward,
    CountdownRewardParser,
    FormatReward,
    TokenRewards,
)

PROBLEM = "target=6, numbers=2,3"


def make_env(reward, size=1, mode="history", tokenizer=None, **columns):
    rows = [{"query": f"q{n}", "answer": PROBLEM, **columns} for n in range(size)]
    env = DatasetChatEnv(
        dataset=rows, shuffle=False, num_envs=size, input_mode=mode, tokenizer=tokenizer
    )
    return env.append_transform(reward)


def graded():
    return CompositeReward(
        {
            "right": Component(CountdownRewardParser(), weight=0.5),
            "form": Component(FormatReward(("answer",)), weight=0.25),
            "there": Component(Fails(), weight=0.25),
        }
    )


def test_the_sum_and_every_component_are_written(answer):
    env = make_env(graded(), 2)
    texts = ["<answer>2 * 3</answer>", "so <answer>2 + 3</answer>"]
    td = env.step(answer(env.reset(), *texts))["next"]
    # 0.5 * 1 + 0.25 * 1 + 0.25 * 1 = 1; 0.5 * 0.1 + 0 + 0.25 = 0.3
    assert td["reward"].flatten().tolist() == pytest.approx([1.0, 0.3])
    assert td["rewards", "right", "value"].shape == (2, 1, 1)
    assert td["rewards", "right", "value"].dtype == torch.float32
    assert td["rewards", "right", "value"].flatten().tolist() == pytest.approx([1.0, 0.1])
    assert td["rewards", "form", "value"].flatten().tolist() == [1.0, 0.0]
    for name in ("right", "form", "there"):
        assert td["rewards", name, "valid"].tolist() == [True, True]
        assert list(td["rewards", name, "error"]) == ["", ""]
        assert td["rewards", name, "seconds"].shape == (2,)
        assert td["rewards", name, "seconds"].dtype == torch.float32
        assert (td["rewards", name, "seconds"] > 0).all()
    assert td["success"].flatten().tolist() == [True, False]  # those of the first component
    assert td["done"].flatten().tolist() == [True, True]
    check_env_specs(env)


def test_a_failed_component_makes_its_row_invalid_and_keeps_the_others(answer):
    env = make_env(graded(), 2)
    texts = ["<answer>2 * 3</answer> fail", "<answer>2 * 3</answer>"]
    td = env.step(answer(env.reset(), *texts))["next"]
    assert td["reward"].flatten()[0].isnan()
    assert td["reward"].flatten()[1] == 1.0
    assert td["reward_valid"].tolist() == [False, True]
    assert td["success"].flatten().tolist() == [False, True]
    assert list(td["error", "type"]) == ["ConnectionError", ""]
    assert next(iter(td["error", "message"])) == "component 'there': nobody there"
    assert td["rewards", "right", "value"].flatten().tolist() == [1.0, 1.0]
    assert td["rewards", "there", "valid"].tolist() == [False, True]
    assert td["rewards", "there", "value"].flatten()[0].isnan()
    assert list(td["rewards", "there", "error"]) == ["ConnectionError: nobody there", ""]


def test_an_optional_component_that_fails_is_done_without(answer):
    reward = CompositeReward(
        {
            "right": Component(CountdownRewardParser(), weight=0.5),
            "there": Component(Fails(), weight=0.5, optional=True),
        }
    )
    env = make_env(reward, 2)
    texts = ["<answer>2 * 3</answer> fail", "<answer>2 + 3</answer>"]
    td = env.step(answer(env.reset(), *texts))["next"]
    assert td["reward"].flatten().tolist() == pytest.approx([1.0, 0.55])
    assert td["reward_valid"].tolist() == [True, True]
    assert list(td["error", "type"]) == ["", ""]
    assert td["rewards", "there", "valid"].tolist() == [False, True]


def test_where_no_component_with_a_weight_is_left_the_row_says_which_failed(answer):
    reward = CompositeReward(
        {
            "right": Component(CountdownRewardParser(), weight=0.0),
            "there": Component(Fails(), weight=0.5, optional=True),
        }
    )
    td = make_env(reward, 2)
    td = td.step(answer(td.reset(), "<answer>2 * 3</answer> fail", "<answer>2 * 3</answer>"))
    assert td["next", "reward_valid"].tolist() == [False, True]
    assert td["next", "reward"].flatten()[0].isnan()
    assert list(td["next", "error", "type"]) == ["ConnectionError", ""]
    assert td["next", "error", "message"][0] == "component 'there': nobody there"


def test_a_sum_beyond_float32_makes_an_invalid_row(answer):
    env = make_env(CompositeReward({"a": Constant(3e38), "b": Constant(3e38)}))
    td = env.step(answer(env.reset(), "x"))["next"]
    assert td["reward_valid"].tolist() == [False]
    assert "too large" in next(iter(td["error", "message"]))


def test_a_component_without_weight_is_only_recorded(answer):
    parts = {"right": CountdownRewardParser(), "seen": Component(Fails(), weight=0.0)}
    env = make_env(CompositeReward(parts))
    td = env.step(answer(env.reset(), "<answer>2*3</answer> fail"))["next"]
    assert td["reward"].item() == 1.0
    assert not td["rewards", "seen", "valid"].item()


def test_components_run_at_the_same_time(answer):
    barrier = threading.Barrier(4, timeout=20)  # two rows of two components
    parts = {
        "task": Constant(1.0),
        "a": Component(Meets(barrier), run="threads", num_workers=2),
        "b": Component(Meets(barrier), run="threads", num_workers=2),
    }
    env = make_env(CompositeReward(parts), 2)
    td = env.step(answer(env.reset(), "x", "y"))["next"]
    assert td["reward"].flatten().tolist() == [3.0, 3.0]


def test_a_slow_component_is_invalid_in_time(answer):
    parts = {
        "task": Constant(1.0),
        "slow": Component(Scripted(), run="threads", timeout=0.3, optional=True),
    }
    env = make_env(CompositeReward(parts), 2)
    td = env.step(answer(env.reset(), "sleep 30", "0.5"))["next"]
    assert td["rewards", "slow", "valid"].tolist() == [False, True]
    assert td["rewards", "slow", "error"][0].startswith("RewardTimeoutError")
    assert td["reward"].flatten().tolist() == [2.0, 1.5]


class Auxiliary(Transform):
    def _step(self, tensordict, next_tensordict):
        flags = torch.tensor([[True], [False]])
        return next_tensordict.set(("tools", "auxiliary"), flags)


def test_rows_that_are_not_scored_are_neutral_in_every_component(answer):
    rows = [{"query": "q", "answer": PROBLEM}] * 2
    env = DatasetChatEnv(dataset=rows, num_envs=2)
    batch = Batch()
    reward = CompositeReward({"task": Scripted(), "judge": batch})
    env = env.append_transform(Auxiliary()).append_transform(reward)
    td = env.step(answer(env.reset(), "raise", "0.5"))["next"]
    assert td["reward"].flatten().tolist() == [0.0, 1.0]
    assert td["reward_valid"].tolist() == [True, True]
    assert td["rewards", "task", "value"].flatten().tolist() == [0.0, 0.5]
    assert td["rewards", "task", "valid"].tolist() == [True, True]
    assert batch.sizes == [1]  # a judge is not even asked


def test_scorers_see_the_columns_tokens_and_endings_that_they_ask_for(tokenizer):
    seen = []

    class Spy(Constant):
        columns = ("query", "level")

        def score(self, sample):
            seen.append(sample)
            return self.value

    env = make_env(CompositeReward({"spy": Spy(1.0)}), 2, "tokens", tokenizer, level="hard")
    policy = AnsweringPolicy("tokens", lambda prompt: "well", tokenizer)
    td = policy(env.reset())
    td["tokens"]["finish_reason"] = torch.tensor([0, 1], dtype=torch.int8)
    env.step(td)
    assert [sample.response for sample in seen] == ["well", "well"]
    assert [sample.columns["query"] for sample in seen] == ["q0", "q1"]
    assert seen[0].columns["level"] == "hard"
    assert seen[0].num_tokens == len(tokenizer("well").input_ids)
    assert [sample.finish_reason.name for sample in seen] == ["STOP", "LENGTH"]
    assert seen[0].answer == PROBLEM


def test_a_column_that_the_rows_lack_is_named(answer):
    class Asks(Constant):
        columns = ("rubric",)

    env = make_env(CompositeReward({"asks": Asks(1.0)}))
    with pytest.raises(DataError, match="lack 'rubric'"):
        env.step(answer(env.reset(), "x"))


def test_rows_need_no_answer_where_no_component_compares(queries, answer):
    from torchrl_llm.envs import ChatEnv

    env = ChatEnv(batch_size=(1,)).append_transform(CompositeReward({"one": Constant(1.0)}))
    assert env.step(answer(env.reset(queries("q")), "x"))["next", "reward"].item() == 1.0


def test_a_conversation_without_a_response_is_invalid_in_every_component():
    env = make_env(graded())
    td = env.reset()
    td["history"].full = td["history"].prompt
    td = env.step(td)["next"]
    assert td["reward_valid"].tolist() == [False]
    assert not any(td["rewards", name, "valid"].item() for name in ("right", "form", "there"))


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_rewards_per_token_are_aligned_with_the_response_in_every_mode(mode, tokenizer):
    texts = iter(["abc", "nan", "a"])
    reward = CompositeReward({"task": Component(Constant(1.0), weight=2.0), "each": PerToken()})
    env = make_env(reward, 3, mode, tokenizer)
    td = env.step(AnsweringPolicy(mode, lambda _: next(texts), tokenizer)(env.reset()))
    rows = read_rows(td["next"], ("token_reward", "total"))
    lengths = [len(ids) for ids in read_rows(td, ("tokens", "response"))]
    assert [len(row) for row in rows] == lengths
    # 0.25, 0.5, ... a token; the whole response's 2 * 1.0 at the last one
    each = [0.25 * (n + 1) for n in range(lengths[0])]
    assert rows[0].tolist() == [*each[:-1], each[-1] + 2.0]
    assert rows[1].isnan().all()
    assert td["next", "reward"].flatten()[0].item() == pytest.approx(sum(each) + 2.0)
    assert td["next", "reward_valid"].tolist() == [True, False, True]


def test_environments_with_rewards_per_token_pass_the_check_of_specs(tokenizer):
    reward = CompositeReward({"each": PerToken()})
    env = make_env(reward, 2, "tokens", tokenizer)
    policy = AnsweringPolicy("tokens", lambda _: "ab", tokenizer)
    td = env.rollout(2, policy, break_when_any_done=False)
    assert ("next", "token_reward", "total") in td.keys(True)
    assert env.reward_spec["token_reward", "total"].dtype == torch.float32


def test_rewards_per_token_need_tokens(answer):
    env = make_env(CompositeReward({"each": PerToken()}))
    with pytest.raises(DataError, match="needs \\('tokens', 'response'\\)"):
        env.step(answer(env.reset(), "x"))


def turn(prompt, full, done, rewards):
    ids = torch.arange(8)
    tokens = {"prompt": ids[:prompt], "response": ids[prompt:full], "full": ids[:full]}
    next_ = {
        "reward": torch.tensor([[float(sum(rewards))]]),
        "token_reward": {"total": torch.tensor(rewards)},
        "done": torch.tensor([done]),
    }
    return TensorDict(tokens=tokens, next=next_, traj_id=torch.tensor(0))


def test_a_buffer_trains_on_the_tokens_rewards_across_turns():
    buffer = ReplayBuffer()
    buffer.append_transform(JoinTurns())
    buffer.append_transform(TokenRewards())
    buffer.extend([turn(1, 3, False, [0.5, 1.0]), turn(5, 6, True, [2.0])])
    row = buffer[0]
    assert row["tokens", "response"].tolist() == [1, 2, 3, 4, 5]
    # what the tool wrote between the turns earns nothing
    assert row["next", "reward"].flatten().tolist() == [0.5, 1.0, 0.0, 0.0, 2.0]


def test_token_rewards_are_put_in_place_once_and_never_in_an_environment(answer):
    rows = lazy_rows([turn(1, 3, True, [0.5, 1.0])])
    transform = TokenRewards()
    for _ in range(2):
        rows = transform(rows)
        assert read_rows(rows, ("next", "reward"))[0].tolist() == [[0.5], [1.0]]
    with pytest.raises(DataError, match="CompositeReward"):
        transform(lazy_rows([TensorDict(next={"reward": torch.ones(1, 1)})]))
    env = make_env(CompositeReward({"one": Constant(1.0)})).append_transform(TokenRewards())
    with pytest.raises(ConfigError, match="replay buffer"):
        env.step(answer(env.reset(), "x"))


def test_rows_outside_an_environment_are_scored_into_next():
    td = TensorDict(
        text=TensorDict(response=Column.of(["1.0", "raise"]), batch_size=[2]),
        tokens=ragged_rows({"response": [torch.arange(2), torch.arange(3)]}),
        batch_size=[2],
    )
    td = CompositeReward({"task": Scripted()}, input_mode="text")(td)
    assert td["next", "rewards", "task", "valid"].tolist() == [True, False]
    assert td["next", "reward_valid"].tolist() == [True, False]


def test_dense_rows_count_no_padding():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    td = TensorDict(
        text=TensorDict(response=Column.of(["a", "b"]), batch_size=[2]),
        tokens=TensorDict(full=ids, response=ids[:, 2:], batch_size=[2]),
        masks=TensorDict(all_attention_mask=mask, batch_size=[2]),
        batch_size=[2],
    )
    td = CompositeReward({"each": PerToken()}, input_mode="text")(td)
    rows = read_rows(td, ("next", "token_reward", "total"))
    assert [row.tolist() for row in rows] == [[0.25, 0.5, 0.75], [0.25]]


def test_one_response_can_be_scored_alone():
    assert graded().score("<answer>2 * 3</answer>", PROBLEM).reward == pytest.approx(1.0)
    with pytest.raises(RewardError, match="component 'there': nobody there"):
        graded().score("fail", PROBLEM)


@pytest.mark.full
def test_a_reward_with_processes_is_pickled_and_closed(answer):
    reward = CompositeReward({"task": Component(Scripted(), run="processes", num_workers=1)})
    reward = pickle.loads(pickle.dumps(reward))
    env = make_env(reward, 2)
    td = env.step(answer(env.reset(), "0.5", "raise"))["next"]
    assert td["reward_valid"].tolist() == [True, False]
    assert list(td["error", "type"]) == ["", "ZeroDivisionError"]
    reward.close()


def test_impossible_sums_are_refused():
    with pytest.raises(ConfigError, match="a component with a weight"):
        CompositeReward({})
    with pytest.raises(ConfigError, match="a component with a weight"):
        CompositeReward({"a": Component(Fails(), weight=0.0)})
    with pytest.raises(ConfigError, match="first component"):
        CompositeReward({"a": Component(Fails(), optional=True)})
    with pytest.raises(ConfigError, match="not be negative"):
        CompositeReward(
            {"a": Component(Fails(), weight=-1.0), "b": Component(Fails(), optional=True)}
        )
