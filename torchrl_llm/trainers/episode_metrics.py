"""Metrics of whole episodes: turns, groups without variance, calls of tools, seconds of rewards."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from tensordict import LazyStackedTensorDict

from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.rollouts import ends_trajectory, row_list
from torchrl_llm.data.wire import leaf

# Answers to calls that no tool was asked for; their names are whatever a model wrote.
_NOT_CARRIED_OUT = {"MalformedCall", "UnknownTool", "TooManyCalls", "CutResponse", "NotRun"}


def episode_metrics(rows: LazyStackedTensorDict) -> dict[str, float]:
    """What the episodes of a step were like.

    Args:
        rows: 1-d stack of rows with rewards, one row per turn, of whole episodes.

    Returns:
        ``train/turns``, mean per episode. ``train/zero_variance``, where rows have a ``group_id``:
        the share of groups whose returns are all equal, of those with two valid ones at least.
        ``perf/reward_s``, seconds of rewards, added up over rows. Where there are tools,
        ``train/tool_calls`` and ``train/tool_failures`` (calls answered by an error, those of the
        model included); and for each tool that was called ``train/tool_calls_<name>``,
        ``train/tool_failures_<name>`` and ``perf/tool_<name>_s``, seconds added up over calls.
    """
    members = row_list(rows)
    episodes = sum(map(ends_trajectory, members))
    metrics = {"train/turns": len(members) / max(episodes, 1)}
    metrics |= _variance(rows)
    seconds = read_rows(rows, ("next", "reward_seconds"), None)
    if seconds is not None:
        metrics["perf/reward_s"] = torch.stack(seconds).sum().item()
    calls = [leaf(row, ("next", "tools", "calls")) for row in members]
    if calls[0] is not None:
        metrics |= _tools([call for made in calls for call in made.data])
    return metrics


def _variance(rows: LazyStackedTensorDict) -> dict[str, float]:
    columns = {name: read_rows(rows, name, None) for name in ("group_id", "traj_id", "agent")}
    if columns["group_id"] is None:
        return {}
    numbers = len(columns["group_id"])
    groups, episodes, agents = (
        [None] * numbers if values is None else [_plain(value) for value in values]
        for values in columns.values()
    )
    returns: dict[Any, float] = defaultdict(float)
    rewards = [reward.sum() for reward in read_rows(rows, ("next", "reward"))]
    flags = read_rows(rows, ("next", "reward_valid"), None)
    valid = [True] * numbers if flags is None else [bool(flag.all()) for flag in flags]
    for place, reward in enumerate(torch.stack(rewards).tolist()):
        episode = place if episodes[place] is None else episodes[place]
        key = groups[place], agents[place], episode
        returns[key] += reward if valid[place] else float("nan")
    by_group: dict[Any, list[float]] = defaultdict(list)
    for (group, agent, _), value in returns.items():
        if abs(value) < float("inf"):
            by_group[group, agent].append(value)
    compared = [values for values in by_group.values() if len(values) > 1]
    equal = sum(len(set(values)) == 1 for values in compared)
    return {"train/zero_variance": equal / len(compared)} if compared else {}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else getattr(value, "data", value)


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
