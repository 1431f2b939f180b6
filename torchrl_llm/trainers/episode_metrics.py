"""Metrics of the rollouts of a step: rewards, lengths, turns, groups without variance, failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import isnan, nan
from statistics import fmean
from typing import Any

import torch
from tensordict import LazyStackedTensorDict
from torch import Tensor

from torchrl_llm.data.enums import FinishReason, TruncationReason
from torchrl_llm.data.failures import PROGRAM, WORLD, failures_of
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.ragged import read_rows, row_values
from torchrl_llm.data.replay_buffers.trajectory_queues import agent_of, task_path, trajectory_of
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.functional.advantages import are_equal

# Errors of calls that reached no tool, so that the name of the tool is only the model's text.
_NOT_CARRIED_OUT = {"MalformedCall", "UnknownTool", "TooManyCalls", "CutResponse", "NotRun"}


class Episodes:
    """The rows of a step by episode, the basis of all metrics of episodes.

    An episode is a trajectory of one agent with all its turns, as an advantage estimator sees it.
    Its return is the sum of its turns' rewards, and it is valid if each turn has a valid reward.

    Args:
        rows: 1-d stack of ``B`` rows with rewards, one row per turn, of ``N`` episodes. Rows
            without ``traj_id`` are whole episodes, one after the other.

    Attributes:
        rewards: float64 ``[B]``, NaN if they are not valid.
        last: int64 ``[N]``, the last row of each episode.
        returns: float64 ``[N]``, NaN if an episode is not valid.
        task_returns: float64 ``[N]``, the same without the penalty of a KL divergence.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> def turn(reward, done):
        ...     after = {"reward": torch.tensor([[reward]]), "done": torch.tensor([done])}
        ...     return TensorDict(next=after)
        >>> rows = lazy_rows([turn(1.0, False), turn(2.0, True), turn(float("nan"), True)])
        >>> Episodes(rows).returns.tolist(), Episodes(rows).last.tolist()
        ([3.0, nan], [1, 2])
    """

    def __init__(self, rows: LazyStackedTensorDict) -> None:
        done = row_values(rows, ("next", "done"), torch.any).tolist()
        last: dict[Any, int] = {}
        names, ended = [], 0
        for at, row in enumerate(row_list(rows)):
            name = trajectory_of(row)
            names.append(ended if name is None else name)
            ended += done[at]
            # If the rows are out of order, the last one is the row that is done.
            if done[at] or not done[last.setdefault(names[-1], at)]:
                last[names[-1]] = at
        places = {name: place for place, name in enumerate(last)}
        self._rows, self._places = rows, torch.tensor([places[name] for name in names])
        self.last = torch.tensor(list(last.values()))
        flags = row_values(rows, ("next", "reward_valid"), torch.all, None)
        rewards = _totals(rows, ("next", "reward"))
        valid = rewards.isfinite() if flags is None else flags & rewards.isfinite()
        self.rewards = rewards.where(valid, torch.nan)
        task = _totals(rows, task_path(("next", "reward")), None)
        task = self.rewards if task is None else task.where(valid, torch.nan)
        self.returns, self.task_returns = self.sums(self.rewards), self.sums(task)
        self._magnitudes = self.sums(task.abs())

    def sums(self, values: Tensor) -> Tensor:
        """Sum numbers of rows, float64 ``[B]``, over each episode: ``[N]``."""
        return values.new_zeros(len(self.last)).index_add(0, self._places, values)

    def mean(self, values: Tensor) -> float:
        """Mean of numbers ``[N]`` over the valid episodes that have one; NaN if there are none.

        Args:
            values: floats, NaN if an episode has none.
        """
        return values[self.returns.isfinite() & values.isfinite()].mean().item()

    def are_equal(self, places: Sequence[int] | None = None) -> bool:
        """Whether all valid episodes, or the given ones, have the same return.

        Compares the task's own reward, within the precision of float32
        (:func:`~torchrl_llm.functional.are_equal`).
        """
        chosen = self.returns.isfinite().nonzero().flatten() if places is None else places
        return are_equal(self.task_returns[chosen], self._magnitudes[chosen])

    def zero_variance(self) -> float | None:
        """Share of equal groups among groups with two valid episodes; ``None`` without any."""
        groups = row_values(self._rows, "group_id", torch.sum, None)
        if groups is None:
            return None
        members: dict[Any, list[int]] = defaultdict(list)
        rows, valid = row_list(self._rows), self.returns.isfinite().tolist()
        for place, at in enumerate(self.last.tolist()):
            if valid[place]:
                members[int(groups[at]), agent_of(rows[at])].append(place)
        compared = [self.are_equal(group) for group in members.values() if len(group) > 1]
        return sum(compared) / len(compared) if compared else None


def _totals(rows: LazyStackedTensorDict, path: tuple[str, ...], default: Any = ...) -> Any:
    """Sum of the rewards over the tokens of each row."""
    values = row_values(rows, path, partial(torch.sum, dtype=torch.float64), default)
    return values if values is default else values.double()


def episode_metrics(rows: LazyStackedTensorDict, episodes: Episodes) -> dict[str, float]:
    """Metrics of the episodes of a step.

    Args:
        rows: 1-d stack of ``B`` rows, one row per turn, of whole episodes.
        episodes: the same rows by episode.

    Returns:
        ``train/turns``, mean per episode. ``train/zero_variance``, if rows have a ``group_id``: the
        share of groups whose returns are all equal, among groups with at least two valid returns.
        ``perf/reward_s``, seconds of rewards, added up over rows. If there are tools,
        ``train/tool_calls`` and ``train/tool_failures`` (calls answered by an error, including
        errors of the model); and for each tool that was called ``train/tool_calls_<name>``,
        ``train/tool_failures_<name>`` and ``perf/tool_<name>_s``, seconds added up over calls.
    """
    metrics = {"train/turns": len(rows) / len(episodes.last)}
    if (share := episodes.zero_variance()) is not None:
        metrics["train/zero_variance"] = share
    seconds = row_values(rows, ("next", "reward_seconds"), torch.sum, None)
    if seconds is not None:
        metrics["perf/reward_s"] = seconds.sum().item()
    counts = row_values(rows, ("next", "tools", "num_calls"), torch.sum, None)
    if counts is not None:
        calling = [rows.tensordicts[place] for place in counts.nonzero().flatten().tolist()]
        metrics |= _tools([call for row in calling for call in row["next", "tools", "calls"]])
    return metrics


def _tools(calls: list[dict[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = {
        "train/tool_calls": len(calls),
        "train/tool_failures": sum(bool(call["error"]) for call in calls),
    }
    carried_out = [call for call in calls if call["error"] not in _NOT_CARRIED_OUT]
    for name in sorted({call["tool"] for call in carried_out}):
        own = [call for call in carried_out if call["tool"] == name]
        metrics[f"train/tool_calls_{name}"] = len(own)
        metrics[f"train/tool_failures_{name}"] = sum(bool(call["error"]) for call in own)
        metrics[f"perf/tool_{name}_s"] = sum(call.get("seconds", 0.0) for call in own)
    return metrics


def rollout_metrics(rows: LazyStackedTensorDict) -> dict[str, float]:
    """Metrics of the policy in a step, from all collected rows.

    Args:
        rows: 1-d stack of rows with rewards, one row per turn.

    Returns:
        ``train/reward`` (mean return of the valid episodes as advantages see it, a KL penalty
        included; NaN without any), ``train/reward_std`` and ``train/success`` (of the last turn, if
        rows have it) over the same episodes, ``train/invalid`` and ``train/truncated`` (fractions
        of the rows), ``train/response_length`` (mean tokens); and the metrics of
        :func:`episode_metrics`. For each component of the reward, before its weight,
        ``train/reward_<name>`` over the same episodes, if it is valid there, and
        ``train/invalid_<name>``. ``train/reward_errors``: rows whose reward raised an error or was
        not valid; ``train/tool_errors``, if there are tools: rows with a call in which the tool
        itself failed; ``train/env_errors``, if there are any: rows whose world or program failed;
        ``train/out_of_context``, if episodes have several turns: the fraction of them that ended
        because the conversation had filled the model's context; and ``train/program_<name>``, the
        mean of a number that programs return by this name.
    """
    episodes = Episodes(rows)
    invalid = episodes.rewards.isnan()
    mean = episodes.mean(episodes.returns)
    lengths = [ids.shape[0] for ids in read_rows(rows, ("tokens", "response"))]
    finish = row_values(rows, ("tokens", "finish_reason"), torch.sum)
    metrics = {
        "train/reward": mean,
        "train/reward_std": episodes.mean((episodes.returns - mean).square()) ** 0.5,
        "train/invalid": invalid.float().mean().item(),
        "train/truncated": FinishReason.cut_rows(finish).float().mean().item(),
        "train/response_length": sum(lengths) / len(lengths),
    }
    success = row_values(rows, ("next", "success"), torch.any, None)
    if success is not None and not isnan(mean):
        metrics["train/success"] = episodes.mean(success[episodes.last].double())
    metrics |= _component_metrics(rows, episodes) | _error_metrics(rows, invalid)
    metrics |= _program_metrics(rows)
    return metrics | _context_metrics(rows, episodes) | episode_metrics(rows, episodes)


def _program_metrics(rows: LazyStackedTensorDict) -> dict[str, float]:
    """The means of the named numbers that programs have returned."""
    if leaf(rows[0], ("next", "program")) is None:
        return {}
    told = [leaf(row, ("next", "program")).data for row in row_list(rows)]
    found: dict[str, list[float]] = {}
    for name, value in (item for numbers in told for item in numbers.items()):
        found.setdefault(f"train/program_{name}", []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def _error_metrics(rows: LazyStackedTensorDict, invalid: Tensor) -> dict[str, int]:
    """Numbers of rows by kind of failure."""
    failed = [{f.source for f in failures_of(row)} for row in row_list(rows)]
    worlds = sum(not sources.isdisjoint((PROGRAM, WORLD)) for sources in failed)
    metrics = {"train/reward_errors": int(invalid.sum()) - worlds}
    if worlds:
        metrics["train/env_errors"] = worlds
    if leaf(rows[0], ("next", "tools")) is not None:
        tools = [any(name.startswith("tool ") for name in sources) for sources in failed]
        metrics["train/tool_errors"] = sum(tools)
    return metrics


def _context_metrics(rows: LazyStackedTensorDict, episodes: Episodes) -> dict[str, float]:
    """Fraction of episodes that ended with a full context, if they have several turns."""
    turns = row_values(rows, "turn", torch.any, None)
    reasons = row_values(rows, ("next", "truncation_reason"), torch.sum, None)
    if turns is None or reasons is None:
        return {}
    full = int((reasons == TruncationReason.MAX_SEQ_LEN).sum())
    if not full and not turns.any():
        return {}
    return {"train/out_of_context": full / len(episodes.last)}


def _component_metrics(rows: LazyStackedTensorDict, episodes: Episodes) -> dict[str, float]:
    """Return and failures of each component of the reward, if it has any."""
    node = rows[0].get(("next", "rewards"), None)
    metrics: dict[str, float] = {}
    for name in () if node is None else node.keys():
        path = ("next", "rewards", name)
        values = row_values(rows, (*path, "value"), torch.sum).double()
        valid = row_values(rows, (*path, "valid"), torch.all)
        metrics[f"train/reward_{name}"] = episodes.mean(episodes.sums(values.where(valid, nan)))
        metrics[f"train/invalid_{name}"] = (~valid).float().mean().item()
    return metrics
