"""The policy with its adapters off as the reference."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import (
    AdapterDisabled,
    FakeBackend,
    SamplingParams,
    TransformersBackend,
    TransformersWrapper,
    load_model,
    load_tokenizer,
)
from torchrl_llm.modules.backends.token_scorer import CausalScorer

IDS = [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8])]
SELECT = [torch.tensor([False, True, False, True]), torch.tensor([False, True])]


def trained_policy(**lora):
    torch.manual_seed(0)
    model = load_model(lora={"r": 4, "target_modules": "all-linear", **lora})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def model():
    return trained_policy()


@pytest.fixture(scope="module")
def base():
    return TransformersBackend(load_model()).token_scores(IDS, SELECT, entropy=True)


def wrapped(kind, model):
    if kind == "scorer":
        return CausalScorer(model)
    backend = TransformersBackend(model)
    if kind == "backend":
        return backend
    return TransformersWrapper(backend, tokenizer=load_tokenizer())


@pytest.mark.parametrize("kind", ["scorer", "backend", "wrapper"])
def test_it_scores_as_the_base_model_does_and_the_policy_as_before(kind, model, base):
    policy = wrapped(kind, model)
    before = policy.token_scores(IDS, SELECT).log_probs.detach()
    scores = AdapterDisabled(policy).token_scores(IDS, SELECT, entropy=True)
    torch.testing.assert_close(scores.log_probs, base.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, base.entropy, atol=1e-5, rtol=1e-5)
    after = policy.token_scores(IDS, SELECT).log_probs.detach()
    assert torch.equal(before, after)
    assert (before - scores.log_probs).abs().max() > 0.1


def test_adapters_on_the_head_and_modules_to_save_are_off_too(base):
    for extra in ({"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}):
        model = trained_policy(**extra)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        policy = TransformersBackend(model)
        before = policy.token_scores(IDS, SELECT).log_probs.detach()
        scores = AdapterDisabled(policy).token_scores(IDS, SELECT)
        torch.testing.assert_close(scores.log_probs, base.log_probs, atol=1e-5, rtol=1e-5)
        assert torch.equal(before, policy.token_scores(IDS, SELECT).log_probs.detach())


def test_what_takes_gradients_is_as_before_and_nothing_of_the_reference_does(model):
    model = copy.deepcopy(model)
    frozen = next(p for n, p in model.named_parameters() if "lora_A" in n)
    frozen.requires_grad_(False)  # PEFT would make it trainable again
    before = [p.requires_grad for p in model.parameters()]
    scores = AdapterDisabled(TransformersBackend(model)).token_scores(IDS, SELECT)
    assert not scores.log_probs.requires_grad
    assert [p.requires_grad for p in model.parameters()] == before


def test_adapters_are_on_again_when_scoring_raises(model):
    backend = TransformersBackend(model)
    expected = backend.token_scores(IDS, SELECT).log_probs.detach()
    trains = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="vocabulary"):
        AdapterDisabled(backend).token_scores([torch.tensor([1, 10**6])], [SELECT[1]])
    assert torch.equal(expected, backend.token_scores(IDS, SELECT).log_probs.detach())
    assert [p.requires_grad for p in model.parameters()] == trains


def test_a_policy_whose_adapters_were_off_stays_so(model, base):
    backend = TransformersBackend(model)
    with model.disable_adapter():
        AdapterDisabled(backend).token_scores(IDS, SELECT)
        again = backend.token_scores(IDS, SELECT).log_probs
    torch.testing.assert_close(again.detach(), base.log_probs.detach(), atol=1e-5, rtol=1e-5)


def test_the_policy_samples_in_another_thread_with_its_adapters_on(model):
    backend = TransformersBackend(model)
    reference = AdapterDisabled(backend)
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    expected = backend.generate([IDS[0]], params)[0][0].token_ids
    got, stop = [], threading.Event()

    def score():
        while not stop.is_set():
            reference.token_scores(IDS, SELECT)

    thread = threading.Thread(target=score)
    thread.start()
    try:
        got = [backend.generate([IDS[0]], params)[0][0].token_ids for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert all(torch.equal(ids, expected) for ids in got)


def test_merged_adapters_are_refused_and_stay_merged(model):
    model = copy.deepcopy(model)
    reference = AdapterDisabled(TransformersBackend(model))
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge"):
        reference.token_scores(IDS, SELECT)
    assert any(getattr(module, "merged", False) for module in model.modules())


def test_what_cannot_be_switched_off_is_refused():
    with pytest.raises(ConfigError, match="no PEFT model"):
        AdapterDisabled(TransformersBackend(load_model()))
    with pytest.raises(ConfigError, match="no PEFT model"):
        AdapterDisabled(FakeBackend(vocab_size=300, eos_token_ids=(1,)))
    with pytest.raises(ConfigError, match="bias"):
        AdapterDisabled(CausalScorer(trained_policy(bias="lora_only")))
