"""Demonstrations: conversations of a table, as token ids with a mask of the learned tokens.

The learned tokens are the text, reasoning and calls of the assistant in every turn, and the token
that ends the turn. A turn with ``weight`` 0 or ``train`` false is left out. In the assistant's
turns, the text of a special token that was added to the tokenizer becomes that token; elsewhere it
is plain text.

:mod:`torchrl_llm.data.row_files` reads the rows, and :mod:`torchrl_llm.data.conversation_rules`
rejects invalid conversations. Next: :class:`torchrl_llm.objectives.SFTLoss` trains on
demonstrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor

from torchrl_llm.data import conversation_rules
from torchrl_llm.data.chat import chat_of
from torchrl_llm.data.column_names import (
    MESSAGES,
    as_messages,
    as_tools,
    check_named,
    columns_before,
    first_column,
    joined_prompt,
    prompt_columns,
)
from torchrl_llm.data.overlong import OnOverlong
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.table_files import place_of
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError, TemplateError, TokenizerError

COMPLETIONS = ("completion", "response", "output", "solution", "answer", "target", "label")
"""Default columns of the answer to learn; the first one that exists is used."""

# Number of shown characters at the beginning and at the end of a demonstration.
_SHOWN = 1200, 400


class DemonstrationColumns(NamedTuple):
    """The columns that form a conversation.

    Attributes:
        prompt: columns of the user's message, joined by an empty line; a value may also be the
            messages before the answer.
        completion: column of the answer, or of its messages.
        messages: column of whole conversations, instead of ``prompt`` and ``completion``.
        tools: column of the tools of a conversation; a row may have none.
        before: columns of messages before the prompt, or before the whole conversation.
    """

    prompt: tuple[str, ...] = ()
    completion: str | None = None
    messages: str | None = None
    tools: str = "tools"
    before: tuple[str, ...] = ()

    @classmethod
    def find(
        cls,
        row: Mapping[str, Any],
        *,
        prompt: str | None = None,
        completion: str | None = None,
        messages: str | None = None,
        tools: str | None = None,
    ) -> Self:
        """Find the named columns, or columns with usual names.

        Without names, the method looks for ``messages`` and ``conversations``, then for a prompt
        and a completion. ``input`` or ``context`` next to ``instruction`` is a part of the prompt,
        and ``system`` and ``history`` precede it; ``system`` may also precede a whole conversation.

        Args:
            row: the first row of the table.
            prompt: column that the user named; ``None`` looks for one.
            completion: as ``prompt``.
            messages: as ``prompt``; replaces ``prompt`` and ``completion``.
            tools: as ``prompt``; the default is ``tools``.

        Raises:
            ConfigError: ``messages`` is given together with ``prompt`` or ``completion``.
            DataError: a column does not exist.

        Example:
            >>> DemonstrationColumns.find({"question": "2+2?", "answer": "4"})[:2]
            (('question',), 'answer')
        """
        named = {"prompt": prompt, "completion": completion, "messages": messages, "tools": tools}
        check_named(row, **named)
        tools = tools or "tools"
        pair = prompt or completion
        if messages is not None and pair is not None:
            raise ConfigError(
                f"data.messages={messages} has whole conversations, which already hold what "
                f"data.prompt and data.completion name; leave out {pair}"
            )
        if pair is None and (messages := messages or first_column(row, MESSAGES)):
            before = columns_before(row, messages, tools, "history")
            return cls(messages=messages, tools=tools, before=before)
        asked = prompt_columns(row, prompt)
        said = completion or first_column(row, [n for n in COMPLETIONS if n not in asked])
        if not asked or said is None:
            raise DataError(
                f"none of the columns {sorted(row)} is a {'prompt' if said else 'completion'} by "
                "its name; name data.prompt and data.completion, or data.messages for whole "
                "conversations"
            )
        before = columns_before(row, *asked, said, tools)
        return cls(asked, said, tools=tools, before=before)

    def read(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read the messages of a row.

        Args:
            row: of the table.

        Raises:
            DataError: a value contains no messages.
        """
        wanted = (*self.prompt[:1], self.completion) if self.messages is None else (self.messages,)
        for name in wanted:
            if name not in row:
                raise DataError(f"there is no column {name!r}; there are {sorted(row)}")
        if self.messages is not None:
            return as_messages(joined_prompt(row, (self.messages,), self.before))
        prompt = joined_prompt(row, self.prompt, self.before)
        found = []
        for name, value, role in (
            (self.prompt[0], prompt, "user"),
            (self.completion, row.get(self.completion), "assistant"),
        ):
            if value is None or value in ("", []):
                raise DataError(f"the column {name!r} is empty")
            found += as_messages(value, role)
        return found

    def read_tools(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Read the tools of a row; ``None`` if it has none.

        Args:
            row: of the table.

        Raises:
            DataError: a value is not a list of tools.
        """
        value = row.get(self.tools)
        return as_tools(value) if value else None


class Demonstration(NamedTuple):
    """A conversation as tokens.

    Attributes:
        token_ids: int64 ``[T]``.
        learned: bool ``[T]``, true for the learned tokens of the assistant; all false if the
            conversation was dropped.
        overlong: whether it was longer than the limit.
    """

    token_ids: Tensor
    learned: Tensor
    overlong: bool

    def row(self) -> TensorDict:
        """Return its row for a loss, batch size ``[]``."""
        return TensorDict(
            tokens={"full": self.token_ids}, masks={"all_assistant_mask": self.learned}
        )


class Demonstrations(Sequence[Demonstration]):
    """The rows of a table as demonstrations; each is made when it is read.

    Args:
        rows: of the table.
        formatter: encodes conversations; has the tokenizer and the chat template.
        columns: names of the columns of a conversation.
        name: name of the table, for errors.
        first_row: number of its first row, for errors.
        held_out: whether its rows are held out, for errors.
        system_prompt: system message to put first in every conversation; ``None`` adds none.
        max_seq_len: most tokens of a conversation; ``None`` for no limit.
        on_overlong: what happens to a longer conversation: ``"error"``, ``"drop"``, or
            ``"truncate"``, which keeps its first tokens.

    Raises:
        DataError: a row that is read cannot be used: no assistant turn, an empty turn, roles in an
            impossible order, a message that the template cannot express, tools with a template that
            has no form for calls, or too many tokens. The error names file and line if rows come
            from a file.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_llm.assets import embedded_model_path
        >>> formatter = ChatFormatter(AutoTokenizer.from_pretrained(embedded_model_path()))
        >>> rows = [{"question": "2+2?", "answer": "4"}]
        >>> columns = DemonstrationColumns.find(rows[0])
        >>> one = Demonstrations(rows, formatter, columns)[0]
        >>> formatter.decode(one.token_ids[one.learned])
        '4<|im_end|>'
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        formatter: ChatFormatter,
        columns: DemonstrationColumns,
        *,
        name: str = "the dataset",
        first_row: int = 1,
        held_out: bool = False,
        system_prompt: str | None = None,
        max_seq_len: int | None = None,
        on_overlong: OnOverlong = "error",
    ) -> None:
        self.rows, self.formatter, self.columns = rows, formatter, columns
        self._name, self._first_row, self._held_out = name, first_row, held_out
        self._system_prompt = system_prompt
        self.max_seq_len, self.on_overlong = max_seq_len, on_overlong

    def __len__(self) -> int:
        return len(self.rows)

    def messages(self, index: int) -> list[dict[str, Any]]:
        """Return the checked conversation of a row.

        Args:
            index: of the row.
        """
        row = self.rows[index]
        try:
            messages = list(chat_of(self.columns.read(row), "message").messages)
            if self._system_prompt is not None:
                if messages and messages[0]["role"] == "system":
                    raise DataError(
                        "it has a system message of its own, and data.system_prompt is the first "
                        "message of every conversation; leave one of the two out"
                    )
                messages.insert(0, {"role": "system", "content": self._system_prompt})
            conversation_rules.check_conversation(messages)
            conversation_rules.learned_turns(messages)
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from error
        return messages

    def tools(self, index: int) -> list[dict[str, Any]] | None:
        """Return the tools of a row; ``None`` if it has none.

        Args:
            index: of the row.
        """
        try:
            tools = self.columns.read_tools(self.rows[index])
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from error
        if tools is not None and self.formatter.probe.call is None:
            raise DataError(
                f"{self.where(index)} has tools ({self.columns.tools}), and the chat template has "
                "no form for them; choose another with model.chat_template_name, or take them out "
                "of the data"
            )
        return tools

    def __getitem__(self, index: int) -> Demonstration:  # type: ignore[override]
        messages, tools = self.messages(index), self.tools(index)
        try:
            encoded = self.formatter.encode_demonstration(messages, tools=tools)
            marked = conversation_rules.with_marks(messages)
            conversation_rules.check_written(
                marked, self.formatter.render(marked, add_generation_prompt=False, tools=tools)
            )
            learned = conversation_rules.keep_turns(
                encoded.assistant, conversation_rules.learned_turns(messages)
            ).clone()
        except (DataError, TemplateError, TokenizerError) as error:
            raise DataError(f"{self.where(index)}: {error}") from error
        ids = encoded.token_ids
        learned[:1] = False  # no earlier token could predict it
        length, limit = ids.shape[0], self.max_seq_len
        if limit is None or length <= limit:
            return Demonstration(ids, learned, False)
        if self.on_overlong == "error":
            raise DataError(
                f"{self.where(index)} has {length} tokens, and a conversation may have {limit}; "
                "drop such rows or cut them (train.on_overlong), or allow more (train.max_seq_len) "
                "if the model does"
            )
        kept = 0 if self.on_overlong == "drop" else limit
        return Demonstration(ids[:kept], learned[:kept], True)

    def where(self, index: int) -> str:
        """Return the location of a row: its file and line, or its number.

        Args:
            index: of the row.
        """
        place = place_of(self.rows[index], f"row {self._first_row + index} of {self._name}")
        return f"{place} (held out)" if self._held_out else place

    def check(self, most: int) -> int:
        """Check the first rows, to report an invalid row early.

        The conversations of all rows in memory are checked, which takes little time.

        Args:
            most: most rows to tokenize.

        Returns:
            The number of overlong rows among these.

        Raises:
            DataError: a row is invalid, or no row has anything to learn.
        """
        overlong, left = 0, 0
        for index in range(min(most, len(self))):
            one = self[index]
            overlong += one.overlong
            left += bool(one.learned.any())
        if not left:
            raise DataError(
                f"all {'held-out ' * self._held_out}rows of {self._name} have more than "
                f"{self.max_seq_len} tokens, and nothing is left to learn from"
            )
        if isinstance(self.rows, list):
            for index in range(most, len(self)):
                self.messages(index)
        return overlong

    def show(self, index: int) -> str:
        """Return a row as the model reads it, with ``[[`` and ``]]`` around the learned parts.

        Args:
            index: of the row.
        """
        one = self[index]
        text, position = "", 0
        for learned, run in groupby(one.learned.tolist()):
            size = len(list(run))
            part = self.formatter.decode(one.token_ids[position : position + size])
            text += f"[[{part}]]" if learned else part
            position += size
        begin, end = _SHOWN
        if len(text) > begin + end:
            left_out = len(text) - begin - end
            text = f"{text[:begin]}\n... {left_out:,} characters ...\n{text[-end:]}"
        return (
            f"{self.where(index)}, {position:,} tokens; the {int(one.learned.sum()):,} between "
            f"[[ and ]] are learned:\n{text.rstrip()}"
        )


def learned_rows(demonstrations: Iterable[Demonstration]) -> LazyStackedTensorDict | None:
    """Return rows for a loss, except rows without learned tokens; ``None`` if none is left.

    Args:
        demonstrations: demonstrations of a batch.
    """
    rows = [each.row() for each in demonstrations if bool(each.learned.any())]
    return lazy_rows(rows) if rows else None
