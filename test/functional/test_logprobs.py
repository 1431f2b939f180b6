from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import entropy_from_logits, selective_log_softmax, token_log_probs


def test_logits_of_one_position_score_the_next_token():
    # Position 0 says (1/4, 3/4), position 1 says (1/2, 1/2); the last position is not used.
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0], [9.0, -9.0]]])
    got = token_log_probs(logits, torch.tensor([[0, 1, 0]]))
    torch.testing.assert_close(got, torch.tensor([[0.0, math.log(0.75), math.log(0.5)]]))


def test_index_zero_is_exactly_zero():
    got = token_log_probs(torch.randn(3, 4, 5), torch.randint(0, 5, (3, 4)))
    assert (got[:, 0] == 0.0).all()


def test_temperature_divides_the_logits():
    logits, ids = torch.randn(2, 4, 5), torch.randint(0, 5, (2, 4))
    got = token_log_probs(logits, ids, temperature=0.5)
    torch.testing.assert_close(got, token_log_probs(logits * 2, ids))


def test_later_tokens_have_no_influence():
    logits, ids = torch.randn(1, 5, 7), torch.randint(0, 7, (1, 5))
    expected = token_log_probs(logits, ids)[:, :3]
    logits[:, 2:] = torch.nan
    torch.testing.assert_close(token_log_probs(logits, ids)[:, :3], expected)


def test_selective_log_softmax_equals_the_whole_one():
    logits, index = torch.randn(3, 4, 9), torch.randint(0, 9, (3, 4))
    expected = logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]
    torch.testing.assert_close(selective_log_softmax(logits, index), expected)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(4, 1000).bfloat16()
    got = selective_log_softmax(logits, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, logits.float().log_softmax(-1)[:, 0])


def test_entropy_of_known_distributions():
    # Uniform over 4: log 4. (1/4, 3/4): log 4 - 3/4 log 3. Certain: 0, and -inf adds nothing.
    assert entropy_from_logits(torch.zeros(4)).item() == pytest.approx(math.log(4))
    got = entropy_from_logits(torch.tensor([0.0, math.log(3)])).item()
    assert got == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert entropy_from_logits(torch.tensor([5.0, -torch.inf])).item() == 0.0


def test_shapes_and_temperatures_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ids \\[B, T\\]"):
        token_log_probs(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long), temperature=0.0)
