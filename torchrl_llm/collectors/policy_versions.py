"""Versions of a collector's policy, in the rows' stamp and in the tokens' trace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector

from torchrl_llm.envs.transforms.policy_version import PolicyVersion
from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource, load_into

Weights = nn.Module | TensorDictBase | Mapping[str, Any]


class VersionedCollector(BaseCollector):
    """Base of the collectors: TorchRL's names for versions, weights and the size of a batch."""

    @property
    @abstractmethod
    def policy_version(self) -> int | str | None:
        """The version of the weights; ``None`` where nothing counts it."""

    def get_policy_version(self) -> int | str | None:
        """The same as :attr:`policy_version`, for callers that can only call methods."""
        return self.policy_version

    @property
    def total_dialog_turns(self) -> int:
        """Turns after which the collector ends; -1 for no end."""
        return self.total_frames

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns of a batch."""
        return self.requested_frames_per_batch

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
        state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Bring weights to whatever samples, and count a new version.

        Args:
            policy_or_weights: the trained module, its state dict, or a tensordict of its weights.
                Without any, the weights are taken to be in their place and the version counts up.
            weights: the same by another name of TorchRL's.
            policy: the same.
            state_dict: the same.

        Raises:
            ConfigError: more than one source, or weights that are not the policy's.
            WeightUpdateError: they did not arrive; the version is the old one then.
        """
        named = (policy_or_weights, weights, policy, state_dict)
        given = [each for each in named if each is not None]
        if len(given) > 1:
            raise ConfigError("pass the weights once")
        self._update(given[0] if given else None)

    def set_weight_updater(self, weight_updater: Any) -> bool:
        """Replace the updater; returns ``True``, as TorchRL's does.

        Args:
            weight_updater: see the arguments of the class.
        """
        self.weight_updater = weight_updater
        return True

    @abstractmethod
    def _update(self, weights: Weights | None) -> None:
        """Bring weights and count a new version."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # An error of the block is not hidden behind one of the collector.
        self.shutdown(raise_on_error=error is None)


class VersionedPolicy:
    """A policy, and the version of its weights in both places where it is written.

    Args:
        policy: tensordict to tensordict; modules in it with an integer ``policy_version`` write
            that into the trace of the tokens that they sample.
        track: stamp rows, by a :class:`~torchrl_llm.envs.transforms.PolicyVersion` of its own or
            the given one.
    """

    def __init__(self, policy: Any, track: bool | PolicyVersion) -> None:
        self.policy = policy
        self.tracker: PolicyVersion | None = None
        if isinstance(track, PolicyVersion):
            self.tracker = track
        elif track:
            self.tracker = PolicyVersion()
        if self.tracker is not None and isinstance(self.tracker.version, int):
            for part in self._parts():
                part.policy_version = self.tracker.version

    @property
    def _backend(self) -> Backend | None:
        backend = getattr(self.policy, "backend", None)
        return backend if isinstance(backend, Backend) else None

    def _parts(self) -> list[Any]:
        parts = self.policy.modules() if isinstance(self.policy, nn.Module) else [self.policy]
        return [part for part in parts if isinstance(getattr(part, "policy_version", None), int)]

    @property
    def version(self) -> int | str | None:
        """The tracker's version, else the policy's own, ``None`` where neither has one."""
        if self.tracker is not None:
            return self.tracker.version
        return next((part.policy_version for part in self._parts()), None)

    def increment_version(self) -> None:
        """Count a new version in both places."""
        if self.tracker is not None:
            self.tracker.increment_version()
        for part in self._parts():
            part.policy_version += 1

    def set_version(self, version: int) -> None:
        """Name the version that acts from now on, in both places.

        Args:
            version: its number.

        Raises:
            ConfigError: rows are stamped with random names, which have no number.
        """
        if self.tracker is not None:
            if not isinstance(self.tracker.version, int):
                raise ConfigError(
                    "versions that somebody else counts need PolicyVersion(int); this one names "
                    "each version at random"
                )
            self.tracker.version = version
        for part in self._parts():
            part.policy_version = version

    def load(self, source: WeightSource, version: int) -> list[WeightReceipt]:
        """Take weights from a source, into the policy's backend or else its module.

        Args:
            source: where they are.
            version: their number.

        Raises:
            ConfigError: the policy has neither in this process.
            WeightUpdateError: they did not arrive; the old ones and their version stay.
        """
        if self._backend is not None:
            receipts = self._backend.update_weights(source, version=version)
        else:
            receipts = [load_into(self.module, source, version=version)]
        self.set_version(version)
        return receipts

    def abort(self) -> None:
        """End the responses of the call under way, where the backend can."""
        if self._backend is not None:
            self._backend.abort()

    @property
    def counts_versions(self) -> bool:
        """Whether its weights may change within a call, because each token has its version."""
        return bool(getattr(getattr(self.policy, "backend", None), "counts_versions", False))

    @property
    def begins_to_count(self) -> bool:
        """Whether that becomes true with the first update."""
        return bool(getattr(getattr(self.policy, "backend", None), "begins_to_count", False))

    @property
    def module(self) -> nn.Module:
        """The module that holds the weights: the backend's, or the policy itself.

        Raises:
            ConfigError: they are not in this process.
        """
        if self._backend is not None and self._backend.module is not None:
            return self._backend.module
        return self.policy if isinstance(self.policy, nn.Module) else self.model

    def stamp(self, carrier: TensorDictBase) -> TensorDictBase:
        """Write the version into what the policy reads now.

        A version that was written a step earlier is not that of the weights that act: they may
        have changed since.

        Args:
            carrier: the environment's rows before the policy call.
        """
        return carrier if self.tracker is None else self.tracker(carrier)

    @property
    def model(self) -> nn.Module:
        """The model inside the policy.

        Raises:
            ConfigError: it is not in this process.
        """
        model = getattr(self.policy, "model", None)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"the policy, a {type(self.policy).__name__}, has no model in this process"
            )
        return model

    def state_dict(self) -> dict[str, Any]:
        """Both versions."""
        return {
            "tracked": None if self.tracker is None else self.tracker.version,
            "parts": [part.policy_version for part in self._parts()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken.

        Raises:
            CheckpointError: the policy has other parts.
        """
        if len(self._parts()) != len(state["parts"]):
            raise CheckpointError(
                f"{len(self._parts())} parts of the policy have a version, and "
                f"{len(state['parts'])} of the saved one had; build it as it was"
            )
        if self.tracker is not None and state["tracked"] is not None:
            self.tracker.version = state["tracked"]
        for part, version in zip(self._parts(), state["parts"], strict=True):
            part.policy_version = version
