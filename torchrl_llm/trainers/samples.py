"""Two answers of a batch as text: the best and the worst answer to a prompt, with results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm._run_log import printable
from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.replay_buffers.trajectory_queues import (
    Trajectory,
    TrajectoryQueue,
    group_value,
)
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.row_text import row_text

_CUT = {FinishReason.LENGTH: "cut by its length limit", FinishReason.ABORT: "aborted"}


def sample_text(rows: LazyStackedTensorDict) -> str:
    """The best and the worst answer to the prompt whose rewards differ most.

    An advantage compares these two. If no rewards differ, they are two answers with the same
    reward; if none is valid, one answer and the reason.

    Args:
        rows: 1-d stack of rows with rewards, one row per turn, of whole episodes.

    Returns:
        For each answer: the question, the answer, the expected answer, and the reward with its
        components; and the reason if the answer is not trained, or only a part of it.
    """
    episodes = [
        Trajectory.of(found, ("next", "reward")) for found in TrajectoryQueue().push(row_list(rows))
    ]
    valid = sorted((each for each in episodes if each.valid), key=lambda each: each.total)
    groups: dict[Any, list[Trajectory]] = defaultdict(list)
    for episode in valid:
        groups[_group(episode.rows[0])].append(episode)
    compared = [group for group in groups.values() if len(group) > 1]
    if not valid:
        return _shown("an answer", episodes[0])
    if compared:
        found, where = max(compared, key=lambda group: group[-1].total - group[0].total), "a prompt"
    else:
        found, where = valid, "the batch"
    worst, best = found[0], found[-1]
    if best.total == worst.total:
        titles = ("an answer", "another, worth the same")
    else:
        titles = (f"best answer of {where}", "worst")
    shown = zip(titles, (best, worst)[: len(found)], strict=False)
    return "\n".join(_shown(title, episode) for title, episode in shown)


def _group(row: TensorDict) -> tuple[Any, ...]:
    """Answers with the same prompt and agent, which are compared with each other."""
    values = (leaf(row, (name,)) for name in ("group_id", "agent"))
    return tuple(None if value is None else group_value(value) for value in values)


def _shown(title: str, episode: Trajectory) -> str:
    about = ", ".join([f"{title}: {_reward(episode)}", *_remarks(episode)])
    text = row_text(episode.rows[-1], indent="    ")
    return printable(f"  {about}\n{text}")


def _reward(episode: Trajectory) -> str:
    if not episode.valid:
        errors = (row.get(("next", "error"), None) for row in episode.rows)
        told = [(error["type"], error["message"]) for error in errors if error is not None]
        texts = (": ".join(" ".join(text.split()) for text in each if text) for each in told)
        return " ".join(["no reward", *filter(None, texts)])
    parts = episode.rows[-1].get(("next", "rewards"), None)
    values = [] if parts is None else [(name, _total(episode.rows, name)) for name in parts.keys()]
    named = ", ".join(f"{name} {value:.3f}" for name, value in values)
    return f"reward {episode.total:.3f}" + f" ({named})" * bool(named)


def _total(rows: Iterable[TensorDict], name: str) -> float:
    return sum(row.get(("next", "rewards", name, "value")).sum().item() for row in rows)


def _remarks(episode: Trajectory) -> list[str]:
    """Reasons why the answer, or some of its tokens, is not trained unchanged."""
    found = [f"{len(episode.rows)} turns"] * (len(episode.rows) > 1)
    for row in episode.rows:
        finish = leaf(row, ("tokens", "finish_reason"))
        found += [_CUT[finish.item()]] if finish is not None and finish.item() in _CUT else []
        source, reason = (leaf(row, ("trace", name)) for name in ("source", "mask_reason"))
        if source is not None:
            masked = reason[(source == Source.SAMPLED) & (reason != MaskReason.TRAINED)]
            names = {MaskReason(code).name.lower() for code in masked.unique().tolist()}
            found += [f"{len(masked)} tokens masked ({', '.join(sorted(names))})"] * bool(names)
    ended = leaf(episode.rows[-1], ("next", "truncation_reason"))
    if ended is not None and bool((ended != TruncationReason.NONE).any()):
        code = int(ended[ended != TruncationReason.NONE][0])
        found.append(f"episode cut ({TruncationReason(code).name.lower()})")
    return list(dict.fromkeys(found))
