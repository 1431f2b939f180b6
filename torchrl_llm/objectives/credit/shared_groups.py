"""Credit over the buffers of several processes: the groups wait in one actor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.envs import Transform

from torchrl_llm._ray import ActorOptions, RemoteObject, require_ray
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.wire import PackedRows, own_rows, pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.credit.group_credit import MCAdvantage


class _Queues:
    """What runs in the actor."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.rule = MCAdvantage(**arguments)

    def push(self, packed: PackedRows) -> PackedRows | None:
        ready = self.rule._inv_call(lazy_rows(unpack_row_list(packed)))
        return None if ready is None else pack_rows(ready)


class RayMCAdvantage(Transform):
    """:class:`~torchrl_llm.objectives.MCAdvantage` whose groups wait in a Ray actor.

    For buffers in several processes that are fed with conversations of the same prompts: a buffer
    that has a part of a group only would wait for the rest for ever. Rows go to the actor as they
    are written, and the write that completes a group gets all of its rows, with advantages, into
    its own buffer.

    Make it once and send copies, which are picklable; or make it in each process with one
    ``actor_name``: the first one starts the actor, which ends with that process. One buffer that
    all collectors write into needs none of this.

    Args:
        grpo_size: trajectories of a group.
        prompt_key: see :class:`~torchrl_llm.objectives.MCAdvantage`.
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet.
        remote_config: what the actor needs, fields of ``ActorOptions``; no CPU by default.
        actor_name: name of the actor in the cluster; without one only copies share it.
        timeout_s: most seconds that a call may take.
        **options: the other arguments of :class:`~torchrl_llm.objectives.MCAdvantage`.

    Raises:
        ConfigError: for arguments that MCAdvantage refuses, or a copy by name that asks for others.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running.
        WorkerError: the actor did not start or answer in time, or died; what waited in it is lost.
    """

    adds_keys_only = True
    requires_shared_write_state = True

    def __init__(
        self,
        grpo_size: int,
        prompt_key: Any = None,
        *,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        actor_name: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__()
        ray = require_ray("RayMCAdvantage", running=ray_init_config is None)
        arguments = {"grpo_size": grpo_size, "prompt_key": prompt_key, **options}
        self.group_size = MCAdvantage(**arguments).group_size  # bad ones are refused here
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        config = {"num_cpus": 0.0, **(remote_config or {})}
        self._queues = RemoteObject(
            partial(_Queues, arguments),
            ActorOptions(name=actor_name, timeout_s=timeout_s, **config),
            what=f"RayMCAdvantage {actor_name or ''}".strip(),
        )
        size = self._queues.read("rule.group_size")
        if size != self.group_size:
            raise ConfigError(
                f"the actor {actor_name!r} was started for groups of {size}, and this is "
                f"RayMCAdvantage({self.group_size})"
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sampled rows pass through."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> LazyStackedTensorDict | None:
        if tensordict is None:
            return None
        ready = self._queues.call("push", pack_rows(row_list(tensordict)))
        return None if ready is None else lazy_rows(own_rows(unpack_row_list(ready)))

    def get_stats(self) -> dict[str, int]:
        """Counts of all writers together, as :meth:`MCAdvantage.get_stats` has them."""
        return self._queues.call("rule.get_stats")

    def reset_stats(self) -> None:
        """Count from zero; queues are left alone."""
        self._queues.call("rule.reset_stats")

    def clear_queues(self) -> int:
        """Give up groups that have not filled, of all writers; returns how many."""
        return self._queues.call("rule.clear_queues")

    def get_extra_state(self) -> dict[str, Any]:
        """Queues in wire form, and counts."""
        return self._queues.call("rule.get_extra_state")

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken, for all writers.

        Args:
            state: replaces what waits in the actor.
        """
        self._queues.call("rule.set_extra_state", dict(state))

    def shutdown(self) -> None:
        """End the actor; what waits in it is gone."""
        self._queues.shutdown()
