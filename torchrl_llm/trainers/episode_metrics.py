"""Metrics of whole episodes: turns, groups without variance, calls of tools, seconds of rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from tensordict import LazyStackedTensorDict
from torch import Tensor

from torchrl_llm.data.ragged import row_values
from torchrl_llm.data.replay_buffers.trajectory_queues import group_value
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.wire import leaf

# Answers to calls that no tool was asked for; their names are whatever a model wrote.
_NOT_CARRIED_OUT = {"MalformedCall", "UnknownTool", "TooManyCalls", "CutResponse", "NotRun"}


def episode_metrics(rows: LazyStackedTensorDict, rewards: Tensor, done: Tensor) -> dict[str, float]:
    """What the episodes of a step were like.

    Args:
        rows: 1-d stack of ``B`` rows, one row per turn, of whole episodes.
        rewards: float32 ``[B]``, NaN where they are not valid.
        done: bool ``[B]``, whether an episode ends with the row.

    Returns:
        ``train/turns``, mean per episode. ``train/zero_variance``, where rows have a ``group_id``:
        the share of groups whose returns are all equal, of those with two valid ones at least.
        ``perf/reward_s``, seconds of rewards, added up over rows. Where there are tools,
        ``train/tool_calls`` and ``train/tool_failures`` (calls answered by an error, those of the
        model included); and for each tool that was called ``train/tool_calls_<name>``,
        ``train/tool_failures_<name>`` and ``perf/tool_<name>_s``, seconds added up over calls.
    """
    metrics = {"train/turns": len(done) / max(int(done.sum()), 1)}
    metrics |= _variance(rows, rewards)
    seconds = row_values(rows, ("next", "reward_seconds"), torch.sum, None)
    if seconds is not None:
        metrics["perf/reward_s"] = seconds.sum().item()
    counts = row_values(rows, ("next", "tools", "num_calls"), torch.sum, None)
    if counts is not None:
        calling = [rows.tensordicts[place] for place in counts.nonzero().flatten().tolist()]
        metrics |= _tools([call for row in calling for call in row["next", "tools", "calls"]])
    return metrics


def _variance(rows: LazyStackedTensorDict, rewards: Tensor) -> dict[str, float]:
    groups = row_values(rows, "group_id", torch.sum, None)
    if groups is None:
        return {}
    episodes = row_values(rows, "traj_id", torch.sum, None)
    names = range(len(groups)) if episodes is None else episodes.tolist()
    agents = [leaf(row, ("agent",)) for row in row_list(rows)]
    keys = zip(groups.tolist(), map(_agent, agents), names, strict=True)
    returns: dict[Any, float] = defaultdict(float)
    for key, reward in zip(keys, rewards.tolist(), strict=True):
        returns[key] += reward
    by_group: dict[Any, list[float]] = defaultdict(list)
    for (group, agent, _), total in returns.items():
        if math.isfinite(total):
            by_group[group, agent].append(total)
    compared = [values for values in by_group.values() if len(values) > 1]
    equal = sum(min(values) == max(values) for values in compared)
    return {"train/zero_variance": equal / len(compared)} if compared else {}


def _agent(value: Any) -> Any:
    return None if value is None else group_value(value)


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
        metrics[f"perf/tool_{name}_s"] = sum(call["seconds"] for call in own)
    return metrics
