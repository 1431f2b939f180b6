"""A transformers policy whose model is in a real Ray actor: as the one in this process."""

from __future__ import annotations

import os
import pickle
import signal
import time
from functools import partial

import pytest
import torch
from conformance.policies import WrapperConformance
from tensordict import TensorDict

from torchrl_llm._ray import ActorOptions
from torchrl_llm.data.views import Text
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.modules import (
    EnginePool,
    RemoteTransformersWrapper,
    TransformersBackend,
    TransformersWrapper,
    load_model,
    load_tokenizer,
)
from torchrl_llm.modules.backends import TensorSource

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def tiny_pool(cluster, tiny_model, tokenizer):
    backend = partial(TransformersBackend, tiny_model, tokenizer=tokenizer)
    options = ActorOptions(num_cpus=0.1, max_concurrency=8)
    with EnginePool(backend, options=options, tokenizer=tokenizer) as pool:
        yield pool


class TestRemoteTransformersWrapper(WrapperConformance):
    @pytest.fixture(autouse=True)
    def _pool(self, tiny_pool):
        self.pool = tiny_pool

    def make_policy(self, tokenizer, **options):
        return RemoteTransformersWrapper(self.pool, tokenizer=tokenizer, **options)


def row(texts=("12 + 34 =", "1 + 1")):
    return TensorDict(text=Text(prompt=list(texts)), batch_size=[len(texts)])


def greedy(policy):
    return policy(row(), temperature=0.0)["text", "response"]


def test_it_answers_as_the_model_in_this_process_and_takes_its_weights(cluster, tmp_path):
    model, tokenizer = load_model(), load_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {"input_mode": "text", "generate_kwargs": {"max_new_tokens": 6}}
    local = TransformersWrapper(model, tokenizer=tokenizer, **settings)
    with RemoteTransformersWrapper(
        str(tmp_path), max_concurrency=4, num_cpus=0.1, actor_name="shared", **settings
    ) as policy:
        assert greedy(policy) == greedy(local)
        scores = {
            name: one.get_new_version(generate=False, inplace=False)(one(row(), temperature=0.0))
            for name, one in (("here", local), ("there", policy))
        }
        for a, b in zip(
            scores["here"]["log_probs"].get("full", as_list=True),
            scores["there"]["log_probs"].get("full", as_list=True),
            strict=True,
        ):
            torch.testing.assert_close(a.detach(), b, atol=1e-5, rtol=1e-5)
        # Another policy of the same name, and a pickled one, use the same actor.
        other = RemoteTransformersWrapper(
            str(tmp_path), num_cpus=9, actor_name="shared", **settings
        )
        copied = pickle.loads(pickle.dumps(policy))
        pids = policy.backend.replica_pids()
        assert other.backend.replica_pids() == copied.backend.replica_pids() == pids
        other.shutdown()
        assert greedy(policy) == greedy(local)
        # It is built again with the weights that it was sent.
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.5)
        policy.backend.update_weights(TensorSource(model.state_dict()), version=3)
        changed = greedy(local)
        assert greedy(policy) == changed
        os.kill(pids[0], signal.SIGKILL)
        assert greedy(policy) == changed
        versions = policy(row())["trace"].get("policy_version", as_list=True)[0]
        assert versions.max() == 3
        assert policy.backend.replica_pids() != pids
    assert ray.is_initialized()


def test_what_cannot_run_is_said_before_an_actor_starts(cluster, tmp_path, tiny_model):
    started = time.monotonic()
    with pytest.raises(ConfigError, match="there is no model"):
        RemoteTransformersWrapper(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="takes the name or folder"):
        RemoteTransformersWrapper(tiny_model)
    load_model().save_pretrained(tmp_path)
    load_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ResourceError, match=r"1 GPU \(0 of 0 free\)"):
        RemoteTransformersWrapper(str(tmp_path), num_gpus=1, input_mode="text")
    assert time.monotonic() - started < 15
