"""What is true of every advantage estimator: late rewards, resuming, the ledger, types, order."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from objectives.credit.credit_rows import NAN, advantages, row, write
from torchrl.envs import Transform

from torchrl_llm.data.nodes import cell
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer, drop_truncated
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import credit as room
from torchrl_llm.objectives.credit import (
    BatchNormalizedReturn,
    BestWorst,
    ConstantCredit,
    CreditAssigner,
    EpisodicReturn,
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
    MonteCarloReturn,
    PerStepReward,
    SPOAdvantage,
)

RULES: dict[str, Callable[..., CreditAssigner]] = {
    "group": lambda **o: MCAdvantage(3, **o),
    "group_by_step": lambda **o: MCAdvantage(3, trajectory_return=None, **o),
    "candidates": lambda **o: MCAdvantage(
        2, candidate_group_size=3, candidate_selection_min_size=3, **o
    ),
    "best_worst": lambda **o: BestWorst(3, **o),
    "leave_one_out": lambda **o: LeaveOneOutAdvantage(3, **o),
    "hybrid": lambda **o: HybridNormalizedReturn(3, **o),
    "hybrid_batches": lambda **o: HybridNormalizedReturn(3, batch_size=6, **o),
    "batch": lambda **o: BatchNormalizedReturn(**o),
    "batch_of_groups": lambda **o: BatchNormalizedReturn(3, baseline="group", batch_size=6, **o),
    "monte_carlo": lambda **o: MonteCarloReturn(0.5, **o),
    "per_step": lambda **o: PerStepReward(**o),
    "episodic": lambda **o: EpisodicReturn(**o),
    "constant": lambda **o: ConstantCredit(**o),
    "spo": lambda **o: SPOAdvantage(prompt_key="group_id", batch_size=6, **o),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class _Scores(Transform):
    """A reward that is known only when rows are written: the value of a table."""

    adds_keys_only = True

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, tensordict):
        return tensordict

    def _inv_call(self, tensordict):
        for made in row_list(tensordict):
            made["next", "reward"] = self.table[made["traj_id"].item()].view(1, 1)
        return tensordict


def _rows(seed=0, groups=4, size=3, dtype=torch.float32):
    """Groups of episodes of one or two turns, with a row that is invalid and one that is cut."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for traj in range(groups * size):
        turns = 1 + traj % 2
        for turn in range(turns):
            reward = round(torch.rand((), generator=generator).item() / 2, 3)
            made = row(
                NAN if traj == 4 else reward,
                group=traj // size,
                traj=traj,
                turn=turn,
                done=turn == turns - 1,
                tokens=1 + (traj + turn) % 4,
                dtype=dtype,
            )
            made["next", "truncated"] = torch.tensor([traj == 7])
            made["next", "terminated"] = torch.tensor([traj != 7 and turn == turns - 1])
            rows.append(made)
    return rows


def _clones(rows):
    return [made.clone() for made in rows]


def _by_row(rows):
    """Advantages by trajectory and turn, of a buffer or of rows."""
    if isinstance(rows, ReplayBuffer):
        rows = rows[:].unbind(0) if len(rows) else ()
    return {
        (r["traj_id"].item(), r["turn"].item()): r["advantage"].flatten().tolist() for r in rows
    }


def _approx(by_row):
    return {key: pytest.approx(value, abs=1e-6) for key, value in by_row.items()}


def test_no_rule_is_missing_here():
    bases = {"BatchStatistics", "ComparingCredit", "CreditAssigner"}
    rules = {
        value
        for name in room.__all__
        if isinstance(value := getattr(room, name), type)
        and issubclass(value, CreditAssigner)
        and name not in bases
    }
    # Rules that need a critic or a teacher have tests of their own.
    assert rules - {room.GAEAdvantage} == {type(make()) for make in RULES.values()}


@every_rule
def test_rewards_that_come_after_the_fact_are_the_rewards(rule):
    rows = [made for made in _rows() if made["next", "done"].all()]
    table = {made["traj_id"].item(): made["next", "reward"].clone() for made in rows}
    expected = _by_row(write(rule(), _clones(rows)))
    late = _clones(rows)
    for made in late:
        made["next", "reward"] = torch.full((1, 1), 55.0)
    buffer = ReplayBuffer(transform=rule())
    buffer.append_transform(_Scores(table))  # appended last, so it runs first
    buffer.extend(lazy_rows(late))
    assert _by_row(buffer) == expected != {}


@every_rule
def test_every_token_is_written_or_counted(rule):
    credit = rule(selectors=[drop_truncated], keep_zero_advantage=False)
    buffer = ReplayBuffer(transform=credit)
    rows = _rows()
    for cut in (0, 7, 13):
        buffer.extend(lazy_rows(_clones(rows)[cut : {0: 7, 7: 13, 13: None}[cut]]))
    buffer.extend(lazy_rows([row(0.5, group=90, traj=90, turn=0, tokens=8)]))
    buffer.extend(lazy_rows([row(0.5, group=91, traj=91, turn=0, tokens=16, done=False)]))

    def accounted():
        stats = credit.get_stats()
        written = sum(map(sampled_tokens, buffer[:].unbind(0)))
        names = ("filtered_tokens", "invalid_tokens", "unfilled_tokens", "queued_tokens")
        return written + sum(stats[name] for name in names)

    generated = sum(map(sampled_tokens, rows)) + 8 + 16
    assert accounted() == generated
    assert credit.get_stats()["invalid_tokens"] >= sampled_tokens(rows[6])
    credit.clear_queues()
    assert accounted() == generated
    assert credit.get_stats()["queued_tokens"] == 0


@every_rule
def test_resumed_is_uninterrupted(rule):
    for cut in [1, 5, 11]:
        rows = _rows()
        whole = rule()
        expected = _by_row(write(whole, _clones(rows)[:cut], _clones(rows)[cut:]))
        first, second = rule(), rule()
        got = _by_row(write(first, _clones(rows)[:cut]))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=False))
        got |= _by_row(write(second, _clones(rows)[cut:]))
        assert got == expected
        assert second.get_stats() == whole.get_stats()


@every_rule
def test_the_order_of_rows_does_not_matter(rule):
    # One batch of whole groups: which groups share a later batch does depend on who came first.
    rows = [row(i * i / 36, group=i // 3, traj=i, turn=0, tokens=1 + i % 4) for i in range(6)]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1)).tolist()
    expected = _by_row(write(rule(), _clones(rows)))
    shuffled = _by_row(write(rule(), [_clones(rows)[i] for i in order]))
    assert shuffled == _approx(expected) != {}


@every_rule
def test_invalid_rewards_have_no_influence(rule):
    rows = _rows()
    expected = _by_row(write(rule(), _clones(rows)))
    other = _clones(rows)
    for made in other:
        if made["traj_id"] == 4:
            made["next", "reward"] = torch.full((1, 1), 1e9)
            made["next", "reward_valid"] = torch.tensor([False])
    assert _by_row(write(rule(), other)) == expected
    assert not any(traj == 4 for traj, _ in expected)


@every_rule
def test_the_advantage_has_the_type_of_the_reward_and_float32_at_least(rule):
    for dtype in [torch.bfloat16, torch.float32, torch.float64]:
        buffer = write(rule(), _rows(dtype=dtype))
        expected = torch.promote_types(dtype, torch.float32)
        assert {r["advantage"].dtype for r in buffer[:].unbind(0)} == {expected}
        assert all(r["advantage"].shape[1:] == (1,) for r in buffer[:].unbind(0))


@every_rule
def test_agents_are_compared_with_their_own_kind(rule):
    plain = _rows()
    expected = _by_row(write(rule(), _clones(plain)))
    if rule().group_size == 1 or getattr(rule(), "batch_size", None):
        return  # statistics over a batch are over all agents
    both = []
    for made in plain:
        twin = made.clone()
        twin["next", "reward"] = -made["next", "reward"]
        made["agent"], twin["agent"] = cell("x"), cell("o")
        both += [made, twin]
    buffer = write(rule(), both)
    assert _by_row(r for r in buffer[:].unbind(0) if r["agent"] == "x") == expected
    opposite = {key: [-value for value in values] for key, values in expected.items()}
    assert _by_row(r for r in buffer[:].unbind(0) if r["agent"] == "o") == _approx(opposite)


@every_rule
def test_advantages_survive_the_joining_of_turns(rule):
    rows, spans, before = _rows(), {}, None
    for made in rows:
        if made["turn"].item():
            # The prompt of a second turn is all of the first one and a token of the environment.
            made["tokens", "prompt"] = torch.cat([before["tokens", "full"], torch.tensor([9])])
            parts = made["tokens", "prompt"], made["tokens", "response"]
            made["tokens", "full"] = torch.cat(parts)
        end = made["tokens", "full"].shape[0]
        spans[made["traj_id"].item(), made["turn"].item()] = slice(
            end - made["tokens", "response"].shape[0], end
        )
        before = made
    expected = _by_row(write(rule(), _clones(rows)))
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.append_transform(rule())
    buffer.extend(lazy_rows(rows))
    joined = {r["traj_id"].item(): r for r in buffer[:].unbind(0)}
    assert len(buffer) == len(joined) == len({traj for traj, _ in expected})
    for (traj, turn), values in expected.items():
        full = joined[traj]["tokens", "full"]
        column = joined[traj]["advantage"].expand(full.shape[0], 1)[spans[traj, turn], 0]
        assert column.tolist() == values * (1 if len(values) > 1 else len(column))


@every_rule
def test_only_what_is_better_than_expected(rule):
    got = _by_row(write(rule(positive_only=True), _rows()))
    assert all(value >= 0 for values in got.values() for value in values)


@every_rule
def test_equal_rewards_are_no_news_to_a_rule_that_compares(rule):
    credit = rule()
    rows = [row(0.7, group=i // 3, traj=i, turn=0, tokens=1 + i % 3) for i in range(6)]
    values = set(advantages(write(credit, rows)))
    if isinstance(credit, (MonteCarloReturn, PerStepReward, EpisodicReturn)):
        assert values == {torch.tensor(0.7).item()}
    elif isinstance(credit, BestWorst):
        assert values == set()
    else:
        assert values == ({1.0} if isinstance(credit, ConstantCredit) else {0.0})


@every_rule
def test_a_rule_can_be_sent_to_another_process(rule):
    credit = pickle.loads(pickle.dumps(rule()))
    assert _by_row(write(credit, _rows())) == _by_row(write(rule(), _rows()))


@every_rule
def test_an_unknown_argument_is_an_error(rule):
    with pytest.raises(TypeError, match="grop_size"):
        rule(grop_size=3)


@pytest.mark.parametrize(
    ("rule", "others"),
    [
        (partial(MCAdvantage, 2), {"eps_as": "added"}),
        (partial(HybridNormalizedReturn, 2), {"deviation_of": "returns", "eps_as": "added"}),
        (BatchNormalizedReturn, {"eps_as": "added"}),
        (SPOAdvantage, {"eps_as": "added"}),
    ],
)
def test_what_guards_a_division_needs_one(rule, others):
    for changed in ({"eps": 0.1}, *({name: value} for name, value in others.items())):
        (name,) = changed
        with pytest.raises(ConfigError, match=f"{name} without effect.*divides by nothing"):
            rule(normalize="none", **changed)
