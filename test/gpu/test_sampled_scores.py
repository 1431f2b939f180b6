"""Log-probs that sampling records, against the model called anew for every token."""

from __future__ import annotations

import pytest
import torch
from gpu.exactness import ROUNDING, assert_as_exact, distance
from gpu.models import in_float64, small_model

from torchrl_llm.data.scoring import ScoreExtras, Support
from torchrl_llm.modules.backends import SamplingParams, TransformersBackend

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 23, 8, 41, 7, 3], [11], [4, 4, 17], [5, 9, 23, 8, 41, 7, 3]]
SAMPLING = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k": {"top_k": 12, "temperature": 1.3},
    "top-p": {"top_p": 0.8},
    "both": {"top_k": 40, "top_p": 0.9, "temperature": 0.8},
    "greedy": {"temperature": 0.0},
}


def sample(model, *, num_samples=3, max_new_tokens=12, **settings):
    """The backend, what was asked of it, and the completions of all prompts."""
    backend = TransformersBackend(model, eos_token_ids=(2,))
    params = SamplingParams(
        max_new_tokens=max_new_tokens, num_samples=num_samples, seed=5, **settings
    )
    prompts = [torch.tensor(ids) for ids in PROMPTS]
    return backend, params, prompts, backend.generate(prompts, params)


def kept(logits, params):
    """Which ids are drawn from, of one vector of logits: sorted, and counted by hand."""
    keep = torch.ones_like(logits, dtype=torch.bool)
    if params.top_k:
        keep &= logits >= logits.sort(descending=True).values[params.top_k - 1]
    if params.top_p < 1:
        order = logits.masked_fill(~keep, -torch.inf).sort(descending=True)
        mass = order.values.softmax(-1).cumsum(-1)
        # The first ids whose mass together reaches top_p.
        number = int((mass < params.top_p).sum()) + 1
        keep &= torch.zeros_like(keep).index_fill(0, order.indices[:number], True)
    return keep


@torch.no_grad()
def token_by_token(model, prompt, completion, params):
    """Log-prob of each sampled token: the whole row before it is run again, without a cache."""
    device = next(model.parameters()).device
    ids = torch.cat([prompt, completion.token_ids]).to(device)
    starts = [0, *(completion.support.counts.cumsum(0).tolist() if completion.support else ())]
    found = []
    for step, place in enumerate(range(len(prompt), len(ids))):
        logits = model(input_ids=ids[None, :place], use_cache=False).logits[0, -1]
        logits = logits if logits.dtype is torch.float64 else logits.float()
        logits = logits / params.scoring_temperature
        if completion.support is not None and completion.support.counts[step]:
            ids_kept = completion.support.token_ids[starts[step] : starts[step + 1]]
            keep = torch.zeros_like(logits, dtype=torch.bool)
            keep[ids_kept.long().to(device)] = True
            logits = logits.masked_fill(~keep, -torch.inf)
        found.append(logits.log_softmax(-1)[ids[place]])
    return torch.stack(found)


@pytest.mark.parametrize("name", SAMPLING)
def test_recorded_log_probs_are_those_of_the_model_called_for_every_token(device, dtype, name):
    model = small_model(device, dtype)
    settings = {"record_support": name not in ("greedy",), **SAMPLING[name]}
    backend, params, prompts, answers = sample(model, **settings)
    exact_model = in_float64(model)
    recorded, slow, exact = [], [], []
    for prompt, completions in zip(prompts, answers, strict=True):
        assert len(completions) == 3
        for completion in completions:
            assert completion.token_ids.device.type == completion.log_probs.device.type == "cpu"
            recorded.append(completion.log_probs)
            slow.append(token_by_token(model, prompt, completion, params))
            exact.append(token_by_token(exact_model, prompt, completion, params))
    recorded, slow, exact = (torch.cat(x) for x in (recorded, slow, exact))
    assert_as_exact(recorded, slow, exact, dtype, what="recorded")
    # What a loss would compute of the same tokens.
    rows = [torch.cat([p, c.token_ids]) for p, cs in zip(prompts, answers, strict=True) for c in cs]
    sizes = [len(p) for p in prompts for _ in range(3)]
    select = [torch.arange(len(ids)) >= size for ids, size in zip(rows, sizes, strict=True)]
    supports = [c.support for cs in answers for c in cs]
    extras = None
    if params.keeps_ids:
        extras = ScoreExtras(support=Support.join(supports))
    for layout in ("padded", "shared"):
        backend.layout = layout
        scores = backend.token_scores(
            rows, select, temperature=params.scoring_temperature, extras=extras
        )
        assert_as_exact(scores.log_probs, slow, exact, dtype, what=layout)


@pytest.mark.parametrize("name", ["top-k", "top-p", "both"])
def test_the_kept_ids_are_those_of_sorted_logits(device, name):
    model = small_model(device, initializer_range=0.2)
    _, params, prompts, answers = sample(model, record_support=True, **SAMPLING[name])
    strange, number = 0, 0
    for prompt, completions in zip(prompts, answers, strict=True):
        completion = completions[0]
        parts = completion.support.token_ids.split(completion.support.counts.tolist())
        ids = torch.cat([prompt, completion.token_ids]).to(device)
        for step, own in enumerate(parts):
            before = ids[None, : len(prompt) + step]
            with torch.no_grad():
                logits = model(input_ids=before, use_cache=False).logits[0, -1].float()
            keep = kept(logits / params.temperature, params).nonzero()[:, 0].tolist()
            strange += len(set(own.tolist()) ^ set(keep))
            number += len(keep)
    # Rounding may decide about an id whose mass ends at top_p.
    assert strange <= 1 < number


def test_greedy_tokens_are_the_most_likely_ones(device):
    model = small_model(device, initializer_range=0.2)
    _, _, prompts, answers = sample(model, temperature=0.0, num_samples=1)
    for prompt, [completion] in zip(prompts, answers, strict=True):
        ids = torch.cat([prompt, completion.token_ids]).to(device)
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        chosen = logits[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
        best = logits[len(prompt) - 1 : -1].amax(-1)
        torch.testing.assert_close(chosen, best, atol=1e-3, rtol=0.0)


def test_a_seed_gives_the_same_samples_again_and_rows_end_where_they_should(device):
    model = small_model(device)
    model.requires_grad_(False)
    first, second = (sample(model, max_new_tokens=30)[3] for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert distance(a.log_probs, b.log_probs) < ROUNDING[torch.float32]
            ended = (a.token_ids == 2).nonzero()[:, 0].tolist()
            assert ended in ([], [len(a.token_ids) - 1])
            assert ended or len(a.token_ids) == 30
    assert len({tuple(c.token_ids.tolist()) for c in first[0]}) == 3


def test_draws_on_the_device_have_the_frequencies_of_the_distribution(device):
    """20,000 draws of 8 tokens: five standard deviations of each count."""
    from torchrl_llm.modules.backends.sampling import draw

    probs = torch.tensor([0.0, 0.3, 0.2, 0.0, 0.25, 0.05, 0.2, 0.0], device=device)
    generator = torch.Generator(device).manual_seed(0)
    ids = draw(probs.log().expand(20_000, 8), generator)
    counts = torch.bincount(ids, minlength=8).double()
    expected = probs.double() * 20_000
    spread = (expected * (1 - probs.double())).sqrt()
    assert (counts[probs == 0] == 0).all()
    assert ((counts - expected).abs() <= 5 * spread).all()
