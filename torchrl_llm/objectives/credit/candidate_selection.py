"""Which candidates of a group are trained when more were sampled than are needed."""

from __future__ import annotations

from math import comb
from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.errors import ConfigError


class MCAdvantageSelector:
    """Chooses the trajectories of a group out of its candidates.

    Args:
        strategy: ``"first"`` takes the first that came. ``"uniform"`` spreads the choice evenly
            over the candidates in the order of their returns, from the worst to the best.
            ``"balanced"`` takes, of all choices whose mean return is inside the bounds, the one
            nearest to their middle, and of several such the one with the widest range of returns;
            without bounds it is ``"uniform"``.
        max_combinations: up to so many choices ``"balanced"`` looks at all; beyond it starts from
            the lowest and highest returns, in the best proportion, and swaps while that helps.
        in_keys: what :meth:`select` reads of each candidate: ``"return"``, or keys of the last row
            of its trajectory, for subclasses that choose by something else.

    Raises:
        ConfigError: for an unknown strategy or no combination.

    Example:
        >>> from tensordict import TensorDict
        >>> candidates = TensorDict({"return": torch.tensor([0.0, 0.0, 0.0, 1.0])}, [4])
        >>> selector = MCAdvantageSelector()
        >>> selector.select(candidates, group_size=2, keep_return_bounds=(0.0, 1.0))
        [0, 3]
    """

    def __init__(
        self,
        strategy: Literal["balanced", "first", "uniform"] = "balanced",
        *,
        max_combinations: int = 100_000,
        in_keys: list[NestedKey] | None = None,
    ) -> None:
        if strategy not in ("balanced", "first", "uniform"):
            raise ConfigError(f"strategy must be balanced, first or uniform; got {strategy!r}")
        if max_combinations < 1:
            raise ConfigError(f"max_combinations must be at least 1, got {max_combinations}")
        self.strategy = strategy
        self.max_combinations = max_combinations
        self.in_keys: list[NestedKey] = ["return"] if in_keys is None else list(in_keys)

    def select(
        self,
        candidates: TensorDictBase,
        *,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """Choose.

        Args:
            candidates: ``[C]`` with ``"return"``, floating ``[C]``, and the ``in_keys``.
            group_size: how many to choose, at most ``C``.
            keep_return_bounds: exclusive bounds on the mean return of the choice.

        Returns:
            Indices of the chosen, ``None`` when no choice is inside the bounds.

        Raises:
            ConfigError: fewer candidates than are to be chosen.
        """
        returns = candidates.get("return").double()
        if len(returns) < group_size:
            raise ConfigError(f"cannot choose {group_size} of {len(returns)} candidates")
        if self.strategy == "balanced" and keep_return_bounds is not None:
            return self._balanced(returns, group_size, keep_return_bounds)
        chosen = list(range(group_size))
        if self.strategy != "first":
            order = returns.argsort(stable=True)
            places = torch.linspace(0, len(returns) - 1, group_size, dtype=torch.float64).round()
            chosen = sorted(order[places.long()].tolist())
        if keep_return_bounds is not None:
            low, high = keep_return_bounds
            if not low < returns[chosen].mean() < high:
                return None
        return chosen

    def _balanced(
        self, returns: Tensor, size: int, bounds: tuple[float, float]
    ) -> list[int] | None:
        low, high = bounds
        middle = (low + high) / 2
        number = len(returns)
        if comb(number, size) <= self.max_combinations:
            chosen = _nearest(returns, torch.combinations(torch.arange(number), size), middle)
        else:
            # Of sorted returns, the k lowest and the rest from the top, for every k.
            order = returns.argsort(stable=True)
            ends = [torch.cat([order[:k], order[number - size + k :]]) for k in range(size + 1)]
            chosen, better = None, _nearest(returns, torch.stack(ends), middle)
            while chosen is None or _distance(returns, better, middle) < _distance(
                returns, chosen, middle
            ):
                chosen = better
                better = _nearest(returns, _neighbours(chosen, number), middle)
        # The middle is as far from both bounds, so if any choice is inside, the nearest one is.
        return chosen if low < returns[chosen].mean() < high else None


def _nearest(returns: Tensor, choices: Tensor, middle: float) -> list[int]:
    """Of choices ``[M, size]`` the one whose mean is nearest to the middle, then the widest."""
    values = returns[choices]
    distance = (values.mean(1) - middle).abs()
    # Means of the same returns in another order differ by rounding.
    nearest = distance <= distance.amin() + 1e-12 * (returns.abs().amax() + abs(middle))
    width = values.amax(1) - values.amin(1)
    return sorted(choices[width.where(nearest, -1.0).argmax()].tolist())


def _neighbours(chosen: list[int], number: int) -> Tensor:
    """All choices that differ from this one in one member."""
    outside = sorted(set(range(number)) - set(chosen))
    return torch.tensor([[*(c for c in chosen if c != a), b] for a in chosen for b in outside])


def _distance(returns: Tensor, chosen: list[int], middle: float) -> float:
    return abs(returns[chosen].mean().item() - middle)
