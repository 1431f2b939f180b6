"""Wilson's interval and the bootstrap over prompts."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import bootstrap_interval, wilson_interval


def ends(interval):
    return interval.low.item(), interval.high.item()


def wilson(right, trials, **options):
    return ends(wilson_interval(torch.tensor(right), torch.tensor(trials), **options))


def test_wilson_equals_numbers_worked_by_hand():
    # 9 of 10, z = 1.96, z^2 = 3.8415: (9 + 1.9207 -+ 1.96 sqrt(9 * 1 / 10 + 0.9604)) / 13.8415
    # = (10.9207 -+ 2.6733) / 13.8415 = 0.59585 and 0.98213
    assert wilson(9, 10) == pytest.approx((0.59585, 0.98213), abs=1e-4)
    # 90 %: z = 1.64485, z^2 = 2.70554: (1 + 1.35277 -+ 1.64485 sqrt(0.5 + 0.67639)) / 4.70554
    assert wilson(1, 2, level=0.9) == pytest.approx((0.120867, 0.879133), abs=1e-5)


def test_wilson_is_where_the_score_test_is_just_not_rejected():
    for right, trials in [(1, 7), (30, 512), (511, 512)]:
        for end in wilson(right, trials):
            gap = abs(right / trials - end) / math.sqrt(end * (1 - end) / trials)
            assert gap == pytest.approx(1.959964, abs=1e-5)


def test_none_and_all_have_a_width_on_one_side_alone():
    # z^2 / (n + z^2) = 3.8415 / 13.8415
    assert wilson(0, 10) == pytest.approx((0.0, 0.27754), abs=1e-5)
    assert wilson(10, 10) == pytest.approx((1 - 0.27754, 1.0), abs=1e-5)
    assert (wilson(0, 10)[0], wilson(10, 10)[1]) == (0.0, 1.0)


def test_without_trials_nothing_is_known():
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_takes_many_at_a_time():
    low, high = wilson_interval(torch.tensor([0, 9]), torch.tensor([10, 10]))
    assert low.tolist() == pytest.approx([wilson(0, 10)[0], wilson(9, 10)[0]])
    assert high.tolist() == pytest.approx([wilson(0, 10)[1], wilson(9, 10)[1]])


@pytest.mark.parametrize("wrong", [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_impossible_counts_and_levels_are_refused(wrong):
    right, trials, level = wrong
    with pytest.raises(ValueError, match=r"expected 0 <= num_right|level must be"):
        wilson(right, trials, level=level)


def test_the_bootstrap_of_two_prompts_has_three_possible_means():
    # (0, 0), (0, 1), (1, 0), (1, 1): a quarter each is 0 and 1, more than 2.5 % on either side.
    assert ends(bootstrap_interval(torch.tensor([0.0, 1.0]))) == (0.0, 1.0)
    # At 40 % the ends are the quantiles 0.3 and 0.7, within the half that is 0.5.
    assert ends(bootstrap_interval(torch.tensor([0.0, 1.0]), level=0.4)) == (0.5, 0.5)


def test_the_bootstrap_equals_a_naive_loop():
    totals, counts = torch.tensor([2.0, 0.0, 5.0]), torch.tensor([3, 0, 4])
    drawn = torch.randint(3, (500, 3), generator=torch.Generator().manual_seed(7)).tolist()
    sums = [
        (sum(totals[i].item() for i in row), sum(counts[i].item() for i in row)) for row in drawn
    ]
    means = torch.tensor([total / count for total, count in sums if count]).double()
    assert len(means) < 500  # some draws hold nothing that counts
    expected = means.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    found = bootstrap_interval(totals, counts, num_resamples=500, seed=7)
    assert ends(found) == pytest.approx(tuple(expected))


def test_many_prompts_give_the_normal_interval():
    # A mean of 2,000 coins of 0.3: 0.3 -+ 1.96 sqrt(0.3 * 0.7 / 2000) = 0.3 -+ 0.0201
    values = (torch.arange(2000) % 10 < 3).float()
    assert ends(bootstrap_interval(values)) == pytest.approx((0.2799, 0.3201), abs=2e-3)


def test_samples_of_one_prompt_do_not_make_it_narrower():
    once = (torch.arange(50) % 2).float()
    low, high = ends(bootstrap_interval(once))
    same = ends(bootstrap_interval(once * 8, torch.full((50,), 8)))
    assert same == pytest.approx((low, high))
    naive = wilson(200, 400)
    assert high - low > 2 * (naive[1] - naive[0])


def test_large_draws_are_cut_into_parts_without_another_result(monkeypatch):
    values = torch.rand(30, generator=torch.Generator().manual_seed(1))
    whole = ends(bootstrap_interval(values))
    monkeypatch.setattr("torchrl_llm.functional.intervals._DRAWN_AT_ONCE", 70)
    assert ends(bootstrap_interval(values)) == whole


def test_the_draw_is_its_own():
    torch.manual_seed(3)
    values = torch.tensor([0.0, 1.0, 2.0, 4.0])
    first, state = ends(bootstrap_interval(values)), torch.get_rng_state()
    torch.manual_seed(4)
    assert ends(bootstrap_interval(values)) == first
    assert ends(bootstrap_interval(values, seed=1, num_resamples=10)) != first
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("totals", "counts"),
    [([], []), ([1.0], [1]), ([1.0, 0.0], [1, 0]), ([0.0, 0.0], [0, 0]), ([1.0, 2.0], [2, 4])],
)
def test_prompts_without_spread_have_no_interval(totals, counts):
    found = bootstrap_interval(torch.tensor(totals), torch.tensor(counts))
    assert all(map(math.isnan, ends(found)))


@pytest.mark.parametrize(
    ("totals", "counts", "options"),
    [
        (torch.zeros(2, 2), None, {}),
        (torch.zeros(2), torch.ones(3), {}),
        (torch.zeros(2), None, {"num_resamples": 0}),
        (torch.zeros(2), None, {"level": 95.0}),
    ],
)
def test_impossible_draws_are_refused(totals, counts, options):
    with pytest.raises(ValueError, match=r"expected totals|level must be"):
        bootstrap_interval(totals, counts, **options)
