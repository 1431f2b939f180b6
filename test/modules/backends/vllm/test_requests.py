"""Sampling parameters and outputs on their way to vLLM and back, without vLLM."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from torchrl_llm.data import FinishReason
from torchrl_llm.errors import BackendError, ConfigError, DataError
from torchrl_llm.modules import SamplingParams
from torchrl_llm.modules.backends.vllm.requests import (
    completion_of,
    full_log_probs,
    prompt_log_probs,
    sampling_arguments,
)


def arguments(eos=(2,), seed=5, max_logprobs=40, max_tokens=9, **options):
    params = SamplingParams(max_new_tokens=20, **options)
    return sampling_arguments(
        params, eos_token_ids=eos, max_tokens=max_tokens, seed=seed, max_logprobs=max_logprobs
    )


def flat(*positions):
    """As vLLM's FlatLogprobs, from a list of (id, log-prob) pairs a position."""
    ends, ids, values = [], [], []
    for pairs in positions:
        ids += [token_id for token_id, _ in pairs]
        values += [value for _, value in pairs]
        ends.append(len(ids))
    starts = [0, *ends[:-1]]
    return SimpleNamespace(token_ids=ids, logprobs=values, start_indices=starts, end_indices=ends)


def output(ids, *positions, reason="stop", versions=None):
    answer = SimpleNamespace(
        token_ids=ids, logprobs=flat(*positions), finish_reason=reason, weight_versions=versions
    )
    return SimpleNamespace(outputs=[answer])


def test_every_field_that_shapes_sampling_is_said():
    found = arguments(
        temperature=0.7,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        stop=("end",),
        stop_token_ids=(9, 2),
        native={"presence_penalty": 0.5, "logit_bias": {3: 1.0}},
    )
    wanted = {
        "temperature": 0.7,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.0,
        "seed": 5,
        "max_tokens": 9,
        "min_tokens": 0,
        "stop": ["end"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [2, 9],
        "ignore_eos": True,
        "logit_bias": {3: 1.0},
        "logprobs": 0,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_greedy_decoding_needs_no_seed_and_no_truncation():
    found = arguments(temperature=0, top_k=4, top_p=0.5)
    assert (found["temperature"], found["seed"]) == (0.0, None)
    assert (found["top_k"], found["top_p"], found["min_p"]) == (0, 1.0, 0.0)


def test_ignoring_the_end_keeps_the_callers_own_stop_ids():
    assert arguments(ignore_eos=True, stop_token_ids=(9,))["stop_token_ids"] == [9]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"top_k": 4}, 0),
        ({"record_support": True}, 0),
        ({"record_support": True, "top_k": 4}, 16),
        ({"record_support": True, "top_k": 20}, 40),
        ({"record_support": True, "top_p": 0.9}, 40),
        ({"record_support": True, "top_p": 0.9, "temperature": 0}, 0),
    ],
)
def test_log_probs_are_asked_for_as_far_as_kept_ids_may_reach(options, asked):
    assert arguments(**options)["logprobs"] == asked


@pytest.mark.parametrize(
    "native",
    [
        {"min_tokens": "3"},
        {"repetition_detection": 5},
        {"repetition_detection": {"no_such": 1}},
        {"structured_outputs": "a*"},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: math.nan}},
        {"extra_args": 3},
        {"bad_words": [5]},
        {"bad_words": "the"},
        {"allowed_token_ids": 5},
    ],
    ids=str,
)
def test_native_arguments_of_another_type_are_refused_before_they_reach_the_engine(native):
    [name] = native
    with pytest.raises(ConfigError, match=name):
        arguments(native=native)


@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_temperatures_that_vllm_would_change_are_refused(temperature):
    with pytest.raises(ConfigError, match=f"got {temperature}"):
        arguments(temperature=temperature)


def test_a_completion_has_the_sampled_ids_and_their_log_probs():
    params = SamplingParams(max_new_tokens=3)
    done = output([7, 8], [(7, -0.5), (3, -0.1)], [(8, -1.5)], reason="length")
    completion = completion_of(done, params, {}, vocab_size=10)
    assert completion.token_ids.tolist() == [7, 8]
    assert completion.token_ids.dtype == torch.int64
    assert completion.log_probs.tolist() == [-0.5, -1.5]
    assert completion.finish_reason == FinishReason.LENGTH
    assert completion.support is completion.versions is None


def test_the_support_is_what_truncation_left():
    params = SamplingParams(max_new_tokens=3, top_k=2, record_support=True)
    done = output(
        [7, 8],
        [(7, -0.7), (3, -0.6), (7, -0.7), (1, -math.inf)],
        [(8, 0.0), (8, 0.0), (2, -math.inf), (3, -math.inf)],
    )
    ids, counts = completion_of(done, params, {}, vocab_size=10).support
    assert ids.tolist() == [7, 3, 8]
    assert counts.tolist() == [2, 1]
    assert ids.dtype == counts.dtype == torch.int32


def test_a_support_that_may_go_on_is_refused_unless_it_is_the_vocabulary():
    params = SamplingParams(max_new_tokens=3, top_p=0.99, record_support=True)
    done = output([7], [(7, -0.7), (3, -0.6), (7, -0.7)])
    with pytest.raises(DataError, match="more than the 2 ids"):
        completion_of(done, params, {}, vocab_size=10)
    assert completion_of(done, params, {}, vocab_size=2).support.counts.tolist() == [2]


def test_each_token_carries_the_version_of_its_weights():
    spans = [SimpleNamespace(version="default", start=0, end=2)]
    spans.append(SimpleNamespace(version="8", start=2, end=3))
    done = output([1, 2, 3], *[[(i, -1.0)] for i in (1, 2, 3)], versions=spans)
    completion = completion_of(
        done, SamplingParams(max_new_tokens=3), {"default": 4, "8": 8}, vocab_size=10
    )
    assert completion.versions.tolist() == [4, 4, 8]
    assert completion.versions.dtype == torch.int32


def test_a_request_aborted_before_its_first_token_is_an_empty_completion():
    done = output([], reason="abort")
    completion = completion_of(done, SamplingParams(max_new_tokens=3), {"1": 1}, vocab_size=10)
    assert completion.finish_reason == FinishReason.ABORT
    assert completion.token_ids.shape == completion.log_probs.shape == (0,)
    assert completion.versions.shape == (0,)


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (output([1], [(1, -1.0)], reason="error"), "ended a response with 'error'"),
        (output([1], [(1, math.nan)]), "not finite"),
    ],
)
def test_what_the_engine_broke_is_an_error(done, message):
    with pytest.raises(BackendError, match=message):
        completion_of(done, SamplingParams(max_new_tokens=1), {}, vocab_size=10)


def test_prompt_scores_begin_with_nothing_before_the_first_token():
    scored = flat([], [(5, -0.25), (1, -0.1)], [(6, -0.5)])
    found = prompt_log_probs(SimpleNamespace(prompt_logprobs=scored))
    assert found.tolist() == [0.0, -0.25, -0.5]


def test_whole_distributions_are_rows_by_id():
    done = SimpleNamespace(
        prompt_logprobs=flat([], [(1, -2.0), (0, -1.0), (1, -2.0), (2, -3.0)]),
        outputs=[SimpleNamespace(logprobs=flat([(2, -0.5), (2, -0.5), (0, -4.0), (1, -5.0)]))],
    )
    assert full_log_probs(done, 3).tolist() == [[-1.0, -2.0, -3.0], [-4.0, -5.0, -0.5]]
