"""Row ids that no two workers share: the source of ``group_id`` and ``traj_id``."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Annotated, Any

import torch
from torch import Tensor

from torchrl_llm._checked import In, checked

_COUNTER_BITS = 35
_INSTANCE_BITS = 12
_PROCESS_BITS = 16
_instances: dict[str, itertools.count] = {}
_numbers: list[tuple[int, int]] = []


@checked
def set_process_number(
    number: Annotated[int, In(f"[0, {2**_PROCESS_BITS})")],
    *,
    first: Annotated[int, In(f"[0, {2 ** (_COUNTER_BITS - 1)})")] = 0,
) -> None:
    """Set the number of this process in the ids of all counters that it creates later.

    Children of ``multiprocessing`` need no number. Without a number, all processes that were
    started differently (actors of Ray, other machines) count as the main one.

    Args:
        number: in ``[0, 2**16)``; the main process has 0, its children count from 1.
        first: first count, in ``[0, 2**34)``. If number and first are random, a resumed run does
            not use the ids of the earlier run again.

    Raises:
        ConfigError: for a number out of range.
    """
    _numbers[:] = [(number, first)]


def _own_worker_id(kind: str) -> int:
    # Children of one parent are numbered by multiprocessing; two levels are distinguished.
    identity = multiprocessing.current_process()._identity[-2:]
    process = sum(number % 256 * 256**level for level, number in enumerate(identity))
    process = _numbers[0][0] if _numbers else process
    instance = next(_instances.setdefault(kind, itertools.count()))
    return process << _INSTANCE_BITS | instance % 2**_INSTANCE_BITS


class IdCounter:
    """Consecutive int64 ids, ``worker_id * 2**35 + count``.

    Args:
        kind: name of the counted things; counters of different kinds are numbered separately.
        worker_id: number of the worker in ``[0, 2**28)``. ``None`` derives it from the process
            (children of ``multiprocessing`` are distinguished) and from the number of counters of
            this kind in the process. A derived number is not copied with the object: an environment
            that is pickled to several workers counts differently in each.

    Raises:
        ConfigError: for a ``worker_id`` out of range.

    Example:
        >>> counter = IdCounter("doc", worker_id=0)
        >>> counter.take(2).tolist(), counter.take(1).tolist()
        ([0, 1], [2])
    """

    @checked
    def __init__(
        self, kind: str, worker_id: Annotated[int, In(f"[0, {2**28})")] | None = None
    ) -> None:
        self.kind = kind
        # With a given worker_id, counts begin at 0.
        self.count = _numbers[0][1] if _numbers and worker_id is None else 0
        self._worker_id = worker_id
        self._derived = worker_id is None

    @property
    def worker_id(self) -> int:
        """The number of this worker."""
        if self._worker_id is None:
            self._worker_id = _own_worker_id(self.kind)
        return self._worker_id

    def next_id(self) -> int:
        """The next id."""
        self.count += 1
        return (self.worker_id << _COUNTER_BITS) + self.count - 1

    def take(self, num: int) -> Tensor:
        """Return the next ids.

        Args:
            num: number of ids.

        Returns:
            int64 ``[num]``.
        """
        first = (self.worker_id << _COUNTER_BITS) + self.count
        self.count += num
        return torch.arange(first, first + num)

    def state_dict(self) -> dict[str, Any]:
        """Worker and count, for an exact resume."""
        return {"worker_id": self.worker_id, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._worker_id, self.count = state["worker_id"], state["count"]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self._derived:
            state["_worker_id"] = None
        return state
