"""The vLLM policy: conformance on a real engine, and every kind of model it takes."""

from __future__ import annotations

import pytest
import torch
from conformance.policies import WrapperConformance
from modules.backends.vllm.engine_helper import shared_tiny
from modules.policies.rows_helper import history_td, tokens_td

from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import TransformersWrapper, vLLMWrapper

pytest.importorskip("vllm")
from torchrl_llm.modules.backends.vllm import VLLMBackend

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tiny(make_tiny_model, tokenizer):
    return shared_tiny(make_tiny_model, tokenizer)


class TestVLLMWrapper(WrapperConformance):
    @pytest.fixture(autouse=True)
    def _engine(self, tiny):
        self._engine = tiny[0]

    def make_policy(self, tokenizer, **options):
        return vLLMWrapper(self._engine, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("input_mode", ["history", "text", "tokens"])
def test_greedy_rows_are_those_of_the_transformers_policy(tiny, tokenizer, input_mode):
    options = {
        "tokenizer": tokenizer,
        "input_mode": input_mode,
        "generate_kwargs": {"temperature": 0, "max_new_tokens": 20},
        "inplace": False,
    }
    ours = vLLMWrapper(tiny[0], **options)
    theirs = TransformersWrapper(tiny[1], **options)
    rows = TestVLLMWrapper()
    rows._tokenizer = tokenizer
    a, b = ours(rows.inputs(ours)), theirs(rows.inputs(theirs))
    for key in (("tokens", "full"), ("masks", "all_assistant_mask"), ("trace", "source")):
        for x, y in zip(read_rows(a, key), read_rows(b, key), strict=True):
            assert torch.equal(x, y)
    for x, y in zip(
        read_rows(a, ("log_probs", "full")), read_rows(b, ("log_probs", "full")), strict=True
    ):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert torch.equal(a["tokens", "finish_reason"], b["tokens", "finish_reason"])


def test_the_tokenizer_is_that_of_the_engine_unless_given(tiny, tokenizer):
    policy = vLLMWrapper(tiny[0], generate_kwargs={"max_new_tokens": 4})
    assert policy.tokenizer.get_vocab() == tokenizer.get_vocab()
    out = policy(history_td([{"role": "user", "content": "Hi"}]))
    assert len(read_rows(out, ("tokens", "response"))[0]) <= 4


def test_the_policy_has_no_parameters_and_asks_for_gradients_in_vain(tiny):
    policy = vLLMWrapper(tiny[0], input_mode="tokens")
    assert list(policy.parameters()) == []
    assert not hasattr(policy, "model")


def test_options_for_a_backend_that_exists_are_refused(tiny):
    backend = VLLMBackend(tiny[0])
    assert vLLMWrapper(backend, input_mode="tokens").backend is backend
    with pytest.raises(ConfigError, match=r"engine_options=\['seeded'\] have no effect"):
        vLLMWrapper(backend, engine_options={"seeded": False})


def test_versions_that_the_engine_counts_reach_the_trace(tiny):
    backend = VLLMBackend(tiny[0])
    policy = vLLMWrapper(
        backend, input_mode="tokens", generate_kwargs={"max_new_tokens": 3, "ignore_eos": True}
    )
    backend.weights_changed(backend.version + 31)
    policy.policy_version = 1
    out = policy(tokens_td([5, 6]))
    [version] = read_rows(out, ("trace", "policy_version"))
    assert version.tolist() == [-1, -1, *[backend.version] * 3]
