"""Other weights in the middle of a response: each token is of those that its version names."""

from __future__ import annotations

import copy
import itertools
import threading
import time

import pytest
import torch

from torchrl_llm.errors import BackendError, WeightUpdateError
from torchrl_llm.modules import SamplingParams, TransformersBackend, load_model
from torchrl_llm.modules.backends import TensorSource

pytest.importorskip("vllm")
from modules.backends.vllm.engine_helper import small_backend

pytestmark = pytest.mark.vllm

# Longer than a block of the cache (128 tokens on the CPU), so that it is shared and found again.
PROMPT = torch.arange(150) % 200 + 10


@pytest.fixture(scope="module")
def models():
    old = load_model()
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    return old, new


@pytest.fixture
def backend(models):
    backend = small_backend(engine_options={"max_model_len": 512}, in_flight="keep")
    backend.generate([PROMPT], SamplingParams(max_new_tokens=1))
    return backend


def weights(model):
    return TensorSource({name: w.detach() for name, w in model.named_parameters()})


def log_probs_by(model, completion):
    whole = torch.cat([PROMPT, completion.token_ids])
    select = torch.arange(len(whole)) >= len(PROMPT)
    with torch.no_grad():
        return TransformersBackend(model).token_scores([whole], [select]).log_probs


def test_a_response_goes_on_with_the_new_weights_and_nothing_of_the_old_cache(backend, models):
    old, new = models
    params = SamplingParams(max_new_tokens=120, seed=4, num_samples=3, ignore_eos=True)
    out, receipts, inner = [], [], backend.engine.llm_engine
    updating = threading.Thread(
        target=lambda: receipts.extend(backend.update_weights(weights(new), version=7))
    )
    step, steps = inner.step, itertools.count()

    def struck():
        number = next(steps)
        if number == 30:
            updating.start()
        if number > 30 and not receipts:  # however late its thread gets a core
            time.sleep(0.2)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "step", struck)
        out.extend(backend.generate([PROMPT], params))
        updating.join(200)
    assert receipts[0].version == backend.version == 7
    for done in out[0]:
        before = done.versions == 0
        assert 5 < int(before.sum()) < 115
        assert set(done.versions.tolist()) == {0, 7}
        by_old, by_new = log_probs_by(old, done), log_probs_by(new, done)
        torch.testing.assert_close(done.log_probs[before], by_old[before], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(done.log_probs[~before], by_new[~before], atol=1e-4, rtol=1e-5)
        # The two models differ by far more than rounding, so the above could fail.
        assert (by_old - by_new).abs().mean() > 0.01
    [[fresh]] = backend.generate([PROMPT], SamplingParams(max_new_tokens=20, temperature=0))
    torch.testing.assert_close(fresh.log_probs, log_probs_by(new, fresh), atol=1e-4, rtol=1e-5)
    assert (fresh.versions == 7).all()

    # Weights that do not arrive whole change nothing, the version neither.
    broken = TensorSource({"model.embed_tokens.weight": torch.zeros(3, 3)})
    with pytest.raises(WeightUpdateError):
        backend.update_weights(broken, version=8)
    assert backend.version == 7
    [[again]] = backend.generate([PROMPT], SamplingParams(max_new_tokens=20, temperature=0))
    assert again.token_ids.tolist() == fresh.token_ids.tolist()
    assert (again.versions == 7).all()


def test_after_a_deep_sleep_only_full_weights_wake_the_engine(backend, models):
    params = SamplingParams(max_new_tokens=3, temperature=0)
    backend.sleep(level=2)
    with pytest.raises(BackendError, match="no room for weights"):
        backend.update_weights(weights(models[1]), version=1)
    backend.wake(weights_only=True)
    with pytest.raises(BackendError, match="weights only"):
        backend.generate([PROMPT], params)
    backend.update_weights(weights(models[1]), version=1)
    backend.wake()
    [[done]] = backend.generate([PROMPT], params)
    torch.testing.assert_close(done.log_probs, log_probs_by(models[1], done), atol=1e-4, rtol=1e-5)
