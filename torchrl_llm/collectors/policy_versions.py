"""Versions of a collector's policy, in rows and in the trace of tokens."""

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
    """Base class of the collectors: TorchRL's names for versions, weights and batch size."""

    @property
    @abstractmethod
    def policy_version(self) -> int | str | None:
        """The version of the weights; ``None`` if versions are not counted."""

    def get_policy_version(self) -> int | str | None:
        """Return :attr:`policy_version`, for callers that can only call methods."""
        return self.policy_version

    @property
    def total_dialog_turns(self) -> int:
        """Number of turns after which the collector ends; -1 for no end."""
        return self.total_frames

    @property
    def dialog_turns_per_batch(self) -> int:
        """Number of turns of a batch."""
        return self.requested_frames_per_batch

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
        state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Send weights to the sampler and count a new version.

        Args:
            policy_or_weights: the trained module, its state dict, or a tensordict of its weights.
                Without arguments, the weights must already be in place, and only the version is
                incremented.
            weights: TorchRL's name for the same argument.
            policy: a further name for it.
            state_dict: a further name for it.

        Raises:
            ConfigError: more than one source is given, or the weights do not belong to the policy.
            WeightUpdateError: the weights did not arrive; the version is unchanged.
        """
        named = (policy_or_weights, weights, policy, state_dict)
        given = [each for each in named if each is not None]
        if len(given) > 1:
            raise ConfigError("pass the weights once")
        self._update(given[0] if given else None)

    def set_weight_updater(self, weight_updater: Any) -> bool:
        """Replace the updater; return ``True``, as in TorchRL.

        Args:
            weight_updater: see the arguments of the class.
        """
        self.weight_updater = weight_updater
        return True

    @abstractmethod
    def _update(self, weights: Weights | None) -> None:
        """Send weights and count a new version."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # An error in the block has precedence over an error of the collector.
        self.shutdown(raise_on_error=error is None)


class VersionedPolicy:
    """A policy and the version of its weights, which is stored in two places.

    Args:
        policy: module from tensordict to tensordict. Submodules with an integer ``policy_version``
            write it into the trace of their sampled tokens.
        track: write the version into rows, with a new
            :class:`~torchrl_llm.envs.transforms.PolicyVersion` (``True``) or the given one.
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
        """The tracker's version, or else the policy's; ``None`` if neither has a version."""
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
        """Set the current version in both places.

        Args:
            version: the version number.

        Raises:
            ConfigError: rows carry random version names instead of numbers.
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
        """Load weights from a source into the policy's backend, or else into its module.

        Args:
            source: source of the weights.
            version: their number.

        Raises:
            ConfigError: the policy has neither backend nor module in this process.
            WeightUpdateError: the weights did not arrive; the old weights and their version stay.
        """
        if self._backend is not None:
            receipts = self._backend.update_weights(source, version=version)
        else:
            receipts = [load_into(self.module, source, version=version)]
        self.set_version(version)
        return receipts

    def abort(self) -> None:
        """Stop the responses of the current call, if the backend supports it."""
        if self._backend is not None:
            self._backend.abort()

    @property
    def counts_versions(self) -> bool:
        """Whether weights may change within a call, because each token carries its version."""
        return bool(getattr(getattr(self.policy, "backend", None), "counts_versions", False))

    @property
    def begins_to_count(self) -> bool:
        """Whether :attr:`counts_versions` becomes true with the first update."""
        return bool(getattr(getattr(self.policy, "backend", None), "begins_to_count", False))

    @property
    def module(self) -> nn.Module:
        """The module with the weights: the backend's module, or the policy itself.

        Raises:
            ConfigError: the weights are not in this process.
        """
        if self._backend is not None and self._backend.module is not None:
            return self._backend.module
        return self.policy if isinstance(self.policy, nn.Module) else self.model

    def stamp(self, carrier: TensorDictBase) -> TensorDictBase:
        """Write the version into the input of the policy.

        This is done at each step, because the weights may have changed since the last step.

        Args:
            carrier: the environment's rows before the policy call.
        """
        return carrier if self.tracker is None else self.tracker(carrier)

    @property
    def model(self) -> nn.Module:
        """Return the model inside the policy.

        Raises:
            ConfigError: the model is not in this process.
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
        """Restore the state of :meth:`state_dict`.

        Raises:
            CheckpointError: the policy is built from different parts.
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
