"""Updater of several training processes: shards are gathered by all, into a whole twin of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrl_llm.weights.weight_names import whole_tensor
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
