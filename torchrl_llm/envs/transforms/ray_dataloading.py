"""One data loader for many environments: one actor draws the rows for all of them.

With a loader in each collector, each collector would read all data itself, and would have to sample
all repeats of a prompt. With this transform every prompt is drawn once, and its repeats go to
whichever environments start conversations next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_llm._ray import ActorOptions, RemoteObject, require_ray
from torchrl_llm._registry import FullSignature
from torchrl_llm.envs.transforms.dataloading import DataLoadingPrimer
from torchrl_llm.errors import ConfigError

# Group ids of actors begin after the ids of ordinary processes.
_worker_ids = itertools.count(2**28 - 1, -1)


class _Source:
    """The object in the actor: a primer without an environment."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._primer = DataLoadingPrimer(**options)
        self._num_drawn = 0

    def first_row(self) -> Mapping[str, Any]:
        return self._primer._first_row()

    def draw(self, num: int) -> tuple[list[Mapping[str, Any]], Tensor]:
        drawn = self._primer._draw(num)
        self._num_drawn += num
        return drawn

    def first_epoch(self) -> int | None:
        return self._primer.first_epoch

    def order(self, method: str, *args: Any) -> Any:
        return getattr(self._primer.order, method)(*args)

    def restart(self, seed: int | None) -> None:
        self._primer.reset_dataloader(seed)
        self._num_drawn = 0

    def state(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn, "primer": self._primer.get_extra_state()}

    def load(self, state: Mapping[str, Any]) -> None:
        # Each environment saved the shared state at a different time; the latest holds for all.
        if state["num_drawn"] >= self._num_drawn:
            self._primer.set_extra_state(state["primer"])
            self._num_drawn = state["num_drawn"]


class RemoteOrder:
    """The order of the rows in an actor: its methods run there.

    It has the methods of :class:`~torchrl_llm.data.row_order.RowOrder`.

    Args:
        source: the actor.
    """

    def __init__(self, source: RemoteObject) -> None:
        self._source = source

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """A method, to be called."""
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._source.call, "order", method)


def _no_loader() -> Iterable[Any]:
    raise ConfigError("the rows of a RayDataLoadingPrimer come from its actor")


class RayDataLoadingPrimer(DataLoadingPrimer):
    """A :class:`DataLoadingPrimer` whose rows come from one Ray actor, for many environments.

    Make it in the process that starts the collectors, and send copies to them: copies can be
    pickled and use the same actor. Or make one in each collector with the same ``actor_name``: the
    first one starts the actor, which ends with the process of this collector.

    Group ids are unique over all of them, and the conversations of a group may be sampled by
    different collectors: write their rows into one buffer, or into buffers that share a
    :class:`~torchrl_llm.objectives.RayMCAdvantage`.

    Args:
        dataloader: see :class:`DataLoadingPrimer`; sent to the actor.
        dataloader_factory: see :class:`DataLoadingPrimer`; called in the actor.
        batch_size: see :class:`DataLoadingPrimer`.
        repeats: see :class:`DataLoadingPrimer`.
        actor_name: name of the actor in the cluster; without a name only copies share it.
        num_cpus: CPUs that the actor holds.
        num_gpus: GPUs that it holds.
        timeout_s: maximum number of seconds of a draw.
        worker_id: begins the group ids, see ``IdCounter``.
        kwargs: further arguments of :class:`DataLoadingPrimer`. With ``group_repeats`` every reset
            draws whole groups.

    Raises:
        ConfigError: for impossible arguments.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has no CPU for the actor.
        WorkerError: the actor did not start or answer in time, or died.

    Environments save the position of the shared loader with their own state. When several are
    restored, the latest position is used.
    """

    __signature__ = FullSignature()

    def __init__(
        self,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        batch_size: int | torch.Size | None = None,
        repeats: int | None = None,
        actor_name: str | None = None,
        num_cpus: float = 0.0,
        num_gpus: float = 0,
        timeout_s: float = 60.0,
        worker_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        require_ray("RayDataLoadingPrimer")
        if (dataloader is None) == (dataloader_factory is None):
            raise ConfigError("pass exactly one of dataloader and dataloader_factory")
        super().__init__(dataloader_factory=_no_loader, repeats=repeats, **kwargs)
        options = {
            "dataloader": dataloader,
            "dataloader_factory": dataloader_factory,
            "batch_size": batch_size,
            "repeats": repeats,
            "worker_id": next(_worker_ids) if worker_id is None else worker_id,
        }
        self._source = RemoteObject(
            partial(_Source, options),
            ActorOptions(
                num_cpus=num_cpus, num_gpus=num_gpus, name=actor_name, timeout_s=timeout_s
            ),
            what=f"RayDataLoadingPrimer {actor_name or ''}".strip(),
        )

    @property
    def order(self) -> RemoteOrder:
        """The order of the rows in the actor, to record results."""
        return RemoteOrder(self._source)

    @property
    def first_epoch(self) -> int | None:
        """As in every primer, over the conversations of all environments."""
        return self._source.call("first_epoch")

    def _first_row(self) -> Mapping[str, Any]:
        if self._example is None:
            self._example = self._source.call("first_row")
        return self._example

    def _draw(self, num: int) -> tuple[list[Mapping[str, Any]], Tensor]:
        self._first_row()
        rows, ids = self._source.call("draw", num)
        return rows, ids.to(self.device)

    def reset_dataloader(self, seed: int | None = None) -> RayDataLoadingPrimer:
        """Restart the data for all environments, and drop repeats that have not started yet.

        Args:
            seed: a new seed, for loaders whose ``reset`` takes one.
        """
        self._source.call("restart", seed)
        return self

    def shutdown(self) -> None:
        """End the actor; no copy can draw any more."""
        self._source.shutdown()

    def get_extra_state(self) -> dict[str, Any]:
        """Position of the shared loader, repeats that have not started, and the group counter."""
        return self._source.call("state")

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken, unless the loader is already further.

        Args:
            state: a saved state; the latest of several is used.
        """
        self._source.call("load", dict(state))
