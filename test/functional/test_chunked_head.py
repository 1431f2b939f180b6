"""The chunked head against full logits: values, gradients, memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm.functional import chunked_greedy_ids, chunked_log_probs, head_tiles

N, D, V, R = 7, 5, 23, 2


def make(*, bias=False, low_rank=False, dtype=torch.float32):
    torch.manual_seed(3)
    inputs = {
        "hidden": torch.randn(N, D, dtype=dtype),
        "weight": torch.randn(V, D, dtype=dtype),
        "bias": torch.randn(V, dtype=dtype) if bias else None,
        "u": torch.randn(N, R, dtype=dtype) if low_rank else None,
        "B": torch.randn(V, R, dtype=dtype) if low_rank else None,
    }
    return {k: None if v is None else v.requires_grad_() for k, v in inputs.items()}


TARGETS = torch.tensor([0, 22, 11, 11, 4, 5, 16])


def chunked(inputs, **settings):
    low_rank = None if inputs["u"] is None else (inputs["u"], inputs["B"])
    return chunked_log_probs(
        inputs["hidden"],
        inputs["weight"],
        TARGETS,
        bias=inputs["bias"],
        low_rank=low_rank,
        **settings,
    )


def naive(inputs, *, scale=1.0, softcap=None, temperature=1.0, **_):
    logits = inputs["hidden"].float() @ inputs["weight"].float().T
    if inputs["u"] is not None:
        logits = logits + inputs["u"].float() @ inputs["B"].float().T
    if inputs["bias"] is not None:
        logits = logits + inputs["bias"].float()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[:, None]
    log_p = (logits / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, TARGETS[:, None])[:, 0], entropy


def gradients(inputs, log_probs, entropy, entropy_weight):
    torch.manual_seed(5)
    total = (log_probs * torch.randn(N)).sum()
    if entropy_weight:
        total = total + entropy_weight * (entropy * torch.randn(N)).sum()
    leaves = [v for v in inputs.values() if v is not None]
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("chunk_size", [None, 1, 40])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale": 0.25},
        {"softcap": 3.0},
        {"temperature": 0.7},
        {"temperature": torch.linspace(0.5, 2.0, N)},
        {"scale": 0.5, "softcap": 2.0, "temperature": torch.linspace(0.5, 2.0, N)},
    ],
    ids=["plain", "scale", "softcap", "temperature", "row temperature", "all"],
)
def test_values_and_gradients_equal_those_of_full_logits(chunk_size, settings):
    for entropy_weight in [0.0, 0.3]:
        for extras in [{}, {"bias": True, "low_rank": True}]:
            inputs = make(**extras)
            expected = naive(inputs, **settings)
            got = chunked(inputs, entropy=True, chunk_size=chunk_size, **settings)
            torch.testing.assert_close(got.log_probs, expected[0], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(got.entropy, expected[1], atol=2e-5, rtol=1e-5)
            for ours, theirs in zip(
                gradients(inputs, *got, entropy_weight),
                gradients(inputs, *expected, entropy_weight),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


def test_a_hand_worked_head():
    # Logits (0, log 3): probabilities 1/4 and 3/4; entropy log 4 - 3/4 log 3.
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [3.0]]).log().clamp(min=0.0)
    scores = chunked_log_probs(hidden, weight, torch.tensor([0, 1]), entropy=True, chunk_size=2)
    torch.testing.assert_close(scores.log_probs.exp(), torch.tensor([0.25, 0.75]))
    entropy = torch.tensor(4.0).log() - 0.75 * torch.tensor(3.0).log()
    torch.testing.assert_close(scores.entropy, entropy.expand(2))


def test_entropy_is_none_unless_asked_for():
    assert chunked(make()).entropy is None


def test_many_row_tiles_give_the_same_weight_gradient(monkeypatch):
    inputs = make(bias=True)
    expected = gradients(inputs, *naive(inputs), 0.3)
    monkeypatch.setitem(head_tiles._MAX_ROWS, "cpu", 3)
    got = gradients(inputs, *chunked(inputs, entropy=True, chunk_size=12), 0.3)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [3, 16, 64, 200])
def test_tiles_wait_in_the_memory_of_the_gradient_without_being_overwritten(monkeypatch, tokens):
    for rows in [64, 16]:
        # With 16 hidden units all, all but one, a quarter and fewer of the tiles are kept.
        monkeypatch.setitem(head_tiles._MAX_ROWS, "cpu", rows)
        hidden = torch.randn(tokens, 16, requires_grad=True)
        weight = torch.randn(97, 16, requires_grad=True)
        targets = torch.randint(0, 97, (tokens,))
        slopes = torch.randn(tokens)
        full = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        expected = torch.autograd.grad((full * slopes).sum(), (hidden, weight))
        for chunk_size in (tokens * 5, tokens * 10, tokens * 50):
            scores = chunked_log_probs(hidden, weight, targets, chunk_size=chunk_size)
            got = torch.autograd.grad((scores.log_probs * slopes).sum(), (hidden, weight))
            for ours, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [None, 1, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_greedy_ids_are_those_of_full_logits(chunk_size, softcap, monkeypatch):
    monkeypatch.setitem(head_tiles._MAX_ROWS, "cpu", 3)
    inputs = make(bias=True, low_rank=True)
    hidden, weight, bias, u, B = (value.detach() for value in inputs.values())
    expected = (hidden @ weight.T + u @ B.T + bias).argmax(-1)
    got = chunked_greedy_ids(
        hidden, weight, bias=bias, low_rank=(u, B), softcap=softcap, chunk_size=chunk_size
    )
    assert got.tolist() == expected.tolist()
    assert len(set(got.tolist())) > 2


def test_of_equal_logits_the_lowest_id_is_greedy():
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [3.0], [3.0], [1.0]])
    for chunk_size in (None, 2, 4):
        assert chunked_greedy_ids(hidden, weight, chunk_size=chunk_size).tolist() == [1, 1]


def test_a_graph_can_be_walked_twice():
    inputs = make()
    total = chunked(inputs, chunk_size=30).log_probs.sum()
    leaves = (inputs["hidden"], inputs["weight"])
    first = [x.clone() for x in torch.autograd.grad(total, leaves, retain_graph=True)]
    for ours, theirs in zip(torch.autograd.grad(total, leaves), first, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_scoring_without_gradients_keeps_nothing(monkeypatch):
    inputs = make()
    monkeypatch.setattr(head_tiles.KeptTiles, "__init__", None)
    with torch.no_grad():
        chunked(inputs)
    chunked({**inputs, "hidden": inputs["hidden"].detach(), "weight": inputs["weight"].detach()})


@pytest.mark.parametrize("case", ["plain", "bias, temperature", "frozen", "in place", "bfloat16"])
def test_logits_that_are_few_are_computed_once(monkeypatch, case):
    options = {"dtype": torch.bfloat16} if case == "bfloat16" else {}
    inputs = make(bias=case.startswith("bias"), **options)
    settings = {"temperature": 0.7} if case.startswith("bias") else {}
    if case == "frozen":
        inputs["weight"].requires_grad_(False)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    # An entropy that is only shown does not ask for the logits again.
    again = chunked(inputs, entropy=True, chunk_size=30, **settings).log_probs
    expected = torch.autograd.grad(again.square().sum(), leaves)
    once = chunked(inputs, entropy=True, in_place_head_grad=case == "in place", **settings)
    monkeypatch.setattr(head_tiles.HeadTiles, "logits", None)
    if case == "in place":
        once.log_probs.square().sum().backward()
        got = [leaf.grad for leaf in leaves]
    else:
        got = torch.autograd.grad(once.log_probs.square().sum(), leaves)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


def test_in_place_gradient_is_the_same_and_accumulates():
    inputs = make()
    weight = inputs["weight"]
    (expected,) = torch.autograd.grad(chunked(inputs, chunk_size=30).log_probs.sum(), weight)
    for _ in range(2):
        chunked(inputs, chunk_size=30, in_place_head_grad=True).log_probs.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * expected, atol=1e-5, rtol=1e-5)


def test_in_place_gradient_needs_a_leaf():
    inputs = make()
    inputs["weight"] = inputs["weight"] * 1.0
    with pytest.raises(ValueError, match="leaf"):
        chunked(inputs, in_place_head_grad=True)


def test_a_frozen_weight_gets_no_gradient():
    inputs = make()
    inputs["weight"].requires_grad_(False)
    chunked(inputs).log_probs.sum().backward()
    assert inputs["weight"].grad is None
    assert inputs["hidden"].grad is not None


def test_bfloat16_inputs_give_float32_scores_and_bfloat16_gradients():
    inputs = make(dtype=torch.bfloat16, bias=True)
    got = chunked(inputs, entropy=True, chunk_size=30)
    expected = naive(inputs)
    assert got.log_probs.dtype is got.entropy.dtype is torch.float32
    # The inputs are rounded, the arithmetic is not.
    torch.testing.assert_close(got.log_probs, expected[0], atol=2e-5, rtol=1e-5)
    for ours, theirs in zip(
        gradients(inputs, *got, 0.3), gradients(inputs, *expected, 0.3), strict=True
    ):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_autocast_around_forward_or_backward_changes_nothing():
    inputs = make()
    expected = gradients(inputs, *chunked(inputs, entropy=True), 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = chunked(inputs, entropy=True)
        assert scores.log_probs.dtype is torch.float32
        got = gradients(inputs, *scores, 0.0)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    scores = chunked_log_probs(hidden, weight, torch.tensor([0, 1]), entropy=True, chunk_size=1)
    assert scores.log_probs.tolist() == [0.0, -2e4]
    assert scores.entropy.tolist() == [0.0, 0.0]
    scores.log_probs.sum().backward()
    assert hidden.grad.isfinite().all()


def test_no_token_gives_empty_scores():
    scores = chunked_log_probs(
        torch.zeros(0, D), torch.randn(V, D), torch.zeros(0, dtype=torch.long), entropy=True
    )
    assert scores.log_probs.shape == scores.entropy.shape == (0,)


def test_no_token_gives_zero_gradients():
    hidden, weight = torch.zeros(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    scores = chunked_log_probs(hidden, weight, torch.zeros(0, dtype=torch.long))
    scores.log_probs.sum().backward()
    assert weight.grad.tolist() == torch.zeros(V, D).tolist()


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_defect_30_no_tensor_of_tokens_by_vocabulary_exists_forward_or_backward(entropy):
    tokens, vocabulary, size = 64, 512, 4
    hidden = torch.randn(tokens, size, requires_grad=True)
    weight = torch.randn(vocabulary, size, requires_grad=True)
    with _Largest() as largest:
        scores = chunked_log_probs(
            hidden,
            weight,
            torch.randint(0, vocabulary, (tokens,)),
            entropy=entropy,
            chunk_size=4096,
        )
        total = scores.log_probs.sum() + (scores.entropy.sum() if entropy else 0.0)
        total.backward()
    assert largest.numel <= 4096 < tokens * vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_ND": torch.zeros(3, 4)}, "hidden states must be"),
        ({"targets_N": torch.zeros(2, dtype=torch.long)}, "targets must be"),
        ({"bias": torch.zeros(2)}, "bias must be"),
        ({"low_rank": (torch.zeros(3, 2), torch.zeros(6, 3))}, "low_rank must be"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": torch.ones(2)}, "temperature must be a number"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    arguments = {
        "hidden_ND": torch.zeros(3, 5),
        "weight_VD": torch.zeros(6, 5),
        "targets_N": torch.zeros(3, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        chunked_log_probs(**{**arguments, **change})
