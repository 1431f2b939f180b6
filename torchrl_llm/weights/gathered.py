"""Updaters of several training processes: shards are gathered, by all of them.

Either each process has a whole twin of the policy, or the first one sends for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.weights.weight_names import Weights, engine_weights, whole_tensor
from torchrl_llm.weights.weight_updater import WeightUpdater


class GatheredWeights(WeightUpdater):
    """Copies the weights of a trained module into its twin, adapters and value head included.

    Shards are gathered one weight at a time; every rank has to push.

    Args:
        trained: the module that learns, sharded by FSDP2 or not.
        twin: a copy of it, made before it was sharded.
        then: pushes the weights of the twin on, to an engine.

    Example:
        >>> trained, twin = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> GatheredWeights(trained, twin).push_weights()
        >>> torch.equal(trained.weight, twin.weight)
        True
    """

    def __init__(
        self, trained: nn.Module, twin: nn.Module, then: WeightUpdater | None = None
    ) -> None:
        self._pairs = list(zip(trained.parameters(), twin.parameters(), strict=True))
        self._then = then

    def register_collector(self, collector: Any) -> None:
        """Bind to a collector, as what pushes the weights on."""
        super().register_collector(collector)
        if self._then is not None:
            self._then.register_collector(collector)

    @property
    def canary(self) -> Any:
        """Of what pushes the weights on; ``None`` without one."""
        return getattr(self._then, "canary", None)

    def push_weights(self, policy_or_weights: Any = None) -> None:
        """Copy what has been trained.

        Args:
            policy_or_weights: not looked at: the weights are those of the trained module.
        """
        with torch.no_grad():
            for trained, twin in self._pairs:
                if trained.requires_grad:
                    twin.copy_(whole_tensor(trained))
        if self._then is not None:
            self._then.push_weights()


class RankZeroWeights(WeightUpdater):
    """Only the first of several training processes sends; all must push, to gather shards.

    Args:
        make: builds the updater that sends; called once, in rank 0, by the first push.

    Attributes:
        inner: the updater; ``None`` before the first push and in other ranks.
    """

    def __init__(self, make: Callable[[], WeightUpdater]) -> None:
        self._make = make
        self.inner: WeightUpdater | None = None

    def push_weights(self, policy_or_weights: Weights | None = None) -> None:
        """Gather the weights, and send them from rank 0.

        Args:
            policy_or_weights: the trained module, the same in every rank.

        Raises:
            ConfigError: none was given.
            WeightUpdateError: they did not arrive; raised in rank 0 alone.
        """
        if policy_or_weights is None:
            raise ConfigError("RankZeroWeights needs the trained module in every rank")
        weights = engine_weights(policy_or_weights)
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self.inner is None:
            self.inner = self._make()
            if self.collector is not None:
                self.inner.register_collector(self.collector)
        self.inner.push_weights(weights)
