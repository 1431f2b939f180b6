"""The digest of weights."""

import pytest
import torch

from torchrl_llm.weights.fingerprint import WeightDigest, weights_digest


def _weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.randn(5, generator=generator).to(torch.bfloat16),
        "c": torch.tensor(2),
        "d": torch.zeros(0),
    }


def test_neither_order_nor_layout_nor_gradient_count():
    weights = _weights()
    turned = dict(reversed(weights.items()))
    turned["a"] = turned["a"].t().contiguous().t().requires_grad_()
    assert weights_digest(turned) == weights_digest(weights.items()) == weights_digest(weights)


def _flip_one_bit(weights):
    weights["b"].view(torch.int16)[4] ^= 1


def _negate_two(weights):
    weights["a"][0, 1:3] *= -1


def _exchange(weights):
    weights["a"][0, 0], weights["a"][2, 3] = weights["a"][2, 3].clone(), weights["a"][0, 0].clone()


@pytest.mark.parametrize(
    "change",
    [
        _flip_one_bit,
        _negate_two,
        _exchange,
        lambda w: w.update(a=w["a"].reshape(4, 3)),
        lambda w: w.update(b=w["b"].view(torch.float16)),
        lambda w: w.update(e=w.pop("a")),
        lambda w: w.pop("d"),
    ],
)
def test_any_change_of_bytes_type_shape_or_name_shows(change):
    weights = _weights()
    change(weights)
    assert weights_digest(weights) != weights_digest(_weights())


def test_parts_make_the_digest_again_after_some_changed():
    digest = WeightDigest()
    for name, value in _weights().items():
        digest.update(name, value)
    assert WeightDigest.of_parts(digest.parts) == digest.value
    assert (digest.num_tensors, digest.num_bytes) == (4, 12 * 4 + 5 * 2 + 8)

    changed = {**_weights(), "a": torch.ones(3, 4)}
    part = WeightDigest()
    part.update("a", changed["a"])
    assert WeightDigest.of_parts({**digest.parts, **part.parts}) == weights_digest(changed)


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 17) - 1, 1 << 17, (1 << 18) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_copy_on_the_way_changes_neither_digest_nor_values(size, dtype):
    tensor = torch.randn(size).to(dtype)
    for wanted in (torch.float32, torch.bfloat16):
        digest, target = WeightDigest(), torch.full((size,), 7.0, dtype=wanted)
        digest.update("a", tensor, target=target)
        assert digest.value == weights_digest({"a": tensor})
        assert torch.equal(target, tensor.to(wanted))


def test_a_target_in_another_layout_gets_the_values_too():
    tensor = torch.randn(6, 4)
    for source, target in [
        (tensor, torch.zeros(4, 6).t()),
        (tensor.t(), torch.zeros(4, 6)),
        (tensor.t(), torch.zeros(6, 4).t()),
        (tensor, torch.zeros(6, 8)[:, :4]),
    ]:
        digest = WeightDigest()
        digest.update("a", source, target=target)
        assert digest.value == weights_digest({"a": source})
        assert torch.equal(target, source)
