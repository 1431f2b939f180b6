"""Rows in every layout against each row alone: values and gradients of all parameters."""

from __future__ import annotations

import shutil

import pytest
import torch
from gpu.exactness import assert_all_as_exact
from gpu.models import expected, gradients, small_model
from modules.backends.test_layouts import ragged_group, uncompiled_flex  # noqa: F401

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.layouts import LAYOUTS
from torchrl_llm.modules.backends.token_scorer import CausalScorer

pytestmark = pytest.mark.gpu


def assert_as_rows_alone(scorer, layouts, rows, dtype, *, autocast=False, **settings):
    """Each layout gives what each row alone gives, to the rounding that this has itself."""
    twins = expected(scorer.model, rows, autocast=autocast, **settings)
    (slow, slow_grads), (exact, exact_grads) = twins
    device = exact[0].device
    for layout in layouts:
        scorer.layout = layout
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            scores = scorer.token_scores(*rows, entropy=True, **settings)
        got = gradients(scorer.model, scores.log_probs, scores.entropy)
        names = [f"{layout} {name}" for name in ("log_probs", "entropy", *exact_grads)]
        fast = [scores.log_probs, scores.entropy, *got.values()]
        slow_all = [*slow, *slow_grads.values()]
        assert_all_as_exact(fast, slow_all, [*exact, *exact_grads.values()], dtype, names=names)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layout_gives_what_each_row_alone_gives(device, dtype, attention):
    model = small_model(device, dtype, attn_implementation=attention)
    scorer = CausalScorer(model)
    assert scorer.layouts == ("auto", *LAYOUTS), scorer.why_not_packed
    rows = ragged_group()
    temperature = torch.linspace(0.5, 2.0, len(rows[0]))
    assert_as_rows_alone(scorer, scorer.layouts, rows, dtype)
    assert_as_rows_alone(scorer, ["shared"], rows, dtype, temperature=temperature)


def test_every_layout_agrees_under_autocast_over_float32_weights(device):
    scorer = CausalScorer(small_model(device))
    rows = ragged_group()
    assert_as_rows_alone(scorer, scorer.layouts, rows, torch.bfloat16, autocast=True)


def test_longer_rows_in_wide_heads_agree(device, dtype):
    """Rows of a few hundred tokens and heads of 64, for which CUDA has other kernels."""
    model = small_model(device, dtype, hidden_size=256, intermediate_size=256)
    scorer = CausalScorer(model)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 290, (130,), generator=generator)
    sequences = [
        torch.cat([prompt, torch.randint(3, 290, (size,), generator=generator)])
        for size in (1, 37, 200, 64)
    ]
    sequences.append(torch.randint(3, 290, (255,), generator=generator))
    select = [torch.arange(len(ids)) >= 130 for ids in sequences]
    assert_as_rows_alone(scorer, ("packed", "shared"), (sequences, select), dtype)


@pytest.mark.timeout(120)
def test_flex_attention_packs_and_shares_as_rows_alone(device, dtype, request):
    settings = {"attn_implementation": "flex_attention"}
    if device.type == "cpu":
        request.getfixturevalue("uncompiled_flex")
        model = small_model(device, dtype)
        model.config._attn_implementation = "flex_attention"
        scorer, rows = CausalScorer(model), ragged_group()
        (slow, _), (exact, _) = expected(model, rows)
        for layout in ("packed", "shared"):
            scorer.layout = layout
            with torch.no_grad():  # it has no backward on a CPU
                got = scorer.token_scores(*rows, entropy=True)[:2]
            assert_all_as_exact(got, slow, exact, dtype)
        return
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("needs a C compiler: flex attention is compiled")
    scorer = CausalScorer(small_model(device, dtype, **settings))
    assert scorer.why_not_packed is None
    assert_as_rows_alone(scorer, ("packed", "shared"), ragged_group(), dtype)


def test_flash_attention_packs_as_rows_alone(device):
    if device.type == "cpu":
        pytest.skip("flash attention has no CPU kernel")
    pytest.importorskip("flash_attn", reason="needs flash-attn: pip install flash-attn")
    settings = {"attn_implementation": "flash_attention_2"}
    scorer = CausalScorer(small_model(device, torch.bfloat16, **settings))
    assert scorer.why_not_packed is None
    rows = ragged_group()
    assert_as_rows_alone(scorer, ("padded", "packed"), rows, torch.bfloat16)
    float32 = CausalScorer(small_model(device, **settings))
    with pytest.raises(ConfigError, match="takes bfloat16 or float16"):
        float32.token_scores(*rows)
    assert_as_rows_alone(float32, ("packed",), rows, torch.bfloat16, autocast=True)
