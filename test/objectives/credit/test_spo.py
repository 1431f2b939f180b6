"""SPO's tracker and advantages by hand: rho in [0.875, 0.96], N_0 = 1 / (1 - 0.875) = 8."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.credit.credit_rows import NAN, advantages, row, write
from objectives.rows_helper import TableActor
from tensordict import TensorDict

from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives.credit import SPOAdvantage


def _row(reward, query="a", **options):
    return row(reward, query=query, dtype=torch.float64, **options)


def _plain(**options):
    return SPOAdvantage(normalize="none", **options)


def test_the_first_reward_of_a_prompt_by_hand():
    spo = _plain()
    # v = 1/2 of alpha = beta = 4; then alpha = 0.96 * 4 + 1 = 4.84, beta = 3.84
    assert advantages(write(spo, [_row(1.0)])) == [0.5]
    assert spo.value("a") == pytest.approx(4.84 / 8.68, abs=1e-12)


def test_the_baseline_is_read_before_it_is_updated():
    spo = _plain()
    buffer = write(spo, [_row(1.0)], [_row(0.0)])
    # alpha 4.84, beta 3.84 -> 0.96 * 4.84 = 4.6464, 0.96 * 3.84 + 1 = 4.6864
    assert advantages(buffer) == pytest.approx([0.5, -4.84 / 8.68], abs=1e-8)
    assert spo.value("a") == pytest.approx(4.6464 / 9.3328, abs=1e-12)


def test_epsilon_may_be_added_to_the_deviation_of_the_batch():
    # r - v is 1/2 three times and -1/2: mean 1/4, squares 3/16 + 9/16, deviation sqrt(3/16) + 1/2.
    rows = [_row(1.0, q) for q in "abc"] + [_row(0.0, "d")]
    got = advantages(write(SPOAdvantage(eps=0.5, eps_as="added"), rows))
    deviation = (3 / 16) ** 0.5 + 0.5
    assert got == pytest.approx([x / deviation for x in (0.25, 0.25, 0.25, -0.75)], abs=1e-12)


def test_the_baseline_does_not_contain_its_own_reward():
    for reward in (0.0, 1.0):
        got = advantages(write(_plain(), [_row(1.0)], [_row(reward)]))[1]
        assert got == pytest.approx(reward - 4.84 / 8.68)


def test_a_policy_that_moved_forgets_faster():
    spo = _plain()
    spo.initialize("a", [1.0] * 7 + [0.0])  # alpha 7, beta 1
    assert spo.value("a") == 7 / 8
    spo.advance(0.005)
    spo.advance(0.005)  # 0.01 nats since: rho = 2^-0.1
    write(spo, [_row(0.0)])
    rho = 2**-0.1
    assert spo.value("a") == pytest.approx(7 * rho / (8 * rho + 1), abs=1e-12)
    # The visit is over: nothing has moved since, and rho is the largest.
    alpha, beta = 7 * rho, rho + 1
    write(spo, [_row(0.0)])
    assert spo.value("a") == pytest.approx(0.96 * alpha / (0.96 * (alpha + beta) + 1), abs=1e-12)


def test_far_behind_only_the_smallest_share_is_left():
    spo = _plain()
    spo.advance(50.0)
    write(spo, [_row(1.0)])
    assert spo.value("a") == pytest.approx((0.875 * 4 + 1) / 8, abs=1e-12)


def _scored(reward, query, log_prob):
    made = _row(reward, query)
    sampled = torch.arange(5) >= 2
    made["log_probs"] = TensorDict(full=torch.where(sampled, log_prob, 0.0))
    return made


def test_a_policy_that_is_watched_says_itself_how_far_it_moved():
    actor = TableActor([-1.0] * 5)
    spo, other = _plain(), _plain()
    spo.watch(actor)
    write(spo, [_scored(1.0, "a", -1.0), _scored(1.0, "b", -1.0)])
    assert spo.moved == 0.0
    with torch.no_grad():
        actor.table -= 0.25
    other.watch(actor)
    other.load_state_dict(spo.state_dict())  # the rows of the batch before are part of the state
    for rule in (spo, other):
        write(rule, [_scored(0.0, "a", -1.25)])
        # k3 of a log-ratio of -1/4 at every token
        kl = math.exp(-0.25) - 1 + 0.25
        assert rule.moved == pytest.approx(kl, abs=1e-6)
        rho = 2 ** (-kl / 0.1)
        assert rho < 0.875  # so the smallest share is left: 4.84 and 3.84 of the first visit
        expected = 0.875 * 4.84 / (0.875 * 8.68 + 1)
        assert rule.value("a") == pytest.approx(expected, abs=1e-6)
    write(spo, [_scored(0.0, "a", -1.25)])
    assert spo.moved == pytest.approx(kl, abs=1e-6)  # it has stood still since


def _watching():
    """A rule after a visit of one prompt, and the actor that it watches."""
    actor, spo = TableActor([-1.0] * 5), _plain()
    spo.watch(actor)
    write(spo, [_scored(1.0, "a", -1.0)])
    return actor, spo


def test_what_was_watched_survives_loading_before_the_policy_is_named():
    actor, spo = _watching()
    with torch.no_grad():
        actor.table -= 0.25
    other = _plain()
    other.load_state_dict(spo.state_dict())
    other.load_state_dict(other.state_dict())  # saved again before anything is watched
    other.watch(actor)
    for rule in (spo, other):
        write(rule, [_scored(0.0, "a", -1.25)])
    assert other.moved == spo.moved > 0
    assert actor.table.grad is None


def test_only_sampled_tokens_of_a_few_rows_are_scored_again():
    actor = TableActor([-1.0] * 5)
    spo = _plain()
    spo.watch(actor, num_rows=1)
    write(spo, [_scored(1.0, "a", -1.0), _scored(1.0, "b", -5.0)])
    write(spo, [_scored(1.0, "a", -1.0)])
    assert [mask.tolist() for mask in actor.seen["select"]] == [[False, False, True, True, True]]
    assert spo.moved == 0.0


@pytest.mark.parametrize("log_prob", [NAN, -math.inf])
def test_a_policy_that_has_diverged_does_not_spoil_what_is_known(log_prob):
    actor, spo = _watching()
    with torch.no_grad():
        actor.table.fill_(log_prob)
    with pytest.raises(DataError, match="diverged"):
        write(spo, [_scored(1.0, "a", -1.0)])
    assert (spo.moved, spo.value("a")) == (0.0, pytest.approx(4.84 / 8.68))


def test_watching_needs_what_it_reads():
    with pytest.raises(ConfigError, match="TokenScorer"):
        _plain().watch(None)
    with pytest.raises(ConfigError, match="kl_key"):
        _plain(kl_key="kl").watch(TableActor([-1.0]))
    with pytest.raises(DataError, match="log_probs"):
        write(_watching()[1], [_row(1.0)])


def test_a_row_may_say_how_far_the_policy_moved():
    spo = _plain(kl_key="kl")
    rows = [_row(1.0), _row(1.0)]
    rows[0]["kl"], rows[1]["kl"] = torch.tensor([0.0]), torch.tensor([0.02])
    write(spo, rows)  # mean 0.01
    rho = 2**-0.1
    assert spo.value("a") == pytest.approx((4 * rho + 2) / (8 * rho + 2), abs=1e-8)
    with pytest.raises(DataError, match="advance"):
        write(spo, [_row(1.0)])


def test_several_answers_of_a_batch_are_one_visit_in_any_order():
    rewards = [1.0, 0.0, 1.0]
    for order in ((0, 1, 2), (1, 2, 0)):
        spo = _plain()
        got = advantages(write(spo, [_row(rewards[i]) for i in order]))
        assert got == [rewards[i] - 0.5 for i in order]
        assert spo.value("a") == pytest.approx((0.96 * 4 + 2) / (0.96 * 8 + 3), abs=1e-12)


def test_the_batch_is_standardised():
    # -0.5 and 0.5 twice: deviation 1/2
    rows = [_row(1.0, "a"), _row(0.0, "b"), _row(1.0, "c"), _row(0.0, "d")]
    assert advantages(write(SPOAdvantage(), rows)) == pytest.approx([1, -1, 1, -1], abs=1e-8)
    # 0.5 0.5 -0.5: mean 1/6, squares 3/4 - 3/36 = 2/3, sample deviation sqrt(1/3)
    got = advantages(
        write(SPOAdvantage(normalize="sample"), [_row(1.0, q) for q in "ab"] + [_row(0.0, "c")])
    )
    assert got == pytest.approx([3**0.5 / 3] * 2 + [-2 * 3**0.5 / 3], abs=1e-8)


def test_a_batch_may_wait_until_it_is_large_enough():
    spo = SPOAdvantage(batch_size=2)
    buffer = write(spo, [_row(1.0, "a")])
    assert len(buffer) == 0
    assert spo.value("a") == 0.5  # not visited yet
    buffer.extend([_row(0.0, "b")])
    assert advantages(buffer) == pytest.approx([1.0, -1.0])


def test_prompts_are_known_again_in_later_epochs_and_agents_apart():
    spo = _plain()
    write(spo, [_row(1.0, agent="x"), _row(0.0, agent="o")])
    assert spo.value("a", "x") > 0.5 > spo.value("a", "o")
    assert spo.value("a") == spo.value("b") == 0.5


def test_uncertain_prompts_weigh_most():
    spo = _plain()
    spo.initialize("sure", [1.0])
    spo.initialize("rare", [0.1])
    got = spo.sampling_weights(["sure", "rare", "new"])
    assert got.tolist() == pytest.approx([0.05, 0.35, 0.55])


@pytest.mark.parametrize("reward", [-0.1, 1.01])
def test_rewards_outside_zero_and_one_are_refused(reward):
    """The reference does not look, and its Beta distribution gets negative counts."""
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        write(_plain(), [_row(reward)])
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        _plain().initialize("a", [reward])


def test_an_invalid_reward_is_no_visit():
    spo = _plain()
    assert len(write(spo, [_row(NAN), _row(1.0, valid=False)])) == 0
    assert spo.value("a") == 0.5


def test_the_tracker_resumes():
    spo, other = SPOAdvantage(), SPOAdvantage()
    write(spo, [_row(1.0, q) for q in "abc"] + [_row(0.0, "d")])
    spo.advance(0.01)
    other.load_state_dict(spo.state_dict())
    rows = [_row(float(q in "ad"), q) for q in "abcd"]
    assert advantages(write(spo, rows)) == advantages(write(other, [r.clone() for r in rows]))
    assert [spo.value(q) for q in "abcd"] == [other.value(q) for q in "abcd"]


def test_rows_without_a_prompt_are_an_error():
    with pytest.raises(DataError, match="query"):
        write(SPOAdvantage(), [row(1.0)])
    assert len(write(SPOAdvantage(prompt_key="group_id"), [row(1.0)])) == 1


def test_a_conversation_may_be_the_prompt():
    from torchrl_llm.data import History

    history = History.from_chats([[{"role": "user", "content": "2+2"}]])
    spo = _plain(prompt_key=("history", "prompt"))
    for made in (_row(1.0), _row(1.0)):
        made["history"] = TensorDict(prompt=history[0])
        write(spo, [made])
    assert len(spo.state_dict()["_extra_state"]["tracker"]["known"]) == 1


def test_a_tracker_that_never_forgets_has_no_first_count_of_its_own():
    with pytest.raises(ConfigError, match="give initial_count"):
        SPOAdvantage(rho_bounds=(1.0, 1.0))
    assert SPOAdvantage(rho_bounds=(1.0, 1.0), initial_count=3).initial_count == 3


def test_the_baseline_follows_a_policy_that_learns():
    """With success rising from 0.1 to 0.9 the tracker ends near it, and an average does not."""
    generator = torch.Generator().manual_seed(0)
    spo = _plain()
    rewards = []
    for step in range(200):
        rate = 0.1 if step < 100 else 0.9
        rewards.append(float(torch.rand((), generator=generator) < rate))
        spo.advance(0.005)
        write(spo, [_row(rewards[-1])])
    assert abs(spo.value("a") - 0.9) < 0.12
    assert abs(sum(rewards) / len(rewards) - 0.9) > 0.3
