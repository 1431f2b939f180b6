from __future__ import annotations

import pytest
import torch
from objectives.rows_helper import BOTH, actor, by_hand, three_rows

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import GSPOLoss, GSPOTokenLoss


@BOTH
@pytest.mark.parametrize("loss_type", [GSPOLoss, GSPOTokenLoss])
class TestByHand:
    def test_a_sequence_inside_the_bounds_and_one_outside(self, loss_type, dtype, tolerance):
        output, gradient = by_hand(loss_type, dtype, clip_epsilon=0.2)
        # s = sqrt(1.21 x 1) = 1.1, A = 2: -2.2. s = 0.64 < 0.8, A = -1: 0.8. Mean of sequences.
        assert output.loss_objective.item() == pytest.approx((-2.2 + 0.8) / 2, abs=tolerance)
        # -s A / (2 tokens x 2 sequences) for both tokens of the first, nothing for the second.
        assert gradient == pytest.approx([-0.55, -0.55, 0.0], abs=tolerance)
        assert output.clip_fraction.item() == pytest.approx(1 / 3)

    def test_the_bounds_of_the_paper(self, loss_type, dtype, tolerance):
        output, gradient = by_hand(loss_type, dtype)
        # 1.1 > 1 + 4e-4 and 0.64 < 1 - 3e-4: both are cut.
        expected = (-1.0004 * 2 + 0.9997) / 2
        assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
        assert gradient == [0.0, 0.0, 0.0]
        assert output.clip_fraction.item() == pytest.approx(1.0)


def test_advantages_of_tokens_move_their_tokens_in_the_token_variant_alone():
    # Advantages 1 and 3 on the tokens of the first sequence, s = 1.1.
    rows = three_rows(torch.float64, first=[9.0, 1.0, 3.0])
    for loss_type, expected in (
        # through s alone: -s (1 + 3) / 2 / (2 x 2 sequences) for both
        (GSPOLoss, [-0.55, -0.55, 0.0]),
        # -s A_t / (2 x 2)
        (GSPOTokenLoss, [-0.275, -0.825, 0.0]),
    ):
        output, gradient = by_hand(loss_type, torch.float64, rows, clip_epsilon=0.2)
        assert output.loss_objective.item() == pytest.approx((-2.2 + 0.8) / 2, abs=1e-8)
        assert gradient == pytest.approx(expected, abs=1e-8)


def test_the_ratio_of_whole_sequences_is_a_product():
    for loss_type in (GSPOLoss, GSPOTokenLoss):
        output, gradient = by_hand(loss_type, torch.float64, clip_epsilon=0.3, level="sequence")
        # 1.21 x 1 = 1.21 < 1.3; 0.64 < 0.7.
        assert output.loss_objective.item() == pytest.approx((-2.42 + 0.7) / 2, abs=1e-8)
    # Of the product each token has the whole derivative: -1.21 x 2 / 2, in the token variant half.
    assert gradient == pytest.approx([-0.605, -0.605, 0.0], abs=1e-8)
    _, gradient = by_hand(GSPOLoss, torch.float64, clip_epsilon=0.3, level="sequence")
    assert gradient == pytest.approx([-1.21, -1.21, 0.0], abs=1e-8)


def test_the_defaults_and_what_is_refused():
    loss = GSPOLoss(actor())
    assert loss.clip_epsilon == (3e-4, 4e-4)
    assert loss.aggregation == "sequence_mean"
    loss.clip_epsilon = 0.1
    assert loss.clip_epsilon == (0.1, 0.1)
    for bad in (1.5, (0.1, -0.1), (0.1, 0.2, 0.3), (None, 0.2)):
        with pytest.raises(ConfigError, match="clip_epsilon must be"):
            loss.clip_epsilon = bad
    assert loss.clip_epsilon == (0.1, 0.1)
    with pytest.raises(TypeError, match="length_normalize"):
        GSPOLoss(actor(), length_normalize=False)
