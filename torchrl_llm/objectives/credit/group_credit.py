"""Advantages relative to the group or the batch: GRPO, RLOO, ScaleRL, REINFORCE++.

:class:`RayMCAdvantage` is GRPO's estimator for buffers in several processes; incomplete groups wait
in one Ray actor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import Transform

from torchrl_llm import functional as F
from torchrl_llm._checked import Ge, In, check, checked
from torchrl_llm._ray import ActorOptions, RemoteObject, require_ray
from torchrl_llm._registry import FullSignature, register
from torchrl_llm.data.nodes import own_rows
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.wire import PackedRows, pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.credit.comparing import (
    ComparingCredit,
    ComparingOptions,
    GroupSize,
    TrajectoryReturn,
    check_deviation,
)
from torchrl_llm.objectives.credit.credit_assigner import (
    BatchStatistics,
    along_tokens,
    sampled_in_response,
)
from torchrl_llm.objectives.credit.return_credit import returns_to_go


@register("advantages", "group")
class MCAdvantage(ComparingCredit):
    r"""GRPO: the advantage of a trajectory over the other trajectories of the same prompt.

    :math:`A_i = (R_i - \bar R) / \max(\sigma, 10^{-6})` over the valid trajectories of a group
    (arXiv:2402.03300, section 4.1.2). All rows of a trajectory have the same advantage. Equal
    returns give exactly 0. Rows wait in queues until their group is complete, see
    :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    The counts of :meth:`get_stats` are also attributes, as in TorchRL.

    Args:
        grpo_size: trajectories per group.
        prompt_key: key that identifies the group; ``None`` uses ``"group_id"`` if present,
            otherwise ``"query"``.
        rewards_key: key of the rewards, ``[1, 1]`` per row, or ``[R, 1]`` aligned with the
            response's tokens.
        advantage_key: key of the advantage: ``[1, 1]``; ``[T, 1]`` for per-token rewards with
            ``trajectory_return=None``.
        done_key: key of the flag that marks the last row of a trajectory.
        verbose: log every call.
        trajectory_return: how the return of a trajectory is computed from the rewards of its turns:
            sum, max, mean or last. ``None`` normalises every reward separately, as TorchRL does by
            default: each turn (or token) has its own advantage, normalised over all turns of all
            trajectories of the group. For single-turn trajectories with one reward, all five
            options give the same result.
        normalize: the standard deviation :math:`\sigma`: ``"sample"`` (computed with G - 1, as in
            TorchRL and TRL) or ``"population"`` (computed with G, as in Ludic). ``"none"`` does not
            divide the advantage (Dr. GRPO, arXiv:2503.20783).
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps`` (TorchRL); ``"added"``: ``eps`` is
            added to the deviation (TRL with 1e-4, Ludic with 1e-8).
        positive_only: negative advantages become 0; ``"before_std"`` sets them to 0 before the
            deviation is computed, as Ludic does.
        **options: see :class:`~torchrl_llm.objectives.credit.ComparingOptions` (dynamic sampling,
            candidates).

    Raises:
        ConfigError: for a size below 2 or arguments that contradict each other.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(7))
        >>> buffer = ReplayBuffer(transform=MCAdvantage(grpo_size=2))
        >>> buffer.extend([row(0.0)]).tolist(), buffer.extend([row(1.0)]).tolist()
        ([], [0, 1])
        >>> [round(r["advantage"].item(), 4) for r in buffer[:].unbind(0)]
        [-0.7071, 0.7071]
    """

    @checked
    def __init__(
        self,
        grpo_size: GroupSize,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        verbose: bool = False,
        *,
        trajectory_return: TrajectoryReturn | None = "sum",
        normalize: Literal["sample", "population", "none"] = "sample",
        eps: Annotated[float, Ge(0)] = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        positive_only: bool | Literal["before_std"] = False,
        **options: Unpack[ComparingOptions],
    ) -> None:
        super().__init__(
            grpo_size,
            prompt_key=prompt_key,
            rewards_key=rewards_key,
            advantage_key=advantage_key,
            done_key=done_key,
            verbose=verbose,
            trajectory_return="sum" if trajectory_return is None else trajectory_return,
            positive_only=bool(positive_only),
            **options,
        )
        check_deviation(normalize, eps, eps_as)
        if trajectory_return is None and self.judges_groups:
            raise ConfigError(
                "keep_return_bounds, keep_zero_variance=False and candidate_group_size judge a "
                "group by its returns: give trajectory_return"
            )
        self.trajectory_return, self.normalize = trajectory_return, normalize
        self._how = {
            "normalize": normalize,
            "eps": eps,
            "eps_as": eps_as,
            "positive_only": positive_only,
        }
        self.in_keys = [prompt_key or "group_id", rewards_key, done_key]
        self.out_keys = [advantage_key]

    @property
    def grpo_size(self) -> int:
        """Trajectories of a group."""
        return self.group_size

    def get_stats(self) -> dict[str, int]:
        """Add TorchRL's ``dropped_groups`` (complete but not written) to the base's counts."""
        stats = super().get_stats()
        return {**stats, "dropped_groups": stats["invalid_groups"] + stats["filtered_groups"]}

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Return the advantages; see the class."""
        return F.group_advantages(returns_N, group_N, **self._how)

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """See the base class; with ``trajectory_return=None``, one advantage per reward."""
        if self.trajectory_return is not None:
            return super().assign_all(groups)
        flat = [reward.reshape(-1).double() for g in groups for t in g for reward in t.rewards]
        sizes = [sum(reward.numel() for t in group for reward in t.rewards) for group in groups]
        turns = [
            [
                Trajectory([row], totals=[total])
                for t in g
                for row, total in zip(t.rows, t.totals, strict=True)
            ]
            for g in groups
        ]
        values = self.level(turns, torch.cat(flat), sizes)
        advantages = self.compare(values, F.row_index(sizes))
        parts = iter(advantages.split([len(rewards) for rewards in flat]))
        return [[[along_tokens(row, next(parts)) for row in t.rows] for t in g] for g in groups]


@register("advantages", "leave_one_out")
class LeaveOneOutAdvantage(ComparingCredit):
    r"""RLOO: a trajectory's return minus the mean return of the *others* in its group.

    :math:`A_i = R_i - \frac{1}{G-1} \sum_{j \ne i} R_j`, arXiv:2402.14740 section 2.3. The baseline
    does not contain the trajectory's own return, so the gradient is unbiased.

    Args:
        group_size: trajectories per group.
        **options: see :class:`~torchrl_llm.objectives.credit.ComparingOptions`.

    Raises:
        ConfigError: for a size below 2.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(7))
        >>> rows = LeaveOneOutAdvantage(3).inv(torch.stack([row(0.0), row(0.0), row(3.0)]))
        >>> rows["advantage"].flatten().tolist()
        [-1.5, -1.5, 3.0]
    """

    @checked
    def __init__(self, group_size: GroupSize, **options: Unpack[ComparingOptions]) -> None:
        super().__init__(group_size, **options)

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Return the advantages; see the class."""
        return F.leave_one_out(returns_N, group_N)


@register("advantages", "hybrid")
class HybridNormalizedReturn(BatchStatistics, ComparingCredit):
    r"""ScaleRL: centred in the group, divided by the deviation of the batch.

    :math:`A_i = (R_i - \bar R_{group}) / \max(\sigma_{batch}, \epsilon)`, arXiv:2510.13786. A group
    that nearly always succeeds has a small deviation, and dividing by it would give large
    advantages. Dividing by the deviation of the batch avoids this. Use
    ``keep_zero_variance=False``, as the paper does, because groups with equal returns only make the
    deviation smaller.

    Args:
        group_size: trajectories per group.
        normalize: ``"population"`` or ``"sample"`` deviation, or ``"none"``.
        deviation_of: deviation of the centred returns (``"advantages"``: the paper, Ludic) or of
            the returns themselves (``"returns"``: TRL's ``scale_rewards="batch"``).
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps``; ``"added"``: ``eps`` is added to the
            deviation (Ludic with 1e-8).
        batch_size: trajectories per batch, see
            :class:`~torchrl_llm.objectives.credit.BatchStatistics`.
        **options: see :class:`~torchrl_llm.objectives.credit.ComparingOptions`.

    Raises:
        ConfigError: for impossible arguments.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(group, reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(group))
        >>> rows = [row(0, 0.0), row(0, 2.0), row(1, 0.0), row(1, 2.0)]
        >>> HybridNormalizedReturn(2).inv(torch.stack(rows))["advantage"].flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]
    """

    @checked
    def __init__(
        self,
        group_size: GroupSize,
        *,
        normalize: Literal["population", "sample", "none"] = "population",
        deviation_of: Literal["advantages", "returns"] = "advantages",
        eps: Annotated[float, Ge(0)] = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        batch_size: int | None = None,
        **options: Unpack[ComparingOptions],
    ) -> None:
        super().__init__(group_size, batch_size=batch_size, **options)
        check_deviation(normalize, eps, eps_as, deviation_of=deviation_of != "advantages")
        self.normalize = normalize
        self._how = {
            "normalize": normalize,
            "deviation_of": deviation_of,
            "eps": eps,
            "eps_as": eps_as,
        }

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Return the advantages; see the class."""
        return F.hybrid_advantages(returns_N, group_N, **self._how)


@register("advantages", "batch")
class BatchNormalizedReturn(BatchStatistics, ComparingCredit):
    r"""REINFORCE++: returns against the mean and deviation of all tokens of the batch.

    :math:`A^{norm} = (A - mean_{batch}(A)) / std_{batch}(A)`, arXiv:2501.03262. Without a baseline,
    :math:`A_t` is the discounted return from turn ``t`` on (or from token ``t`` on, if rewards are
    per token: :class:`~torchrl_llm.envs.transforms.KLRewardTransform` adds the paper's
    :math:`-\beta \sum_{i \ge t} KL_i`). With ``baseline="group"``, :math:`A_t` is the episode's
    return minus the mean of its group (REINFORCE++-baseline). With ``"leave_one_out"``, it is the
    episode's return minus the mean of the other episodes of the group.

    Args:
        group_size: trajectories per group; 1 without a baseline.
        baseline: ``"none"``, ``"group"`` or ``"leave_one_out"``.
        gamma: discount from one turn to the next, without a baseline.
        over: unit of the statistics: with ``"tokens"`` every sampled token of the batch counts once
            (the paper and its code); with ``"samples"`` every row counts once (Ludic's REINFORCE
            with baseline).
        normalize: ``"population"`` or ``"sample"`` deviation, or ``"none"`` for no division.
        eps: small number that prevents a division by 0.
        eps_as: ``"floor"``: the deviation is at least ``eps``; ``"added"``: ``eps`` is added to the
            deviation.
        batch_size: trajectories per batch, see
            :class:`~torchrl_llm.objectives.credit.BatchStatistics`.
        **options: see :class:`~torchrl_llm.objectives.credit.ComparingOptions`.

    Raises:
        ConfigError: for arguments that are impossible, or would have no effect.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_)
        >>> rows = BatchNormalizedReturn().inv(torch.stack([row(0.0), row(4.0)]))
        >>> rows["advantage"].flatten().tolist()
        [-1.0, 1.0]
    """

    @checked
    def __init__(
        self,
        group_size: int = 1,
        *,
        baseline: Literal["none", "group", "leave_one_out"] = "none",
        gamma: Annotated[float, In("[0, 1]")] = 1.0,
        over: Literal["tokens", "samples"] = "tokens",
        normalize: Literal["population", "sample", "none"] = "population",
        eps: Annotated[float, Ge(0)] = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        batch_size: int | None = None,
        **options: Unpack[ComparingOptions],
    ) -> None:
        check_deviation(normalize, eps, eps_as)
        if baseline != "none":
            check("group_size", group_size, GroupSize)
        super().__init__(group_size, batch_size=batch_size, **options)
        if baseline != "none" and gamma != 1:
            raise ConfigError("gamma has no effect with a baseline, which is one of whole episodes")
        if baseline == "none" and self.trajectory_return != "sum" and not self.judges_groups:
            raise ConfigError("trajectory_return has no effect without a baseline")
        self.baseline, self.gamma, self.over = baseline, gamma, over
        self.normalize, self.eps, self.eps_as = normalize, eps, eps_as

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """Return the advantages of a batch; see the class."""
        columns = self._unnormalised(groups)
        flat = [
            (row, values)
            for group, of_group in zip(groups, columns, strict=True)
            for trajectory, of_rows in zip(group, of_group, strict=True)
            for row, values in zip(trajectory.rows, of_rows, strict=True)
        ]
        weights = [self._weights(row, values) for row, values in flat]
        normalised = F.batch_normalize(
            torch.cat([values.reshape(-1) for _, values in flat]),
            torch.cat(weights),
            normalize=self.normalize,
            eps=self.eps,
            eps_as=self.eps_as,
        )
        parts = iter(normalised.split([len(w) for w in weights]))
        return [[[along_tokens(row, next(parts)) for row in t.rows] for t in g] for g in groups]

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Subtract the group's baseline from the returns."""
        if self.baseline == "group":
            return F.group_advantages(returns_N, group_N, normalize="none")
        return F.leave_one_out(returns_N, group_N)

    def _unnormalised(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        if self.baseline != "none":
            return ComparingCredit.assign_all(self, groups)
        return [[returns_to_go(t, self.gamma) for t in group] for group in groups]

    def _weights(self, row: Any, values: Tensor) -> Tensor:
        """Return how often each value of a row counts."""
        sampled = sampled_in_response(row).double()
        if values.numel() == 1:
            return sampled.sum().reshape(1) if self.over == "tokens" else sampled.new_ones(1)
        return sampled / (1 if self.over == "tokens" else sampled.sum().clamp(min=1))


class _Queues:
    """The object that runs in the Ray actor."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.estimator = MCAdvantage(**arguments)

    def push(self, packed: PackedRows) -> PackedRows | None:
        ready = self.estimator._inv_call(lazy_rows(unpack_row_list(packed)))
        return None if ready is None else pack_rows(ready)


class RayMCAdvantage(Transform):
    """:class:`~torchrl_llm.objectives.MCAdvantage` whose groups wait in a Ray actor.

    Use it for buffers in several processes that receive conversations of the same prompts. A buffer
    with only a part of a group would wait forever for the other rows. So each buffer sends its rows
    to the actor. The buffer whose write completes a group receives all rows of the group, with
    advantages.

    Create it once and send (picklable) copies, or create it in each process with the same
    ``actor_name``: the first process starts the actor, and the actor ends with that process. If all
    collectors write into one buffer, you do not need this class.

    Args:
        grpo_size: trajectories per group.
        prompt_key: see :class:`~torchrl_llm.objectives.MCAdvantage`.
        ray_init_config: arguments of ``ray.init``, if Ray is not running yet.
        remote_config: resources of the actor, fields of ``ActorOptions``; no CPU by default.
        actor_name: name of the actor in the cluster; without a name, only copies of this object
            share the actor.
        timeout_s: timeout of a call in seconds.
        **options: the other arguments of :class:`~torchrl_llm.objectives.MCAdvantage`.

    Raises:
        ConfigError: for arguments that MCAdvantage rejects, or if the named actor has different
            arguments.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running.
        WorkerError: the actor died, or did not start or answer in time; the rows that waited in it
            are lost.
    """

    __signature__ = FullSignature(MCAdvantage)
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
        **options: Unpack[ComparingOptions],
    ) -> None:
        super().__init__()
        ray = require_ray("RayMCAdvantage", running=ray_init_config is None)
        arguments = {"grpo_size": grpo_size, "prompt_key": prompt_key, **options}
        # Rejects bad arguments in this process; the tuple hides the estimator from nn.Module.
        self._arguments = (MCAdvantage(**arguments),)
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        config = {"num_cpus": 0.0, **(remote_config or {})}
        self._queues = RemoteObject(
            partial(_Queues, arguments),
            ActorOptions(name=actor_name, timeout_s=timeout_s, **config),
            what=f"RayMCAdvantage {actor_name or ''}".strip(),
        )
        size = self._queues.read("estimator.group_size")
        if size != self.group_size:
            raise ConfigError(
                f"the actor {actor_name!r} was started for groups of {size}, and this is "
                f"RayMCAdvantage({self.group_size})"
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled rows unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> LazyStackedTensorDict | None:
        if tensordict is None:
            return None
        ready = self._queues.call("push", pack_rows(row_list(tensordict)))
        return None if ready is None else lazy_rows(own_rows(unpack_row_list(ready)))

    def get_stats(self) -> dict[str, int]:
        """Return the counts of :meth:`MCAdvantage.get_stats`, summed over all writers."""
        return self._queues.call("estimator.get_stats")

    def reset_stats(self) -> None:
        """Reset the counts; queues are not changed."""
        self._queues.call("estimator.reset_stats")

    def clear_queues(self) -> int:
        """Drop the incomplete groups of all writers, and return their number."""
        return self._queues.call("estimator.clear_queues")

    def get_extra_state(self) -> dict[str, Any]:
        """Return the queues as plain data, and the counts."""
        return self._queues.call("estimator.get_extra_state")

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned, for all writers.

        Args:
            state: replaces the queues of the actor.
        """
        self._queues.call("estimator.set_extra_state", dict(state))

    def shutdown(self) -> None:
        """End the actor; rows that wait in it are lost."""
        self._queues.shutdown()


_COUNTED = (
    *("completed_trajectories", "completed_groups", "written_groups", "dropped_groups"),
    *("queued_groups", "queued_trajectories"),
)
_ARGUMENTS = (
    *("group_size", "grpo_size", "prompt_key", "rewards_key", "advantage_key", "done_key"),
    *("verbose", "trajectory_return", "keep_return_bounds", "candidate_group_size"),
    *("candidate_selection_min_size", "candidate_selector"),
)
for _name in _COUNTED:
    for _class in (MCAdvantage, RayMCAdvantage):
        setattr(_class, _name, property(lambda self, name=_name: self.get_stats()[name]))
for _name in _ARGUMENTS:
    _value = property(lambda self, name=_name: getattr(*self._arguments, name))
    setattr(RayMCAdvantage, _name, _value)
