"""Collectors over a pool of environments that step on their own."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from collectors.collecting import make_env, make_policy
from torchrl.envs import AsyncEnvPool

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import History
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.weights.weight_source import TensorSource


def _pool(num=3, **options):
    return AsyncEnvPool([partial(make_env, 1, **options)] * num, stack="lazy")


def test_trajectories_of_a_pool_come_whole(policy):
    buffer = ReplayBuffer(transform=JoinTurns())
    with LLMCollector(
        _pool(tool="result"),
        policy=policy,
        yield_completed_trajectories=True,
        dialog_turns_per_batch=4,
        total_dialog_turns=24,
        track_policy_version=True,
    ) as collector:
        assert collector.async_envs
        for batch in collector:
            done = [row["next", "done"].item() for row in batch.unbind(0)]
            assert done[-1] is True
            assert batch["policy_version"].unique().tolist() == [0]
            assert isinstance(batch["history", "full"], History)
            buffer.extend(batch)
    rows = buffer[:].unbind(0)
    # every row's question says how many turns it takes: all of them are there, joined
    for row in rows:
        assert row["num_turns"].item() == row["turns"]
    assert len({row["traj_id"].item() for row in rows}) == len(rows)


def _member(query):
    return DatasetChatEnv(dataset=[{"query": query, "answer": query.upper()}], num_envs=1)


def test_members_may_begin_with_rows_of_their_own(policy):
    queries = ["Hi!", "A longer one, is it not?"]
    pool = AsyncEnvPool([partial(_member, query) for query in queries], stack="lazy")
    try:
        rows = pool.reset().unbind(0)
        assert [row["history"].prompt.content for row in rows] == [[[query]] for query in queries]
    finally:
        pool.close()


def test_only_last_steps_of_a_pool(policy):
    with LLMCollector(
        _pool(2, turns=2), policy=policy, yield_only_last_steps=True, total_dialog_turns=8
    ) as collector:
        assert [batch["turn"].tolist() for batch in collector] == [[1]] * 4
        assert collector.dialog_turns == 8


def test_a_slow_environment_does_not_hold_up_the_others(policy):
    """The first member waits for a permit that it gets only after others have finished."""
    release = threading.Event()

    def slow():
        env = make_env(1, 1)
        step = env.transform[-1]._step

        def waiting(tensordict, next_tensordict):
            assert release.wait(30)
            return step(tensordict, next_tensordict)

        env.transform[-1]._step = waiting
        return env

    pool = AsyncEnvPool([slow, partial(make_env, 1, 1)], stack="lazy")
    with LLMCollector(pool, policy=policy, yield_completed_trajectories=True) as collector:
        batches = iter(collector)
        quick = [next(batches) for _ in range(3)]
        release.set()
        assert len({batch["traj_id"].item() // 2**35 for batch in quick}) == 1


def test_ready_environments_are_answered_in_one_call(tokenizer):
    sizes = []
    policy = make_policy(tokenizer)

    def counting(td):
        sizes.append(td.batch_size[0])
        return policy(td)

    with LLMCollector(
        _pool(3, turns=1), policy=counting, yield_completed_trajectories=True
    ) as collector:
        next(iter(collector))
    assert sizes[0] == 3


@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        (partial(_pool, 2), {"dialog_turns_per_batch": 2}, "never at the same step"),
        (
            lambda: AsyncEnvPool([partial(make_env, 2)] * 2, stack="lazy"),
            {"yield_completed_trajectories": True},
            "batch size",
        ),
        (
            lambda: AsyncEnvPool([partial(make_env, 1)] * 2),
            {"yield_completed_trajectories": True},
            "stack='lazy'",
        ),
        (
            partial(_pool, 2),
            {"yield_completed_trajectories": True, "async_envs": False},
            "AsyncEnvPool",
        ),
    ],
)
def test_pools_that_cannot_work_are_refused(policy, pool, options, message):
    env = pool()
    with pytest.raises(ConfigError, match=message):
        LLMCollector(env, policy=policy, **options)
    env.close(raise_if_closed=False)


def test_a_pool_cannot_be_saved(policy):
    with LLMCollector(_pool(2), policy=policy, yield_completed_trajectories=True) as collector:
        next(iter(collector))
        with pytest.raises(CheckpointError, match="AsyncEnvPool"):
            collector.state_dict()


def test_an_error_of_a_member_reaches_the_loop(policy):
    def broken():
        env = make_env(1, 1)

        def fail(tensordict, next_tensordict):
            raise OSError("a member is broken")

        env.transform[-1]._step = fail
        return env

    pool = AsyncEnvPool([broken, broken], stack="lazy")
    with (
        pytest.raises(OSError, match="member is broken"),
        LLMCollector(pool, policy=policy, yield_completed_trajectories=True) as collector,
    ):
        next(iter(collector))
    assert torch.is_grad_enabled()


def test_a_pool_that_cannot_drop_refuses_before_its_weights_change(tokenizer):
    policy = make_policy(tokenizer)
    collector = LLMCollector(
        _pool(2), policy=policy, dialog_turns_per_batch=2, yield_completed_trajectories=True
    )
    before = [p.detach().clone() for p in policy.model.parameters()]
    new = {name: p.detach() + 1 for name, p in policy.model.named_parameters()}
    try:
        with pytest.raises(ConfigError, match="cannot be dropped"):
            collector.load_weights(TensorSource(new), version=1, in_flight="abort")
        assert all(
            torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True)
        )
        assert collector.policy_version == 0
    finally:
        collector.shutdown()
