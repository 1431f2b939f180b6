from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from recipes.kill_helper import run_pages

from torchrl_llm.modules.backends.token_scorer import CausalScorer

IDS = [torch.tensor([3, 9, 4, 4, 17, 6]), torch.tensor([8, 2, 30]), torch.tensor([5, 5])]
SELECT = [
    torch.tensor([0, 1, 0, 1, 1, 1]).bool(),
    torch.tensor([0, 0, 0]).bool(),
    torch.tensor([0, 1]).bool(),
]


@pytest.fixture(scope="module")
def scorer(tiny_model):
    return CausalScorer(tiny_model)


def test_scores_are_flat_and_in_row_major_order(scorer):
    whole = scorer.token_scores(IDS, SELECT).log_probs
    first = scorer.token_scores(IDS[:1], SELECT[:1]).log_probs
    last = scorer.token_scores(IDS[2:], SELECT[2:]).log_probs
    assert whole.shape == (5,)
    torch.testing.assert_close(whole, torch.cat([first, last]), atol=1e-5, rtol=1e-5)


def test_a_temperature_a_row_reaches_each_of_its_tokens(scorer):
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    got = scorer.token_scores(IDS, SELECT, temperature=temperatures, entropy=True)
    first = scorer.token_scores(IDS[:1], SELECT[:1], temperature=0.5, entropy=True)
    last = scorer.token_scores(IDS[2:], SELECT[2:], temperature=2.0, entropy=True)
    for ours, parts in zip(got[:2], zip(first[:2], last[:2], strict=True), strict=True):
        torch.testing.assert_close(ours, torch.cat(parts), atol=1e-5, rtol=1e-5)


def test_temperature_with_full_logits_is_the_same(tiny_model, scorer):
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    twin = CausalScorer(tiny_model, full_logits=True)
    ours = scorer.token_scores(IDS, SELECT, temperature=temperatures, entropy=True)
    theirs = twin.token_scores(IDS, SELECT, temperature=temperatures, entropy=True)
    torch.testing.assert_close(ours[:2], theirs[:2], atol=1e-5, rtol=1e-5)


def test_the_first_token_of_a_row_cannot_be_scored(scorer):
    with pytest.raises(ValueError, match="first token of a row has no prefix"):
        scorer.token_scores([torch.tensor([1, 2])], [torch.tensor([True, True])])


def test_rows_of_one_token_and_nothing_selected_give_nothing(scorer):
    got = scorer.token_scores([torch.tensor([4])], [torch.tensor([False])], entropy=True)
    assert got.log_probs.shape == got.entropy.shape == (0,)


def test_settings_without_effect_are_refused(tiny_model):
    with pytest.raises(ValueError, match="no effect with full_logits"):
        CausalScorer(tiny_model, full_logits=True, chunk_size=8)


def test_a_copy_of_the_scorer_has_its_own_head(tiny_model):
    first = CausalScorer(tiny_model)
    second = copy.deepcopy(first)
    assert second.head.module is second.model.get_output_embeddings()
    assert second.head.module is not first.head.module


def grads(model, **scorer_settings):
    model.zero_grad()
    scorer = CausalScorer(model, **scorer_settings)
    scores = scorer.token_scores(IDS, SELECT, entropy=True)
    (scores.log_probs.sum() + 0.1 * scores.entropy.sum()).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("tied", [True, False])
def test_in_place_head_gradient_equals_plain_autograd(make_tiny_model, tied):
    model = make_tiny_model(tie_word_embeddings=tied)
    expected = grads(model, chunk_size=64)
    for ours, theirs in zip(
        grads(model, chunk_size=64, in_place_head_grad=True), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_is_exact(make_tiny_model):
    model = make_tiny_model().train()
    expected = grads(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for ours, theirs in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_autocast_keeps_scores_in_float32(make_tiny_model):
    model = make_tiny_model(initializer_range=0.02)
    scorer = CausalScorer(model)
    expected = scorer.token_scores(IDS, SELECT).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = scorer.token_scores(IDS, SELECT, entropy=True)
    scores.log_probs.sum().backward()
    assert scores.log_probs.dtype is scores.entropy.dtype is torch.float32
    torch.testing.assert_close(scores.log_probs, expected, atol=2e-2, rtol=1e-2)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_a_bfloat16_model_trains(make_tiny_model):
    model = make_tiny_model(initializer_range=0.02).bfloat16()
    scores = CausalScorer(model).token_scores(IDS, SELECT)
    scores.log_probs.sum().backward()
    assert scores.log_probs.dtype is torch.float32
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())


def test_defect_18_a_model_that_takes_its_cache_second_is_called_by_name():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).eval()
    assert CausalScorer(model).token_scores(IDS, SELECT).log_probs.shape == (5,)


def test_defect_30_the_model_makes_no_logits_of_its_own(make_tiny_model):
    model = make_tiny_model()
    scorer = CausalScorer(model)
    calls = []
    model.lm_head.register_forward_hook(lambda *args: calls.append(args))
    scorer.token_scores(IDS, SELECT).log_probs.sum().backward()
    assert not calls


@pytest.mark.full
@pytest.mark.slow
def test_two_sharded_ranks_have_the_gradients_of_one_process(tmp_path):
    failed, said = run_pages(tmp_path, Path(__file__).with_name("fsdp_worker.py"), [], {})
    assert not failed, said
    found = re.findall(r"largest relative error: (\S+)", said)
    assert len(found) == 2
    assert max(map(float, found)) < 1e-5


def test_a_sharded_head_outside_of_its_root_is_refused(tiny_model):
    from torch.distributed.tensor import DTensor

    from torchrl_llm.errors import ConfigError
    from torchrl_llm.modules.backends.head import LMHead

    class Sharded(torch.nn.Linear):
        pass

    head = LMHead(Sharded(4, 6, bias=False))
    fake = torch.Tensor._make_subclass(DTensor, head.module.weight.data)
    head.module._parameters["weight"] = fake
    with pytest.raises(ConfigError, match="fully_shard to the CausalScorer"):
        head.score(torch.zeros(2, 4), torch.tensor([0, 1]))
