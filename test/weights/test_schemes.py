"""TorchRL's schemes: settings on both sides, senders and receivers of them."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from weights.processes import answer, fake, trained_fake

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.weights import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    engine_weights,
    get_model_metadata,
)
from torchrl_llm.weights.fingerprint import weights_digest


@pytest.fixture(params=["broadcast", "double_buffer"])
def pair(request, tmp_path):
    """A sender, a backend, and a receiver that listens, each of a copy of one scheme."""
    if request.param == "broadcast":
        scheme = VLLMWeightSyncScheme(device="cpu", timeout_s=20)
    else:
        scheme = VLLMDoubleBufferSyncScheme(tmp_path)
    backend = fake()
    sender = scheme.create_sender()
    receiver = pickle.loads(pickle.dumps(scheme)).create_receiver(backend)
    receiver.listen()
    yield sender, backend, receiver
    receiver.shutdown()
    sender.shutdown()


def _wait_for(receiver, version):
    deadline = time.monotonic() + 20
    while receiver.version != version and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (receiver.version, receiver.failure) == (version, None)


def test_what_the_sender_has_the_receiver_gets_and_collectors_count_it(pair):
    sender, backend, receiver = pair
    counted = []
    sender.register_collector(SimpleNamespace(increment_version=lambda: counted.append(1)))
    sender.register_model(trained_fake(1))
    sender.update_weights()
    _wait_for(receiver, 1)
    assert answer(backend) == answer(fake(1))
    sender.update_weights(trained_fake(2).state_dict())
    _wait_for(receiver, 2)
    assert answer(backend) == answer(fake(2))
    assert (sender.version, len(counted)) == (2, 2)


def test_a_caller_that_counts_versions_itself_publishes(pair):
    sender, backend, receiver = pair
    digest = sender.publish(trained_fake(3), 40)
    _wait_for(receiver, 40)
    assert digest == weights_digest(engine_weights(trained_fake(3)))
    assert receiver.receipts[0].digest == digest
    assert answer(backend) == answer(fake(3))


def test_without_a_model_there_is_nothing_to_send(pair):
    with pytest.raises(ConfigError, match="register_model"):
        pair[0].update_weights()


def test_a_failed_update_is_known_on_both_sides_and_the_next_one_is_fine():
    scheme = VLLMWeightSyncScheme(device="cpu", timeout_s=20)
    backend, sender = fake(), scheme.create_sender()
    receiver = scheme.create_receiver(backend)
    receiver.init_all_workers_group(get_model_metadata(backend.module))
    with pytest.raises(WeightUpdateError, match="refused"):
        sender.update_weights({"head": torch.zeros(2, 2)})
    assert (sender.version, receiver.version) == (0, None)
    sender.update_weights(trained_fake(1))
    _wait_for(receiver, 1)
    assert answer(backend) == answer(fake(1))
    receiver.shutdown()


def test_an_engine_that_can_be_called_needs_no_receiver():
    scheme = VLLMWeightSyncScheme(device="cpu", timeout_s=20)
    policy = FakeWrapper(fake(), input_mode="tokens")
    sender = scheme.create_sender()
    trained = trained_fake(1)
    sender.init_all_workers_group(get_model_metadata(trained), vllm_engine=policy)
    [receipt] = sender.update_weights(trained)
    assert receipt.version == 1
    assert answer(policy.backend) == answer(fake(1))
    with pytest.raises(ConfigError, match="announced"):
        sender.update_weights({"head": torch.zeros(2, 2)})


def test_a_trainer_that_starts_again_does_not_send_version_one_twice(tmp_path):
    scheme = VLLMDoubleBufferSyncScheme(tmp_path)
    sender = scheme.create_sender()
    sender.publish(trained_fake(1), 8)
    sender.shutdown()
    sender = scheme.create_sender()
    sender.update_weights(trained_fake(2))
    receiver = scheme.create_receiver(fake())
    assert receiver.poll_and_apply(timeout=0)
    assert receiver.version == sender.version == 9


def test_bad_settings_are_refused_where_they_are_made(tmp_path):
    for make, message in (
        (lambda: VLLMWeightSyncScheme(strategy="pickle"), "strategy"),
        (lambda: VLLMWeightSyncScheme(gpus_per_replica=0), "gpus_per_replica"),
        (lambda: VLLMDoubleBufferSyncScheme(tmp_path, strategy="pickle"), "strategy"),
        (lambda: VLLMDoubleBufferSyncScheme(tmp_path, num_threads=0), "num_threads"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    assert VLLMWeightSyncScheme(gpus_per_replica=2, num_replicas=3).num_receivers == 6
