"""The chunked head against all logits at once: values and gradients, float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from gpu.exactness import assert_all_as_exact, distance

from torchrl_llm.functional import (
    chunked_divergence,
    chunked_greedy_ids,
    chunked_log_probs,
    support_log_probs,
)
from torchrl_llm.modules.backends.head import LMHead

pytestmark = pytest.mark.gpu
# Of N x V logits: all at once, tiles of both kinds, tiles of one column.
CHUNKS = [None, 1 << 14, 300]
FORMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": "rows"},
    "bias": {"bias": True},
    "adapter": {"low_rank": True, "scale": 0.5},
    "softcap": {"softcap": 3.0, "temperature": "rows", "scale": 1.5},
    "all": {
        "bias": True,
        "low_rank": True,
        "softcap": 3.0,
        "temperature": "rows",
        "scale": 1.5,
    },
}


class Problem:
    """Inputs of a head, drawn on the CPU, on a device in a type."""

    def __init__(self, device, dtype, *, tokens=257, vocabulary=1009, width=64, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

        self.hidden = draw(tokens, width)
        self.weight = draw(vocabulary, width, scale=2.0 * width**-0.5)
        self.bias = draw(vocabulary)
        self.adapter, self.adapter_weight = draw(tokens, 4), draw(vocabulary, 4, scale=0.5)
        self.targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
        self.temperatures = (torch.rand(tokens, generator=generator) + 0.5).to(device)
        self.up = torch.randn(2, tokens, generator=generator).to(device)

    def leaves(self, form, dtype=None):
        """Copies that take gradients, of what the form has; ``None`` for the others."""
        wanted = [self.hidden, self.weight, self.bias, self.adapter, self.adapter_weight]
        has = [True, True, "bias" in form, "low_rank" in form, "low_rank" in form]
        return [
            x.detach().clone().to(dtype or x.dtype).requires_grad_() if there else None
            for x, there in zip(wanted, has, strict=True)
        ]

    def settings(self, form, leaves):
        """Arguments of the chunked functions besides states and weight."""
        settings = {name: form[name] for name in ("scale", "softcap") if name in form}
        if leaves[2] is not None:
            settings["bias"] = leaves[2]
        if leaves[3] is not None:
            settings["low_rank"] = (leaves[3], leaves[4])
        temperature = form.get("temperature", 1.0)
        settings["temperature"] = self.temperatures if temperature == "rows" else temperature
        return settings


def naive_logits(leaves, form, problem, index=slice(None)):
    """All logits after the temperature, in the type of the leaves until the softmax."""
    hidden, weight, bias, adapter, adapter_weight = leaves
    logits = hidden[index] @ weight.T
    if adapter is not None:
        logits = logits + adapter[index] @ adapter_weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits if logits.dtype is torch.float64 else logits.float()
    logits = logits * form.get("scale", 1.0)
    if "softcap" in form:
        logits = torch.tanh(logits / form["softcap"]) * form["softcap"]
    temperature = form.get("temperature", 1.0)
    if temperature == "rows":
        temperature = problem.temperatures[index, None].to(logits.dtype)
    return logits / temperature


def naive_scores(leaves, form, problem):
    log_p = naive_logits(leaves, form, problem).log_softmax(-1)
    own = log_p.gather(1, problem.targets[:, None])[:, 0]
    return own, -(log_p.exp() * log_p).sum(-1)


def with_gradients(leaves, problem, values):
    """The values, and the gradients of the leaves of a weighted sum of them."""
    weights = problem.up.to(values[0].dtype)
    total = sum((value * up).sum() for value, up in zip(values, weights, strict=False))
    wanted = [x for x in leaves if x is not None]
    return [*values, *torch.autograd.grad(total, wanted)]


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", FORMS)
def test_log_probs_entropy_and_all_gradients_are_those_of_all_logits(
    device, dtype, name, chunk_size
):
    form, problem = FORMS[name], Problem(device, dtype)
    if chunk_size == 300 and name not in ("plain", "all"):
        pytest.skip("tiles of one column are tried with two forms")
    results = []
    for kind in (dtype, torch.float64):
        leaves = problem.leaves(form, kind)
        values = naive_scores(leaves, form, problem)
        results.append(with_gradients(leaves, problem, values))
    leaves = problem.leaves(form)
    scores = chunked_log_probs(
        leaves[0],
        leaves[1],
        problem.targets,
        entropy=True,
        chunk_size=chunk_size,
        **problem.settings(form, leaves),
    )
    assert scores.log_probs.dtype is scores.entropy.dtype is torch.float32
    assert_all_as_exact(with_gradients(leaves, problem, scores), *results, dtype)
    # Without the entropy the tiles that were kept make the gradient.
    leaves = problem.leaves(form)
    only = chunked_log_probs(
        leaves[0],
        leaves[1],
        problem.targets,
        chunk_size=chunk_size,
        **problem.settings(form, leaves),
    )
    got = with_gradients(leaves, problem, [only.log_probs])
    expected = []
    for kind in (dtype, torch.float64):
        leaves = problem.leaves(form, kind)
        values = naive_scores(leaves, form, problem)[:1]
        expected.append(with_gradients(leaves, problem, values))
    assert_all_as_exact(got, *expected, dtype)


def test_tiles_of_the_devices_own_size_give_the_gradients_of_all_logits(device, dtype):
    """More logits than the device keeps, so that the gradient's own memory holds tiles."""
    # On CUDA 1,500 x 60,000 are more than 2^26; a rehearsal has a size to match.
    small = device.type == "cpu"
    shape = {"tokens": 96, "vocabulary": 4001} if small else {"tokens": 1500, "vocabulary": 60_013}
    problem = Problem(device, dtype, **shape, width=96)
    chunk_size = 1 << 16 if small else None
    exact = problem.leaves({}, torch.float64)
    twin = problem.leaves({})
    exact = with_gradients(exact, problem, naive_scores(exact, {}, problem)[:1])
    slow = with_gradients(twin, problem, naive_scores(twin, {}, problem)[:1])
    leaves = problem.leaves({})
    scores = chunked_log_probs(leaves[0], leaves[1], problem.targets, chunk_size=chunk_size)
    assert_all_as_exact(with_gradients(leaves, problem, [scores.log_probs]), slow, exact, dtype)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_gradient_added_in_place_is_the_one_that_autograd_adds(device, dtype, chunk_size):
    problem, grads = Problem(device, dtype), []
    for in_place in (False, True):
        hidden, weight = problem.leaves({})[:2]
        weight.grad = torch.ones_like(weight)
        scores = chunked_log_probs(
            hidden, weight, problem.targets, chunk_size=chunk_size, in_place_head_grad=in_place
        )
        (scores.log_probs * problem.up[0]).sum().backward()
        grads.append((hidden.grad, weight.grad))
    for plain, placed in zip(*grads, strict=True):
        # Each column is added in one product here and in another there.
        assert distance(placed, plain) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_autocast_gives_what_it_gives_the_plain_head(device):
    """Float32 weights under a bfloat16 autocast: gradients are float32."""
    problem = Problem(device, torch.float32)
    exact = problem.leaves({"bias": True}, torch.float64)
    exact = with_gradients(exact, problem, naive_scores(exact, {"bias": True}, problem))
    slow = problem.leaves({"bias": True})
    with torch.autocast(device.type, torch.bfloat16):
        logits = torch.nn.functional.linear(*slow[:3]).float()
        log_p = logits.log_softmax(-1)
    own = log_p.gather(1, problem.targets[:, None])[:, 0]
    slow = with_gradients(slow, problem, (own, -(log_p.exp() * log_p).sum(-1)))
    fast = problem.leaves({"bias": True})
    with torch.autocast(device.type, torch.bfloat16):
        scores = chunked_log_probs(
            fast[0], fast[1], problem.targets, bias=fast[2], entropy=True, chunk_size=1 << 14
        )
    got = with_gradients(fast, problem, scores)
    assert all(x.dtype is torch.float32 for x in got)
    assert_all_as_exact(got, slow, exact, torch.bfloat16)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_divergence_from_a_teacher_is_that_of_all_logits(device, dtype, direction, chunk_size):
    form = {"bias": True, "softcap": 3.0, "temperature": "rows"}
    problem, teacher = Problem(device, dtype), Problem(device, dtype, width=48, seed=1)
    results = []
    for kind in (dtype, torch.float64):
        leaves = problem.leaves(form, kind)
        log_p = naive_logits(leaves, form, problem).log_softmax(-1)
        other = [x.detach() for x in teacher.leaves({}, kind)[:2]] + [None] * 3
        rows = {"temperature": "rows"}
        log_q = naive_logits(other, rows, problem).log_softmax(-1)
        first, second = (log_p, log_q) if direction == "reverse" else (log_q, log_p)
        value = (first.exp() * (first - second)).sum(-1)
        results.append(with_gradients(leaves, problem, [value]))
    leaves = problem.leaves(form)
    value = chunked_divergence(
        leaves[0],
        leaves[1],
        teacher.hidden,
        teacher.weight,
        direction=direction,
        chunk_size=chunk_size,
        **problem.settings(form, leaves),
    )
    assert_all_as_exact(with_gradients(leaves, problem, [value]), *results, dtype)


@pytest.mark.parametrize("whole", [False, True], ids=["all cut", "some whole"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_scores_on_the_kept_ids_are_those_of_masked_logits(device, dtype, name, whole):
    form, problem = FORMS[name], Problem(device, dtype, tokens=61)
    generator = torch.Generator().manual_seed(2)
    counts = torch.randint(1, 40, (61,), generator=generator)
    if whole:
        counts[::3] = 0
    kept = []
    for target, count in zip(problem.targets.tolist(), counts.tolist(), strict=True):
        others = torch.randperm(1009, generator=generator)
        kept.append(torch.cat([torch.tensor([target]), others[others != target]])[:count])
    keep = torch.zeros(61, 1009, dtype=torch.bool)
    for row, ids in enumerate(kept):
        keep[row, ids if len(ids) else slice(None)] = True
    keep = keep.to(device)
    results = []
    for kind in (dtype, torch.float64):
        leaves = problem.leaves(form, kind)
        logits = naive_logits(leaves, form, problem).masked_fill(~keep, -torch.inf)
        log_p = logits.log_softmax(-1)
        own = log_p.gather(1, problem.targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p.masked_fill(~keep, 0.0)).sum(-1)
        results.append(with_gradients(leaves, problem, (own, entropy)))
    leaves = problem.leaves(form)
    scores = support_log_probs(
        leaves[0],
        leaves[1],
        problem.targets,
        torch.cat(kept).to(device, torch.int32),
        counts.to(device, torch.int32),
        entropy=True,
        chunk_size=1 << 12,
        **problem.settings(form, leaves),
    )
    assert_all_as_exact(with_gradients(leaves, problem, scores), *results, dtype)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_greedy_ids_are_the_argmax_of_all_logits(device, dtype, chunk_size):
    problem = Problem(device, dtype)
    logits = naive_logits(problem.leaves({}, torch.float64), {}, problem)
    ids = chunked_greedy_ids(problem.hidden, problem.weight, chunk_size=chunk_size)
    assert ids.device.type == device.type
    chosen = logits.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), atol=1e-4, rtol=0.0)


def test_a_head_on_the_device_scores_with_its_own_bias(device, dtype):
    problem = Problem(device, dtype)
    linear = torch.nn.Linear(64, 1009, device=device, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(problem.weight)
        linear.bias.copy_(problem.bias)
    head = LMHead(linear, softcap=3.0)
    got = head.score(problem.hidden, problem.targets, entropy=True)
    form = {"softcap": 3.0, "bias": True}
    exact, slow = (
        naive_scores(problem.leaves(form, kind), form, problem) for kind in (torch.float64, dtype)
    )
    assert_all_as_exact(got, slow, exact, dtype)
