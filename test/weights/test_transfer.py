"""Weights by vLLM's own transfer: all or nothing, proven, whoever dies. No GPU was at hand."""

import pickle
import signal
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from weights.processes import ChildBackend, TransferLearner, answer, fake, fake_of_vllm
from weights.processes import trained_fake as trained
from weights.without_gpu import StoreGroup, install

from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError, WorkerError
from torchrl_llm.recipes.ray_collection import RayCollection
from torchrl_llm.weights import (
    CanaryCheck,
    TransferSource,
    TransferWeights,
    VLLMTransfer,
    WeightLedger,
    engine_weights,
)
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import TensorSource

pytestmark = pytest.mark.vllm

KINDS = pytest.mark.parametrize("kind", ["nccl", "ipc"])


@pytest.fixture(autouse=True)
def transfer(monkeypatch):
    install()
    monkeypatch.setattr(StoreGroup, "before", None)


def push(kind, *engines, timeout_s=30.0, **options):
    return TransferWeights(*engines, kind=kind, packed=False, timeout_s=timeout_s, **options)


@KINDS
def test_two_engines_get_every_version_and_prove_it(kind):
    engines, ledger = [fake(), fake()], WeightLedger()
    reference = fake()
    updater = push(kind, *engines, ledger=ledger, canary=CanaryCheck(reference))
    for version in (1, 2, 3):
        reference.module.load_state_dict(trained(version).state_dict())
        updater.push_weights(trained(version))
        digest = weights_digest(engine_weights(trained(version)))
        assert [(r.version, r.digest) for r in updater.receipts] == [(version, digest)] * 2
        assert [answer(engine) for engine in engines] == [answer(fake(version))] * 2
        ledger.check({version: digest})


@KINDS
def test_an_engine_of_another_shape_says_so_and_all_keep_what_they_can(kind):
    engine = fake()
    updater = push(kind, engine)
    with pytest.raises(WeightUpdateError, match=r"head.*\(3, 3\)"):
        updater.push_weights({**trained(1).state_dict(), "head": torch.zeros(3, 3)})
    assert (answer(engine), updater.version) == (answer(fake()), 0)
    updater.push_weights(trained(1))
    assert (answer(engine), updater.version) == (answer(fake(1)), 1)


def test_a_bit_that_fell_over_on_its_way_is_found_before_anything_is_loaded():
    engine = fake()

    def fall(count, tensor):
        tensor.view(-1)[0] += 1

    weights = {name: value.clone() for name, value in trained(1).state_dict().items()}
    updater = push("nccl", engine)
    StoreGroup.before = staticmethod(fall)
    with pytest.raises(WeightUpdateError, match="was sent as"):
        updater.push_weights(weights)
    assert (answer(engine), updater.version) == (answer(fake()), 0)


def test_without_a_fingerprint_nothing_is_hashed():
    engine = fake()
    updater = push("nccl", engine, fingerprint=False)
    updater.push_weights(trained(1))
    assert updater.receipts[0].digest == "unhashed-1"
    assert answer(engine) == answer(fake(1))


def test_a_version_that_only_one_of_two_engines_took_is_counted_and_not_proven():
    fine, refuses = fake(), fake()

    def refuse(source, *, version):
        dict(source.receive())
        raise WeightUpdateError("not these")

    refuses.update_weights = refuse
    ledger = WeightLedger()
    updater = push("nccl", fine, refuses, ledger=ledger)
    with pytest.raises(WeightUpdateError, match="not these"):
        updater.push_weights(trained(1))
    assert (answer(fine), updater.version) == (answer(fake(1)), 1)
    with pytest.raises(WeightUpdateError):
        ledger.check({1: weights_digest(engine_weights(trained(1)))})


def test_receivers_that_do_not_come_are_counted():
    started = time.monotonic()
    transfer = VLLMTransfer("nccl", timeout_s=4.0, packed=False)
    engine = fake()
    with pytest.raises(WeightUpdateError, match="1 of 2 receivers came"):
        transfer.send(
            dict(trained(1).state_dict()),
            lambda source: engine.update_weights(source, version=1),
            num_receivers=2,
        )
    assert time.monotonic() - started < 30
    assert answer(engine) == answer(fake())


def test_a_receiver_that_cannot_even_begin_says_why_at_once():
    started = time.monotonic()

    def tell(source):
        raise ConfigError("no room")

    with pytest.raises(ConfigError, match="no room"):
        VLLMTransfer("nccl").send({"a": torch.zeros(2)}, tell, num_receivers=1)
    assert time.monotonic() - started < 10


@KINDS
def test_who_comes_after_the_push_gets_a_copy_of_the_same_weights(kind):
    sources, engine = [], fake()
    told = CanaryCheck(fake(1)).target()

    def tell(source):
        sources.append(source)
        assert type(pickle.loads(pickle.dumps(source))) is TransferSource
        return engine.update_weights(source, version=4)

    weights = engine_weights(trained(1))
    transfer = VLLMTransfer(kind, packed=False)
    [receipt] = transfer.send(weights, tell, num_receivers=1, counter="me", canary=told)
    for value in weights.values():
        value.data.zero_()  # training goes on
    late = pickle.loads(pickle.dumps(sources[0]))
    assert type(late) is TensorSource
    assert (late.digest, late.counter) == (receipt.digest, "me")
    assert late.canary.to_json() == told.to_json()
    successor = fake()
    assert successor.update_weights(late, version=4)[0].digest == receipt.digest
    assert answer(successor) == answer(engine) == answer(fake(1))


def test_a_source_whose_push_is_over_is_refused_in_time():
    source = TransferSource("nccl", 1.0)
    source.meeting = ("127.0.0.1", 1)
    engine = fake()
    with pytest.raises(WeightUpdateError, match="transfer of weights by nccl"):
        engine.update_weights(source, version=1)
    assert answer(engine) == answer(fake())


def test_nobody_to_send_to_is_an_error():
    with pytest.raises(ConfigError, match="no receiver"):
        VLLMTransfer("nccl").send({}, list, num_receivers=0)


# -- other processes ------------------------------------------------------------------------------


@pytest.mark.slow
@KINDS
def test_engines_elsewhere_follow_and_one_that_was_started_again_does_too(children, kind):
    engines = [ChildBackend(children(fake_of_vllm)) for _ in range(2)]
    assert answer(engines[0]) == answer(engines[1])  # both have started
    updater = push(kind, *engines, timeout_s=60.0)
    updater.push_weights(trained(1))
    assert [answer(engine) for engine in engines] == [answer(fake(1))] * 2
    engines[0].child.kill()
    engines[0].child = children(fake_of_vllm)
    assert answer(engines[0]) == answer(fake())
    updater.push_weights(trained(2))
    assert [answer(engine) for engine in engines] == [answer(fake(2))] * 2


@pytest.mark.slow
def test_an_engine_that_died_fails_the_push_within_its_limit(children):
    alive, dead = (ChildBackend(children(fake_of_vllm)) for _ in range(2))
    assert answer(alive) == answer(dead)  # both have started
    updater = push("nccl", alive, dead, timeout_s=15.0)
    updater.push_weights(trained(1))
    dead.child.kill()
    started = time.monotonic()
    with pytest.raises((TorchRLLLMError, OSError)):
        updater.push_weights(trained(2))
    assert time.monotonic() - started < 60
    # The other one has what it had, and serves; it is in the next push.
    assert answer(alive) == answer(fake(1))
    updater = push("nccl", alive, timeout_s=30.0)
    updater.version = 1
    updater.push_weights(trained(3))
    assert answer(alive) == answer(fake(3))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_learner_lost_in_a_transfer_leaves_old_weights_and_a_new_one_is_taken(children, how):
    engine = fake()
    learner = children(TransferLearner)
    taken = learner_update(learner, engine, 1, 1)
    assert taken.version == 1
    assert answer(engine) == answer(fake(1))

    learner.call("strike", how, 1)
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match="the transfer of weights by nccl"):
        learner_update(learner, engine, 5, 2)
    assert time.monotonic() - started < 30
    # One of two tensors had arrived. The sampler has its weights and its version, and serves.
    assert answer(engine) == answer(fake(1))

    learner.kill()
    successor = children(TransferLearner)
    assert learner_update(successor, engine, 2, 3).version == 3
    assert answer(engine) == answer(fake(2))


def learner_update(learner, engine, seed, version):
    """Take what the learner sends, as a proxy would tell this process."""
    learner.send("begin", seed)
    source = learner.result()
    [receipt] = engine.update_weights(source, version=version)
    learner.call("end", [receipt])
    return receipt


# -- collectors of a recipe -----------------------------------------------------------------------


class Member:
    """A collector as the learner sees it."""

    def __init__(self):
        self.backend, self.sources, self.away = fake(), [], False

    def pid(self):
        if self.away:
            raise WorkerError("it is being restarted")
        return 1

    def check(self):
        pass

    def load_weights(self, source, *, version):
        self.sources.append(source)
        return self.backend.update_weights(source, version=version)


@pytest.fixture
def collection(monkeypatch):
    from torchrl_llm.recipes import ray_collection

    def put(weights):
        return TensorSource(weights, digest=weights_digest(weights))

    stored = SimpleNamespace(put=put)
    monkeypatch.setattr(ray_collection, "ObjectStoreSource", stored)
    members = [Member(), Member()]
    carrier = VLLMTransfer("nccl", packed=False, timeout_s=3.0)
    return RayCollection(
        members, LocalChannel(), batch_rows=2, pacer=None, timeout_s=60.0, carrier=carrier
    )


def kinds(collection):
    return [[type(source) for source in member.sources] for member in collection.members]


def test_collectors_of_a_recipe_get_each_version_by_the_transfer(collection):
    for version in (1, 2):
        collection.publish(trained(version), version=version)
        assert all(answer(m.backend) == answer(fake(version)) for m in collection.members)
    assert kinds(collection) == [[TransferSource] * 2] * 2
    collection.ledger.check({2: weights_digest(engine_weights(trained(2)))})


def test_while_a_collector_is_restarted_weights_go_by_ray(collection):
    collection.members[1].away = True
    collection.publish(trained(1), version=1)
    assert kinds(collection) == [[TensorSource]] * 2
    collection.members[1].away = False
    collection.publish(trained(2), version=2)
    assert kinds(collection) == [[TensorSource, TransferSource]] * 2


def test_a_transfer_that_fails_is_made_good_by_ray(collection, monkeypatch):
    lost = collection.members[1].backend
    update = lost.update_weights

    def refuse_transfers(source, *, version):
        if isinstance(source, TransferSource):
            raise WeightUpdateError("it died")
        return update(source, version=version)

    monkeypatch.setattr(lost, "update_weights", refuse_transfers)
    collection.publish(trained(1), version=1)
    assert kinds(collection) == [[TransferSource, TensorSource]] * 2
    assert all(answer(m.backend) == answer(fake(1)) for m in collection.members)
