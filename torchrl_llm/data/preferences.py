"""Preferences of a table: pairs of a chosen and a rejected answer, or answers with a label.

Each answer is a conversation in which only the answer is learned; see
:class:`~torchrl_llm.data.demonstrations.Demonstrations`. Next:
:class:`torchrl_llm.objectives.DPOLoss` and related losses compare the answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm.data.column_names import (
    MESSAGES,
    as_messages,
    as_tools,
    chat_in,
    check_named,
    columns_before,
    first_column,
    joined_prompt,
    prompt_columns,
)
from torchrl_llm.data.demonstrations import COMPLETIONS, Demonstration, Demonstrations
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError

PAIRS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("preferred", "dispreferred"),
    ("accepted", "rejected"),
    ("better", "worse"),
    ("response_j", "response_k"),
)
"""Default columns of the two answers; the first pair that exists is used."""

LABELS = ("label", "labels", "is_good", "desirable", "kto_tag")
"""Default columns of the label (whether an answer is good); the first one that exists is used."""

_GOOD = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
# Anthropic's hh-rlhf and similar datasets write a conversation as one text.
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class PreferenceColumns(NamedTuple):
    """The columns that form a preference.

    Attributes:
        answers: columns of the two answers, the chosen one first, or of the one answer that has a
            label. An answer is a text, its messages, or the whole conversation.
        label: column of the label (whether the answer is good); ``None`` for pairs.
        prompt: columns of the prompt, joined by an empty line; none if each answer is a whole
            conversation.
        margin: column of a number: how much better the chosen answer is.
        tools: column of the tools of a conversation; a row may have none.
        before: columns of messages before the prompt.
    """

    answers: tuple[str, ...]
    label: str | None = None
    prompt: tuple[str, ...] = ()
    margin: str | None = None
    tools: str = "tools"
    before: tuple[str, ...] = ()

    @classmethod
    def find(
        cls,
        row: Mapping[str, Any],
        *,
        prompt: str | None = None,
        chosen: str | None = None,
        rejected: str | None = None,
        completion: str | None = None,
        label: str | None = None,
        margin: str | None = None,
        tools: str | None = None,
    ) -> Self:
        """Find the named columns, or columns with usual names.

        Args:
            row: the first row of the table.
            prompt: column that the user named; ``None`` looks for one. It may be a column of
                messages.
            chosen: as ``prompt``.
            rejected: as ``prompt``.
            completion: as ``prompt``; the one answer of a row, instead of ``chosen`` and
                ``rejected``.
            label: as ``prompt``.
            margin: as ``prompt``; the default is ``margin``, if rows have it.
            tools: as ``prompt``.

        Raises:
            ConfigError: only one of ``chosen`` and ``rejected`` is given, or a pair and a label.
            DataError: a column does not exist.

        Example:
            >>> PreferenceColumns.find({"question": "2+2?", "chosen": "4", "rejected": "5"})[:3]
            (('chosen', 'rejected'), None, ('question',))
        """
        check_named(
            row,
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            completion=completion,
            label=label,
            margin=margin,
            tools=tools,
        )
        if (chosen is None) != (rejected is None):
            raise ConfigError("data.chosen and data.rejected name the two answers of a row: both")
        if chosen is not None and (completion or label):
            raise ConfigError(
                "a row is a pair (data.chosen, data.rejected) or an answer with a label "
                "(data.completion, data.label), not both"
            )
        answers = () if chosen is None else (chosen, rejected)
        if not answers and not (completion or label):
            answers = next((pair for pair in PAIRS if set(pair) <= set(row)), ())
        asked = prompt_columns(row, prompt)
        if prompt is None and not asked and (talk := first_column(row, MESSAGES)):
            asked = (talk,)
        if not answers:
            label = label or first_column(row, LABELS)
            known = [name for name in COMPLETIONS if name not in (*asked, label)]
            answers = (completion or first_column(row, known),)
        if answers == (None,) or (len(answers) == 1 and label is None):
            raise DataError(
                f"none of the columns {sorted(row)} is a pair of answers by its name; name "
                "data.chosen and data.rejected, or data.completion and data.label for single "
                "answers that are good or bad"
            )
        asked = tuple(name for name in asked if name not in (*answers, label))
        tools, margin = tools or "tools", margin or first_column(row, ("margin",))
        before = columns_before(row, *asked, *answers, label, tools, margin)
        return cls(answers, label, asked, margin, tools, before)

    def read(self, row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Read the conversation of each answer; only the answer in it is learned.

        Args:
            row: of the table.

        Raises:
            DataError: a value contains no messages, or there is no prompt.
        """
        prompt, said = self.parts(row)
        asked = [{**m, "train": False} if m["role"] == "assistant" else m for m in prompt]
        return [[*asked, *messages] for messages in said]

    def parts(
        self, row: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
        """Return the messages before the answers, and the messages of each answer.

        Args:
            row: of the table.

        Raises:
            DataError: as for :meth:`read`.
        """
        said = [_said(name, row.get(name)) for name in self.answers]
        whole = {messages[0]["role"] != "assistant" for messages in said}
        if len(whole) == 2:
            raise DataError("one of the two answers is a whole conversation, the other is not")
        prompt = self._prompt(row)
        pairs = zip(self.answers, said, strict=True)
        silent = [name for name, messages in pairs if messages[-1]["role"] != "assistant"]
        if whole == {True}:
            shared = shared_messages(said)
            _check_prompt(prompt, said[0][:shared])
            prompt, said = said[0][:shared], [messages[shared:] for messages in said]
        are_answers = all(each and each[0]["role"] == "assistant" for each in said)
        if silent and not (prompt and are_answers):
            raise DataError(f"the conversation in the column {silent[0]!r} ends without an answer")
        if not prompt:
            raise DataError(
                "there is no prompt before the answers: name data.prompt, or give whole "
                "conversations"
            )
        if not are_answers:
            raise DataError("the conversations must continue with the assistant where they differ")
        return prompt, said

    def _prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        value = joined_prompt(row, self.prompt, self.before) if self.prompt else None
        if isinstance(value, str) and (talk := _dialogue(value)):
            return talk
        if value is None or value in ("", []):
            return []
        return chat_in(value) or as_messages(value, "user")

    def read_label(self, row: Mapping[str, Any]) -> bool:
        """Return whether the answer of a row is good.

        Args:
            row: of the table.

        Raises:
            DataError: anything other than true or false, 1 or 0.
        """
        value = row.get(self.label)
        said = value.strip().lower() if isinstance(value, str) else value
        found = _GOOD.get(said) if isinstance(said, (str, int, float)) else None
        if found is None:
            raise DataError(f"the column {self.label!r} must be true or false, got {value!r:.100}")
        return found

    def read_margin(self, row: Mapping[str, Any]) -> float:
        """Return how much better the chosen answer of a row is; 0 if not given.

        Args:
            row: of the table.

        Raises:
            DataError: it is not a number.
        """
        value = row.get(self.margin) if self.margin else None
        try:
            found = 0.0 if value in (None, "") else float(value)
        except (TypeError, ValueError):
            found = float("nan")
        if not abs(found) < float("inf"):
            raise DataError(f"the column {self.margin!r} must be a number, got {value!r:.100}")
        return found


def _said(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the messages in a column of answers."""
    if value is None or value in ("", []):
        raise DataError(f"the column {name!r} is empty")
    if isinstance(value, Mapping):
        value = [value]
    talk = _dialogue(value) if isinstance(value, str) else None
    return talk or chat_in(value) or as_messages(value, "assistant")


def _dialogue(text: str) -> list[dict[str, Any]] | None:
    """Parse a text with ``Human:`` and ``Assistant:``; return ``None`` for other texts."""
    parts = _TURN.split(text)
    if len(parts) < 3 or parts[0].strip() or parts[1] != "Human":
        return None
    turns = zip(parts[1::2], parts[2::2], strict=True)
    messages = [{"role": _ROLES[who], "content": said.strip()} for who, said in turns]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def shared_messages(conversations: Sequence[Sequence[Any]]) -> int:
    """Return the number of equal messages at the beginning, before the last assistant turn.

    Args:
        conversations: whole conversations, each a list of messages.
    """
    shared = 0
    for at, messages in enumerate(zip(*conversations, strict=False)):
        if any(message != messages[0] for message in messages[1:]):
            break
        shared = at + 1
    while shared and (
        shared == min(map(len, conversations))
        or any(each[shared]["role"] == "tool" for each in conversations)
    ):
        shared -= 1  # equal answers, one that begins with the other, or a call's result
    return shared


def _check_prompt(prompt: Sequence[Any], begin: Sequence[Any]) -> None:
    """Reject a prompt that is not the prompt of the conversations in the same row."""
    known = [message.get("content") for message in begin]
    odd = [m["content"] for m in prompt if m.get("content") not in known]
    if odd:
        raise DataError(
            f"the answers are whole conversations, and the prompt {odd[0]!r:.100} is not in "
            "their common beginning; leave the column out of the data"
        )


class _Side:
    """The columns of one answer of each row, in the form of demonstrations."""

    def __init__(self, columns: PreferenceColumns, number: int) -> None:
        self._columns, self._number, self.tools = columns, number, columns.tools

    def read(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._columns.read(row)[self._number]

    def read_tools(self, row: Mapping[str, Any]) -> list[Any] | None:
        value = row.get(self.tools)
        return as_tools(value) if value else None


class Preference(NamedTuple):
    """A row as tokens.

    Attributes:
        index: index of the row; the answers of a pair share it.
        answers: the chosen and the rejected answer, or the one answer with a label.
        good: whether each answer is good.
        margin: how much better the chosen answer is.
    """

    index: int
    answers: tuple[Demonstration, ...]
    good: tuple[bool, ...]
    margin: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether no answer was dropped because of its length."""
        return all(bool(answer.learned.any()) for answer in self.answers)

    def rows(self) -> Iterator[TensorDict]:
        """Return its rows for a loss, batch size ``[]``."""
        index = torch.tensor(self.index)
        for answer, good in zip(self.answers, self.good, strict=True):
            row = answer.row()
            row["pair_id"] = row["group_id"] = index
            row["is_chosen"] = torch.tensor(good)
            yield row.set("margin", torch.tensor(self.margin))


class Preferences(Sequence[Preference]):
    """The rows of a table as preferences; each is made when it is read.

    Args:
        rows: of the table.
        formatter: encodes conversations; has the tokenizer and the chat template.
        columns: names of the columns of a preference.
        settings: further arguments of :class:`~torchrl_llm.data.demonstrations.Demonstrations`.

    Raises:
        DataError: a row that is read is not a preference; the error names file and line.

    Example:
        >>> from torchrl_llm.modules import load_tokenizer
        >>> rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}]
        >>> columns = PreferenceColumns.find(rows[0])
        >>> pair = Preferences(rows, ChatFormatter(load_tokenizer()), columns)[0]
        >>> [len(answer.token_ids) for answer in pair.answers], pair.good
        ([15, 15], (True, False))
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        formatter: ChatFormatter,
        columns: PreferenceColumns,
        **settings: Any,
    ) -> None:
        self.rows, self.columns = rows, columns
        self._answers = [
            Demonstrations(rows, formatter, _Side(columns, number), **settings)
            for number in range(len(columns.answers))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Preference:  # type: ignore[override]
        answers, row = tuple(each[index] for each in self._answers), self.rows[index]
        try:
            if self.columns.label is not None:
                return Preference(index, answers, (self.columns.read_label(row),))
            return Preference(index, answers, (True, False), self.columns.read_margin(row))
        except DataError as error:
            raise DataError(f"{self._answers[0].where(index)}: {error}") from error

    def check(self, most: int) -> None:
        """Check the first rows, to report an invalid row early.

        Args:
            most: most rows to check.

        Raises:
            DataError: a row is invalid, or no row has anything to learn.
        """
        for answers in self._answers:
            answers.check(most)
        if not any(self[index].is_whole for index in range(min(most, len(self)))):
            raise DataError(
                f"none of the first {most} rows has all its answers within "
                f"{self._answers[0].max_seq_len} tokens: nothing is left to learn from"
            )

    def show(self, index: int) -> str:
        """Return a row as the model reads it, with ``[[`` and ``]]`` around the compared parts.

        Args:
            index: of the row.
        """
        row = self[index]
        names = ("rejected", "chosen") if len(row.answers) > 1 else ("bad", "good")
        shown = zip(row.good, self._answers, strict=True)
        return "\n\n".join(f"{names[good]}: {each.show(index)}" for good, each in shown)


def preference_rows(preferences: Iterable[Preference]) -> LazyStackedTensorDict | None:
    """Return rows for a loss, except rows with a dropped answer; ``None`` if none is left.

    Args:
        preferences: preferences of a batch.
    """
    rows = [row for each in preferences if each.is_whole for row in each.rows()]
    return lazy_rows(rows) if rows else None
