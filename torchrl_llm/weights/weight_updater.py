"""Updaters that bring trained weights to a collector's sampling policy.

A collector calls its updater in ``update_policy_weights_`` while no policy call is running, and
then counts a new version of the policy. The updaters of this module are for one process and for
several trainers; :mod:`torchrl_llm.weights.engine_updaters` contains the updaters of engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError


def named_weights(source: nn.Module | TensorDictBase | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights under their dotted names.

    Args:
        source: a module, its ``state_dict()``, or a tensordict of its weights.

    Returns:
        Name to detached tensor; the tensors share the source's memory.

    Raises:
        ConfigError: for any other kind of source.

    Example:
        >>> sorted(named_weights(nn.Linear(1, 1)))
        ['bias', 'weight']
    """
    if isinstance(source, nn.Module):
        # A state dict may contain objects that are not tensors (extra states); they are not
        # weights.
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

    A subclass implements :meth:`push_weights`. An updater serves one collector.
    """

    _collector: Any = None

    @property
    def collector(self) -> Any:
        """The collector of this updater; ``None`` before :meth:`register_collector`."""
        return self._collector

    def register_collector(self, collector: Any) -> None:
        """Bind to a collector; the collector calls this method itself.

        Args:
            collector: collector whose ``policy`` receives the weights.

        Raises:
            ConfigError: it already serves a different collector.
        """
        if self.collector not in (None, collector):
            raise ConfigError(
                f"this {type(self).__name__} serves another collector; make a new one"
            )
        self._collector = collector

    @property
    def policy(self) -> Any:
        """The policy that receives the weights.

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
        """Send the weights to the policy.

        Args:
            policy_or_weights: the weights; ``None`` for the weights that the updater already knows.
        """


Source = nn.Module | TensorDictBase | Mapping[str, Any]


def _modules_of(policy: Any) -> list[nn.Module]:
    """Return the possible roots of the names: the policy's model, then the policy."""
    found = [getattr(policy, "model", None), policy]
    modules = [module for module in found if isinstance(module, nn.Module)]
    if not modules:
        raise ConfigError(
            f"the policy, a {type(policy).__name__}, holds no module in this process, so there are "
            "no weights to update; give the collector the weight_updater of its engine"
        )
    return modules


def _model_of(source: Source) -> Source:
    """Return the model that owns the weights, if a whole policy was given."""
    model = getattr(source, "model", None) if isinstance(source, nn.Module) else None
    return model if isinstance(model, nn.Module) else source


def _paired(policy: Any, source: Source) -> list[tuple[str, Tensor, Tensor]]:
    """Return ``(name, target, given)`` for each given weight.

    Raises:
        ConfigError: the names or shapes differ from those of the policy's weights.
    """
    best: tuple[int, set[str], set[str]] | None = None
    sources = [_model_of(source), source]
    for candidate in sources if sources[0] is not source else sources[:1]:
        given = named_weights(candidate)
        for module in _modules_of(policy):
            targets = named_weights(module)
            unknown = set(given) - set(targets)
            covered = {targets[name].data_ptr() for name in given if name in targets}
            # A tied weight has two names and one memory; one name is enough.
            missing = {
                name
                for name, target in targets.items()
                if name not in given and target.data_ptr() not in covered
            }
            if not unknown and not missing:
                return [(name, targets[name], value) for name, value in given.items()]
            if best is None or len(unknown) + len(missing) < best[0]:
                best = (len(unknown) + len(missing), unknown, missing)
    _, unknown, missing = best
    raise ConfigError(
        "the weights are not those of the policy: "
        f"{len(missing)} of its weights were not given {sorted(missing)[:3]}, and {len(unknown)} "
        f"were given that it does not have {sorted(unknown)[:3]}"
    )


class InProcessWeights(WeightUpdater):
    """Copies weights into the policy in place, and skips weights that are already shared.

    This is the default updater of :class:`~torchrl_llm.collectors.LLMCollector`. If one module
    samples and trains, nothing is copied. With two modules, the trainer's weights are copied into
    the sampler.

    Attributes:
        num_copied: number of weights that the last update copied; 0 if all are shared.

    Example:
        >>> from types import SimpleNamespace
        >>> policy, trained = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> collector, updater = SimpleNamespace(policy=policy), InProcessWeights()
        >>> updater.register_collector(collector)
        >>> updater.push_weights(trained)
        >>> torch.equal(policy.weight, trained.weight), updater.num_copied
        (True, 2)
    """

    num_copied: int = 0

    def push_weights(self, policy_or_weights: Source | None = None) -> None:
        """Copy weights into the policy.

        Args:
            policy_or_weights: the trained module or its weights; ``None`` for shared weights, which
                are not copied.

        Raises:
            ConfigError: names or shapes differ from those of the policy's weights.
        """
        self.num_copied = 0
        if policy_or_weights is None:
            return
        pairs = _paired(self.policy, policy_or_weights)
        # All shapes are checked first, so that an error leaves the policy unchanged.
        for name, target, given in pairs:
            if target.shape != given.shape:
                raise ConfigError(
                    f"{name!r} has shape {tuple(target.shape)} in the policy and "
                    f"{tuple(given.shape)} in the given weights"
                )
        with torch.no_grad():
            for _, target, given in pairs:
                if target.data_ptr() != given.data_ptr():
                    target.copy_(given)
                    self.num_copied += 1


class JointWeights(WeightUpdater):
    """Several updaters of one collector, one per player's policy.

    Args:
        updaters: updaters that each already have the weights of their policy.

    Example:
        >>> JointWeights([InProcessWeights(), InProcessWeights()]).push_weights()
    """

    def __init__(self, updaters: Iterable[WeightUpdater]) -> None:
        self.updaters = list(updaters)

    def register_collector(self, collector: Any) -> None:
        """Bind all of them to a collector.

        Args:
            collector: see :meth:`WeightUpdater.register_collector`.
        """
        super().register_collector(collector)
        for each in self.updaters:
            each.register_collector(collector)

    def push_weights(self, policy_or_weights: Source | None = None) -> None:
        """Let each updater send its weights; all get the same new version.

        Args:
            policy_or_weights: must be ``None``, because each updater has its own weights.

        Raises:
            ConfigError: weights are given, but they cannot belong to all policies.
        """
        if policy_or_weights is not None:
            raise ConfigError("each updater of JointWeights has weights of its own: give none")
        for each in self.updaters:
            each.push_weights()
