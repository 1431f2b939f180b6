"""Loss on held-out demonstrations: a mean over tokens that no batching changes."""

import math

import pytest
import torch

from torchrl_llm.data.demonstrations import Demonstration
from torchrl_llm.errors import DataError
from torchrl_llm.evaluation import HeldOutLoss, held_out_loss
from torchrl_llm.modules.backends import CausalScorer


def demonstration(ids, learned):
    return Demonstration(torch.tensor(ids), torch.tensor(learned).bool(), False)


ROWS = [
    demonstration([3, 4, 5, 6, 7], [0, 0, 1, 1, 1]),
    demonstration([8, 9], [0, 1]),
    demonstration([1, 2, 3], [0, 0, 0]),  # nothing of it counts
]


def test_the_loss_is_that_of_the_models_own_logits_whatever_the_budget(tiny_model):
    counted = ROWS[:2]
    log_probs, right = [], []
    for row in counted:
        logits = tiny_model(row.token_ids[None]).logits[0, :-1].log_softmax(-1)
        for at in row.learned.nonzero().flatten().tolist():
            token = row.token_ids[at]
            log_probs.append(logits[at - 1, token].item())
            right.append(bool(logits[at - 1].argmax() == token))
    for budget in (None, 1, 8):
        result = held_out_loss(CausalScorer(tiny_model), ROWS, token_budget=budget)
        assert result.num_tokens == 4
        assert result.loss == pytest.approx(-sum(log_probs) / 4, rel=1e-5)
        assert result.token_accuracy == sum(right) / 4
        assert result.metrics()["eval/perplexity"] == pytest.approx(math.exp(result.loss))


def test_rows_without_a_token_to_predict_are_refused(tiny_model):
    with pytest.raises(DataError, match="none of the held-out rows"):
        held_out_loss(CausalScorer(tiny_model), ROWS[2:])


def test_a_perplexity_that_no_number_holds_is_infinite():
    assert HeldOutLoss(loss=800.0, token_accuracy=0.0, num_tokens=1).perplexity == math.inf
