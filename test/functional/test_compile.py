"""Every functional loss compiles as one graph, with the values and gradients it has without.

``aot_eager`` traces forward and backward as the default backend does and skips its code generation,
which takes seconds a function; one slow test goes all the way.
"""

from __future__ import annotations

import shutil
from inspect import isfunction

import pytest
import torch
from functional.surrogates.rows import ragged

from torchrl_llm import functional as F
from torchrl_llm.functional import policy_surrogates as surrogates
from torchrl_llm.objectives import minor_sft_loss, sft_loss

COMPILER = shutil.which("g++") or shutil.which("clang++")
ROWS = 6
COUNTS = F.Normalizer(15, 5)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
# test_reduce.py compiles every mode without its backward.
MODES = ("sequence_mean", "prompt_mean")


def aggregated(mode, normalizer=None):
    settings = {"constant_length": 7} if mode == "constant" else {}
    if mode == "prompt_mean":
        settings["group_S"] = GROUPS

    def function(log_ratio, log_probs, advantage, row):
        losses = F.ppo_clip(log_ratio, advantage, 0.2, 0.28)[0]
        return F.aggregate(losses, row, ROWS, mode, normalizer=normalizer, **settings)

    return function


def head(seed=0):
    """States and weights of a small head, targets, and the same of a teacher."""
    torch.manual_seed(seed)
    states = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    return states, weights, torch.randint(0, 11, (5,)), *teacher


def scores(result):
    return result.log_probs + 0.3 * result.entropy


# Of log-ratios, log-probs, advantages and rows. The inputs require gradients.
LOSSES = {
    "ppo_clip": lambda x, p, a, r: F.ppo_clip(x, a, 0.2, 0.28),
    "sapo": lambda x, p, a, r: F.sapo(x, a),
    "gspo": lambda x, p, a, r: F.gspo(x, a, r, ROWS),
    "gspo_token": lambda x, p, a, r: F.gspo_token(x, a, r, ROWS),
    "gmpo": lambda x, p, a, r: F.gmpo(x, a, r, ROWS),
    "reinforce": lambda x, p, a, r: F.reinforce(p, a, F.truncated_weights(x, 2.0)),
    "sequence_weights": lambda x, p, a, r: F.reinforce(p, a, F.sequence_weights(x, r, ROWS, 2.0)),
    "cispo": lambda x, p, a, r: F.cispo(p, x, a),
    "topr": lambda x, p, a, r: F.topr(p, x, a, r, ROWS),
    "k1": lambda x, p, a, r: F.k1(x),
    "k2": lambda x, p, a, r: F.k2(x),
    "k3": lambda x, p, a, r: F.k3(x),
    "weighted_k3": lambda x, p, a, r: F.weighted_k3(x, p),
    "masked_weights": lambda x, p, a, r: F.reinforce(p, a, F.masked_weights(x, 0.5, 2.0)),
    "level_log_ratio": lambda x, p, a, r: F.level_log_ratio(x, r, ROWS, "geometric"),
    "sequence_mask": lambda x, p, a, r: p * F.sequence_mask(x, r, ROWS, 0.5, 2.0),
    "value_loss": lambda x, p, a, r: F.value_loss(x, a, p.detach(), 0.2),
    "sft_loss": lambda x, p, a, r: sft_loss(F.sequence_log_ratio(p, r, ROWS), "mean"),
    "minor_sft_loss": lambda x, p, a, r: minor_sft_loss(p, x.detach(), 0.1, "mean"),
    **{f"aggregate {mode}": aggregated(mode) for mode in MODES},
    **{f"aggregate {m} of a part": aggregated(m, COUNTS) for m in ("sequence_mean", "constant")},
}


def options(h, w):
    """All that a head may have besides, made of states and weights so that these get gradients."""
    low_rank = (h[:, :2], w[:, 2:4])
    return {"bias": w.sum(-1), "low_rank": low_rank, "softcap": 5.0, "scale": 0.7}


def teacher_options(h, w):
    return {f"teacher_{name}": value for name, value in options(h, w).items()}


TEMPERATURES = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)

# Of states, weights of the head, targets, and states and weights of a teacher.
HEADS = {
    "log_probs and entropy": lambda h, w, t, *_: scores(F.chunked_log_probs(h, w, t, entropy=True)),
    "log_probs": lambda h, w, t, *_: F.chunked_log_probs(h, w, t, temperature=0.5).log_probs,
    "log_probs of a head with everything": lambda h, w, t, *_: scores(
        F.chunked_log_probs(
            h, w, t, **options(h, w), temperature=TEMPERATURES, entropy=True, chunk_size=12
        )
    ),
    "reverse of heads with everything": lambda h, w, t, *teacher: F.chunked_divergence(
        h,
        w,
        *teacher,
        **options(h, w),
        **teacher_options(*teacher),
        temperature=TEMPERATURES,
        chunk_size=12,
    ),
    "log_probs of logits": lambda h, w, t, *_: F.selective_log_softmax(h @ w.T, t),
    "reverse": lambda h, w, t, *teacher: F.chunked_divergence(h, w, *teacher),
    "forward": lambda h, w, t, *teacher: F.chunked_divergence(h, w, *teacher, direction="forward"),
}


def values_and_gradients(function, inputs):
    result = function(*inputs)
    loss, *others = result if isinstance(result, tuple) else (result,)
    gradients = torch.autograd.grad(loss.sum(), inputs[:2], allow_unused=True)
    return [loss.detach(), *others, *(g for g in gradients if g is not None)]


def check(function, inputs, backend):
    torch.compiler.reset()
    expected = values_and_gradients(function, inputs)
    got = values_and_gradients(torch.compile(function, fullgraph=True, backend=backend), inputs)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


# Of each kind of operation one in a plain run; all under the marker.
SAMPLE = ("ppo_clip", "gspo", "topr", "weighted_k3", "value_loss", "aggregate prompt_mean")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in LOSSES]
)
def test_a_loss_is_one_graph(name):
    check(LOSSES[name], ragged(), "aot_eager")


@pytest.mark.parametrize("name", HEADS)
def test_what_a_loss_is_made_of_is_one_graph(name):
    check(HEADS[name], head(), "aot_eager")


def test_ids_and_a_gradient_in_place_are_those_without_a_compiler():
    states, weights, targets, *_ = head()

    def function(w):
        scores = F.chunked_log_probs(states.detach(), w, targets, in_place_head_grad=True)
        return scores.log_probs.sum(), F.chunked_greedy_ids(states, w, chunk_size=12)

    found = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaf = weights.detach().clone().requires_grad_()
        loss, ids = run(leaf)
        loss.backward()
        found.append((loss, ids, leaf.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_softmax_over_a_few_ids_is_that_without_a_compiler():
    states, weights, targets, *_ = head()
    ids = torch.stack([targets, (targets + 1) % 11], 1).flatten()

    def function(h, w):
        counts = torch.full((5,), 2)
        return scores(F.support_log_probs(h, w, targets, ids, counts, entropy=True))

    found = [
        values_and_gradients(run, (states, weights))
        for run in (function, torch.compile(function, backend="aot_eager"))  # not in one graph
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("head_dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_an_operator_keeps_the_rules_of_operators(needs, head_dtype):
    """Shapes, types and strides that a compiler is told; nothing written that nobody is told of."""
    hidden = torch.randn(5, 8, dtype=head_dtype, requires_grad=needs[0])
    weight = torch.randn(8, 11, dtype=head_dtype).t().requires_grad_(needs[1])
    bias, temperature = torch.randn(11, requires_grad=True), torch.rand(5) + 0.5
    targets, low = torch.randint(0, 11, (5,)), (torch.randn(5, 2), torch.randn(11, 2))
    products = torch.float64 if head_dtype is torch.float64 else torch.float32
    own = (hidden, weight, bias, *low)
    arguments = (*own, targets, temperature, 1.0, 0.7, 5.0, True, 12, products)
    torch.library.opcheck(torch.ops.torchrl_llm.chunked_head, arguments)
    teacher = (torch.randn(5, 6), torch.randn(11, 6), None, None, None)
    rest = (0.7, None, products, 1.0, 5.0, products, 12, "forward")
    arguments = (*own, *teacher, None, 0.5, *rest)
    torch.library.opcheck(torch.ops.torchrl_llm.chunked_divergence, arguments)


@pytest.mark.full
@pytest.mark.skipif(not COMPILER, reason="the default backend generates C++; needs a compiler")
@pytest.mark.parametrize("name", ["gspo", "aggregate sequence_mean"])
def test_the_default_backend_agrees(name):
    check(LOSSES[name], ragged(), "inductor")


def test_every_surrogate_is_here():
    found = vars(surrogates).items()
    own = {name for name, f in found if isfunction(f) and f.__module__ == surrogates.__name__}
    assert own - {"policy_gradient_loss"} <= LOSSES.keys()  # which is for padded rows
