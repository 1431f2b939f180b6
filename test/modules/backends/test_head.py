"""Body and head of every kind of model against the model's own logits."""

from __future__ import annotations

import pytest
import torch
from modules.backends.model_zoo import build
from torch import nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import token_log_probs
from torchrl_llm.modules.backends.head import LMHead, model_body
from torchrl_llm.modules.backends.token_scorer import CausalScorer

IDS = [torch.tensor([3, 9, 4, 4, 17]), torch.tensor([8, 2, 30])]
SELECT = [torch.tensor([0, 1, 0, 1, 1]).bool(), torch.tensor([0, 0, 1]).bool()]


FAMILIES = {
    "tied": ("qwen2 tied", {}),
    "untied": ("llama", {}),
    "bias": ("phi", {}),
    "bias, other body": ("gptj", {}),
    "no position ids": ("bloom", {}),
    "learned positions": ("gpt2", {}),
    "divided logits": ("granite", {"logits_scaling": 8.0}),
    "multiplied logits": ("cohere", {"logit_scale": 0.25}),
    "multiplied by a divisor's name": ("hyperclovax", {"logits_scaling": 0.5}),
    "soft-capped logits": ("gemma2", {"final_logit_softcapping": 2.0}),
}


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def model(request):
    family, settings = FAMILIES[request.param]
    return build(family, **settings)


def naive(model, ids, select, temperature=1.0):
    """One row at a time through the model's own logits."""
    scores, entropies = [], []
    for row, mask in zip(ids, select, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits.float()
        scores.append(token_log_probs(logits, row[None], temperature=temperature)[0][mask])
        log_p = (logits[0, :-1] / temperature).log_softmax(-1)[mask[1:]]
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(scores), torch.cat(entropies)


def gradients(model, total):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(total, parameters, allow_unused=True)


def assert_same(model, scorer, temperature=1.0):
    expected, entropy = naive(model, IDS, SELECT, temperature)
    got = scorer.token_scores(IDS, SELECT, temperature=temperature, entropy=True)
    torch.testing.assert_close(got.log_probs, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy, entropy, atol=2e-5, rtol=1e-5)
    weights = torch.linspace(-1, 2, len(expected))
    ours = gradients(model, (got.log_probs * weights).sum() + got.entropy.sum())
    theirs = gradients(model, (expected * weights).sum() + entropy.sum())
    for mine, other in zip(ours, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other, atol=5e-5, rtol=1e-3)


def test_values_and_gradients_of_every_family_equal_those_of_its_own_logits(model):
    assert_same(model, CausalScorer(model, chunk_size=32), temperature=0.8)


def test_full_logits_are_the_slow_twin(model):
    assert_same(model, CausalScorer(model, full_logits=True), temperature=0.8)


def lora(model, **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **settings)
    return peft.get_peft_model(model, config)


class TestLoRA:
    def test_adapters_of_the_body_alone(self):
        model = lora(build("qwen2"), target_modules=["q_proj"])
        assert_same(model, CausalScorer(model))

    def test_adapters_on_the_head(self):
        model = lora(build("llama", tie_word_embeddings=False), target_modules=["lm_head"])
        scorer = CausalScorer(model, chunk_size=32)
        assert_same(model, scorer, temperature=0.8)
        base = model.get_base_model().lm_head.base_layer.weight
        assert not base.requires_grad

    def test_two_adapters_add_up(self):
        import peft

        model = lora(build("llama", tie_word_embeddings=False), target_modules=["lm_head"])
        second = peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False)
        model.add_adapter("second", second)
        model.base_model.set_adapter(["default", "second"])
        assert_same(model, CausalScorer(model))

    def test_disabled_and_merged_adapters_are_seen_at_the_call(self):
        model = lora(build("llama", tie_word_embeddings=False), target_modules=["lm_head"])
        scorer = CausalScorer(model)
        adapted = scorer.token_scores(IDS, SELECT).log_probs
        with model.disable_adapter():
            expected, _ = naive(model, IDS, SELECT)
            got = scorer.token_scores(IDS, SELECT).log_probs
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
            assert not torch.allclose(got, adapted)
        model.merge_adapter()
        merged = scorer.token_scores(IDS, SELECT).log_probs
        torch.testing.assert_close(merged, adapted, atol=2e-5, rtol=1e-5)

    def test_a_head_that_is_saved_whole(self):
        model = lora(
            build("llama", tie_word_embeddings=False),
            target_modules=["q_proj"],
            modules_to_save=["lm_head"],
        )
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
        assert_same(model, CausalScorer(model))

    def test_another_kind_of_adapter_on_the_head_is_refused(self):
        model = lora(
            build("llama", tie_word_embeddings=False), target_modules=["lm_head"], use_dora=True
        )
        with pytest.raises(ConfigError, match=r"not plain LoRA.*full_logits=True"):
            CausalScorer(model).token_scores(IDS, SELECT)


class TestRefusals:
    def test_an_unknown_logit_field_names_the_way_out(self):
        model = build("qwen2")
        model.config.logit_magic = 3.0
        with pytest.raises(ConfigError, match=r"logit_magic=3.0.*full_logits=True"):
            LMHead.from_model(model)
        model.config.logit_magic = None
        LMHead.from_model(model)

    def test_a_factor_that_no_field_names_is_found_by_value(self):
        model = build("qwen2")
        forward = model.forward

        def doubled(*args, **kwargs):
            output = forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

        model.forward = doubled
        with pytest.raises(
            ConfigError, match=r"does something that the chunked head does not know"
        ):
            LMHead.from_model(model)

    def test_the_check_leaves_the_model_as_it_was(self):
        model = build("qwen2").train()
        model.model.layers[0].eval()
        LMHead.from_model(model)
        assert model.training
        assert not model.model.layers[0].training
        assert all(p.grad is None for p in model.parameters())

    def test_a_head_that_is_not_linear_is_refused(self):
        with pytest.raises(ConfigError, match="not a plain linear layer"):
            LMHead(nn.Sequential(nn.Linear(4, 4)))

    def test_a_model_without_body_is_refused(self):
        with pytest.raises(ConfigError, match="no body apart from its head"):
            model_body(nn.Linear(2, 2))
