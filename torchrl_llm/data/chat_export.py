"""Chats for supervised training, from rollouts of a run or answers of an evaluation.

A chat is the conversation of a trajectory's last turn: its messages with tool calls and reasoning.
Chats are selected by their reward, by comparison with other chats of the same prompt, or both.
``torchrl-llm export`` is the command.

Next: :mod:`torchrl_llm.data.demonstrations` reads the exported chats.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Protocol

from tensordict import TensorDict

from torchrl_llm._checked import Ge, checked
from torchrl_llm._files import replacing
from torchrl_llm._imports import require
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.data.rollout_store import RolloutStore
from torchrl_llm.data.table_files import FileRow, read_jsonl
from torchrl_llm.errors import DataError

# Only the environment needs ``is_complete``; ``raw`` is the sampled text of messages that a parser
# changed.
_LEFT_OUT = {"is_complete", "raw"}


@dataclass
class SampledChat:
    """A conversation with its result.

    Attributes:
        messages: messages of the whole conversation, as plain values.
        reward: sum of the rewards of its turns; ``None`` if it is not valid.
        group: key that all answers to one prompt share.
        cut: whether a length limit cut its last answer.
        tools: schemas of its tools, if any.
    """

    messages: list[dict[str, Any]]
    reward: float | None
    group: Any
    cut: bool = False
    tools: list[Any] | None = None

    def row(self) -> dict[str, Any]:
        """Return the columns to write."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"messages": self.messages, **tools, "reward": self.reward}


def read_chats(source: str | Path) -> Iterator[SampledChat]:
    """Read the conversations of a run, or of an evaluation.

    Args:
        source: folder of a run with stored rollouts; folder of an evaluation, for the answers to
            all its tasks; or one file of an evaluation, ``answers_TASK.jsonl``.

    Raises:
        DataError: ``source`` contains no rollouts and no answers, or is damaged.
    """
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.glob("answers_*.jsonl"))
    if not files:
        yield from stored_chats(RolloutStore(path))
    for file in files:
        for record in read_jsonl(file):
            yield _of_record(record, file)


def _of_record(record: FileRow, file: Path) -> SampledChat:
    messages, reward = record.get("messages"), record.get("reward")
    sound = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if not sound or not isinstance(reward, int | float | None) or "valid" not in record:
        raise DataError(
            f"line {record.number} of {file} is not an answer of an evaluation: it needs messages, "
            f"reward and valid, and has {sorted(record)}"
        )
    group = (file.name, json.dumps(record.get("prompt", record.number)))
    found = [_plain_message(message) for message in messages]
    kept = reward if record["valid"] else None
    return SampledChat(found, kept, group, bool(record.get("cut")), record.get("tools"))


def stored_chats(store: RolloutStore) -> Iterator[SampledChat]:
    """Read the conversations of stored rollouts, group by group.

    Args:
        store: store that is opened for reading.

    Raises:
        DataError: a row has no conversation or no reward.
    """
    for step in store.steps():
        tools = store.about(step).get("tools")
        groups: dict[Any, list[SampledChat]] = {}
        for turns in store.trajectories(step):
            episode = Trajectory.of(turns, ("next", "reward"))
            group_id = leaf(turns[0], ("group_id",))
            group = (step, None if group_id is None else int(group_id))
            reward = episode.total if episode.valid else None
            cut = any(map(_is_cut, turns))
            chat = SampledChat(_messages(turns[-1]), reward, group, cut, tools)
            groups.setdefault(group, []).append(chat)
        yield from chain.from_iterable(groups.values())


def _messages(row: TensorDict) -> list[dict[str, Any]]:
    cell = leaf(row, ("history", "full", "messages"))
    if cell is None:
        raise DataError(
            'rows have no ("history", "full"): only conversations become chats, not rows of text'
        )
    return [_plain_message(message) for message in cell.data.messages]


def _is_cut(row: TensorDict) -> bool:
    reason = leaf(row, ("tokens", "finish_reason"))
    return reason is not None and FinishReason(int(reason)).cut


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in _LEFT_OUT}


@checked
@dataclass(kw_only=True)
class ChatFilter:
    """Selects the conversations with a valid reward that are good enough.

    Attributes:
        min_reward: least reward; ``None`` for any.
        best_of_group: most conversations per prompt: those with the highest rewards, and the first
            of equal ones; ``None`` for all.
        only_whole: leave out conversations with a cut answer.
        duplicates: keep repeated conversations, which are equal message for message.
        counts: after the selection: numbers of conversations ``read``, ``written``, and left out
            for each reason.

    Raises:
        ConfigError: ``best_of_group`` below 1.

    Example:
        >>> said = [[{"role": "assistant", "content": text}] for text in "aab"]
        >>> chats = [SampledChat(m, r, 0) for m, r in zip(said, (1.0, 1.0, 0.0), strict=True)]
        >>> wanted = ChatFilter(min_reward=1.0)
        >>> len(list(wanted(chats))), dict(wanted.counts)
        (1, {'read': 3, 'twice': 1, 'reward below 1.0': 1, 'written': 1})
    """

    min_reward: float | None = None
    best_of_group: Annotated[int, Ge(1)] | None = None
    only_whole: bool = True
    duplicates: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, chats: Iterable[SampledChat]) -> Iterator[SampledChat]:
        """Return the selected conversations, group by group, in the order in which groups begin.

        Args:
            chats: conversations; with ``best_of_group``, conversations of the same group must be
                adjacent.
        """
        seen: set[str] = set()
        group: list[SampledChat] = []
        for chat in chats:
            self.counts["read"] += 1
            if group and chat.group != group[0].group:
                yield from self._best(group)
                group = []
            if (reason := self._reason(chat, seen)) is not None:
                self.counts[reason] += 1
            else:
                group.append(chat)
        yield from self._best(group)

    def _reason(self, chat: SampledChat, seen: set[str]) -> str | None:
        """Return why a conversation is left out regardless of its group; ``None`` if it is kept."""
        if chat.reward is None:
            return "without a valid reward"
        if chat.cut and self.only_whole:
            return "cut"
        if self.min_reward is not None and chat.reward < self.min_reward:
            return f"reward below {self.min_reward}"
        if not self.duplicates:
            text = json.dumps(chat.messages, sort_keys=True, default=str)
            if text in seen:
                return "twice"
            seen.add(text)
        return None

    def _best(self, group: list[SampledChat]) -> list[SampledChat]:
        kept = group
        if self.best_of_group is not None:
            kept = sorted(group, key=lambda chat: -chat.reward)[: self.best_of_group]
            self.counts["not the best"] += len(group) - len(kept)
        self.counts["written"] += len(kept)
        return kept


class Written(Protocol):
    """Anything that can be written as one line."""

    def row(self) -> dict[str, Any]:
        """Return the columns of the line, with JSON values."""


def write_chats(chats: Iterable[Written], path: str | Path) -> int:
    """Write all conversations as JSON lines, or none if one fails.

    Args:
        chats: conversations, or pairs of them (:mod:`torchrl_llm.data.pair_export`).
        path: path of the file.

    Returns:
        The number of written lines.

    Raises:
        DataError: there are no chats, or a message contains a value that JSON cannot express.
        OSError: the file cannot be written.
    """
    path = Path(path)
    number = 0
    with replacing(path) as draft:
        with draft.open("wb") as file:
            for number, chat in enumerate(chats, 1):
                file.write(_line(chat, number))
        if not number:
            raise DataError(f"no conversation is good enough to be written to {path}")
    return number


def _line(chat: Written, number: int) -> bytes:
    try:
        text = json.dumps(chat.row(), ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"conversation {number} cannot be written: {error}") from error
    # Models sometimes write lone surrogates. They are not valid UTF-8, but valid JSON if escaped.
    return text.encode("utf-8", "backslashreplace")


def as_dataset(chats: Iterable[SampledChat]) -> Any:
    """Return conversations as a ``datasets.Dataset``, with call arguments as JSON texts.

    Args:
        chats: at least one conversation.

    Raises:
        MissingExtraError: without the package ``datasets``.
        DataError: there are no chats.
    """
    datasets = require("datasets", extra="data", feature="chats as a datasets.Dataset")
    rows = [{**chat.row(), "messages": list(map(_flat_calls, chat.messages))} for chat in chats]
    if not rows:
        raise DataError("no conversation is good enough for a dataset")
    return datasets.Dataset.from_list(rows)


def _flat_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Convert call arguments to text, because a table cannot store arbitrary argument names."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    flat = [
        {
            **call,
            "function": {**(made := call["function"]), "arguments": json.dumps(made["arguments"])},
        }
        for call in calls
    ]
    return {**message, "tool_calls": flat}
