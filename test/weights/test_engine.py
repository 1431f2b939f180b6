"""All weights, or those that changed, to engines: what is proven and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from weights.learner import Faulty, Learner, assert_same_model, does_nothing

from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends import FakeBackend, TransformersBackend
from torchrl_llm.weights import CanaryCheck, DeltaWeights, EngineWeights, WeightLedger
from torchrl_llm.weights.weight_source import TensorSource


def _sampler(make_tiny_model, **options):
    return TransformersBackend(make_tiny_model(seed=5, **options), eos_token_ids=(2,))


class _Counting:
    """A collector as far as an updater sees it."""

    def __init__(self, policy, policy_version=0):
        self.policy, self.policy_version = policy, policy_version

    def increment_version(self):
        self.policy_version += 1

    def update(self, updater, weights=None):
        updater.push_weights(weights)
        self.increment_version()


@pytest.mark.parametrize("updater_type", [EngineWeights, DeltaWeights])
@pytest.mark.parametrize("tied", [True, False])
def test_a_sampler_follows_ten_optimizer_steps(make_tiny_model, updater_type, tied):
    learner = Learner(make_tiny_model(tie_word_embeddings=tied))
    sampler = _sampler(make_tiny_model, tie_word_embeddings=tied)
    ledger = WeightLedger()
    canary = CanaryCheck(learner.reference, tolerance=1e-6)
    updater = updater_type(sampler, model=learner.model, canary=canary, ledger=ledger)
    for version in range(1, 11):
        learner.step()
        updater.push_weights()
        assert_same_model(sampler, learner.reference, tolerance=0.0)
        [receipt] = updater.receipts
        assert (receipt.version, receipt.digest) == (version, ledger.digest(version))
    assert len({ledger.digest(version) for version in range(1, 11)}) == 10


def test_a_delta_is_what_changed_and_leaves_the_same_digest_as_all(make_tiny_model):
    model = make_tiny_model()
    trained = [*model.model.layers[1].parameters()]
    learner = Learner(model, parameters=trained)
    sampler, twin = _sampler(make_tiny_model), _sampler(make_tiny_model)
    updater = DeltaWeights(sampler, model=model)
    whole = EngineWeights(twin, model=model)
    updater.push_weights()
    whole.push_weights()
    assert (updater.num_sent, updater.receipts[0].num_tensors) == (26, 26)
    for _ in range(2):
        learner.step()
        updater.push_weights()
        whole.push_weights()
        assert updater.num_sent == updater.receipts[0].num_tensors == len(trained) == 12
        assert updater.num_bytes_sent == sum(p.numel() * 4 for p in trained)
        assert updater.receipts[0].digest == whole.receipts[0].digest
        assert_same_model(sampler, learner.reference, tolerance=0.0)
    updater.push_weights()
    assert updater.num_sent == 0
    assert updater.receipts[0].digest == whole.receipts[0].digest


def test_an_engine_that_missed_a_delta_is_sent_all_weights(make_tiny_model):
    learner = Learner(make_tiny_model())
    learner.optimizer.param_groups[0]["params"] = [*learner.model.model.norm.parameters()]
    first, second = _sampler(make_tiny_model), _sampler(make_tiny_model)
    updater = DeltaWeights(first, second, model=learner.model)
    updater.push_weights()
    # The second one is built anew, or loaded by somebody else: it holds other weights.
    second.update_weights(TensorSource(dict(make_tiny_model(seed=9).state_dict())), version=7)
    learner.step()
    updater.push_weights()
    norm, everything = 64 * 4, sum(p.numel() * 4 for p in learner.model.parameters())
    assert updater.num_bytes_sent == norm + everything
    assert_same_model(second, learner.reference, tolerance=0.0)
    assert len({receipt.digest for receipt in updater.receipts}) == 1


def test_a_failed_proof_leaves_no_version_that_anybody_may_claim(make_tiny_model):
    learner = Learner(make_tiny_model())
    engine = Faulty(_sampler(make_tiny_model), fault=lambda weights: None)
    ledger = WeightLedger()
    updater = EngineWeights(engine, canary=CanaryCheck(learner.reference), ledger=ledger)
    collector = _Counting(SimpleNamespace(backend=engine))
    updater.register_collector(collector)
    learner.step()
    collector.update(updater, learner.model)
    assert collector.policy_version == updater.version == 1

    engine.fault = does_nothing
    learner.step()
    with pytest.raises(WeightUpdateError):
        collector.update(updater, learner.model)
    # What is sampled now is called version 2, and nobody proved a version 2.
    assert collector.policy_version == 2
    with pytest.raises(WeightUpdateError, match="version 2 of the weights, which was never proven"):
        ledger.check({2: updater.receipts[0].digest})
    ledger.check({1: updater.receipts[0].digest}, versions=[1, 1])

    engine.fault = lambda weights: None
    collector.update(updater, learner.model)
    assert collector.policy_version == updater.version == updater.receipts[0].version == 3
    ledger.check({3: updater.receipts[0].digest})


def test_weights_that_did_not_arrive_leave_the_old_version_in_force(make_tiny_model):
    sampler = _sampler(make_tiny_model)
    before = [p.clone() for p in sampler.model.parameters()]
    updater = EngineWeights()
    collector = _Counting(SimpleNamespace(backend=sampler), policy_version=4)
    updater.register_collector(collector)
    half = dict(make_tiny_model().state_dict())
    del half["model.norm.weight"]
    with pytest.raises(WeightUpdateError, match=r"1 weights .* not sent: \['model.norm.weight'\]"):
        updater.push_weights(half)
    assert collector.policy_version == 4
    after = sampler.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # A collector that continues a run counts on from where it was.
    collector.update(updater, make_tiny_model())
    assert collector.policy_version == updater.receipts[0].version == 5


def test_one_of_two_engines_that_fails_ends_the_claim_of_both():
    class Dead(FakeBackend):
        def update_weights(self, source, *, version):
            raise WorkerError("it died")

    trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=3).module
    alive = FakeBackend(vocab_size=16, eos_token_ids=(2,))
    updater = EngineWeights(alive, Dead(vocab_size=16, eos_token_ids=(2,)), model=trained)
    collector = _Counting(None)
    updater.register_collector(collector)
    with pytest.raises(WorkerError):
        updater.push_weights()
    assert (updater.version, collector.policy_version) == (1, 1)


def test_engines_that_answer_with_other_weights_or_versions_are_refused():
    class Echoing(FakeBackend):
        change = None

        def update_weights(self, source, *, version):
            [receipt] = super().update_weights(source, version=version)
            return [receipt._replace(**(self.change or {}))]

    trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=3).module
    one, two = (Echoing(vocab_size=16, eos_token_ids=(2,)) for _ in range(2))
    updater = EngineWeights(one, two, model=trained)
    updater.push_weights()
    for change, message in (({"digest": "ab"}, "digests"), ({"version": 0}, r"versions \[0, \d\]")):
        two.change = change
        with pytest.raises(WeightUpdateError, match=message):
            updater.push_weights()


def test_settings_without_an_engine_or_weights_are_refused():
    fake = FakeBackend(vocab_size=16, eos_token_ids=(2,))
    with pytest.raises(ConfigError, match="has no weights to push"):
        EngineWeights(fake).push_weights()
    with pytest.raises(ConfigError, match=r"takes backends, got Linear"):
        EngineWeights(nn.Linear(1, 1))
    updater = EngineWeights()
    updater.register_collector(_Counting(nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="a Linear, has no backend"):
        updater.push_weights(fake.module)
