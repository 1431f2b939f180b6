"""Rotary angles that change with the longest row of a call: LongRoPE and dynamic NTK.

Expected values come from plain transformers, one row and one forward.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from modules.backends.model_zoo import VOCAB, build
from objectives.every_loss import full_rows

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import SamplingParams, TransformersBackend
from torchrl_llm.modules.backends import CausalScorer
from torchrl_llm.modules.backends.vllm.backend import VLLMBackend
from torchrl_llm.modules.model_loading import context_of, rotary_limit
from torchrl_llm.modules.reward_model import HFRewardModelWrapper
from torchrl_llm.objectives import GRPOLoss, check_invariance

LIMIT = 32


def phi3(**factors):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": LIMIT,
        **factors,
    }
    return build("phi3", original_max_position_embeddings=LIMIT, rope_parameters=rope)


def dynamic():
    return build("llama dynamic", max_position_embeddings=LIMIT)


def row(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(model, ids, start):
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    return log_probs[start - 1 : -1].gather(-1, ids[start:, None])[:, 0].float()


@pytest.mark.parametrize("make", [phi3, dynamic])
def test_a_call_never_reaches_the_row_that_would_move_its_neighbours(make):
    model = make()
    short, long = row(6), row(50, seed=1)
    with torch.no_grad():
        padded = torch.stack([torch.nn.functional.pad(short, (0, 44)), long])
        moved = model(padded, use_cache=False).logits[0, :6] - model(short[None]).logits[0]
    assert moved.abs().max() > 0.1  # what it is about
    backend = TransformersBackend(model)
    assert backend.max_length == LIMIT
    select = [torch.arange(len(ids)) > 2 for ids in (short, long)]
    for refused in (
        lambda: backend.token_scores([short, long], select),
        lambda: CausalScorer(model).token_scores([short, long], select),
        lambda: backend.logits([short, long]),
        lambda: TransformersBackend(model, max_length=LIMIT + 1),
    ):
        with pytest.raises(ConfigError, match=rf"beyond the {LIMIT} .*within {LIMIT} tokens"):
            refused()
    backend.token_scores([short, long[:LIMIT]], [select[0], select[1][:LIMIT]])


@pytest.mark.parametrize("make", [phi3, dynamic])
def test_rows_end_where_they_would_be_scored_as_something_else(make):
    model = make()
    backend = TransformersBackend(model)
    prompts = [row(5), row(20, seed=2)]
    groups = backend.generate(prompts, SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert [len(c.token_ids) for [c] in groups] == [LIMIT - 5, LIMIT - 20]
    for prompt, [completion] in zip(prompts, groups, strict=True):
        ids = torch.cat([prompt, completion.token_ids])
        own = alone(model, ids, len(prompt))
        torch.testing.assert_close(completion.log_probs, own, atol=1e-4, rtol=0)


def test_equal_factors_have_no_limit_and_are_what_long_rows_had():
    """The way out that the error names."""
    fixed = phi3(short_factor=[2.0, 3.0, 4.0, 5.0])
    assert rotary_limit(fixed.config) is None
    assert context_of(fixed.config) == 512
    long = row(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(fixed(long).logits, phi3()(long).logits)
    backend, prompts = TransformersBackend(fixed), [row(5), row(40, seed=3)]
    groups = backend.generate(prompts, SamplingParams(max_new_tokens=60, ignore_eos=True))
    for prompt, [completion] in zip(prompts, groups, strict=True):
        ids = torch.cat([prompt, completion.token_ids])
        own = alone(fixed, ids, len(prompt))
        torch.testing.assert_close(completion.log_probs, own, atol=1e-4, rtol=0)


def test_check_invariance_does_not_blame_the_loss():
    shapes = ((2, 3), (2, 60), (3, 1), (3, 4))
    with pytest.raises(ConfigError, match=r"rotary angles") as refusal:
        check_invariance(GRPOLoss(CausalScorer(phi3())), full_rows(shapes=shapes, vocab=VOCAB))
    assert "GRPOLoss" not in str(refusal.value)
    fits = full_rows(shapes=((2, 3), (2, 29), (3, 1), (3, 4)), vocab=VOCAB)
    check_invariance(GRPOLoss(CausalScorer(phi3().double())), fits)


def test_limits_are_read_whether_layers_share_their_angles_or_not():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0],
        "long_factor": [2.0],
        "original_max_position_embeddings": 7,
    }
    for ropes, limit in (
        (rope, 7),
        ({"full_attention": rope, "sliding_attention": {"rope_type": "default"}}, 7),
        ({**rope, "long_factor": [1.0]}, None),
        ({**rope, "long_factor": [1.0], "short_mscale": 1.0, "long_mscale": 1.2}, 7),
        ({"rope_type": "yarn", "factor": 2.0}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        (None, None),
    ):
        config = SimpleNamespace(rope_parameters=ropes, max_position_embeddings=64)
        assert rotary_limit(config) == limit


def test_a_reward_model_scores_such_rows_one_by_one():
    import transformers
    from tensordict import TensorDict

    config = phi3().config
    config.num_labels = 1
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    rows = [row(6), row(50, seed=1)]
    stacked = TensorDict.lazy_stack([TensorDict(tokens={"full": ids}) for ids in rows])
    got = HFRewardModelWrapper(model, token_key=("tokens", "full"))(stacked)
    with torch.no_grad():
        expected = torch.cat([model(ids[None]).logits[0] for ids in rows])
    torch.testing.assert_close(got["reward"].flatten(), expected, atol=1e-4, rtol=1e-4)


def test_an_engine_that_turns_positions_as_those_of_longer_rows_is_refused():
    """vLLM decides once, by ``max_model_len``."""
    config = SimpleNamespace(
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        max_model_len=LIMIT + 1,
        hf_config=phi3().config,
    )
    inner = SimpleNamespace(add_request=None, model_config=config)
    with pytest.raises(ConfigError, match=f"max_model_len={LIMIT}"):
        VLLMBackend(SimpleNamespace(llm_engine=inner))
