"""StepCounter: cuts episodes and says why."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import StepCounter as CoreStepCounter
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.envs import ChatEnv, GSM8KEnv
from torchrl_llm.envs.transforms import StepCounter

MAX_STEPS, NONE = int(TruncationReason.MAX_STEPS), int(TruncationReason.NONE)


def test_it_is_torchrls_step_counter():
    assert issubclass(StepCounter, CoreStepCounter)
    with pytest.raises(ValueError, match="max_steps"):
        StepCounter(max_steps=0)


def test_an_episode_is_cut_at_max_steps_with_the_reason(queries, answer):
    env = ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=2))
    td = env.reset(queries("a"))
    assert td["truncation_reason"].item() == NONE
    td, after = env.step_and_maybe_reset(answer(td, "1"))
    assert not td["next", "truncated"].item()
    td = env.step(answer(after, "2"))["next"]
    assert td["truncated"].item()
    assert td["done"].item()
    assert not td["terminated"].item()
    assert td["step_count"].item() == 2
    assert td["truncation_reason"].item() == MAX_STEPS


def test_a_row_that_terminates_in_the_last_step_is_not_truncated(answer):
    rows = [{"question": "q", "answer": "#### 1"}]
    env = GSM8KEnv(dataset=rows, num_envs=2, max_steps=1)
    td = env.step(answer(env.reset(), "<answer>1</answer>", "no idea"))["next"]
    assert td["done"].flatten().tolist() == [True, True]
    assert td["terminated"].flatten().tolist() == [True, False]
    assert td["truncated"].flatten().tolist() == [False, True]
    assert td["truncation_reason"].flatten().tolist() == [NONE, MAX_STEPS]


def test_rows_that_are_not_stepped_do_not_count(queries, answer):
    env = ChatEnv(batch_size=(2,)).append_transform(StepCounter(max_steps=1))
    td = answer(env.reset(queries("a", "b")), "1", "2")
    td["_step"] = torch.tensor([True, False])
    td = env.step(td)["next"]
    assert td["step_count"].flatten().tolist() == [1, 0]
    assert td["truncated"].flatten().tolist() == [True, False]
    assert td["done"].flatten().tolist() == [True, False]
    assert td["truncation_reason"].flatten().tolist() == [MAX_STEPS, NONE]


def test_without_a_limit_it_only_counts(queries, answer):
    env = ChatEnv(batch_size=(1,)).append_transform(StepCounter())
    td = env.step(answer(env.reset(queries("a")), "1"))["next"]
    assert td["step_count"].item() == 1
    assert not td["done"].item()
    check_env_specs(env, tensordict=env.reset(queries("a")))


def test_it_declares_the_reason_in_an_environment_without_one():
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    env = ContinuousActionVecMockEnv().append_transform(StepCounter(max_steps=2))
    check_env_specs(env)
    td = env.rollout(2)
    assert td["next", "truncation_reason"].flatten().tolist() == [NONE, MAX_STEPS]
    assert isinstance(td, TensorDict) or td.batch_size
