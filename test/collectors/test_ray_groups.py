"""Groups that complete across processes: one primer, one buffer or one credit rule for all."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from collectors.ray_helper import QUESTIONS, fake_policy, shared_env
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement

from torchrl_llm.collectors import RayLLMCollector
from torchrl_llm.data.replay_buffers import JoinTurns, RayReplayBuffer, ReplayBuffer
from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.data.row_order import BandOrder
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import DataLoadingPrimer, RayDataLoadingPrimer
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.objectives import MCAdvantage, RayMCAdvantage

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

PATIENCE_S = 280.0


# -- prompts ------------------------------------------------------------------------------------


def test_results_reach_the_order_of_an_actor_and_go_on_after_a_resume():
    def rows():
        made = [{"query": f"question {n}"} for n in range(6)]
        return RayDataLoadingPrimer(RowLoader(made, seed=0, order=BandOrder(revisit=2)), repeats=2)

    first = rows()
    env, other = (shared_env(copy, 2) for copy in _copies(first, 2))
    drawn = [each.reset()["row_id"].tolist() for each in (env, other, env)]
    assert all(a == b for a, b in drawn)
    left = sorted(set(range(6)) - {a for a, _ in drawn})
    first.order.record({row: [1.0, 0.0] if row == drawn[0][0] else [1.0] for row, _ in drawn})
    first.order.record({row: [0.0] for row in left})
    assert first.order.ended() is None
    assert first.order.metrics()["train/curriculum_active"] == 1 / 6
    second = rows()  # another actor, as after a kill
    second.order.load_state_dict(first.order.state_dict())
    second.set_extra_state(first.get_extra_state())
    again = shared_env(second, 2)
    for each in (env, again):
        assert [each.reset()["row_id"].tolist() for _ in range(2)] == [[drawn[0][0]] * 2] * 2
    for each in (first, second):
        each.shutdown()


@pytest.fixture(scope="module")
def primer(cluster):
    made = RayDataLoadingPrimer(QUESTIONS, repeats=2, actor_name="questions")
    yield made
    made.shutdown()


def _copies(primer, number):
    return [pickle.loads(pickle.dumps(primer)) for _ in range(number)]


def test_all_environments_draw_from_one_loader_and_share_its_groups(primer):
    primer.reset_dataloader()
    first, second = (shared_env(copy, 1) for copy in _copies(primer, 2))
    drawn = [env.reset() for env in (first, second, first, first, second)]
    queries = [query for td in drawn for query in td["query"]]
    groups = [group for td in drawn for group in td["group_id"].tolist()]
    # Two repeats of a prompt, over whichever environment asks next.
    assert queries == [f"question {i}" for i in (0, 0, 1, 1, 2)]
    assert [group - groups[0] for group in groups] == [0, 0, 1, 1, 2]
    # No other process hands out such ids.
    local = DataLoadingPrimer(QUESTIONS)
    assert shared_env(local, 1).reset()["group_id"].item() < groups[0]


def test_it_continues_at_the_latest_of_the_saved_positions(primer):
    primer.reset_dataloader()
    first, second = (shared_env(copy, 2) for copy in _copies(primer, 2))
    first.reset()
    earlier = first.transform.state_dict()
    second.reset()
    later = second.transform.state_dict()
    ahead = first.reset()
    primer.reset_dataloader()
    for state in (later, earlier):
        first.transform.load_state_dict(state)
    again = second.reset()
    assert list(again["query"]) == list(ahead["query"])
    assert torch.equal(again["group_id"], ahead["group_id"])


def test_environments_with_one_actor_name_share_its_rows(primer):
    primer.reset_dataloader()
    make = partial(
        DatasetChatEnv,
        dataset=[{"query": "never seen", "turns": 1}],
        ray_backend=True,
        dataloader_actor_name="questions",
    )
    first, second = make(), make()
    queries = [env.reset()["query"][0] for env in (first, second, first)]
    assert queries == ["question 0", "question 0", "question 1"]


def test_a_primer_needs_one_loader():
    with pytest.raises(ConfigError, match="exactly one"):
        RayDataLoadingPrimer()


# -- credit -------------------------------------------------------------------------------------


def _row(group, reward, trajectory):
    next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1, dtype=torch.bool)}
    tokens = {"response": torch.arange(3)}
    return TensorDict(
        next=next_,
        tokens=tokens,
        group_id=torch.tensor(group),
        traj_id=torch.tensor(trajectory),
    )


@pytest.fixture(scope="module")
def credit(cluster):
    made = RayMCAdvantage(2, actor_name="rule")
    yield made
    made.shutdown()


def test_a_group_whose_rows_are_written_by_two_processes_completes(credit):
    first, second = (ReplayBuffer(transform=copy) for copy in _copies(credit, 2))
    assert len(first.extend([_row(7, 0.0, 0), _row(8, 1.0, 1)])) == 0
    # Whoever completes a group gets it: with plain buffers neither of them ever would.
    assert second.extend([_row(7, 1.0, 2)]).tolist() == [0, 1]
    assert len(first) == 0
    advantages = [row["advantage"].item() for row in second[:].unbind(0)]
    expected = MCAdvantage(2)
    plain = ReplayBuffer(transform=expected)
    plain.extend([_row(7, 0.0, 0), _row(7, 1.0, 2)])
    assert advantages == [row["advantage"].item() for row in plain[:].unbind(0)]
    stats = credit.get_stats()
    assert (stats["completed_groups"], stats["queued_groups"]) == (1, 1)
    assert stats["queued_tokens"] == 3
    state = credit.get_extra_state()
    assert credit.clear_queues() == 1
    assert credit.get_stats()["queued_groups"] == 0
    credit.set_extra_state(state)
    assert first.extend([_row(8, 0.0, 3)]).tolist() == [0, 1]
    credit.reset_stats()
    assert credit.get_stats()["completed_groups"] == 0


def test_a_rule_of_another_size_under_one_name_is_refused(credit):
    with pytest.raises(ConfigError, match="groups of 2"):
        RayMCAdvantage(3, actor_name="rule")
    with pytest.raises(ConfigError, match="grpo_size"):
        RayMCAdvantage(1)
    credit.shutdown()
    with pytest.raises(WorkerError, match="rule"):
        credit.get_stats()


# -- buffers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buffer(cluster):
    made = RayReplayBuffer(
        storage=partial(LazyStackStorage, 100),
        sampler=SamplerWithoutReplacement(),
        transform_factory=[partial(MCAdvantage, 2), JoinTurns],
        batch_size=2,
        remote_config={"num_cpus": 0.25},
    )
    yield made
    made.shutdown()


def test_a_buffer_over_there_does_what_one_here_does(buffer):
    local = ReplayBuffer(
        storage=LazyStackStorage(100), sampler=SamplerWithoutReplacement(), batch_size=2
    )
    local.append_transform(MCAdvantage(2))
    local.append_transform(JoinTurns())
    for target in (buffer, local):
        assert target.extend([_row(1, 0.0, 0), _row(2, 1.0, 1)]).tolist() == []
        assert target.add(_row(1, 1.0, 2)).tolist() == [0, 1]
        assert len(target) == 2
        rewards = [row["next", "reward"].item() for row in target[:].unbind(0)]
        assert rewards == [0.0, 1.0]
        assert target[1]["num_turns"].item() == 1
        drawn = [row["advantage"].item() for row in target.sample().unbind(0)]
        assert sorted(round(a, 4) for a in drawn) == [-0.7071, 0.7071]
    assert buffer.transform_stats()["MCAdvantage"]["queued_groups"] == 1
    state = buffer.state_dict()
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.load_state_dict(state)
    assert len(next(iter(buffer))) == 2
    buffer.empty()


def test_transforms_are_made_where_the_buffer_is():
    with pytest.raises(ConfigError, match="transform_factory"):
        RayReplayBuffer(transform=MCAdvantage(2))


def test_collectors_fill_one_buffer_and_groups_complete_across_them(buffer, primer):
    """Two environments of one row each: no group of two can ever complete in one of them alone."""
    buffer.empty()
    primer.reset_dataloader()
    build = partial(
        RayLLMCollector,
        partial(shared_env, primer, 1),
        policy_factory=fake_policy,
        dialog_turns_per_batch=1,
        replay_buffer=buffer,
        num_cpus=0.25,
    )
    with ThreadPoolExecutor(2) as threads:
        collectors = list(threads.map(lambda name: build(name=name), ("a", "b")))
    for collector in collectors:
        collector.start()

    def processes_by_group():
        groups = {}
        for row in buffer[:].unbind(0):
            # The high bits of an id say which process gave it out.
            groups.setdefault(row["group_id"].item(), []).append(row["traj_id"].item() >> 47)
        return groups

    def some_group_is_of_both():
        return any(len(set(members)) == 2 for members in processes_by_group().values())

    deadline = time.monotonic() + PATIENCE_S
    # One of them may be ready long before the other.
    while len(buffer) < 20 or not some_group_is_of_both():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for collector in collectors:
        collector.check()
        collector.shutdown()
    rows = buffer[:].unbind(0)
    assert all(len(members) == 2 for members in processes_by_group().values())
    assert all("advantage" in row for row in rows)
    primer.shutdown()

    def ask_until_it_is_gone():
        while time.monotonic() < deadline:
            primer.reset_dataloader()

    with pytest.raises(WorkerError, match="questions"):
        ask_until_it_is_gone()
