"""Online DPO: the pairs of a group, and their loss."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.credit.credit_rows import NAN, row, write
from objectives.rows_helper import TableActor, make_row

from torchrl_llm.data.enums import Source
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.errors import DataError
from torchrl_llm.objectives import BestWorst, OnlineDPOLoss
from torchrl_llm.trainers import micro_batches

TABLE = [-0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -0.2, -0.3, -0.4]


def returns_of(rows):
    return [float(each["next", "reward"]) for each in rows.unbind(0)]


def test_the_best_and_the_worst_of_each_group_are_marked():
    rewards = {0: (0.5, 2.0, -1.0, 2.0), 1: (1.0, 1.0, 1.0, 1.0), 2: (NAN, 3.0, 4.0, 3.5)}
    rows = [
        row(reward, group=group, traj=4 * group + n)
        for group, of_group in rewards.items()
        for n, reward in enumerate(of_group)
    ]
    credit = BestWorst(4)
    written = write(credit, rows)[:]
    assert returns_of(written) == [2.0, -1.0, 4.0, 3.0]
    assert written["advantage"].flatten().tolist() == [1.0, -1.0, 1.0, -1.0]
    assert written["is_chosen"].tolist() == [True, False, True, False]
    first, second, third, fourth = written["pair_id"].tolist()
    assert first == second != third == fourth
    assert [int(each["traj_id"]) for each in written.unbind(0)][:2] == [1, 2]  # the first of equal
    stats = credit.get_stats()
    assert (stats["written_groups"], stats["filtered_groups"]) == (2, 1)


def test_numbers_of_pairs_go_on_after_a_resume():
    def numbers(credit, group):
        pair = [row(float(n), group=group, traj=2 * group + n) for n in (0, 1)]
        return set(write(credit, pair)[:]["pair_id"].tolist())

    first, second = BestWorst(2), BestWorst(2)
    before = numbers(first, 0)
    second.set_extra_state(first.get_extra_state())
    assert before.isdisjoint(numbers(second, 1))


def pair_rows():
    """Two pairs whose log-probs are in the table of the actor, that of each token."""
    ids = [[1, 2, 3], [1, 4], [5, 2], [5, 6, 7, 8]]
    references = [[0.0, -1.0, -2.0], [0.0, -1.5], [0.0, -0.5], [0.0, -3.0, -1.0, -1.0]]
    rows = []
    for n, (tokens, reference) in enumerate(zip(ids, references, strict=True)):
        made = make_row(tokens, 1, ref=torch.tensor(reference))
        made["pair_id"], made["is_chosen"] = torch.tensor(n // 2), torch.tensor(n % 2 == 0)
        rows.append(made)
    return lazy_rows(rows)


def test_the_loss_by_hand():
    rows, actor = pair_rows(), TableActor(TABLE)
    output = OnlineDPOLoss(actor, beta=1.0)(rows)
    # Log-ratios: chosen -1.5 - 2 + 3 = -0.5, rejected -2.5 + 1.5 = -1; and -1.5 + 0.5 = -1 and
    # -0.9 + 5 = 4.1. Differences 0.5 and -5.1, of which -log sigmoid is 0.4741 and 5.1061.
    expected = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(5.1))]
    assert output.total_loss().item() == pytest.approx(sum(expected) / 2, abs=1e-6)
    assert output.accuracy.item() == 0.5
    assert output.margin.item() == pytest.approx((0.5 - 5.1) / 2)
    output.total_loss().backward()
    # d loss / d table[3], which the first chosen answer has once: -sigmoid(-0.5) / 2.
    assert actor.table.grad[3].item() == pytest.approx(-1 / (1 + math.exp(0.5)) / 2, abs=1e-6)
    # table[2]: chosen twice.
    both = -1 / (1 + math.exp(0.5)) / 2 - 1 / (1 + math.exp(-5.1)) / 2
    assert actor.table.grad[2].item() == pytest.approx(both, abs=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"form": "ipo"}, {"sft_coeff": 0.3}, {"form": "hinge", "beta": 0.7}], ids=str
)
def test_the_rows_of_a_trajectory_are_one_answer(settings):
    # The first chosen answer in one row of two turns, and in a row for each of them.
    def rows(*first):
        made = [make_row(*each, ref=torch.tensor(ref)) for *each, ref in first]
        for each in made:
            each["pair_id"], each["is_chosen"] = torch.tensor(0), torch.tensor(True)
        return lazy_rows([*made, *pair_rows().unbind(0)[1:]])

    def found(batch):
        actor = TableActor(TABLE)
        output = OnlineDPOLoss(actor, **settings)(batch)
        output.total_loss().backward()
        assert bool(actor.table.grad.isfinite().all())
        return [output.total_loss().detach(), output.margin, actor.table.grad]

    whole = found(rows(([1, 2, 3], 1, [0.0, -1.0, -2.0])))
    parts = found(rows(([1, 2], 1, [0.0, -1.0]), ([1, 4, 3], 2, [0.0, 0.0, -2.0])))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_pairs_stay_together_and_pieces_add_up():
    rows, actor = pair_rows(), TableActor(TABLE)
    loss = OnlineDPOLoss(actor)
    shuffled = lazy_rows([rows.unbind(0)[n] for n in (3, 0, 2, 1)])
    pieces = micro_batches(shuffled, budget=6)
    assert sorted(sorted(piece["pair_id"].tolist()) for piece in pieces) == [[0, 0], [1, 1]]
    counts = loss.normalizer(shuffled)
    total = sum(loss(piece, normalizer=counts).total_loss() for piece in pieces)
    torch.testing.assert_close(total, loss(rows).total_loss())


def test_tokens_that_were_not_sampled_do_not_count():
    rows = pair_rows()
    changed = [each.clone() for each in rows.unbind(0)]
    changed[0] = make_row([1, 8, 2, 3], 1, ref=torch.tensor([0.0, -9.0, -1.0, -2.0]))
    changed[0]["trace", "source"][1] = int(Source.TEMPLATE)
    changed[0]["pair_id"], changed[0]["is_chosen"] = torch.tensor(0), torch.tensor(True)
    loss = OnlineDPOLoss(TableActor(TABLE))
    torch.testing.assert_close(
        loss(lazy_rows(changed)).total_loss(), loss(rows).total_loss(), atol=1e-7, rtol=0
    )


def test_a_row_without_a_reference_or_without_its_other_is_refused():
    loss, rows = OnlineDPOLoss(TableActor(TABLE)), pair_rows()
    with pytest.raises(DataError, match=r"pairs \[1\] do not have them"):
        loss(rows[:3])
    bare = lazy_rows([each.exclude(("next", "ref_log_probs")) for each in rows.unbind(0)])
    with pytest.raises(DataError, match="RetrieveLogProb with the reference policy writes it"):
        loss(bare)
