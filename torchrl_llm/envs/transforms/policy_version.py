"""Version of the policy that acted: :class:`PolicyVersion` writes it into every row."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import Transform

from torchrl_llm.data.column import Column
from torchrl_llm.errors import ConfigError

_MOST_CHANGES = 10_000


class VersionChange(NamedTuple):
    """A change from one version to the next.

    Attributes:
        timestamp: time of the change.
        old_version: the version before; ``None`` for the first.
        new_version: the version from then on.
    """

    timestamp: datetime
    old_version: str | int | None
    new_version: str | int


class PolicyVersion(Transform):
    """Writes ``"policy_version"`` at reset and step.

    Code that changes the policy's weights calls :meth:`increment_version`, as
    :class:`~torchrl_llm.collectors.LLMCollector` does. The version of a transition is the version
    of its root: the version when the policy was called.

    Args:
        version_type: ``int`` or ``"int"`` counts from 0, int64 ``[B]``; ``str`` or ``"uuid"`` gives
            each version a random name, a string per row.

    Attributes:
        version: the current version; a new one may be set.
        version_history: the latest 10,000 changes, the oldest first.

    Raises:
        ConfigError: for an unknown type.

    Example:
        >>> version = PolicyVersion(int)
        >>> version.increment_version()
        >>> version.version
        1
    """

    def __init__(self, version_type: type | Literal["int", "uuid"] = int) -> None:
        super().__init__()
        if version_type not in (int, str, "int", "uuid"):
            raise ConfigError(f'version_type must be int or "uuid", got {version_type!r}')
        self.version_type = version_type
        self._version: int | str | None = None
        self.version_history: deque[VersionChange] = deque(maxlen=_MOST_CHANGES)
        self.version = 0 if version_type in (int, "int") else str(uuid.uuid4())

    @property
    def version(self) -> int | str:
        """The current version."""
        return self._version  # type: ignore[return-value]

    @version.setter
    def version(self, version: int | str) -> None:
        self.version_history.append(VersionChange(datetime.now(), self._version, version))
        self._version = version

    def increment_version(self) -> None:
        """Set the next version: the next number, or a new random name."""
        self.version = str(uuid.uuid4()) if isinstance(self.version, str) else self.version + 1

    def _stamp(self, td: TensorDictBase) -> TensorDictBase:
        size = td.batch_size.numel()
        if isinstance(self.version, str):
            td.set("policy_version", Column.of([self.version] * size))
        else:
            value = torch.full(td.batch_size, self.version, dtype=torch.int64, device=td.device)
            td.set("policy_version", value)
        return td

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._stamp(next_tensordict)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._stamp(tensordict_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stamp rows outside an environment."""
        return self._stamp(tensordict)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ``policy_version``."""
        shape, device = observation_spec.shape, observation_spec.device
        observation_spec["policy_version"] = (
            Unbounded(shape=shape, dtype=torch.int64, device=device)
            if isinstance(self.version, int)
            else NonTensor(shape=shape, example_data="version", batched=True)
        )
        return observation_spec

    def get_extra_state(self) -> dict[str, Any]:
        """The current version."""
        return {"version": self.version}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved version."""
        self.version = state["version"]
