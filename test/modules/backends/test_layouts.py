"""Padded, bucketed, packed and shared rows: one result in value and gradient, and what is run."""

from __future__ import annotations

import pytest
import torch
from modules.backends.model_zoo import build

from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import RowCosts
from torchrl_llm.modules import load_model
from torchrl_llm.modules.backends import attention
from torchrl_llm.modules.backends.attention import why_not_packed
from torchrl_llm.modules.backends.layouts import LAYOUTS, ModelSize, Rows, lay_out
from torchrl_llm.modules.backends.token_scorer import CausalScorer

COSTS = RowCosts(token=1.0, pair=0.01, call=100.0, block=2.0)


def ragged_group(*, vocabulary=60, seed=0):
    """Two groups of four with a prompt each, a row of its own, one that is all masked.

    Responses of 1 to 25 tokens, one with holes in its mask, as joined turns have them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(size):
        return torch.randint(3, vocabulary, (size,), generator=generator)

    sequences, select = [], []
    for size in (5, 9):
        prompt = draw(size)
        for length in (1, 7, 3, 25):
            sequences.append(torch.cat([prompt, draw(length)]))
            select.append(torch.arange(size + length) >= size)
    sequences += [draw(21), draw(6), draw(2)]
    holes = torch.arange(21) % 3 == 1
    holes[:3] = False
    select += [holes, torch.zeros(6, dtype=torch.bool), torch.tensor([False, True])]
    order = torch.randperm(len(sequences), generator=generator).tolist()
    return [sequences[k] for k in order], [select[k] for k in order]


def results(scorer, layout, rows, **settings):
    """Log-probs, entropies and all gradients of a weighted sum of both."""
    scorer.layout = layout
    scorer.model.zero_grad()
    scores = scorer.token_scores(*rows, entropy=True, **settings)
    weights = torch.linspace(-1.0, 1.0, len(scores.log_probs)).to(scores.log_probs.device)
    ((scores.log_probs * weights).sum() + 0.1 * scores.entropy.sum()).backward()
    grads = [p.grad.clone() for p in scorer.model.parameters() if p.grad is not None]
    return scores, grads


def assert_all_layouts_agree(scorer, rows, *, tolerance=1e-5, **settings):
    expected, expected_grads = results(scorer, "padded", rows, **settings)
    for layout in scorer.layouts:
        scores, grads = results(scorer, layout, rows, **settings)
        for ours, theirs in zip(scores[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        # An absolute error that is small beside the largest gradient of the model.
        largest = max(float(g.abs().max()) for g in expected_grads)
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance * largest, rtol=tolerance)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_layouts_agree_in_value_and_gradient(make_tiny_model, attention):
    scorer = CausalScorer(make_tiny_model(attn_implementation=attention))
    assert scorer.layouts == ("auto", *LAYOUTS)
    rows = ragged_group()
    assert_all_layouts_agree(scorer, rows)
    assert_all_layouts_agree(scorer, rows, temperature=torch.linspace(0.5, 2.0, len(rows[0])))


def test_all_layouts_agree_with_rows_one_at_a_time(make_tiny_model):
    model = make_tiny_model()
    sequences, select = ragged_group()
    alone = []
    for ids, mask in zip(sequences, select, strict=True):
        log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        alone.append(log_probs.gather(1, ids[1:, None])[:, 0][mask[1:]])
    scorer = CausalScorer(model)
    for layout in scorer.layouts:
        scorer.layout = layout
        got = scorer.token_scores(sequences, select).log_probs
        torch.testing.assert_close(got, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_all_layouts_agree_under_gradient_checkpointing(make_tiny_model, reentrant):
    rows = ragged_group()
    model = make_tiny_model()
    expected = results(CausalScorer(model), "padded", rows)[1]
    model = make_tiny_model().train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    scorer = CausalScorer(model)
    assert_all_layouts_agree(scorer, rows)
    for ours, theirs in zip(results(scorer, "shared", rows)[1], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


def test_all_layouts_agree_with_lora(make_tiny_model):
    peft = pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_tiny_model(), config)
    assert_all_layouts_agree(CausalScorer(model), ragged_group())


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_all_layouts_agree_in_bfloat16_to_its_rounding(make_tiny_model, how):
    model = make_tiny_model(initializer_range=0.02)
    scorer = CausalScorer(model.bfloat16() if how == "weights" else model)
    assert scorer.why_not_packed is None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        assert_all_layouts_agree(scorer, ragged_group(), tolerance=3e-2)


PACKABLE = {
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
    "gemma2": {"sliding_window": 64},
    "qwen3": {},
    "qwen2_moe": {},
}
UNPACKABLE = {"bloom": "takes no position_ids", "qwen3_next": "linear_attention"}


@pytest.mark.parametrize("name", PACKABLE)
def test_all_layouts_agree_in_every_family_that_can_be_packed(name):
    scorer = CausalScorer(build(name, **PACKABLE[name]))
    assert scorer.why_not_packed is None
    assert_all_layouts_agree(scorer, ragged_group())


@pytest.mark.parametrize(("name", "reason"), UNPACKABLE.items())
def test_models_that_cannot_be_packed_say_why_and_are_scored_in_rectangles(name, reason):
    scorer = CausalScorer(build(name))
    assert reason in scorer.why_not_packed
    assert scorer.layouts == ("auto", "padded", "bucketed")
    with pytest.raises(ConfigError, match="is not available"):
        scorer.layout = "packed"
    assert_all_layouts_agree(scorer, ragged_group())


def test_a_state_that_leaks_from_row_to_row_is_found_by_trying():
    """A convolution over the stream, which no field of the configuration tells of."""
    model = build("llama")
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    scorer = CausalScorer(model)
    assert "different states than padded ones" in scorer.why_not_packed
    assert_all_layouts_agree(scorer, ragged_group())


def test_rows_beyond_a_sliding_window_are_not_packed():
    scorer = CausalScorer(build("mistral", sliding_window=8))
    sequences, select = ragged_group()
    short = [k for k, ids in enumerate(sequences) if len(ids) <= 9]
    assert_all_layouts_agree(scorer, ([sequences[k] for k in short], [select[k] for k in short]))
    expected = results(scorer, "padded", (sequences, select))[0].log_probs
    got = results(scorer, "auto", (sequences, select))[0].log_probs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    scorer.layout = "packed"
    with pytest.raises(ConfigError, match="rows of at most 8 tokens"):
        scorer.token_scores(sequences, select)


def test_unknown_layouts_are_refused(tiny_model):
    with pytest.raises(
        ConfigError, match="one of 'auto', 'padded', 'bucketed', 'packed', 'shared', got 'pack'"
    ):
        CausalScorer(tiny_model, layout="pack")


def test_nothing_that_no_scored_token_depends_on_is_run():
    sequences = [torch.arange(1, 9), torch.arange(1, 5), torch.arange(1, 7)]
    select = [torch.zeros(8).bool(), torch.zeros(4).bool(), torch.zeros(6).bool()]
    select[0][4] = True  # needs tokens 0 to 3
    select[2][2] = True  # needs tokens 0 and 1
    stream = lay_out(Rows(sequences, select), ["padded"], COSTS)
    assert stream.input_ids.tolist() == [1, 2, 3, 4, 1, 2, 0, 0]
    assert stream.index.tolist() == [3, 5]
    assert stream.targets.tolist() == [5, 3]


def test_a_shared_prompt_is_there_once():
    prompt = torch.tensor([7, 8, 9])
    sequences = [torch.cat([prompt, torch.tensor(r)]) for r in ([11, 12], [13], [14, 15, 16])]
    select = [torch.arange(len(ids)) >= 3 for ids in sequences]
    stream = lay_out(Rows(sequences, select), ["shared"], COSTS)
    # The prompt, then what each response has before its last token, padded to one width.
    assert stream.input_ids.tolist() == [7, 8, 9, 14, 15, 11, 0]
    assert stream.position_ids.tolist()[:6] == [0, 1, 2, 3, 4, 3]
    # Row 0 from the prompt and 11; row 1 from the prompt alone; row 2 from the prompt, 14, 15.
    assert stream.index.tolist() == [2, 5, 2, 2, 3, 4]
    assert [(b.rows, b.width) for b in stream.blocks] == [(1, 3), (2, 2)]
    assert stream.blocks[1].prefix.owner == (0, 0)
    assert stream.blocks[1].prefix.lengths == (3, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_a_scored_token_still_call_the_model_once(make_tiny_model, layout):
    """Ranks that share weights stay in step, and a backward gives zeros."""
    scorer = CausalScorer(make_tiny_model(), layout=layout)
    ids = [torch.tensor([4, 5, 6]), torch.tensor([4])]
    scores = scorer.token_scores(ids, [torch.zeros(len(x)).bool() for x in ids], entropy=True)
    assert scores.log_probs.shape == (0,)
    scores.log_probs.sum().backward()
    assert all(not p.grad.any() for p in scorer.model.model.parameters())


def choice(lengths, *, prompt=None, **changes):
    """Which of the layouts is taken for random rows: by the calls and blocks of the stream."""
    first = torch.randint(3, 60, (prompt or 1,))
    sequences = []
    for length in lengths:
        own = torch.randint(3, 60, (len(first),))
        sequences.append(torch.cat([first if prompt else own, torch.randint(3, 60, (length,))]))
    select = [torch.arange(len(ids)) >= len(first) for ids in sequences]
    return lay_out(Rows(sequences, select), LAYOUTS, COSTS._replace(**changes))


def test_the_cheapest_layout_is_taken():
    equal = choice([40] * 8)
    assert (len(equal.blocks), equal.one_call) == (1, False)
    ragged = choice([400, 390, 20, 21, 19, 20])
    assert ragged.one_call
    assert len(ragged.blocks) > 1
    # Where blocks are dear and calls are cheap, rectangles are called one by one.
    calls = choice([400, 390, 20, 21, 19, 20], call=1.0, block=1e9)
    assert len(calls.blocks) > 1
    assert not calls.one_call
    group = choice([10] * 8, prompt=300)
    assert any(block.prefix is not None for block in group.blocks)


def test_costs_grow_with_the_model(make_tiny_model):
    sizes = [
        ModelSize.of(model := make_tiny_model(hidden_size=width), model) for width in (64, 128)
    ]
    assert sizes[0].weights < sizes[1].weights
    small, large = (size.costs(torch.device("cpu")) for size in sizes)
    assert small.token < large.token
    assert small.pair < large.pair
    assert small.call < large.call
    assert small.block == large.block


def test_the_layout_of_a_policy_is_that_of_its_scorer(make_tiny_model):
    from torchrl_llm.modules import TransformersBackend, TransformersWrapper

    backend = TransformersBackend(make_tiny_model(), layout="bucketed")
    policy = TransformersWrapper(backend, input_mode="tokens")
    assert policy.layout == backend.scorer.layout == "bucketed"
    policy.layout = "shared"
    assert backend.scorer.layout == "shared"
    with pytest.raises(ConfigError, match="contradicts the backend's layout 'shared'"):
        TransformersWrapper(backend, input_mode="tokens", pad_model_input=True)
    packed = TransformersWrapper(make_tiny_model(), input_mode="tokens", pad_model_input=False)
    assert packed.layout == "packed"


# -- attention by one kernel ----------------------------------------------------------------------


def packed_model(make_tiny_model, kernel):
    """The model of the other tests with another attention, which need not be installed."""
    model = make_tiny_model()
    model.config._attn_implementation = kernel
    return model


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Flex attention as plain operations: compiling it for a CPU takes a minute."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    integration = "transformers.integrations.flex_attention.WrappedFlexAttention.__call__"
    monkeypatch.setattr(integration, lambda self: flex.flex_attention)
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.WrappedFlexAttention.__init__",
        lambda self, training: None,
    )
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.masking_utils._is_torch_greater_or_equal_than_2_6", False)


def test_flex_attention_scores_packed_and_shared_rows_as_sdpa_does(
    make_tiny_model, uncompiled_flex
):
    rows = ragged_group()
    with torch.no_grad():
        expected = CausalScorer(make_tiny_model(), layout="padded").token_scores(*rows)
        scorer = CausalScorer(packed_model(make_tiny_model, "flex_attention"))
        assert scorer.layouts == ("auto", *LAYOUTS)
        for layout in scorer.layouts:
            scorer.layout = layout
            got = scorer.token_scores(*rows).log_probs
            torch.testing.assert_close(got, expected.log_probs, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"'flex_attention' has no backward on a CPU; .*no_grad"):
        scorer.token_scores(*rows)


def varlen_attention(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, **settings
):
    """What flash attention's kernel promises for rows behind each other, ``[S, heads, dim]``."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype is torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert causal
    attend = torch.nn.functional.scaled_dot_product_attention
    sizes = cu_seqlens_q.diff().tolist()
    rows = [
        attend(*(x.transpose(0, 1)[None] for x in row), is_causal=True, enable_gqa=True)
        for row in zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    ]
    return torch.cat([row[0].transpose(0, 1) for row in rows])


def flash_attention(q, k, v, **settings):
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def flash_by_hand(monkeypatch):
    """Flash attention's functions in plain torch, on the CPU; transformers calls them as ever."""
    from transformers import modeling_flash_attention_utils as flash

    functions = (flash_attention, varlen_attention, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    # Whatever is loaded next, here or after this test, is loaded anew.
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr("torchrl_llm.modules.backends.head.check_kernel", lambda model: 0)


def test_flash_attention_is_told_where_each_packed_row_ends(make_tiny_model, flash_by_hand):
    scorer = CausalScorer(packed_model(make_tiny_model, "flash_attention_2"))
    assert scorer.why_not_packed is None
    assert scorer.layouts == ("auto", "padded", "bucketed", "packed")
    with pytest.raises(ConfigError, match="flash attention cannot show a row a shared prompt"):
        scorer.layout = "shared"
    rows = ragged_group()
    expected, expected_grads = results(CausalScorer(make_tiny_model()), "padded", rows)
    for layout in scorer.layouts:
        scores, grads = results(scorer, layout, rows)
        torch.testing.assert_close(scores[:2], expected[:2], atol=1e-5, rtol=1e-5)
        largest = max(float(g.abs().max()) for g in expected_grads)
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 * largest, rtol=1e-5)


def test_one_kernel_for_all_rows_needs_no_padding(make_tiny_model, flash_by_hand):
    seen = []
    scorer = CausalScorer(packed_model(make_tiny_model, "flash_attention_2"), layout="packed")
    forward = scorer.model.model.forward
    scorer.model.model.forward = lambda **inputs: seen.append(inputs) or forward(**inputs)
    scorer.token_scores(*ragged_group())
    lengths = seen[-1]["cu_seq_lens_q"].diff().tolist()
    assert sum(lengths) == seen[-1]["input_ids"].shape[1]
    assert sorted(lengths) == sorted(n for n in Rows(*ragged_group()).lengths if n)


@pytest.fixture
def row_kernel(monkeypatch):
    """Torch's kernel for rows of all lengths, row by row on the CPU; what lengths it was given."""
    seen = []

    def varlen_attn(q, k, v, ends, ends_k, most, most_k, *, scale, window_size):
        sizes = ends.diff().tolist()
        assert window_size == (-1, 0), "causal"
        assert (most, most_k) == (max(sizes), max(sizes))
        assert ends.dtype == torch.int32
        assert torch.equal(ends, ends_k)
        seen.append(sizes)
        attend = torch.nn.functional.scaled_dot_product_attention
        rows = [
            attend(*(x.transpose(0, 1)[None] for x in row), is_causal=True, scale=scale)
            for row in zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        ]
        return torch.cat([row[0].transpose(0, 1) for row in rows])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "has_row_kernel", lambda *given: True)
    return seen


def test_packed_rows_of_all_lengths_are_attended_by_torchs_kernel(make_tiny_model, row_kernel):
    scorer, rows = CausalScorer(make_tiny_model(num_key_value_heads=2)), ragged_group()
    assert_all_layouts_agree(scorer, rows)
    row_kernel.clear()
    results(scorer, "packed", rows)
    assert sorted(row_kernel[-1]) == sorted(n for n in Rows(*rows).lengths if n), "no padding"
    row_kernel.clear()
    results(scorer, "shared", rows)
    assert row_kernel == [], "a shared prompt needs a mask"


def test_torchs_kernel_is_for_16_bit_types_on_a_gpu():
    device = torch.device("cpu")
    assert not attention.has_row_kernel(device, torch.bfloat16, 64)
    assert attention.compute_dtype(device, torch.float32) is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention.compute_dtype(device, torch.float32) is torch.bfloat16


def test_attention_that_cannot_run_here_is_refused_with_what_to_do(make_tiny_model):
    with pytest.raises(ConfigError, match=r"'flash_attention_2' runs on a GPU; move the model"):
        CausalScorer(packed_model(make_tiny_model, "flash_attention_2"))
    with pytest.raises(ConfigError, match=r"'flash_attention_3'.*FlashAttention3 has been toggled"):
        load_model(attn_implementation="flash_attention_3")
    scorer = CausalScorer(make_tiny_model())
    assert "cannot keep rows apart" in why_not_packed(
        model := packed_model(make_tiny_model, "paged|sdpa"), model
    )
    assert scorer.why_not_packed is None
