"""A zoo of tiny models: what is sampled and scored is what each model says of a row alone.

What is expected comes from plain transformers: one row, one forward, no cache, no padding.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from modules.backends.model_zoo import FAMILIES, VOCAB, build

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import SamplingParams, TransformersBackend
from torchrl_llm.modules.backends import CausalScorer

# Heads that the chunked one does not know: the error says full_logits=True, with which they work.
OWN_LOGITS = {
    "modernbert-decoder",
    "bert decoder",
    "electra decoder",
    "rembert decoder",
    "roformer decoder",
    "big_bird decoder",
    "megatron-bert decoder",
    "roc_bert decoder",
    "ernie decoder",
}
NO_CACHE = "has no key-value cache"
DIFFERS = "cannot be sampled from: its logits with a cache are"
REFUSED = {
    "recurrent_gemma": DIFFERS,  # its state lives in the module
    "zamba2": DIFFERS,  # a step has no bound for its time step, a forward has one
    "bert": DIFFERS,  # looks ahead
    "roberta decoder": DIFFERS,  # its positions begin behind the padding id
    "camembert decoder": DIFFERS,
    "xlm-roberta decoder": DIFFERS,
    "xlm-roberta-xl decoder": DIFFERS,
    "xmod decoder": DIFFERS,
    "data2vec-text decoder": DIFFERS,
    "minimax": "with a cache it fails with ValueError: MiniMax uses cache of its own",
    "cpmant": "with a cache it fails",
    "prophetnet": "with a cache it fails",
    "mamba": NO_CACHE,
    "reformer": NO_CACHE,
    "openai-gpt": NO_CACHE,
    "xlnet": NO_CACHE,
    "xlm": NO_CACHE,
}
ACCEPTED = [name for name in FAMILIES if name not in REFUSED]
FAST = ["qwen3_next", "lfm2", "bart", "gpt_neo", "mpt", "llama4", "bert decoder"]
FAST += ["llama", "gemma2", "gpt_neox", "cohere", "opt", "bloom", "qwen2_moe"]
FAST_REFUSED = ["recurrent_gemma", "zamba2", "bert", "mamba"]
UNPACKED = {
    "gpt_neo": "does not take a stream that is longer than its context",
    "big_bird decoder": "does not take a stream that is longer than its context",
    "mpt": "takes no position_ids",
    "roformer decoder": "takes no position_ids",
}


def some(names, fast):
    return [n if n in fast else pytest.param(n, marks=pytest.mark.full) for n in names]


def prompts():
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 1, 23, 23, 2)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    return [*rows, rows[2].clone()]


@torch.no_grad()
def alone(model, row, start):
    """Log-probs of a row's tokens from ``start`` on."""
    log_probs = model(input_ids=row[None], use_cache=False).logits[0].double().log_softmax(-1)
    return log_probs[start - 1 : -1].gather(-1, row[start:, None])[:, 0].float()


@pytest.mark.parametrize("name", some(ACCEPTED, FAST))
def test_sampling_and_every_layout_give_what_the_model_says_of_each_row_alone(name):
    model = build(name)
    if name in OWN_LOGITS:
        with pytest.raises(ConfigError, match=r"TransformersBackend\(model, full_logits=True\)"):
            TransformersBackend(model)
    backend = TransformersBackend(
        model, eos_token_ids=(2, *range(30, 36)), full_logits=name in OWN_LOGITS
    )
    # Equal prompts, three rows of each, and rows that end early.
    groups = backend.generate(prompts(), SamplingParams(max_new_tokens=28, num_samples=3, seed=5))
    sizes = {len(c.token_ids) for group in groups for c in group}
    assert len(sizes) > 3 or name == "minicpm3"  # it is sure of itself
    rows, starts, sampled = [], [], []
    for prompt, group in zip(prompts(), groups, strict=True):
        for completion in group:
            rows.append(torch.cat([prompt, completion.token_ids]))
            starts.append(len(prompt))
            sampled.append(completion.log_probs)
    expected = [alone(model, row, start) for row, start in zip(rows, starts, strict=True)]
    torch.testing.assert_close(torch.cat(sampled), torch.cat(expected), atol=1e-4, rtol=0)
    for layout in ("padded", "bucketed", "packed", "shared"):
        some_rows = list(range(len(rows)))
        if layout not in backend.layouts:
            with pytest.raises(ConfigError, match=type(model).__name__) as refusal:
                backend.layout = layout
            assert UNPACKED.get(name, "") in str(refusal.value)
            continue
        backend.layout = layout
        window = backend.scorer._longest_plain_row
        if layout in ("packed", "shared") and max(map(len, rows)) > window + 1:
            some_rows = [k for k in some_rows if len(rows[k]) <= window]
        select = [torch.arange(len(rows[k])) >= starts[k] for k in some_rows]
        with torch.no_grad():
            scores = backend.token_scores([rows[k] for k in some_rows], select).log_probs
        wanted = torch.cat([expected[k] for k in some_rows])
        torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=0)
        if layout == "padded" and name in FAST:
            torch.testing.assert_close(scores, torch.cat(sampled), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", some(REFUSED, FAST_REFUSED))
def test_a_model_that_would_be_sampled_wrongly_is_refused_by_name(name):
    model = build(name)
    for full_logits in (False, True):
        with pytest.raises(ConfigError, match=REFUSED[name]) as refusal:
            TransformersBackend(model, full_logits=full_logits)
        assert type(model).__name__ in str(refusal.value)
        assert "full_logits" not in str(refusal.value)


def test_the_zoo_holds_more_than_forty_architectures_and_the_page_names_them():
    page = (Path(__file__).parents[3] / "docs/source/tested_models.rst").read_text()
    passed, refused = page.split("These architectures pass:")[1].split("These are refused")

    def kinds(names):
        return {getattr(transformers, FAMILIES[name][0]).model_type for name in names}

    assert len(kinds(ACCEPTED)) > 40
    assert kinds(ACCEPTED) <= set(re.findall(r"[\w-]+", passed))
    assert kinds(REFUSED) <= set(re.findall(r"[\w-]+", refused))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) for n in ("cpmant", "xlnet")] + ["bert"]
)
def test_a_model_that_looks_ahead_is_not_scored(name):
    model = build(name)
    for full_logits in (False, True):
        with pytest.raises(ConfigError, match="gives a row different logits when tokens"):
            CausalScorer(model, full_logits=full_logits)


@pytest.mark.parametrize("name", ["bart", pytest.param("trocr", marks=pytest.mark.full)])
def test_prompts_of_different_length_are_sampled_apart_where_padding_would_shift_them(name):
    model = build(name)
    backend = TransformersBackend(model, eos_token_ids=(2,))
    batches = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    params = SamplingParams(max_new_tokens=2, num_samples=2, ignore_eos=True, seed=1)
    with hook:
        groups = backend.generate(prompts(), params)
    # Lengths 5, 1, 23 (two different prompts, one of them twice) and 2.
    assert batches == [(1, 5), (2, 1), (1, 1), (2, 1), (2, 23), (6, 1), (1, 2), (2, 1)]
    for prompt, group in zip(prompts(), groups, strict=True):
        for completion in group:
            row = torch.cat([prompt, completion.token_ids])
            own = alone(model, row, len(prompt))
            torch.testing.assert_close(completion.log_probs, own, atol=1e-4, rtol=0)


def test_a_decoder_may_have_more_layers_than_its_encoder():
    model = build("bart", decoder_layers=3)
    completions = TransformersBackend(model).generate(
        prompts(), SamplingParams(max_new_tokens=3, ignore_eos=True)
    )
    row = torch.cat([prompts()[0], completions[0][0].token_ids])
    torch.testing.assert_close(completions[0][0].log_probs, alone(model, row, 5), atol=1e-4, rtol=0)
