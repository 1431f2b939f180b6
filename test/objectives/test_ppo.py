"""PPO: the clipped surrogate with the critic's loss beside it."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import BOTH, TableActor, double, make_row, make_rows
from torch import nn

from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import ValueHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import GRPOLoss, PPOLoss, PPOLossOutput, check_invariance


class ActorCritic(TableActor):
    """Log-prob and value of a token are parameters of its id."""

    def __init__(self, log_probs, values):
        super().__init__(log_probs)
        self.values = nn.Parameter(torch.as_tensor(values, dtype=torch.float32).clone())

    def token_scores(self, sequences, select, *, extras=None, **options):
        scores = super().token_scores(sequences, select, **options)
        if extras is None or not extras.values:
            return scores
        ids = torch.cat([s[m] for s, m in zip(sequences, select, strict=True)])
        return scores._replace(values=self.values[ids])


def ppo_row(ids, prompt, targets, values=None, **settings):
    row = make_row(ids, prompt, **settings)
    row["value_target", "full"] = torch.tensor(targets)
    if values is not None:
        row["values", "full"] = torch.tensor(values)
    return row


def batch():
    """Ids 1 and 2 (advantage 2), id 3 alone (advantage -1), and a masked row full of junk."""
    nan = math.nan
    return make_rows(
        ppo_row([5, 1, 2], 1, [nan, 1.0, 0.0], [nan, 0.4, 0.5], advantage=2.0),
        ppo_row([5, 6, 3], 2, [nan, nan, -1.0], [nan, nan, 0.0], advantage=-1.0),
        ppo_row([5, 4], 1, [nan, nan], [nan, nan], advantage=nan, old=nan, reason=[1, 5]),
    )


# Ratios 1.21 (clipped), 1 and 0.64 (clipped); values 0.5, 1.0 and 0.25.
LOG_PROBS = [-9.0, -1 + math.log(1.21), -1.0, -1 + math.log(0.64), -9.0, -9.0, -9.0, -9.0]
VALUES = [9.0, 0.5, 1.0, 0.25, 9.0, 9.0, 9.0, 9.0]


def by_hand(dtype, **settings):
    model = ActorCritic(LOG_PROBS, VALUES).to(dtype)
    with torch.no_grad():  # exact in float64
        model.table.copy_(torch.tensor(LOG_PROBS, dtype=torch.float64))
    rows = double(batch()) if dtype is torch.float64 else batch()
    output = PPOLoss(model, **settings)(rows)
    output.total_loss().backward()
    return output, model


@BOTH
def test_both_losses_and_their_gradients_are_those_worked_by_hand(dtype, tolerance):
    output, model = by_hand(dtype)
    # Policy: min(1.21 * 2, 1.2 * 2) = 2.4; 1 * 2 = 2; min(-0.64, -0.8) = -0.8; mean over 3 tokens.
    assert output.loss_objective.item() == pytest.approx(-(2.4 + 2 - 0.8) / 3, abs=tolerance)
    # Values: (0.5 - 1)^2 / 2 = 0.125, (1 - 0)^2 / 2 = 0.5, (0.25 + 1)^2 / 2 = 0.78125;
    # half of their mean.
    assert output.loss_value.item() == pytest.approx(1.40625 / 6, abs=tolerance)
    # Gradient of a value: 0.5 (V - R) / 3.
    assert model.values.grad[1:4].tolist() == pytest.approx(
        [-0.25 / 3, 0.5 / 3, 0.625 / 3], abs=tolerance
    )
    assert model.table.grad[1:4].tolist() == pytest.approx([0.0, -2 / 3, 0.0], abs=tolerance)
    assert not model.values.grad[[0, 4, 5, 6, 7]].any()
    assert output.value.item() == pytest.approx(1.75 / 3, abs=tolerance)
    assert output.value_target.item() == pytest.approx(0.0, abs=tolerance)
    assert output.value_error.item() == pytest.approx(2.8125 / 3, abs=tolerance)
    assert output.value_clip_fraction.item() == 0.0
    assert isinstance(output, PPOLossOutput)


@BOTH
def test_a_clipped_value_is_held_near_its_old_one(dtype, tolerance):
    output, model = by_hand(dtype, value_clip=0.2, value_coeff=1.0)
    # Old values 0.4, 0.5, 0.
    #   0.5 moved by 0.1: inside, 0.125, gradient -0.5
    #   1.0 moved by 0.5: held at 0.7 has error 0.245 < 0.5: gradient 1
    #   0.25 moved by 0.25: held at 0.2 has error (1.2)^2 / 2 = 0.72 < 0.78125: gradient 1.25
    assert output.loss_value.item() == pytest.approx(1.40625 / 3, abs=tolerance)
    assert model.values.grad[1:4].tolist() == pytest.approx(
        [-0.5 / 3, 1 / 3, 1.25 / 3], abs=tolerance
    )
    # With old values on the far side it is the clip that counts: id 2, held at 1.3 of 1.5.
    rows = make_rows(ppo_row([5, 2], 1, [0.0, 0.0], [0.0, 1.5]))
    model = ActorCritic(LOG_PROBS, VALUES)
    output = PPOLoss(model, value_clip=0.2, value_coeff=1.0)(rows)
    output.total_loss().backward()
    assert output.loss_value.item() == pytest.approx(1.3**2 / 2, abs=1e-6)
    assert output.value_clip_fraction.item() == 1.0
    assert not model.values.grad.any()


def test_the_policy_part_is_that_of_grpo():
    model = ActorCritic(LOG_PROBS, VALUES)
    settings = {"entropy_coeff": 0.1, "clip_epsilon": (0.1, 0.3), "aggregation": "sequence_mean"}
    ours, other = PPOLoss(model, **settings)(batch()), GRPOLoss(model, **settings)(batch())
    for name in ("loss_objective", "loss_entropy", "clip_fraction", "kl_approx"):
        assert getattr(ours, name) == getattr(other, name)


def test_values_are_averaged_as_the_objective_is():
    # Per row: (0.125 + 0.5) / 2 and 0.78125, then their mean, then one half.
    output = PPOLoss(ActorCritic(LOG_PROBS, VALUES), aggregation="sequence_mean")(batch())
    assert output.loss_value.item() == pytest.approx((0.3125 + 0.78125) / 4, abs=1e-6)


def test_a_critic_of_its_own_values_the_tokens_and_is_a_part_of_the_loss():
    actor, critic = TableActor(LOG_PROBS), ActorCritic([0.0] * 8, VALUES)
    loss = PPOLoss(actor, critic)
    output = loss(batch())
    output.total_loss().backward()
    assert output.loss_value.item() == pytest.approx(1.40625 / 6, abs=1e-6)
    assert critic.values.grad.any()
    assert critic.table.grad is None
    assert any(parameter is critic.values for parameter in loss.parameters())


def test_the_critic_is_asked_for_values_alone():
    seen = []

    class Watching(ActorCritic):
        def token_scores(self, sequences, select, *, extras=None, **options):
            seen.append(extras)
            return super().token_scores(sequences, select, extras=extras, **options)

    PPOLoss(TableActor(LOG_PROBS), Watching([0.0] * 8, VALUES))(batch())
    assert seen == [ScoreExtras(values=True, log_probs=False)]


def test_layouts_splits_orders_and_junk_have_no_influence(make_tiny_model):
    head = ValueHead(make_tiny_model().config.hidden_size)
    nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    scorer = CausalScorer(make_tiny_model(), value_head=head)
    rows = make_rows(
        ppo_row([5, 1, 2, 7], 1, [0.0, 1.0, 0.5, 2.0], [0.0, 0.1, 0.2, 0.3], old=-5.5),
        ppo_row([5, 6, 3], 2, [0.0, 0.0, -1.0], [0.0, 0.0, 0.5], advantage=-2.0, old=-5.9),
        ppo_row([5, 9, 4], 1, [0.0, 1.0, -1.0], [0.0, 0.0, 0.5], reason=[1, 0, 5], old=-5.7),
    )
    check_invariance(PPOLoss(scorer, value_clip=0.1), rows)


def test_what_is_missing_or_broken_is_an_error_that_says_what_to_do():
    model = ActorCritic(LOG_PROBS, VALUES)
    with pytest.raises(DataError, match="RetrieveValues"):
        PPOLoss(model, value_clip=0.2)(make_rows(ppo_row([5, 1], 1, [0.0, 0.0])))
    with pytest.raises(DataError, match="value the 1 selected"):
        PPOLoss(TableActor(LOG_PROBS))(make_rows(ppo_row([5, 1], 1, [0.0, 0.0])))
    broken = ActorCritic(LOG_PROBS, [math.inf] * 8)
    with pytest.raises(DataError, match="critic's values"):
        PPOLoss(broken)(make_rows(ppo_row([5, 1], 1, [0.0, 0.0])))


def test_a_critic_has_to_score_and_arguments_have_to_exist():
    with pytest.raises(ConfigError, match="critic_network"):
        PPOLoss(TableActor(LOG_PROBS), nn.Linear(1, 1))
    with pytest.raises(TypeError, match="critic_coef"):
        PPOLoss(TableActor(LOG_PROBS), critic_coef=1.0)
