"""Task from your own rows: any table, its relevant columns, and a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_llm._registry import register
from torchrl_llm.data.column_names import (
    MESSAGES,
    chat_in,
    check_named,
    columns_before,
    first_column,
    joined_prompt,
    prompt_columns,
)
from torchrl_llm.data.conversation_rules import ROLES
from torchrl_llm.data.messages import message_text
from torchrl_llm.data.row_files import load_rows, plain_rows
from torchrl_llm.data.table_cells import plain_value
from torchrl_llm.data.table_files import place_of
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.function_reward import as_reward
from torchrl_llm.rewards.reward_parser import RewardParser

ANSWERS = ("answer", "solution", "target", "label", "output", "response", "completion")
"""Columns that may hold the answer if none is named; the first one that exists is used."""


class RowColumns(NamedTuple):
    """Columns of a table that the task uses.

    Attributes:
        prompt: columns with the question.
        answer: column with the answer that the reward compares with the response; ``None`` if the
            data has none.
        before: columns with text before the prompt.
    """

    prompt: tuple[str, ...]
    answer: str | None
    before: tuple[str, ...]


@register("tasks", "rows")
class RowsEnv(TaskEnv):
    """Your own rows (``data=FILE``), scored by your own function (``reward=``).

    Cells become plain Python values: numbers of NumPy and torch are converted, a missing cell (NaN)
    is ``None``, and whole numbers in a column with missing cells stay integers. Rows of the
    environment have ``query`` (the user's message, or the messages of a conversation that the model
    is to continue), ``answer`` (``None`` if the data has none) and ``row``, the row of the data,
    which is passed to a reward of ``(response, row)``.

    Args:
        dataset: the data, in any form that :func:`~torchrl_llm.data.row_files.load_rows` accepts.
        prompt: column with the user's message; if not given, the first of
            :data:`~torchrl_llm.data.column_names.PROMPTS` (``instruction`` together with
            ``input``), or else the first column with conversations. ``system`` (a text) and
            ``history`` (pairs of question and answer) come before it.
        answer: column with the answer that the reward compares with the response; if not given, the
            first of :data:`ANSWERS` that exists, or none.
        messages: column with the messages of a conversation, instead of ``prompt``; an answer of
            the model at its end is removed, and becomes the ``answer`` if no column is named.
        reward: see :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv`.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv`.

    Raises:
        ConfigError: ``prompt`` and ``messages`` are both given, or there is no reward.
        DataError: a column does not exist (the message lists the existing ones), or the reward
            compares with answers and there are none.

    Example:
        >>> rows = [{"question": "What is 3 + 4?", "answer": "7"}]
        >>> env = RowsEnv(dataset=rows, reward=lambda response, answer: response == answer)
        >>> td = env.reset()
        >>> td["query"][0], td["answer"][0], td["row"][0]["question"]
        ('What is 3 + 4?', '7', 'What is 3 + 4?')
    """

    def __init__(
        self,
        *,
        dataset: Any = None,
        data_files: Any = None,
        prompt: str | None = None,
        answer: str | None = None,
        messages: str | None = None,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        source = self._dataset(dataset, data_files)
        if source is None:
            raise ConfigError(
                "rows of your own need data: data=FILE (CSV, JSON, JSON lines, Parquet), a folder "
                "or the name of a dataset on the hub"
            )
        rows = plain_rows(load_rows(source, name=name, split=split))
        if kwargs.get("reward") is not None:
            kwargs["reward"] = as_reward(kwargs["reward"])
        named = {"prompt": prompt, "answer": answer, "messages": messages}
        self._columns = check_rows(rows, kwargs.get("reward"), **named)
        super().__init__(dataset=rows, **kwargs)

    def make_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of the data as ``query``, ``answer`` and ``row``."""
        query, answer = query_and_answer(row, self._columns)
        plain = {name: plain_value(value) for name, value in row.items()}
        return {"query": query, "answer": plain_value(answer), "row": plain}

    def make_reward(self) -> RewardParser:
        """Raises: your own rows have no default reward."""
        raise ConfigError(
            "rows of your own need a reward: reward=FILE.py:FUNCTION of (response, answer), or the "
            "name of one (torchrl-llm list rewards), reward=exact for example"
        )


def check_rows(
    rows: Sequence[Mapping[str, Any]], reward: RewardParser | None, **named: str | None
) -> RowColumns:
    """Check rows before an environment is built; all rows in memory are checked.

    Args:
        rows: the rows of the data.
        reward: the reward that scores answers to them; ``None`` for none.
        named: arguments of :func:`choose_columns`.

    Returns:
        As :func:`choose_columns`.

    Raises:
        DataError: a row has no prompt, or the reward compares with answers and there are none.
    """
    columns = choose_columns(rows[0], **named)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows[0]], 1):
        _query(row, columns, place_of(row, f"row {number}"))
    needed = reward is not None and reward.needs_answer and columns.answer is None
    if needed and query_and_answer(rows[0], columns)[1] is None:
        raise DataError(
            f"the reward compares with an answer, and none of the columns {sorted(rows[0])} is one "
            "by its name; name it, data.answer=..., or take a reward of (response) or "
            "(response, row)"
        )
    return columns


def query_and_answer(
    row: Mapping[str, Any], columns: RowColumns
) -> tuple[str | list[dict[str, Any]], Any]:
    """Question of a row, and the answer with which the reward compares.

    Args:
        row: a row of the data.
        columns: columns of :func:`choose_columns`.
    """
    query, last = _query(row, columns, "a row"), None
    if isinstance(query, list) and query[-1].get("role") == "assistant":
        last = _said(query.pop())
    if columns.answer is None:
        return query, last
    answer = row.get(columns.answer)
    if (messages := chat_in(answer)) and messages[-1].get("role") == "assistant":
        answer = _said(messages[-1])
    return query, answer


def _said(message: Mapping[str, Any]) -> Any:
    """The content of a message; content in parts becomes one text."""
    content = message.get("content")
    return message_text({"content": content}) if isinstance(content, (list, tuple)) else content


def _query(row: Mapping[str, Any], columns: RowColumns, where: str) -> str | list[dict[str, Any]]:
    """The question: a text, or messages with at least one of the user's."""
    try:
        query, fine = joined_prompt(row, columns.prompt, columns.before), False
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if (messages := chat_in(query)) is not None:
        query, roles = messages, {message["role"] for message in messages}
        fine = "user" in roles and roles.issubset(ROLES)
    elif isinstance(query, str):
        fine = bool(query.strip())
    if not fine:
        raise DataError(
            f"{where}: the column {columns.prompt[0]!r} must hold a text or a list of messages of "
            f"the roles {', '.join(ROLES)} with one of the user's, got {query!r}"
        )
    return query


def choose_columns(
    row: Mapping[str, Any], *, prompt: str | None, answer: str | None, messages: str | None
) -> RowColumns:
    """The columns with the prompt (or the messages), the answer, and the text before the prompt.

    Args:
        row: the first of the data.
        prompt: name given by the user; ``None`` to search a column.
        answer: as ``prompt``.
        messages: as ``prompt``.

    Raises:
        ConfigError: both ``prompt`` and ``messages``.
        DataError: a column does not exist.
    """
    if prompt is not None and messages is not None:
        raise ConfigError(
            f"data.prompt={prompt} and data.messages={messages} both name the question; give one"
        )
    check_named(row, prompt=prompt, messages=messages, answer=answer)
    talk = messages or first_column(row, MESSAGES)
    asked = (messages,) if messages else prompt_columns(row, prompt)
    asked = asked or tuple(filter(None, [talk]))
    if not asked:
        raise DataError(
            f"none of the columns {sorted(row)} is a prompt by its name; name one: data.prompt=... "
            "or data.messages=... for whole conversations"
        )
    answer = answer or first_column(row, [name for name in ANSWERS if name not in asked])
    whole = "history" if asked == (talk,) else None
    return RowColumns(asked, answer, columns_before(row, *asked, answer, whole))
