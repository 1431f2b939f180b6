"""Selectors: which trajectories of a group take part at all.

A selector is any function from the trajectories of a group to one flag each. What it leaves out
enters no statistic, is not written, and is counted as filtered; of a group with fewer than two left
nothing is written. Every :class:`~torchrl_llm.data.replay_buffers.GroupTransform` takes selectors,
so every rule of credit does::

    MCAdvantage(8, selectors=[drop_truncated])

Whole groups are judged by their returns with ``keep_zero_variance`` and ``keep_return_bounds`` of
the rules that compare returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.data.wire import leaf

Selector = Callable[[Sequence[Trajectory]], Sequence[bool]]
"""One flag for each trajectory of a group: whether it takes part."""


def drop_truncated(group: Sequence[Trajectory]) -> list[bool]:
    """Leave out episodes that were cut (``truncated`` and not ``terminated``).

    Args:
        group: trajectories of one group.

    Returns:
        True where the episode came to an end of its own.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(next={"done": True, "truncated": True, "terminated": False})
        >>> drop_truncated([Trajectory([row])])
        [False]
    """
    return [not trajectory.truncated for trajectory in group]


def drop_incomplete(group: Sequence[Trajectory]) -> list[bool]:
    """Leave out trajectories with a response that its length limit cut.

    Args:
        group: trajectories of one group.

    Returns:
        True where every turn's ``("tokens", "finish_reason")`` is another than ``length``.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(tokens={"finish_reason": int(FinishReason.LENGTH)})
        >>> drop_incomplete([Trajectory([row]), Trajectory([TensorDict()])])
        [False, True]
    """
    return [
        all(
            (reason := leaf(row, ("tokens", "finish_reason"))) is None
            or int(reason) != FinishReason.LENGTH
            for row in trajectory.rows
        )
        for trajectory in group
    ]
