"""What receivers of weights hold, and which changes they take."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.modules import FakeBackend, SamplingParams, TransformersBackend, load_model
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import (
    DeltaSource,
    TensorSource,
    copy_checked,
    load_into,
    open_source,
)


def _state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture
def loaded():
    """A module that was sent all weights, and what they were."""
    module = nn.Linear(2, 3)
    state = _state(nn.Linear(2, 3))
    load_into(module, TensorSource(state), version=1)
    return module, state


def _delta(state, **changed):
    after = {**state, **changed}
    return DeltaSource(changed, base=weights_digest(state), result=weights_digest(after)), after


def test_a_delta_upon_a_delta_gives_the_digest_of_the_whole(loaded):
    module, state = loaded
    source, state = _delta(state, bias=torch.ones(3))
    receipt = load_into(module, pickle.loads(pickle.dumps(source)), version=2)
    assert receipt[:4] == (2, weights_digest(state), 1, 12)
    source, state = _delta(state, weight=torch.zeros(3, 2))
    receipt = load_into(module, source, version=3)
    assert receipt.digest == weights_digest(module.state_dict()) == weights_digest(state)


def test_a_delta_of_other_weights_is_refused_and_nothing_changes(loaded):
    module, state = loaded
    other, _ = _delta({**state, "weight": torch.zeros(3, 2)}, bias=torch.ones(3))
    with pytest.raises(WeightUpdateError, match=f"this sampler holds {weights_digest(state)}"):
        load_into(module, other, version=2)
    wrong = DeltaSource({"bias": torch.ones(3)}, base=weights_digest(state), result="00")
    with pytest.raises(WeightUpdateError, match="should be 00"):
        load_into(module, wrong, version=2)
    assert weights_digest(module.state_dict()) == weights_digest(state)
    # A copy of the module was sent nothing yet.
    source, _ = _delta(state, bias=torch.ones(3))
    with pytest.raises(WeightUpdateError, match="none that it was sent"):
        load_into(copy.deepcopy(module), source, version=2)
    load_into(module, source, version=2)


def test_after_a_change_of_unknown_base_nothing_can_be_built_upon_it(loaded):
    module, state = loaded
    load_into(module, TensorSource({"bias": torch.ones(3)}, kind="delta"), version=2)
    assert module.bias.tolist() == [1, 1, 1]
    source, _ = _delta({**state, "bias": torch.ones(3)}, weight=torch.zeros(3, 2))
    with pytest.raises(WeightUpdateError, match="none that it was sent"):
        load_into(module, source, version=3)


def test_a_refused_load_leaves_what_was_held(loaded):
    module, state = loaded
    with pytest.raises(WeightUpdateError, match=r"'bias' was sent with shape \(4,\)"):
        load_into(module, TensorSource({**state, "bias": torch.ones(4)}), version=2)
    with pytest.raises(WeightUpdateError, match=r"1 weights .* \['weight'\]"):
        load_into(module, TensorSource({"bias": torch.ones(3)}), version=2)
    source, state = _delta(state, bias=torch.ones(3))
    assert load_into(module, source, version=2).digest == weights_digest(state)


def test_a_source_in_one_process_is_hashed_once_and_on_its_way_before_it_leaves():
    source = TensorSource({"a": torch.ones(2)})
    assert source.digest is None
    gone = pickle.loads(pickle.dumps(source))
    assert gone.digest == weights_digest({"a": torch.ones(2)})
    assert open_source(gone, version=1).receipt.digest == gone.digest


def test_what_lies_in_place_is_not_copied():
    target = torch.zeros(4)
    # A tensor of the same memory that may not be written to would raise if it were.
    copy_checked({"a": target[:2], "b": torch.ones(2)}, {"a": target[:2], "b": target[2:]})
    assert target.tolist() == [0, 0, 1, 1]
    targets = {"a": target[:2], "b": target[2:]}
    with pytest.raises(WeightUpdateError, match=r"1 weights .* \['b'\]"):
        copy_checked({"a": target[:2]}, targets, required=["a", "b"])


def test_tensors_in_hand_are_hashed_when_they_are_copied(loaded):
    module, _ = loaded
    new = _state(nn.Linear(2, 3))
    incoming = open_source(TensorSource(new), version=2)
    new["bias"].zero_()  # what counts is what was copied
    receipt = load_into(module, incoming, version=2)
    assert receipt[:4] == (2, weights_digest(new), 2, 36)
    assert weights_digest(module.state_dict()) == weights_digest(new)
    with pytest.raises(WeightUpdateError, match="other values under the same number"):
        load_into(module, TensorSource(_state(nn.Linear(2, 3))), version=2)


def test_weights_without_fingerprint_arrive_and_no_delta_builds_upon_them(loaded):
    module, _ = loaded
    state = _state(nn.Linear(2, 3))
    source = TensorSource(state)
    source.hashed = False
    for sent in (source, pickle.loads(pickle.dumps(source))):
        receipt = load_into(module, sent, version=2)
        assert receipt[:4] == (2, "unhashed-2", 2, 36)
    assert torch.equal(module.weight, state["weight"])
    delta, _ = _delta(state, bias=torch.ones(3))
    with pytest.raises(WeightUpdateError, match="send it all weights"):
        load_into(module, delta, version=3)


def fake_backend():
    return FakeBackend(vocab_size=16, eos_token_ids=(2,))


def torch_backend():
    return TransformersBackend(load_model(), eos_token_ids=(2,))


class Slow(TensorSource):
    """Weights that arrive when they are told to."""

    in_hand = False

    def __init__(self, weights):
        super().__init__(weights)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def receive(self):
        self.asked.set()
        assert self.go_on.wait(60)
        yield from super().receive()


@pytest.mark.parametrize("make", [fake_backend, torch_backend])
def test_a_sampler_goes_on_while_weights_are_on_their_way(make):
    backend = make()
    source = Slow({name: value + 1 for name, value in backend.module.state_dict().items()})
    prompt, params = [torch.tensor([3, 4])], SamplingParams(max_new_tokens=2)
    with ThreadPoolExecutor(1) as other:
        update = other.submit(backend.update_weights, source, version=1)
        assert source.asked.wait(60)
        assert len(backend.generate(prompt, params)) == 1
        assert not update.done()
        source.go_on.set()
        [receipt] = update.result(60)
    assert receipt.digest == weights_digest(backend.module.state_dict())


def test_a_number_is_that_of_whoever_counts(loaded):
    module, _ = loaded
    source = TensorSource(_state(nn.Linear(2, 3)))
    source.counter = "a trainer that came later"
    load_into(module, source, version=1)
    assert load_into(module, source, version=1).version == 1
    other = TensorSource(_state(nn.Linear(2, 3)))
    other.counter = source.counter
    with pytest.raises(WeightUpdateError, match="other values under the same number"):
        load_into(module, other, version=1)
