"""How exact a fast path is, next to its slow twin and a computation in float64."""

from __future__ import annotations

import torch

# Relative error in the norm that a result of this type may have, whatever its twin's error is.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 4e-3}


def distance(got, exact):
    """Norm of the error, relative to the norm of the exact result."""
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    return float((got - exact).norm() / exact.norm().clamp_min(1e-30))


def assert_as_exact(fast, slow, exact, dtype, *, what="", factor=2.0):
    """The fast path's error is at most ``factor`` times its twin's, or that of one rounding."""
    ours, theirs = distance(fast, exact), distance(slow, exact)
    limit = factor * theirs + ROUNDING[dtype]
    assert ours <= limit, f"{what}: error {ours:.1e}, of the slow path {theirs:.1e}, {limit=:.1e}"


def assert_all_as_exact(fast, slow, exact, dtype, *, names=None, factor=2.0):
    """The same of several tensors; ``None`` where all three have none.

    A tensor that is nearly zero next to the largest (a bias whose gradient cancels) is measured
    against that.
    """
    names = range(len(exact)) if names is None else names
    whole = [x for x in exact if x is not None]
    largest = max(float(x.detach().double().norm()) for x in whole)
    for name, ours, theirs, true in zip(names, fast, slow, exact, strict=True):
        if true is None:
            assert ours is None
            continue
        if float(true.detach().double().norm()) < 1e-3 * largest:
            error = float((ours.detach().cpu().double() - true.detach().cpu().double()).norm())
            assert error <= 10 * ROUNDING[dtype] * largest, f"{name}: error {error:.1e}"
        else:
            assert_as_exact(ours, theirs, true, dtype, what=str(name), factor=factor)


def assert_all_near(got, expected, share):
    """Tensors by name: each error is at most a share of the largest norm among those expected.

    Not of its own norm: the gradient of a bias of keys is zero but for rounding.
    """
    assert got.keys() == expected.keys()
    largest = max(float(x.detach().double().norm()) for x in expected.values())
    for name, true in expected.items():
        error = float((got[name].detach().cpu().double() - true.detach().cpu().double()).norm())
        assert error <= share * largest, (
            f"{name}: error {error:.1e}, the largest norm {largest:.1e}"
        )
