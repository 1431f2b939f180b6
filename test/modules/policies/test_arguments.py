"""Arguments of policies as users write them: the constructors', and those of generation."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields

import pytest
import torch
from modules.policies.rows_helper import fake_tokens, tokens_td
from tensordict import TensorDict

from torchrl_llm import modules
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeBackend, LLMWrapperBase, SamplingParams, TransformersBackend
from torchrl_llm.modules.policies.policy_arguments import PolicyOptions, parse_generate_kwargs

OWN = {
    "FakeWrapper": "answers tokenizer vocab_size eos_token_ids max_length",
    "LLMWrapperBase": "backend tokenizer",
    "RemoteTransformersWrapper": "model max_concurrency validate_model actor_name num_gpus "
    "num_cpus tokenizer num_replicas device dtype timeout_s start_timeout_s full_logits",
    "TransformersWrapper": "model tokenizer pad_model_input device full_logits",
    "vLLMWrapper": "model tokenizer pad_model_input device engine_options",
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


def test_names_of_vllm_that_torchrl_maps_mean_the_common_ones(fake):
    found = parse_generate_kwargs({"max_tokens": 3, "n": 4}, fake)
    assert (found.params.max_new_tokens, found.num_samples) == (3, 4)
    policy = fake_tokens(generate_kwargs={"max_new_tokens": 5})
    [response] = policy(tokens_td([5]), max_tokens=2)["tokens"].get("response", as_list=True)
    assert len(response) <= 2


@pytest.mark.parametrize("name", ["output_scores", "return_dict_in_generate", "pad_token_id"])
def test_names_that_change_nothing_here_are_left_out_with_a_warning(fake, name):
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        assert params({name: 1, "top_k": 3}, fake) == params({"top_k": 3}, fake)


def test_one_dictionary_serves_the_policy_that_samples_and_the_one_that_scores():
    shared = {"max_new_tokens": 2, "temperature": 0.5, "n": 2, "skip_special_tokens": True}
    out = fake_tokens(generate_kwargs=shared)(tokens_td([5], [6]))
    scorer = fake_tokens(generate=False, generate_kwargs=shared)
    flat = out.reshape(-1)
    scored = scorer(flat)
    assert scored.batch_size == (4,)
    assert scored is not flat  # as with TorchRL: several samples are never written in place
    rows = (x.get(("log_probs", "full"), as_list=True) for x in (scored, flat))
    for new, old in zip(*rows, strict=True):
        torch.testing.assert_close(new[1:], old[1:])
    with pytest.raises(ConfigError, match="did you mean 'top_k'"):
        fake_tokens(generate=False, generate_kwargs={"topk": 3})


def test_ends_of_a_response_by_the_name_of_transformers(fake):
    assert params({"eos_token_id": 2}, fake).stop_token_ids == (2,)
    assert params({"eos_token_id": [5, 2], "stop_token_ids": [4]}, fake).stop_token_ids == (2, 4, 5)


def test_greedy_is_said_in_two_ways(fake):
    assert params({"do_sample": False}, fake).greedy
    assert params({"temperature": 0.0}, fake).greedy
    assert params({"do_sample": False}, fake).scoring_temperature == 1.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"max_tokens": 4, "max_new_tokens": 5}, "they mean the same, give one"),
        ({"n": 4, "num_return_sequences": 2}, "they mean the same, give one"),
        ({"stop": "x"}, "renamed to 'stop_sequences'"),
        ({"eos_token_id": [3, 4]}, r"leaves out \[2\], which end a response"),
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
        ({"stop_sequences": [""]}, "must not contain empty strings"),
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


def test_attributes_that_torchrls_users_read_answer():
    class Collector: ...

    policy = fake_tokens(generate_kwargs={"max_tokens": 5}, prefer_tokens=False, min_batch_size=2)
    assert (policy.return_tokens, policy.return_masks, policy.return_log_probs) == (True,) * 3
    assert (policy.return_text, policy.return_history, policy.prefer_tokens) == (False,) * 3
    assert (policy.tokens_key, policy.masks_key, policy.num_samples) == ("tokens", "masks", None)
    assert policy.input_key == ("tokens", "prompt")
    assert policy.generate_kwargs == {"max_new_tokens": 5}
    assert (policy.log_prob_keys, policy.padding_value) == (["log_probs"], 0)
    state = policy.get_batching_state()
    assert policy.batching is state["batching_enabled"] is True
    assert (state["queue_size"], state["pending_futures"], state["timeout"]) == (0, 0, 10.0)
    assert fake_tokens().get_batching_state()["batching_enabled"] is False
    collector = Collector()
    assert policy.collector is None
    policy.register_collector(collector)
    assert policy.collector is collector
    assert pickle.loads(pickle.dumps(policy)).collector is None


def test_arguments_of_a_vllm_policy_that_its_engine_decides_are_told():
    backend = FakeBackend(vocab_size=8, eos_token_ids=(2,))
    with pytest.warns(UserWarning, match="pad_model_input has no effect"):
        modules.vLLMWrapper(backend, input_mode="tokens", pad_model_input=True)
    with pytest.raises(ConfigError, match="the engine runs where it was built"):
        modules.vLLMWrapper(backend, input_mode="tokens", device="cpu")


@pytest.mark.parametrize("mode", ["history", "text"])
def test_what_torchrl_sets_for_its_tokenizer_may_be_given(mode, tokenizer):
    given = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    policy = modules.FakeWrapper(tokenizer=tokenizer, input_mode=mode, tokenizer_kwargs=given)
    assert policy.tokenizer_kwargs is None
    with pytest.raises(ConfigError, match="tokenizer_kwargs"):
        policy.get_new_version(tokenizer_kwargs={"padding_side": "right"})


def test_the_wrapper_takes_the_hint_that_it_gives(make_tiny_model):
    model = make_tiny_model().eval()
    model.config.logit_magic = 3.0  # a field that the chunked head does not know
    with pytest.raises(ConfigError, match=r"full_logits=True\) lets"):
        modules.TransformersWrapper(model, input_mode="tokens", generate=False)
    policy = modules.TransformersWrapper(
        model, input_mode="tokens", generate=False, full_logits=True
    )
    ids = torch.tensor([5, 6, 7])
    for each in (policy, policy.get_new_version(pad_model_input=True)):
        out = each(TensorDict(tokens=ragged_rows({"full": [ids]}), batch_size=[1]))
        with torch.no_grad():
            wanted = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])
        torch.testing.assert_close(out[0]["log_probs", "full"][1:], wanted.flatten())
    model.config.logit_magic = None
    backend = TransformersBackend(model)
    with pytest.raises(ConfigError, match="give the model itself"):
        modules.TransformersWrapper(backend, input_mode="tokens", full_logits=True)
