"""Rows longer than training may have; every value worked by hand, or against a row cut by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data import MaskReason, Source, TruncationReason
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.overlong import LengthRule, cut_row
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, Trajectory, drop_truncated
from torchrl_llm.data.token_facts import FACTS, TokenFact, register_fact, unregister_fact
from torchrl_llm.envs.transforms import OverlongPenalty
from torchrl_llm.errors import OverlongError
from torchrl_llm.objectives import GAEAdvantage

P, S, TOOL = int(Source.PROMPT), int(Source.SAMPLED), int(Source.TOOL)


def turn(sources, response, *, number=0, traj=0, done=True, per_token=False, first_id=0):
    """A turn whose per-token facts are all different; ``response`` tokens of it are the answer."""
    size = len(sources)
    source = torch.tensor(sources, dtype=torch.int8)
    ids = torch.arange(first_id, first_id + size)
    row = TensorDict(
        {
            "tokens": {
                "prompt": ids[: size - response],
                "response": ids[size - response :],
                "full": ids,
                "finish_reason": torch.tensor(0, dtype=torch.int8),
            },
            "support": {
                "counts": torch.where(source == S, 2, 0).to(torch.int32),
                "token_ids": torch.stack([ids, ids + 100], 1)[source == S].reshape(-1).int(),
            },
            "next": {
                "reward": torch.full((1, 1), 1.0 + number),
                "reward_valid": torch.tensor(True),
                "done": torch.tensor([done]),
                "terminated": torch.tensor([done]),
                "truncated": torch.tensor([False]),
                "truncation_reason": torch.tensor([-1], dtype=torch.int8),
                "ref_log_probs": {"full": -ids.float()},
            },
            "traj_id": torch.tensor(traj),
            "turn": torch.tensor(number),
        }
    )
    for place, fact in enumerate(FACTS.values()):
        if fact.key[0] == "tokens":
            continue
        values = (ids.view(-1, *[1] * len(fact.shape)) + 10 * place + number).expand(
            size, *fact.shape
        )
        row.set(fact.key, values.to(fact.dtype).clone())
        if fact.parts:
            row.set((fact.key[0], "response"), row.get(fact.key)[size - response :])
    row.set(("trace", "source"), source)
    row.set(("trace", "mask_reason"), torch.where(source == S, 0, 1).to(torch.int8))
    if per_token:
        row.set(("next", "reward"), (ids[size - response :].float() + 1)[:, None])
        row.set(("next", "token_reward", "total"), ids[size - response :].float() + 1)
    return row


@pytest.fixture
def route():
    """A fact of a user's own, of two numbers a token."""
    yield register_fact(
        TokenFact(name="route", dtype=torch.int16, key=("router", "experts"), shape=(2,))
    )
    unregister_fact("route")


@pytest.mark.parametrize("limit", range(2, 7))
def test_every_fact_of_the_table_is_cut_and_the_row_holds_together(route, limit):
    row = turn([P, P, P, S, S, S, S], 4)
    before = copy.deepcopy(row)
    cut = cut_row(row, limit)
    assert (row == before).all()
    for fact in FACTS.values():
        assert torch.equal(cut[fact.key], row[fact.key][:limit]), fact.name
        if fact.parts:
            assert torch.equal(cut[fact.key[0], "response"], row[fact.key][3:limit])
    parts = [cut["tokens", name].tolist() for name in ("prompt", "response")]
    assert parts == [list(range(3))[:limit], list(range(3, 7))[: max(limit - 3, 0)]]
    assert cut["next", "ref_log_probs", "full"].tolist() == [-float(i) for i in range(limit)]
    sampled = [i for i in range(3, 7) if i < limit]
    assert cut["support", "counts"].tolist() == [2 if i in sampled else 0 for i in range(limit)]
    assert cut["support", "token_ids"].tolist() == [n for i in sampled for n in (i, i + 100)]
    assert cut["cut_tokens"].item() == 4 - len(sampled)
    assert cut["next", "reward"].tolist() == [[1.0]]  # of the row: it was earned


@pytest.mark.parametrize("limit", range(2, 7))
def test_the_return_of_every_token_that_is_left_is_what_it_was(limit):
    row = turn([P, P, P, S, S, S, S], 4, per_token=True)
    cut = cut_row(row, limit)
    left = max(limit - 3, 0)
    for key in (("next", "reward"), ("next", "token_reward", "total")):
        assert cut[key].shape[0] == max(left, 1)  # of an empty answer: a reward of the row
        to_go = [row[key].flatten()[i:].sum().item() for i in range(max(left, 1))]
        assert [cut[key].flatten()[i:].sum().item() for i in range(max(left, 1))] == to_go
    # 4 5 6 7: with two tokens left, the second gets 5 + 6 + 7.
    if left == 2:
        assert cut["next", "reward"].flatten().tolist() == [4.0, 18.0]


def test_a_row_that_was_cut_is_truncated_unless_it_has_a_reason_already():
    cut = cut_row(turn([P, S, S], 2), 2)
    assert cut["next", "truncated"].tolist() == [True]
    assert cut["next", "truncation_reason"].item() == TruncationReason.MAX_SEQ_LEN
    assert cut["next", "terminated"].item()
    out_of_steps = turn([P, S, S], 2)
    out_of_steps["next", "truncation_reason"] = torch.tensor([0], dtype=torch.int8)
    reason = cut_row(out_of_steps, 2)["next", "truncation_reason"].item()
    assert reason == TruncationReason.MAX_STEPS
    bare = TensorDict(tokens={"full": torch.arange(3), "response": torch.arange(1, 3)})
    assert cut_row(bare, 2)["next", "truncation_reason"].item() == TruncationReason.MAX_SEQ_LEN


def test_what_was_cut_twice_counts_both_cuts():
    row = turn([P, S, S, S, S], 4)
    assert cut_row(cut_row(row, 4), 2)["cut_tokens"].item() == 3
    assert torch.equal(
        cut_row(cut_row(row, 4), 2)["tokens", "full"], cut_row(row, 2)["tokens"]["full"]
    )


def test_selectors_see_the_cut_and_nothing_is_expected_behind_it():
    whole, cut = turn([P, S, S], 2), cut_row(turn([P, S, S], 2, done=False), 2)
    cut["next", "terminated"] = torch.tensor([False])
    group = [Trajectory([whole]), Trajectory([cut]), Trajectory([cut, whole])]
    assert drop_truncated(group) == [True, False, False]
    assert [trajectory.goes_on for trajectory in group] == [False, False, False]


def test_a_critic_gets_the_reward_that_stood_on_a_token_that_is_gone():
    row = turn([P, S, S, S], 3, per_token=True)
    row["next", "reward"] = torch.tensor([[0.0], [0.0], [1.0]])
    row["values", "full"] = torch.tensor([0.0, 0.5, 0.25, 9.0])
    row["next", "terminated"] = torch.tensor([False])  # bootstrap would want a value behind it
    cut = cut_row(row, 3)
    (done,) = GAEAdvantage(normalize="none").inv(lazy_rows([cut])).unbind(0)
    # Both tokens left look forward to 1: 1 - 0.5 and 1 - 0.25.
    assert done["advantage"].flatten().tolist() == [0.0, 0.5, 0.75]
    assert done["value_target", "full"].tolist() == [0.0, 1.0, 1.0]


def two_turns(**options):
    """Two tokens of prompt, three sampled; two of a tool, two sampled."""
    first = [P, P, S, S, S]
    return [
        turn(first, 3, done=False, **options),
        turn([*first, TOOL, TOOL, S, S], 2, number=1, **options),
    ]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("limit", range(2, 10))
def test_turns_that_are_cut_and_joined_are_the_joined_row_cut(route, limit, per_token):
    turns = two_turns(per_token=per_token)
    (whole,) = JoinTurns().inv(lazy_rows(turns)).unbind(0)
    expected = cut_row(whole, limit) if limit < 9 else whole
    fitted = LengthRule(max_seq_len=limit, on_overlong="truncate").fit(turns)
    (joined,) = JoinTurns().inv(lazy_rows(fitted.kept)).unbind(0)
    assert joined["num_turns"].item() == 2
    keys = [fact.key for fact in FACTS.values()] + [("support", "counts"), ("support", "token_ids")]
    for key in [
        *keys,
        ("tokens", "prompt"),
        ("tokens", "response"),
        ("next", "ref_log_probs", "full"),
    ]:
        assert torch.equal(joined[key], expected[key]), key
    assert leaf(joined, ("cut_tokens",)) == leaf(expected, ("cut_tokens",))
    assert joined["next", "truncated"].item() == (limit < 9)
    if limit > 2:
        assert torch.equal(joined["next", "reward"], expected["next", "reward"])


def test_a_second_row_of_a_rewritten_conversation_is_judged_by_its_own_length():
    first, _ = two_turns()
    rewritten = turn([P, S], 1, number=1, first_id=50)  # a context strategy made it short
    fitted = LengthRule(max_seq_len=4, on_overlong="truncate").fit([first, rewritten])
    assert [len(row["tokens", "full"]) for row in fitted.kept] == [4, 2]
    assert (fitted.cut_tokens, fitted.overlong) == (1, 1)
    joined = JoinTurns().inv(lazy_rows(fitted.kept)).unbind(0)
    assert [len(row["tokens", "full"]) for row in joined] == [4, 2]


def test_rows_that_fit_are_handed_on_as_they_are():
    rows = two_turns()
    fitted = LengthRule(max_seq_len=9).fit(rows)
    assert all(map(lambda a, b: a is b, fitted.kept, rows))
    assert (fitted.cut_tokens, fitted.overlong, fitted.dropped) == (0, 0, [False, False])
    empty = TensorDict(tokens={"full": torch.arange(0), "response": torch.arange(0)})
    assert LengthRule(max_seq_len=2).fit([empty, TensorDict()]).overlong == 0


def test_truncation_marks_what_was_collected_and_cuts_what_is_trained():
    rows = two_turns()
    fitted = LengthRule(max_seq_len=4, on_overlong="truncate").fit(rows)
    over = int(MaskReason.OVERLONG)
    assert [row["trace", "mask_reason"].tolist() for row in fitted.marked] == [
        [1, 1, 0, 0, over],
        [1, 1, 0, 0, over, 1, 1, over, over],
    ]
    assert rows[0]["trace", "mask_reason"].tolist() == [1, 1, 0, 0, 0]
    assert [row["trace", "mask_reason"].tolist() for row in fitted.kept] == [[1, 1, 0, 0]] * 2
    assert (fitted.cut_tokens, fitted.overlong) == (1 + 2, 1)


def test_a_dropped_conversation_leaves_with_all_of_its_turns():
    other = turn([P, S], 1, traj=7)
    fitted = LengthRule(max_seq_len=6, on_overlong="drop").fit([*two_turns(), other])
    assert fitted.dropped == [True, True, False]
    assert [row["next", "reward_valid"].item() for row in fitted.kept] == [False, False, True]
    assert [len(row["tokens", "full"]) for row in fitted.kept] == [5, 6, 2]  # and costs no forward
    assert fitted.marked[0]["next", "reward_valid"].item()
    masked = (fitted.marked[0]["trace", "mask_reason"] == MaskReason.OVERLONG).tolist()
    assert masked == [False, False, True, True, True]
    assert (fitted.cut_tokens, fitted.overlong) == (2, 1)


def test_agents_of_one_game_are_conversations_of_their_own():
    rows = [turn([P, S, S], 2), turn([P, S], 1)]
    for number, row in enumerate(rows):
        row["agent"] = torch.tensor(number)
    assert LengthRule(max_seq_len=2, on_overlong="drop").fit(rows).dropped == [True, False]


def test_an_error_names_the_row_its_length_and_what_to_change():
    row = turn([P, P, S, S], 2, traj=12)
    row["group_id"] = torch.tensor(3)
    with pytest.raises(OverlongError) as error:
        LengthRule(max_seq_len=3).fit([turn([P, S], 1), row])
    said = str(error.value)
    assert "row 1 of the batch, group_id=3, traj_id=12, turn=0 has 4 tokens, 2 of them" in said
    assert "train.max_seq_len is 3" in said
    assert "train.on_overlong=truncate" in said


def test_a_length_penalty_counts_what_was_said_and_not_what_is_left():
    row = cut_row(turn([P] + [S] * 10, 10), 4)
    (punished,) = OverlongPenalty(max_length=10, cache=4)(lazy_rows([row])).unbind(0)
    assert punished["next", "overlong_penalty"].item() == -1.0
