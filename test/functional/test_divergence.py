"""Divergence over the whole vocabulary: by hand, chunked against naive, in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import chunked_divergence, divergence_from_logits, head_tiles

DIRECTIONS = ("reverse", "forward")
# p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2).
P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
LOG2 = math.log(2)


def by_hand(direction):
    """Both divergences are 1/2 log 2 - 1/4 log 2 = log(2) / 4; the gradients of the logits differ.

    reverse: p (log p - log q - KL) = (1/2 (1 - 1/4), 1/4 (0 - 1/4), 1/4 (-1 - 1/4)) log 2
    forward: p - q = (1/4, 0, -1/4)
    """
    if direction == "reverse":
        return LOG2 / 4, [0.375 * LOG2, -0.0625 * LOG2, -0.3125 * LOG2]
    return LOG2 / 4, [0.25, 0.0, -0.25]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_from_logits_it_is_what_is_worked_by_hand(direction):
    for dtype, tolerance in [(torch.float64, 1e-8), (torch.float32, 1e-5)]:
        value, gradient = by_hand(direction)
        logits = P.log().to(dtype).requires_grad_()
        got = divergence_from_logits(logits, Q.log().to(dtype) + 3.0, direction=direction)
        got.backward()
        assert got.dtype is dtype
        assert got.item() == pytest.approx(value, abs=tolerance)
        expected = torch.tensor(gradient, dtype=dtype)
        torch.testing.assert_close(logits.grad, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_chunks_it_is_what_is_worked_by_hand(direction):
    for chunk_size in [1, None]:
        for dtype, tolerance in [(torch.float64, 1e-8), (torch.float32, 1e-5)]:
            value, gradient = by_hand(direction)
            # One state with value 1: the weights are the logits.
            weight = P.log().to(dtype)[:, None].requires_grad_()
            ones, teacher = torch.ones(1, 1, dtype=dtype), Q.log().to(dtype)[:, None]
            got = chunked_divergence(
                ones, weight, ones, teacher, direction=direction, chunk_size=chunk_size
            )
            got.sum().backward()
            assert got.dtype is dtype
            assert got.item() == pytest.approx(value, abs=tolerance)
            expected = torch.tensor(gradient, dtype=dtype)[:, None]
            torch.testing.assert_close(weight.grad, expected, atol=tolerance, rtol=0)


def case(*, bias=False, low_rank=False, dtype=torch.float64):
    """Nine states of widths 4 and 6 over 13 ids, and what else the heads may have."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    model = {"hidden": draw(9, 4), "weight": draw(13, 4)}
    teacher = {"hidden": draw(9, 6), "weight": draw(13, 6)}
    for head in (model, teacher):
        if bias:
            head["bias"] = draw(13)
        if low_rank:
            head["low_rank"] = (draw(9, 2), draw(13, 2))
    return model, teacher


def logits_of(head, scale, softcap, temperature):
    logits = head["hidden"] @ head["weight"].T
    if "low_rank" in head:
        states, columns = head["low_rank"]
        logits = logits + states @ columns.T
    if "bias" in head:
        logits = logits + head["bias"]
    logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)


def leaves(head):
    return [head["hidden"], head["weight"], *[head[k] for k in ("bias",) if k in head]] + [
        *head.get("low_rank", ())
    ]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("parts", "scale", "softcap", "temperature"),
    [
        ({}, 1.0, None, 1.0),
        ({"bias": True}, 0.5, None, 0.7),
        ({"low_rank": True}, 1.0, 2.0, 1.0),
        ({"bias": True, "low_rank": True}, 2.0, 3.0, torch.linspace(0.5, 2.0, 9).double()),
    ],
)
def test_chunked_and_naive_agree_in_value_and_gradient(
    monkeypatch, direction, parts, scale, softcap, temperature
):
    for chunk_size in [1, 17, None]:
        monkeypatch.setitem(head_tiles._MAX_ROWS, "cpu", 4)
        model, teacher = case(**parts)
        upstream = torch.linspace(-1.0, 2.0, 9, dtype=torch.float64)
        naive = divergence_from_logits(
            logits_of(model, scale, softcap, temperature),
            logits_of(teacher, 1.5, 4.0, temperature),
            direction=direction,
        )
        expected = torch.autograd.grad(naive @ upstream, leaves(model))
        got = chunked_divergence(
            model["hidden"],
            model["weight"],
            teacher["hidden"],
            teacher["weight"],
            direction=direction,
            bias=model.get("bias"),
            low_rank=model.get("low_rank"),
            scale=scale,
            softcap=softcap,
            teacher_bias=teacher.get("bias"),
            teacher_low_rank=teacher.get("low_rank"),
            teacher_scale=1.5,
            teacher_softcap=4.0,
            temperature=temperature,
            chunk_size=chunk_size,
        )
        torch.testing.assert_close(got, naive, atol=1e-10, rtol=1e-10)
        gradients = torch.autograd.grad(got @ upstream, leaves(model))
        torch.testing.assert_close(gradients, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_float32_keeps_its_digits_where_logits_are_large(direction):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator, dtype=torch.float64) * 3
    shift = torch.tensor([0.0, 80.0, -80.0, 500.0, 1000.0, -1000.0], dtype=torch.float64)[:, None]
    near = logits + torch.randn(6, 50, generator=generator, dtype=torch.float64) * 0.1
    expected = divergence_from_logits(logits, near, direction=direction)
    eye = torch.eye(50)
    got = chunked_divergence(
        (logits + shift).float(), eye, near.float(), eye, direction=direction, chunk_size=60
    )
    # The inputs themselves are rounded to about 1e-7 of the shift.
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_models_are_at_distance_zero_with_gradient_zero(direction):
    model, _ = case(dtype=torch.float32)
    same = (model["hidden"], model["weight"])
    got = chunked_divergence(*same, *same, direction=direction, chunk_size=20)
    gradients = torch.autograd.grad(got.sum(), same)
    assert got.abs().max() < 1e-6
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients)


def test_the_teacher_gets_no_gradient():
    model, teacher = case()
    chunked_divergence(*leaves(model), *leaves(teacher)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves(teacher))
    assert all(leaf.grad is not None for leaf in leaves(model))


def test_no_token_gives_no_divergence_and_zero_gradient():
    weight = torch.randn(5, 3, requires_grad=True)
    got = chunked_divergence(torch.zeros(0, 3), weight, torch.zeros(0, 2), torch.randn(5, 2))
    got.sum().backward()
    assert got.shape == (0,)
    assert not weight.grad.any()


def test_no_tensor_of_all_logits_is_ever_made():
    tokens, vocabulary = 64, 4096
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    teacher = torch.randn(tokens, 8), torch.randn(vocabulary, 8)
    with Watch():
        chunked_divergence(hidden, weight, *teacher, chunk_size=8192).sum().backward()
    assert largest <= vocabulary * 8 < tokens * vocabulary


def test_bad_input_is_refused():
    states, head = torch.zeros(2, 3), torch.zeros(5, 3)
    with pytest.raises(ValueError, match="reverse or forward"):
        chunked_divergence(states, head, states, head, direction="sideways")
    with pytest.raises(ValueError, match="one vocabulary"):
        chunked_divergence(states, head, states, torch.zeros(6, 3))
    with pytest.raises(ValueError, match=r"the teacher must be \[N, D\]"):
        chunked_divergence(states, head, torch.zeros(2, 4), head)
    with pytest.raises(ValueError, match="one shape"):
        divergence_from_logits(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="temperature"):
        chunked_divergence(states, head, states, head, temperature=torch.ones(3))
