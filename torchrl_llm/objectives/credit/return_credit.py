"""Advantages without a group: a constant, the returns of an episode, a critic's values.

These estimators need no group. They write a trajectory as soon as it is done or, with statistics
over a batch, as soon as the batch is complete.

Shape legend: ``T`` tokens of a row, ``R`` of its response, ``N`` sampled tokens of all episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._checked import In, checked
from torchrl_llm._registry import register
from torchrl_llm.data.nodes import leaf, set_copied
from torchrl_llm.data.replay_buffers.grouping import drop_truncated
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory, as_path
from torchrl_llm.errors import DataError
from torchrl_llm.functional import batch_normalize, gae
from torchrl_llm.functional.advantages import discounted_returns
from torchrl_llm.objectives.credit.comparing import TrajectoryReturn, trajectory_returns
from torchrl_llm.objectives.credit.credit_assigner import (
    BatchStatistics,
    CreditAssigner,
    CreditOptions,
    along_tokens,
    per_trajectory,
    sampled_in_response,
)


@register("advantages", "constant")
class ConstantCredit(CreditAssigner):
    """The same advantage for every row, as in supervised learning on the samples.

    Args:
        value: the advantage; with float64 rewards it is stored as float64.
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
        """Return the advantages of one trajectory; see the class."""
        # float64, as in all estimators; the written column has the dtype of the reward.
        value = torch.full((1, 1), self.value, dtype=torch.float64)
        return [[value.clone() for _ in t.rows] for t in group]


@register("advantages", "episodic")
class EpisodicReturn(CreditAssigner):
    """The return of the whole episode as the advantage of each of its rows, without a baseline.

    Args:
        trajectory_return: how the return is computed from the rewards of the turns: sum, max, mean
            or last.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for an unknown ``trajectory_return``.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(next={"reward": torch.ones(1, 1), "done": torch.ones(1).bool()})
        >>> EpisodicReturn().inv(torch.stack([row]))["advantage"].item()
        1.0
    """

    @checked
    def __init__(
        self, *, trajectory_return: TrajectoryReturn = "sum", **options: Unpack[CreditOptions]
    ) -> None:
        super().__init__(1, **options)
        self.trajectory_return = trajectory_return

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Return the advantages of one trajectory; see the class."""
        return per_trajectory([group], trajectory_returns(group, self.trajectory_return))[0]


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

    reads_tokens = True

    def __init__(self, **options: Unpack[CreditOptions]) -> None:
        super().__init__(1, **options)

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Return the advantages of one trajectory; see the class."""
        for trajectory in group:
            _check_turns(trajectory, "the reward of each turn")
        return [
            [along_tokens(row, reward) for row, reward in zip(t.rows, t.rewards, strict=True)]
            for t in group
        ]


@register("advantages", "monte_carlo")
class MonteCarloReturn(CreditAssigner):
    r"""Discounted return from each turn on: :math:`A_t = G_t = r_t + \gamma G_{t+1}`.

    The discount applies once per *environment step*. There is no discount between rows with the
    same ``"env_step"`` (a turn that called tools and the turn after it, or several model calls in
    one step), nor between the tokens of a response. (Ludic discounts once per model call.) Without
    that column, steps are identified by ``"turn"`` and ``("next", "tools", "auxiliary")``. With
    rewards per token, the return of a token starts with its own reward.

    A truncated episode lacks the rewards after the cut. Treating it as ended is correct only if
    running out of time is a failure.

    Args:
        gamma: discount from one step to the next.
        truncated: how truncated episodes are handled: ``"keep"`` treats them as ended, ``"drop"``
            does not write them, ``"bootstrap"`` adds a critic's value of the state after the cut.
        value_key: key of the critic's value, one number per row; ``"bootstrap"`` reads it from the
                last row.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for impossible arguments.
        DataError: when a value is missing, or the turns have already been joined.

    Example:
        >>> from tensordict import TensorDict
        >>> def turn(reward, done):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.tensor([done])}
        ...     return TensorDict(next=next_, traj_id=torch.tensor(0))
        >>> rows = torch.stack([turn(0.0, False), turn(1.0, True)])
        >>> MonteCarloReturn(0.5).inv(rows)["advantage"].flatten().tolist()
        [0.5, 1.0]
    """

    reads_tokens = True

    @checked
    def __init__(
        self,
        gamma: Annotated[float, In("[0, 1]")] = 1.0,
        *,
        truncated: Literal["keep", "drop", "bootstrap"] = "keep",
        value_key: NestedKey = ("next", "state_value"),
        **options: Unpack[CreditOptions],
    ) -> None:
        super().__init__(1, **_with_cuts(truncated, options))
        self.gamma, self.truncated, self.value_key = gamma, truncated, value_key

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Return the advantages of one trajectory; see the class."""
        return [
            [along_tokens(*pair) for pair in zip(t.rows, self._to_go(t), strict=True)]
            for t in group
        ]

    def _to_go(self, trajectory: Trajectory) -> list[Tensor]:
        behind = _value_behind(trajectory, self.truncated, self.value_key)
        return returns_to_go(trajectory, self.gamma, behind.item())


def _with_cuts(truncated: str, options: CreditOptions) -> CreditOptions:
    """Add a selector that drops truncated episodes to the options of an estimator."""
    if truncated != "drop":
        return options
    return {**options, "selectors": (*options.get("selectors", ()), drop_truncated)}


def _value_behind(trajectory: Trajectory, truncated: str, key: NestedKey) -> Tensor:
    """Return the value of the state after a cut; 0 if the episode counts as ended."""
    if truncated != "bootstrap" or not trajectory.goes_on:
        return torch.zeros(())
    value = leaf(trajectory.rows[-1], as_path(key))
    if value is None or value.numel() != 1 or not bool(value.isfinite().all()):
        raise DataError(
            "an episode was cut, and truncated='bootstrap' needs the value of the state behind "
            f"the cut, a finite number at {key!r} of its last row, and got {value}; "
            "RetrieveValues writes it, or choose keep or drop"
        )
    return value.reshape(())


def returns_to_go(trajectory: Trajectory, gamma: float, bootstrap: float = 0.0) -> list[Tensor]:
    """Compute the discounted return from each turn on, or from each token if rewards are per token.

    Args:
        trajectory: the episode. Its rows are grouped into steps by ``"env_step"`` if present,
            otherwise by ``"turn"``; then a row that called tools belongs to the turn of the next
            row.
        gamma: discount from one step to the next.
        bootstrap: value of the state after the last turn.

    Returns:
        One float64 tensor ``[1]`` or ``[R]`` per row.

    Raises:
        DataError: when the turns were joined into one row, because the return after each turn is
            lost.
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
    """Indices of the rows of each step of the environment."""
    steps = [leaf(row, ("env_step",)) for row in trajectory.rows]
    counted = all(step is not None for step in steps)
    numbers = steps if counted else [leaf(row, ("turn",)) for row in trajectory.rows]
    turn, last = [0], numbers[0]
    for i, number in enumerate(numbers[1:], 1):
        same = number is not None and last is not None and torch.equal(number, last)
        if not same and (counted or not _thought(trajectory.rows[i - 1])):
            yield turn
            turn = []
        turn.append(i)
        last = number
    yield turn


def _thought(row: TensorDictBase) -> bool:
    """Whether a row only called tools; such a row is not a step of the environment."""
    auxiliary = leaf(row, ("next", "tools", "auxiliary"))
    return auxiliary is not None and bool(auxiliary.all())


def _check_turns(trajectory: Trajectory, what: str, *, discounted: bool = False) -> None:
    for row, reward in zip(trajectory.rows, trajectory.rewards, strict=True):
        joined = leaf(row, ("num_turns",))
        if joined is not None and int(joined) > 1 and (discounted or reward.numel() == 1):
            raise DataError(
                f"{what} is lost in a row of {int(joined)} joined turns: append JoinTurns to the "
                "buffer before the advantage estimator, so that it runs after it"
            )


@register("advantages", "gae")
class GAEAdvantage(BatchStatistics):
    r"""PPO's advantage estimator: computes advantages of tokens from a critic's values.

    arXiv:1506.02438 equation 16. Every sampled token of an episode is a step. Tokens of tools and
    templates between two turns belong to the state of the next token and are not discounted. The
    reward of a turn goes to its last sampled token; rewards per token (a KL term in the reward,
    :class:`~torchrl_llm.envs.transforms.KLRewardTransform`) go to their tokens. See
    :func:`~torchrl_llm.functional.gae`.

    :class:`~torchrl_llm.envs.transforms.RetrieveValues` writes the values. Append it to the buffer
    after this estimator, because the transform appended last runs first::

        buffer.append_transform(JoinTurns())
        buffer.append_transform(GAEAdvantage())
        buffer.append_transform(RetrieveValues(policy))

    It also writes the critic's target, the TD(lambda) return, under ``value_target_key``.
    :class:`~torchrl_llm.objectives.PPOLoss` reads it and the advantage.

    Args:
        gamma: discount per token; with 1 (usual) a reward at the end does not shrink with the
            length.
        lmbda: decay of the estimate; 1 is the return minus the value.
        normalize: standardise the advantages over all sampled tokens of a batch with the
            ``"sample"`` or ``"population"`` deviation; ``"none"`` leaves the advantages unchanged.
            Value targets are never standardised.
        batch_size: episodes per batch, see
            :class:`~torchrl_llm.objectives.credit.credit_assigner.BatchStatistics`.
        truncated: how truncated episodes are handled: ``"bootstrap"`` adds the value of the state
            after the cut, ``"keep"`` treats them as ended, ``"drop"`` does not write them.
        values_key: key of the value of the state before each token, ``[T]``.
        final_value_key: key of the value of the state after a cut, one number, read from the last
                row.
        value_target_key: key of the targets, ``[T]``, 0 at tokens that were not sampled.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for impossible arguments.
        DataError: when values are missing or their number differs from the number of tokens.

    Example:
        >>> row = TensorDict(
        ...     tokens={"full": torch.arange(3), "response": torch.arange(1, 3)},
        ...     values={"full": torch.tensor([0.0, 0.5, 0.25])},
        ...     next={"reward": torch.ones(1, 1), "done": torch.ones(1).bool()})
        >>> rows = GAEAdvantage(normalize="none").inv(torch.stack([row]))
        >>> rows["advantage"].flatten().tolist(), rows["value_target", "full"].flatten().tolist()
        ([0.0, 0.5, 0.75], [0.0, 1.0, 1.0])
    """

    reads_tokens = True

    @checked
    def __init__(
        self,
        *,
        gamma: Annotated[float, In("[0, 1]")] = 1.0,
        lmbda: Annotated[float, In("[0, 1]")] = 1.0,
        normalize: Literal["sample", "population", "none"] = "sample",
        batch_size: int | None = None,
        truncated: Literal["bootstrap", "keep", "drop"] = "bootstrap",
        values_key: NestedKey = ("values", "full"),
        final_value_key: NestedKey = ("next", "state_value"),
        value_target_key: NestedKey = ("value_target", "full"),
        **options: Unpack[CreditOptions],
    ) -> None:
        super().__init__(1, batch_size=batch_size, **_with_cuts(truncated, options))
        self.gamma, self.lmbda = gamma, lmbda
        self.normalize, self.truncated = normalize, truncated
        self.values_key, self.final_value_key = values_key, final_value_key
        self.value_target_key = value_target_key

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]] | None]:
        """Return the advantages of a batch's tokens; also write the value targets into its rows."""
        episodes = [trajectory for group in groups for trajectory in group]
        steps = self._steps(episodes)
        result = gae(
            steps.rewards,
            steps.values,
            steps.episode,
            gamma=self.gamma,
            lmbda=self.lmbda,
            bootstrap_S=torch.stack(
                [_value_behind(t, self.truncated, self.final_value_key) for t in episodes]
            ),
        )
        advantage = result.advantage
        if self.normalize != "none":
            advantage = batch_normalize(advantage, normalize=self.normalize)
        rows = [row for trajectory in episodes for row in trajectory.rows]
        targets = _columns(rows, steps.sampled, result.target)
        for row, target in zip(rows, targets, strict=True):
            set_copied(row, as_path(self.value_target_key), target)
        columns = iter(_columns(rows, steps.sampled, advantage))
        return [[[next(columns)[:, None] for _ in t.rows] for t in group] for group in groups]

    def _steps(self, episodes: list[Trajectory]) -> _Steps:
        sampled, values, rewards, places, counts = [], [], [], [], []
        seen = 0
        for trajectory in episodes:
            start = seen
            for row, reward in zip(trajectory.rows, trajectory.rewards, strict=True):
                value, mask = self._value_and_mask(row)
                sampled.append(mask)
                values.append(value)
                rewards.append(reward.reshape(-1))
                places.append(_places(seen, mask.shape[0], reward.numel()))
                seen += mask.shape[0]
            counts.append(seen - start)
        mask = torch.cat(sampled)
        episode = torch.repeat_interleave(torch.tensor(counts))
        found = torch.cat(values)[mask]
        if not bool(found.isfinite().all()):
            raise DataError(f"{self.values_key!r} is NaN or infinite at sampled tokens")
        given = torch.cat(rewards)
        dtype = torch.promote_types(found.dtype, torch.promote_types(given.dtype, torch.float32))
        of_reward = torch.repeat_interleave(
            torch.tensor([sum(r.numel() for r in t.rewards) for t in episodes])
        )
        collected = _on_steps(given.to(dtype), torch.cat(places), of_reward, mask, episode[mask])
        return _Steps(collected, found.to(dtype), episode[mask], sampled)

    def _value_and_mask(self, row: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the values along a row's response, and which of its tokens were sampled."""
        full, response = leaf(row, ("tokens", "full")), leaf(row, ("tokens", "response"))
        if full is None or response is None:
            raise DataError(
                'GAEAdvantage needs ("tokens", "full") and ("tokens", "response"), which the '
                "policy writes"
            )
        value = leaf(row, as_path(self.values_key))
        if value is None or value.shape != full.shape:
            raise DataError(
                f"GAEAdvantage needs {self.values_key!r}, a value for each of the "
                f"{full.shape[0]} tokens of a row, and got "
                f"{None if value is None else tuple(value.shape)}; append "
                "RetrieveValues(policy) to the buffer after it"
            )
        return value[full.shape[0] - response.shape[0] :], sampled_in_response(row)


class _Steps(NamedTuple):
    """The sampled tokens of a batch of episodes, concatenated.

    Attributes:
        rewards: ``[N]``.
        values: ``[N]``.
        episode: int64 ``[N]``.
        sampled: per row, which tokens of its response were sampled, bool ``[R]``.
    """

    rewards: Tensor
    values: Tensor
    episode: Tensor
    sampled: list[Tensor]


def _places(start: int, size: int, count: int) -> Tensor:
    """Return the positions of a row's rewards in the concatenated responses of all rows."""
    if count == 1 or not size:
        # The reward of an empty response goes to the position just before it.
        return torch.full((count,), start + size - 1)
    if count != size:
        raise DataError(
            f"a row has {count} rewards and a response of {size} tokens: there must be one "
            "reward, or one per token"
        )
    return torch.arange(start, start + size)


def _on_steps(
    rewards: Tensor, places: Tensor, of_reward: Tensor, mask_L: Tensor, of_step: Tensor
) -> Tensor:
    """Return the rewards of the steps ``[N]``.

    A reward at a position without a sampled token (a tool result, an empty response) goes to the
    last sampled token before it. At the beginning of an episode it goes to the first sampled token.
    In an episode without sampled tokens it is dropped.
    """
    steps = torch.zeros_like(of_step, dtype=rewards.dtype)
    if not of_step.numel():
        return steps
    before = torch.cat([mask_L.new_zeros(1, dtype=torch.int64), mask_L.cumsum(0)])
    step = before[places + 1] - 1
    first = torch.searchsorted(of_step, of_reward)
    step = torch.maximum(step, first).clamp(max=of_step.shape[0] - 1)
    own = of_step[step] == of_reward
    return steps.index_add(0, step[own], rewards[own])


def _columns(rows: list[TensorDict], sampled: list[Tensor], steps_N: Tensor) -> list[Tensor]:
    """Put the values of the steps at their places in ``tokens.full`` of each row, 0 elsewhere."""
    lengths = [row.get(("tokens", "full")).shape[0] for row in rows]
    sizes = [mask.shape[0] for mask in sampled]
    ends = torch.tensor(lengths).cumsum(0)
    shift = ends - torch.tensor(sizes).cumsum(0)
    responses = torch.cat(sampled).nonzero()[:, 0]
    index = responses + torch.repeat_interleave(shift, torch.tensor(sizes))[responses]
    flat = steps_N.new_zeros(sum(lengths)).index_put((index,), steps_N)
    return [part.clone() for part in flat.split(lengths)]
