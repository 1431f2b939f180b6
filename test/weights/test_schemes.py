"""TorchRL's schemes: settings on both sides, senders and receivers of them."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
import torch
from weights.processes import answer, fake, trained_fake

from torchrl_llm.compat import vllm_weight_sync
from torchrl_llm.errors import ConfigError, MissingExtraError
from torchrl_llm.modules import (
    FakeWrapper,
    stateless_init_process_group,
    stateless_init_process_group_async,
)
from torchrl_llm.weights import (
    VLLMDoubleBufferSyncScheme,
    VLLMTransfer,
    VLLMWeightSyncScheme,
    engine_weights,
    get_model_metadata,
)
from torchrl_llm.weights.fingerprint import weights_digest


@pytest.fixture(params=["called", "files"])
def pair(request, tmp_path):
    """A sender, a backend, and what brings the last version to it, if it must be asked for."""
    backend = fake()
    if request.param == "called":
        scheme = VLLMWeightSyncScheme(device="cpu")
        sender = scheme.create_sender()
        sender.init_all_workers_group(vllm_engine=FakeWrapper(backend, input_mode="tokens"))
        receiver = scheme.create_receiver(backend)
        receiver.init_all_workers_group(get_model_metadata(backend.module))
        found = False
    else:
        scheme = VLLMDoubleBufferSyncScheme(tmp_path)
        sender, receiver, found = scheme.create_sender(), scheme.create_receiver(backend), True

    def poll():
        assert receiver.poll_and_apply(timeout=0) is found

    yield sender, backend, poll
    sender.shutdown()


def test_what_the_sender_has_the_receiver_gets_and_collectors_count_it(pair):
    sender, backend, poll = pair
    counted = []
    sender.register_collector(SimpleNamespace(increment_version=lambda: counted.append(1)))
    sender.register_model(trained_fake(1))
    sender.update_weights()
    poll()
    assert answer(backend) == answer(fake(1))
    sender.update_weights(trained_fake(2).state_dict())
    poll()
    assert answer(backend) == answer(fake(2))
    assert (sender.version, len(counted)) == (2, 2)


def test_a_caller_that_counts_versions_itself_publishes(pair):
    sender, backend, poll = pair
    digest = sender.publish(trained_fake(3), 40)
    poll()
    assert digest == weights_digest(engine_weights(trained_fake(3)))
    assert (answer(backend), sender.version) == (answer(fake(3)), 40)


def test_without_a_model_there_is_nothing_to_send(pair):
    with pytest.raises(ConfigError, match="register_model"):
        pair[0].update_weights()


def test_a_sender_needs_an_engine_that_it_can_call():
    sender = VLLMWeightSyncScheme(device="cpu").create_sender()
    with pytest.raises(ConfigError, match="init_all_workers_group"):
        sender.update_weights(trained_fake(1))
    with pytest.raises(ConfigError, match="needs vllm_engine"):
        sender.init_all_workers_group(get_model_metadata(trained_fake(1)))


def test_other_weights_than_announced_are_refused_and_nothing_is_counted():
    sender, backend = VLLMWeightSyncScheme(device="cpu").create_sender(), fake()
    sender.init_all_workers_group(get_model_metadata(trained_fake(1)), vllm_engine=backend)
    with pytest.raises(ConfigError, match="announced"):
        sender.update_weights({"head": torch.zeros(2, 2)})
    assert (sender.version, answer(backend)) == (0, answer(fake()))
    sender.update_weights(trained_fake(1))
    assert (sender.version, answer(backend)) == (1, answer(fake(1)))


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


def test_a_receiver_takes_weights_that_are_here(tmp_path):
    backend = fake()
    receiver = VLLMDoubleBufferSyncScheme(tmp_path).create_receiver(backend)
    receiver.apply_weights(trained_fake(1))
    assert (receiver.version, answer(backend)) == (1, answer(fake(1)))
    with pytest.raises(ConfigError, match="in place"):
        receiver.apply_weights(trained_fake(1), inplace=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: VLLMWeightSyncScheme(master_port=12345), "master_port has no effect"),
        (lambda: vllm_weight_sync.vLLMUpdater(master_port=12345), "master_port has no effect"),
        (lambda: VLLMDoubleBufferSyncScheme("weights", num_threads=4), "num_threads has no effect"),
        (lambda: VLLMDoubleBufferSyncScheme("weights"), None),
        (lambda: VLLMWeightSyncScheme(), None),
    ],
    ids=["scheme", "updater", "threads", "folder", "nothing"],
)
def test_what_has_no_effect_is_said(make, said, monkeypatch):
    told = []
    monkeypatch.setattr(vllm_weight_sync, "tell_once", told.append)
    make()
    assert [text for text in told if said and said in text] == told
    assert len(told) == (said is not None)


def test_groups_that_cannot_be_are_refused_before_anything_is_imported(monkeypatch):
    with pytest.raises(ConfigError, match="rank must be in"):
        stateless_init_process_group(None, 0, 2, 2)
    with pytest.raises(ConfigError, match="master_port"):
        stateless_init_process_group(None, None, 0, 2)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for begin in (
        lambda: stateless_init_process_group(None, 1, 0, 2),
        lambda: asyncio.run(stateless_init_process_group_async(None, 1, 0, 2)),
        lambda: VLLMTransfer("nccl"),
    ):
        with pytest.raises(MissingExtraError, match="vllm"):
            begin()
