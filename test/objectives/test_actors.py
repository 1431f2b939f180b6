"""Actors that are no TokenScorer: any module with logits or a distribution, by value."""

from __future__ import annotations

import copy

import pytest
import torch
from objectives.rows_helper import make_row, make_rows
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from torchrl_llm.envs.transforms import RetrieveLogProb
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import GRPOLoss, SFTLoss


class Logits(nn.Module):
    """Logits of a model; of the token at each position instead of the next one, if asked."""

    def __init__(self, model, aligned):
        super().__init__()
        self.model, self.aligned = model, aligned

    def forward(self, input_ids, attention_mask):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits.roll(1, 1) if self.aligned else logits


def as_module(model):
    keys = [("tokens", "full"), ("masks", "all_attention_mask")]
    return TensorDictModule(Logits(model, aligned=False), in_keys=keys, out_keys=["logits"])


def as_distribution(model):
    keys = ["input_ids", "attention_mask"]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Logits(model, aligned=True), in_keys=keys, out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
        ),
    )


class NoHead(nn.Module):
    """A model of nobody's make: it can be run, and that is all."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask)


def rows():
    made = [make_row([5, 1, 2, 9, 4], 2, advantage=1.5), make_row([7, 3], 1, advantage=-1.0)]
    for row, temperature in zip(made, (1.0, 0.7), strict=True):
        row["tokens", "temperature"] = torch.tensor(temperature)
    return make_rows(*made)


def outcome(loss_of, model, wrap):
    model = copy.deepcopy(model)
    output = loss_of(wrap(model))(rows())
    output.total_loss().backward()
    return output.total_loss().detach(), [p.grad for p in model.parameters()]


LOSSES = {
    "grpo": lambda actor: GRPOLoss(actor, entropy_coeff=0.1),
    "sft": SFTLoss,
}


@pytest.mark.parametrize("wrap", [as_module, as_distribution, NoHead, lambda model: model])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_scorer(tiny_model, name, wrap):
    expected, gradients = outcome(LOSSES[name], tiny_model, CausalScorer)
    loss, found = outcome(LOSSES[name], tiny_model, wrap)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert any(bool(gradient.any()) for gradient in gradients)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


def test_a_model_that_shows_no_output_embeddings_makes_its_own_logits(tiny_model):
    hidden = copy.deepcopy(tiny_model)
    hidden.get_output_embeddings = lambda: None
    expected, gradients = outcome(SFTLoss, tiny_model, CausalScorer)
    loss = SFTLoss(CausalScorer(hidden))(rows()).total_loss()
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close([p.grad for p in hidden.parameters()], gradients)


def test_the_actor_stays_what_was_given(tiny_model):
    actor = as_module(tiny_model)
    loss = SFTLoss(actor)
    assert loss.actor_network is actor
    assert {*loss.state_dict()} == {f"actor_network.{name}" for name in actor.state_dict()}


def test_a_reference_may_be_such_a_module_too(tiny_model):
    expected = RetrieveLogProb(CausalScorer(tiny_model), assistant_only=False)(rows())
    found = RetrieveLogProb(as_module(tiny_model), assistant_only=False)(rows())
    for row, other in zip(found.tensordicts, expected.tensordicts, strict=True):
        key = ("next", "ref_log_probs", "full")
        torch.testing.assert_close(row[key], other[key], rtol=1e-5, atol=1e-5)


def test_modules_that_cannot_be_actors_are_told_why(tiny_model):
    logits = Logits(tiny_model, aligned=False)
    with pytest.raises(ConfigError, match="'observation'"):
        SFTLoss(TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]))
    with pytest.raises(ConfigError, match="one key named 'logits'"):
        SFTLoss(TensorDictModule(logits, in_keys=["input_ids"], out_keys=["values"]))
    with pytest.raises(ConfigError, match="must be a TokenScorer"):
        SFTLoss("actor")
    with pytest.raises(ConfigError, match=r"\[B, T, V\]"):
        SFTLoss(as_module(lambda **_: type("Out", (), {"logits": torch.zeros(2, 5)})))(rows())
