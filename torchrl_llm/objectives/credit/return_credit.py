"""Credit without comparison: what came after a turn, in the turn, or in the whole episode.

These rules need no group and write a trajectory as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Unpack

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.data.replay_buffers.group_selectors import drop_truncated
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory, as_path
from torchrl_llm.data.wire import leaf
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional.advantages import discounted_returns
from torchrl_llm.objectives.credit.comparing import (
    RETURNS,
    TrajectoryReturn,
    check_choice,
    trajectory_returns,
)
from torchrl_llm.objectives.credit.credit_assigner import (
    CreditAssigner,
    CreditOptions,
    along_tokens,
)


@register("advantages", "constant")
class ConstantCredit(CreditAssigner):
    """The same advantage for every row: supervised learning on what was sampled.

    Args:
        value: the advantage; a float64 reward keeps all of its digits.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(next={"reward": torch.zeros(1, 1), "done": torch.ones(1).bool()})
        >>> ConstantCredit(2.0).inv(torch.stack([row]))["advantage"].item()
        2.0
    """

    def __init__(self, value: float = 1.0, **options: Unpack[CreditOptions]) -> None:
        super().__init__(1, **options)
        self.value = float(value)

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Advantages of one trajectory; see the class."""
        # In float64, as all rules; what is written has the dtype of the reward.
        value = torch.full((1, 1), self.value, dtype=torch.float64)
        return [[value.clone() for _ in t.rows] for t in group]


@register("advantages", "episodic")
class EpisodicReturn(CreditAssigner):
    """The return of the whole episode as the advantage of each of its rows, without a baseline.

    Args:
        trajectory_return: the return from the rewards of the turns: sum, max, mean or last.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for an unknown ``trajectory_return``.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(next={"reward": torch.ones(1, 1), "done": torch.ones(1).bool()})
        >>> EpisodicReturn().inv(torch.stack([row]))["advantage"].item()
        1.0
    """

    def __init__(
        self, *, trajectory_return: TrajectoryReturn = "sum", **options: Unpack[CreditOptions]
    ) -> None:
        super().__init__(1, **options)
        check_choice("trajectory_return", trajectory_return, RETURNS)
        self.trajectory_return = trajectory_return

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Advantages of one trajectory; see the class."""
        returns = torch.unbind_copy(
            trajectory_returns(group, self.trajectory_return)[:, None, None]
        )
        return [[own] * len(t.rows) for t, own in zip(group, returns, strict=True)]


@register("advantages", "per_step")
class PerStepReward(CreditAssigner):
    """The reward of a turn, or of a token, as its own advantage.

    Args:
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(next={"reward": torch.ones(1, 1), "done": torch.ones(1).bool()})
        >>> PerStepReward().inv(torch.stack([row]))["advantage"].item()
        1.0
    """

    def __init__(self, **options: Unpack[CreditOptions]) -> None:
        super().__init__(1, **options)

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Advantages of one trajectory; see the class."""
        for trajectory in group:
            _check_turns(trajectory, "the reward of each turn")
        return [
            [along_tokens(row, reward) for row, reward in zip(t.rows, t.rewards, strict=True)]
            for t in group
        ]


@register("advantages", "monte_carlo")
class MonteCarloReturn(CreditAssigner):
    r"""What came after: :math:`A_t = G_t = r_t + \gamma G_{t+1}` over the turns of an episode.

    The discount is one *environment turn*: rows with the same ``"turn"`` (several calls of the
    model within one) are not discounted against each other, nor are a turn that thought with tools
    (``("next", "tools", "auxiliary")``) and the one behind it, nor the tokens of a response. (The
    reference of Ludic discounts once a call.) Rewards per token give each token what comes after
    it.

    An episode that was cut has lost the rewards behind the cut: treating it as ended there is right
    only where running out of time is a failure.

    Args:
        gamma: discount from one turn to the next.
        truncated: episodes that were cut: ``"keep"`` takes them as ended, ``"drop"`` does not write
            them, ``"bootstrap"`` adds a critic's value of the state behind the cut.
        value_key: that value, a number a row, read of the last row for ``"bootstrap"``.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for impossible arguments.
        DataError: a value is missing, or rows were joined before.

    Example:
        >>> from tensordict import TensorDict
        >>> def turn(reward, done):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.tensor([done])}
        ...     return TensorDict(next=next_, traj_id=torch.tensor(0))
        >>> rows = torch.stack([turn(0.0, False), turn(1.0, True)])
        >>> MonteCarloReturn(0.5).inv(rows)["advantage"].flatten().tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        gamma: float = 1.0,
        *,
        truncated: Literal["keep", "drop", "bootstrap"] = "keep",
        value_key: NestedKey = ("next", "state_value"),
        **options: Unpack[CreditOptions],
    ) -> None:
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma must be in [0, 1], got {gamma}")
        check_choice("truncated", truncated, ("keep", "drop", "bootstrap"))
        super().__init__(1, **options)
        self.gamma, self.truncated, self.value_key = gamma, truncated, value_key

    def select(self, group: list[Trajectory]) -> list[Trajectory]:
        """Without cut episodes where they are dropped."""
        group = super().select(group)
        if self.truncated != "drop":
            return group
        return [t for t, kept in zip(group, drop_truncated(group), strict=True) if kept]

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Advantages of one trajectory; see the class."""
        return [
            [
                along_tokens(row, values)
                for row, values in zip(
                    t.rows, returns_to_go(t, self.gamma, self._bootstrap(t)), strict=True
                )
            ]
            for t in group
        ]

    def _bootstrap(self, trajectory: Trajectory) -> float:
        if self.truncated != "bootstrap" or not trajectory.truncated:
            return 0.0
        value = leaf(trajectory.rows[-1], as_path(self.value_key))
        if value is None or value.numel() != 1 or not bool(value.isfinite().all()):
            raise DataError(
                "truncated='bootstrap' needs the value of the state behind the cut, a finite "
                f"number at {self.value_key!r} of the last row, and got {value}; let a critic "
                "write it, or choose keep or drop"
            )
        return value.item()


def returns_to_go(trajectory: Trajectory, gamma: float, bootstrap: float = 0.0) -> list[Tensor]:
    """What comes after each turn, or after each token where rewards are per token.

    Args:
        trajectory: with one row a turn, or rows of one turn with the same ``"turn"``; a row that
            thought with tools is one turn with the next.
        gamma: discount from one turn to the next.
        bootstrap: value of the state behind the last turn.

    Returns:
        For each row float64 ``[1]``, or ``[R]``.

    Raises:
        DataError: turns were joined into one row, so what came after each is lost.
    """
    _check_turns(trajectory, "the return after each turn", discounted=gamma != 1)
    turns = list(_turns(trajectory))
    totals = torch.tensor(
        [sum(trajectory.totals[i] for i in turn) for turn in turns], dtype=torch.float64
    )
    returns = discounted_returns(totals, gamma, bootstrap=bootstrap)
    after = [*(gamma * returns[1:]).unbind(), torch.tensor(gamma * bootstrap, dtype=torch.float64)]
    to_go: list[Tensor] = []
    for turn, following in zip(reversed(turns), reversed(after), strict=True):
        for i in reversed(turn):
            reward = trajectory.rewards[i].reshape(-1).double()
            values = reward.flip(0).cumsum(0).flip(0) + following
            to_go.append(values)
            following = values[0] if values.numel() else following
    return to_go[::-1]


def _turns(trajectory: Trajectory) -> Iterator[list[int]]:
    """Indices of the rows of each environment turn."""
    turn, last = [0], leaf(trajectory.rows[0], ("turn",))
    for i, row in enumerate(trajectory.rows[1:], 1):
        number = leaf(row, ("turn",))
        same = number is not None and last is not None and torch.equal(number, last)
        if not same and not _thought(trajectory.rows[i - 1]):
            yield turn
            turn = []
        turn.append(i)
        last = number
    yield turn


def _thought(row: TensorDictBase) -> bool:
    """Whether a row did nothing but think with tools, which is no step of the environment."""
    auxiliary = leaf(row, ("next", "tools", "auxiliary"))
    return auxiliary is not None and bool(auxiliary.all())


def _check_turns(trajectory: Trajectory, what: str, *, discounted: bool = False) -> None:
    for row, reward in zip(trajectory.rows, trajectory.rewards, strict=True):
        joined = leaf(row, ("num_turns",))
        if joined is not None and int(joined) > 1 and (discounted or reward.numel() == 1):
            raise DataError(
                f"{what} is lost in a row of {int(joined)} joined turns: append JoinTurns to the "
                "buffer before the rule of credit, so that it runs after it"
            )
