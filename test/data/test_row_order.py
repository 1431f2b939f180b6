"""Orders of rows that follow results: what is drawn, how often, and after a resume."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from torchrl_llm.data.row_files import GeneratedRows, RowLoader
from torchrl_llm.data.row_order import (
    ROW_ID,
    BandOrder,
    QueueOrder,
    RowOrder,
    WeightedOrder,
    shuffled,
)
from torchrl_llm.errors import ConfigError, DataError

ORDERS = [BandOrder, QueueOrder, WeightedOrder]


def loader_of(order, num_rows=12, seed=3):
    return RowLoader(GeneratedRows(lambda i: {"query": str(i)}, num_rows), seed=seed, order=order)


def draws(loader, number):
    """Indices of the next rows, over as many passes as it takes."""
    found = []
    while len(found) < number:
        for row in loader:
            found.append(int(row[ROW_ID]))
            assert row["query"] == str(found[-1])
            if len(found) == number:
                break
    return found


@pytest.mark.parametrize("order", [BandOrder, QueueOrder])
def test_without_results_an_order_is_a_shuffled_pass_after_the_other(order):
    found = draws(loader_of(order()), 24)
    assert found[:12] == shuffled(12, 3, 0).tolist()
    assert found[12:] == shuffled(12, 3, 1).tolist()
    plain = RowLoader(GeneratedRows(lambda i: {"query": str(i)}, 12), seed=3)
    assert [int(row["query"]) for row in plain] == found[:12]


def easy_medium_impossible(row):
    """What eight answers to a row come to: rows 0 to 3, 4 to 7 and 8 to 11 differ."""
    return [[1.0] * 8, [1.0, 0.0] * 4, [0.0] * 8][row // 4]


def test_a_band_spends_its_draws_on_rows_of_medium_difficulty():
    order = BandOrder(0.1, 0.9, revisit=4)
    loader = loader_of(order)
    seen = Counter()
    for _ in range(96):
        (row,) = draws(loader, 1)
        seen[row] += 1
        order.record({row: easy_medium_impossible(row)})
    # The first pass has all 12; of five passes the medium rows are in all, the others in one: 4 * 5
    # draws for the medium, 8 for the others, 28 in five passes; 96 = 3 * 28 + 12.
    assert {row: seen[row] for row in range(4, 8)} == dict.fromkeys(range(4, 8), 16)
    assert sum(seen[row] for row in (0, 1, 2, 3, 8, 9, 10, 11)) == 32
    assert all(seen[row] == 4 for row in (0, 3, 8, 11))
    assert order.metrics() == {
        "train/curriculum_seen": 1.0,
        "train/curriculum_success": 0.5,
        "train/curriculum_active": 4 / 12,
    }


def test_a_row_that_rests_returns_and_is_judged_anew():
    order = BandOrder(0.25, 0.75, revisit=2, memory=0.5)
    loader = loader_of(order, num_rows=2)
    order.record({0: [0.0] * 8, 1: [1.0, 0.0]})
    assert draws(loader, 3) == [1, 1, 1]  # passes 0 to 2
    assert sorted(draws(loader, 2)) == [0, 1]
    order.record({0: [1.0, 0.0, 0.0]})  # 3 of 11 with what was known, 1 of 3 without
    assert order.wanted().tolist() == [True, True]
    # Inside the band the visits before count: (0.5 * 3 * 1/3 + 0) / (0.5 * 3 + 1) = 0.2
    order.record({0: [0.0]})
    assert order.state_dict()["rate"][0].item() == pytest.approx(0.2)
    assert order.wanted().tolist() == [False, True]


def test_a_band_goes_on_where_all_rows_rest():
    order = BandOrder(revisit=3)
    loader = loader_of(order, num_rows=4)
    order.record({row: [0.0, 0.0] for row in range(4)})
    assert order.active() == 0
    assert sorted(draws(loader, 4)) == [0, 1, 2, 3]
    assert loader.epoch == 4  # the passes 0 to 3 were left out


def test_a_queue_ends_when_each_row_is_solved_or_was_visited_often_enough():
    order = QueueOrder(solved=1.0, visits=2)
    loader = loader_of(order, num_rows=4)
    visits = Counter()
    while order.ended() is None:
        (row,) = draws(loader, 1)
        visits[row] += 1
        order.record({row: [1.0, 1.0] if row < 2 else [1.0, 0.0]})
    assert visits == {0: 1, 1: 1, 2: 2, 3: 2}
    assert order.ended() == "the queue is empty: of 4 prompts 2 solved, 2 unsolved (visits=2)"
    assert order.active() == 0
    assert len(draws(loader, 3)) == 3  # whoever still draws gets rows


def test_a_queue_without_a_limit_ends_when_all_is_solved():
    order = QueueOrder(solved=0.5)
    order.begin(2)
    order.record({0: [1.0, 0.0], 1: [1.0, 0.0, 0.0]})
    assert order.ended() is None
    assert order.wanted().tolist() == [False, True]
    order.record({0: [0.0], 1: [1.0]})  # what is solved stays solved
    assert order.ended() == "the queue is empty: of 2 prompts 2 solved"


def test_rows_are_drawn_by_their_weights():
    order = WeightedOrder(floor=0.05)
    loader = loader_of(order, num_rows=3)
    order.record({0: [1.0, 0.0], 1: [1.0] * 4, 2: [1.0, 0.0, 0.0, 0.0, 0.0]})
    # sqrt(1/4) + 0.05, sqrt(0) + 0.05, sqrt(1/5 * 4/5) + 0.05
    assert order.weights().tolist() == pytest.approx([0.55, 0.05, 0.45])
    found = Counter(draws(loader, 4200))
    for row, share in enumerate((0.55, 0.05, 0.45)):
        assert found[row] / 4200 == pytest.approx(share / 1.05, abs=0.03)
    assert order.active() == pytest.approx(1.05**2 / (3 * (0.55**2 + 0.05**2 + 0.45**2)))


def test_a_tracker_says_how_likely_success_is():
    order = WeightedOrder(floor=0.05)
    order.begin(2)
    order.record({0: [1.0], 1: [0.0]}, {0: 0.8, 1: 0.2})
    assert order.weights().tolist() == pytest.approx([0.45, 0.45])


@pytest.mark.parametrize("make", ORDERS)
def test_what_is_drawn_after_a_resume_is_what_would_have_been_drawn(make):
    def step(loader):
        found = draws(loader, 5)
        loader.order.record({row: easy_medium_impossible(row) for row in found})
        return found

    whole = loader_of(make())
    first = [step(whole) for _ in range(3)]  # 15 draws: in the middle of the second pass
    position, results = whole.state_dict(), whole.order.state_dict()
    rest = [step(whole) for _ in range(6)]
    again = loader_of(make(), seed=99)
    again.order.load_state_dict(results)
    again.load_state_dict(position)
    assert [step(again) for _ in range(6)] == rest
    for name, value in whole.order.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(again.order.state_dict()[name]))
    assert first != rest[:3]


@pytest.mark.parametrize("make", ORDERS)
def test_ten_thousand_rows_are_drawn_at_once(make):
    loader = loader_of(make(), num_rows=10_000)
    loader.order.record({row: [0.0, 1.0] for row in range(0, 10_000, 7)})
    assert len(set(draws(loader, 500))) > 450


@pytest.mark.parametrize(("make", "message"), [
    (lambda: BandOrder(0.9, 0.1), r"rises within \[0, 1\], got \[0.9, 0.1\]"),
    (lambda: RowLoader([{}], order=BandOrder(), shuffle=False), "no shuffle=False"),
    (lambda: RowLoader([{}], order=BandOrder(), collate_fn=list), "no collate_fn"),
])  # fmt: skip
def test_impossible_orders_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("results", [{0: [1.5]}, {3: [1.0]}, {-1: [1.0]}, {0: [float("nan")]}])
def test_results_that_are_no_successes_are_refused(results):
    order = BandOrder()
    order.begin(3)
    with pytest.raises(DataError, match=r"successes in \[0, 1\] of one of 3 rows"):
        order.record(results)


def test_results_of_other_data_are_refused():
    order = BandOrder()
    order.begin(3)
    state = order.state_dict()
    order.begin(4)
    with pytest.raises(DataError, match="those of 3 rows, and the dataset has 4"):
        order.load_state_dict(state)


def test_a_row_without_results_is_as_it_was():
    order = BandOrder()
    order.begin(2)
    order.record({1: []})
    assert order.metrics()["train/curriculum_seen"] == 0
    assert isinstance(order, RowOrder)
