"""Weight updates: how the sampling policy gets the weights that were trained.

An updater is given to a collector, which calls it in ``update_policy_weights_`` while no policy
call is running, and then counts a new version of the policy.

Next: :mod:`torchrl_llm.weights.in_process` for one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError


def named_weights(source: nn.Module | TensorDictBase | Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights by their dotted names.

    Args:
        source: a module, its ``state_dict()``, or a tensordict of its weights.

    Returns:
        Name to tensor; the tensors are the source's own, detached.

    Raises:
        ConfigError: for anything else.

    Example:
        >>> sorted(named_weights(nn.Linear(1, 1)))
        ['bias', 'weight']
    """
    if isinstance(source, nn.Module):
        # A state dict may hold objects beside tensors (extra states); they are no weights.
        values: Mapping[str, Any] = source.state_dict(keep_vars=True)
    elif isinstance(source, TensorDictBase):
        values = dict(source.flatten_keys(".").items())
    elif isinstance(source, Mapping):
        values = source
    else:
        raise ConfigError(
            "weights must be a module, a state dict or a tensordict of weights, got "
            f"{type(source).__name__}"
        )
    return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}


class WeightUpdater(ABC):
    """Brings weights from the trainer to the policy of a collector.

    A subclass says how in :meth:`push_weights`. An updater serves one collector.
    """

    _collector: Any = None

    @property
    def collector(self) -> Any:
        """The collector that it serves; ``None`` before it was given to one."""
        return self._collector

    def register_collector(self, collector: Any) -> None:
        """Bind to a collector; done by the collector itself.

        Args:
            collector: has the ``policy`` that gets the weights.

        Raises:
            ConfigError: it serves another collector already.
        """
        if self.collector not in (None, collector):
            raise ConfigError(
                f"this {type(self).__name__} serves another collector; make a new one"
            )
        self._collector = collector

    @property
    def policy(self) -> Any:
        """The policy that gets the weights.

        Raises:
            ConfigError: no collector was registered.
        """
        if self.collector is None:
            raise ConfigError(
                f"{type(self).__name__} has no collector: pass it as weight_updater=... to one"
            )
        return self.collector.policy

    @abstractmethod
    def push_weights(
        self, policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None
    ) -> None:
        """Bring the weights over.

        Args:
            policy_or_weights: where they are; ``None`` for the place that the updater knows.
        """
