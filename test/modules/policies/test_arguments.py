"""Arguments of policies as users write them: the constructors', and those of generation."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from torchrl_llm import modules
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeBackend, LLMWrapperBase, SamplingParams, TransformersBackend
from torchrl_llm.modules.policies.policy_arguments import PolicyOptions, parse_generate_kwargs

OWN = {
    "FakeWrapper": "answers tokenizer vocab_size eos_token_ids max_length",
    "LLMWrapperBase": "backend tokenizer",
    "RemoteTransformersWrapper": "model tokenizer max_concurrency validate_model actor_name "
    "num_gpus num_cpus num_replicas device dtype timeout_s start_timeout_s",
    "TransformersWrapper": "model tokenizer pad_model_input device",
    "vLLMWrapper": "model tokenizer engine_options",
}


@pytest.mark.parametrize("name", OWN)
def test_the_signature_of_a_policy_lists_every_argument_with_its_default(name):
    cls = getattr(modules, name)
    options = {field.name: field.default for field in fields(PolicyOptions)}
    shown = inspect.signature(cls).parameters
    assert list(shown) == [*OWN[name].split(), *options]
    assert {key: shown[key].default for key in options} == options
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) has no argument 'pad_outputs'; .*'pad_output'"
    ):
        cls(FakeBackend(vocab_size=8, eos_token_ids=(2,)), input_mode="tokens", pad_outputs=True)


def test_a_policy_of_a_user_takes_the_common_arguments_too():
    class Quiet(LLMWrapperBase):
        def __init__(self, model, *, hush=False, tokenizer=None, **options):
            super().__init__(model, tokenizer=tokenizer, **options)

    with pytest.raises(TypeError, match=r"Quiet\(\) has no argument 'hus'; did you mean 'hush'"):
        Quiet(None, hus=True)
    assert list(inspect.signature(Quiet).parameters)[:4] == [
        "model", "hush", "tokenizer", "input_mode",
    ]  # fmt: skip
    first = Quiet(FakeBackend(vocab_size=8, eos_token_ids=(2,)), input_mode="tokens")
    again = first.get_new_version(generate=False)
    assert type(again) is Quiet
    assert again.backend is first.backend
    assert again.in_keys == [("tokens", "full")]


@pytest.fixture
def fake():
    return FakeBackend(vocab_size=8, eos_token_ids=(2,))


def params(kwargs, backend):
    return parse_generate_kwargs(kwargs, backend).params


def test_nothing_given_is_plain_sampling(fake):
    assert params({}, fake) == SamplingParams(max_new_tokens=256)


def test_common_arguments_are_taken_over(fake):
    given = {
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "stop_sequences": ["x"],
        "stop_token_ids": [4],
        "seed": 1,
        "ignore_eos": True,
        "num_beams": 1,
        "early_stopping": None,
        "do_sample": True,
    }
    wanted = SamplingParams(
        max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2,
        stop=("x",), stop_token_ids=(4,), seed=1, ignore_eos=True,
    )  # fmt: skip
    assert params(given, fake) == wanted


def test_greedy_is_said_in_two_ways(fake):
    assert params({"do_sample": False}, fake).greedy
    assert params({"temperature": 0.0}, fake).greedy
    assert params({"do_sample": False}, fake).scoring_temperature == 1.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"max_tokens": 4}, "renamed to 'max_new_tokens'"),
        ({"n": 4}, "renamed to 'num_samples'"),
        ({"num_beams": 4}, "beam search"),
        ({"length_penalty": 2.0}, "beam search"),
        ({"do_sample": False, "temperature": 0.7}, "greedily"),
        ({"do_sample": True, "temperature": 0}, "contradicts"),
        ({"num_samples": 2, "num_return_sequences": 3}, "mean the same"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop_sequences": [""]}, "without empty strings"),
        ({"min_new_tokens": 3}, "unknown generation argument"),
    ],
)
def test_defect_20_unknown_old_and_contradicting_arguments_are_errors(fake, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        parse_generate_kwargs(kwargs, fake)


def test_native_arguments_are_those_of_the_backend(tiny_model):
    backend = TransformersBackend(tiny_model)
    assert params({"min_new_tokens": 3, "typical_p": None}, backend).native == {"min_new_tokens": 3}
    with pytest.raises(ConfigError, match="did you mean 'min_new_tokens'"):
        params({"min_new_token": 3}, backend)


def test_rows_say_when_temperature_does_not_reproduce_their_distribution():
    for given, truncates in (
        ({}, False),
        ({"temperature": 0.3}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"top_k": 5, "temperature": 0}, False),
    ):
        params = SamplingParams(max_new_tokens=1, **given)
        assert params.truncates_support == truncates, given
