"""Components: scores, failures, limits, and the arithmetic of a weighted sum."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards import scorers

from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards import (
    BatchScorer,
    Component,
    CountdownRewardParser,
    RewardScore,
    Sample,
    Scorer,
)
from torchrl_llm.rewards.composite_reward import weighted_total

NAN = math.nan


def total(values, weights, optional):
    return weighted_total(torch.tensor(values), torch.tensor(weights), torch.tensor(optional))


def test_a_total_is_the_weighted_sum():
    # 0.5 * 1 + 2 * 0.25 = 1.0; 0.5 * 0 - 2 * 1 = -2
    found = total([[1.0, 0.0], [0.25, -1.0]], [0.5, 2.0], [False, False])
    assert found.values.tolist() == [1.0, -2.0]
    assert found.valid.all()
    assert found.weights.tolist() == [[0.5, 0.5], [2.0, 2.0]]


def test_a_component_that_failed_is_no_zero():
    found = total([[1.0], [NAN]], [1.0, 1.0], [False, False])
    assert found.values.isnan().all()
    assert found.valid.tolist() == [False]


def test_without_an_optional_component_the_others_weigh_more_in_proportion():
    # weights 1, 2 and 1 of which the last is missing: (1 * 1 + 2 * 0.5) * 4 / 3
    found = total([[1.0], [0.5], [NAN]], [1.0, 2.0, 1.0], [False, False, True])
    assert found.values.tolist() == pytest.approx([8 / 3])
    assert found.valid.tolist() == [True]
    assert found.weights.flatten().tolist() == pytest.approx([4 / 3, 8 / 3, 0])


def test_where_nothing_is_left_the_row_is_invalid():
    assert total([[NAN], [NAN]], [1.0, 1.0], [True, True]).valid.tolist() == [False]
    assert total([[NAN], [1.0]], [1.0, 0.0], [True, False]).valid.tolist() == [False]


def test_a_sum_beyond_float32_is_invalid():
    found = total([[3e38, -3e38], [3e38, -3e38]], [1.0, 1.0], [False, False])
    assert found.valid.tolist() == [False, False]
    assert found.values.isnan().all()


def test_a_component_without_weight_harms_nobody():
    found = total([[0.5], [NAN]], [1.0, 0.0], [False, False])
    assert found.values.tolist() == [0.5]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_totals_agree_with_a_loop(data):
    size = data.draw(st.integers(1, 4))
    number = st.floats(-2, 2)
    weights = data.draw(st.lists(st.floats(0, 3), min_size=size, max_size=size))
    optional = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    column = st.lists(st.one_of(number, st.just(NAN)), min_size=size, max_size=size)
    values = data.draw(column)
    weights = [round(weight, 2) for weight in weights]  # no weight that float32 makes nothing of
    found = total([[v] for v in values], weights, optional)
    kept, harmed = [], False
    for value, weight, may_fail in zip(values, weights, optional, strict=True):
        if weight and math.isnan(value):
            harmed |= not may_fail
        elif weight:
            kept.append((value, weight))
    valid = bool(kept) and not harmed
    assert found.valid.item() == valid
    if valid:
        expected = sum(v * w for v, w in kept) * (sum(weights) / sum(w for _, w in kept))
        assert found.values.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def samples(*texts, tokens=None):
    return [Sample(text, num_tokens=tokens) for text in texts]


def run(component, *texts, tokens=None, pool=None):
    return component.outcomes(samples(*texts, tokens=tokens), pool)


@pytest.fixture(scope="module")
def pool():
    pool = Component(scorers.Scripted(), run="processes", num_workers=1).make_pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("where", ["inline", "threads", "processes"])
def test_scores_and_failures_are_the_same_wherever_a_component_runs(where, pool):
    component = Component(scorers.Scripted(), run=where, num_workers=1)
    pool = pool if where == "processes" else None
    found = run(component, "0.25", "raise", "score", pool=pool)
    assert found[0].value == RewardScore(0.25, True, True, False)
    assert (found[1].value, found[1].error) == (None, "ZeroDivisionError")
    assert found[1].message == "by zero"
    assert found[2].value == (0.5, False, False, True)
    assert all(outcome.seconds >= 0 for outcome in found)


def test_a_component_in_processes_is_stopped_in_time(pool):
    component = Component(scorers.Scripted(), run="processes", num_workers=1, timeout=1.0)
    component.outcomes(samples("1"), pool)  # it is up
    start = time.monotonic()
    (found,) = component.outcomes(samples("power"), pool)
    assert time.monotonic() - start < 3.0
    assert found.error == "RewardTimeoutError"
    assert found.seconds >= 1.0


def test_rewards_per_token_have_one_finite_number_for_each():
    component = Component(scorers.PerToken())
    found = run(component, "x", "short", "nan", tokens=2)
    assert found[0].value.tolist() == [0.25, 0.5]
    assert found[0].value.dtype == torch.float32
    assert "must have 2 numbers" in found[1].message
    assert "finite" in found[2].message
    assert run(component, "x", tokens=0)[0].value.shape == (0,)


BAD_FLAG = RewardScore(1.0, success=None)
TOO_LARGE = (1e39, -1e300, 10**400, RewardScore(3.5e38))


@pytest.mark.parametrize(
    "value", [NAN, math.inf, None, "1.0", [1.0, 2.0], object(), BAD_FLAG, *TOO_LARGE]
)
def test_what_is_no_number_is_a_failure(value):
    (found,) = run(Component(scorers.Constant(value)), "x")
    assert found.error == "RewardError"


def test_a_batch_is_scored_at_once_and_its_failures_stay_in_their_rows():
    scorer = scorers.Batch()
    found = run(Component(scorer, run="threads"), "a", "fail", "b")
    assert scorer.sizes == [3]
    assert [outcome.error for outcome in found] == ["", "ValueError", ""]
    assert [o.value.reward for o in found if o.value] == [0.5, 0.5]


def test_a_batch_that_fails_fails_for_every_row():
    for text, error in (("all", "TimeoutError"), ("few", "RewardError"), ("none", "TypeError")):
        found = run(Component(scorers.Batch()), text, "b")
        assert [outcome.error for outcome in found] == [error] * 2
    assert run(Component(scorers.Batch())) == []


def test_a_batch_has_a_limit_together():
    class Slow(BatchScorer):
        def score_batch(self, samples):
            time.sleep(1.0)

    found = run(Component(Slow(), run="threads", timeout=0.1), "a", "b")
    assert [outcome.error for outcome in found] == ["RewardTimeoutError"] * 2


def test_parsers_and_functions_are_components_too():
    found = run(Component(lambda sample: len(sample.response) / 4), "ab")
    assert found[0].value.reward == 0.5
    sample = Sample("<answer>3 * 2</answer>", answer="target=6, numbers=2,3")
    (found,) = Component(CountdownRewardParser()).outcomes([sample], None)
    assert found.value == (1.0, True, True, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scorer": 3}, "a function of a Sample, got 3"),
        ({"weight": NAN}, "weight must be finite"),
        ({"timeout": 1.0}, "needs threads or processes"),
        ({"timeout": -1.0, "run": "threads"}, "above 0"),
        ({"scorer": scorers.Batch(), "run": "processes"}, "rows together"),
    ],
)
def test_impossible_terms_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Component(**{"scorer": scorers.Scripted(), **settings})


def test_a_scorer_that_another_process_cannot_import_is_refused_at_once():
    class Local(Scorer):
        def score(self, sample):
            return 1.0

    with pytest.raises(ConfigError, match="top of a module"):
        Component(Local(), run="processes").make_pool()
