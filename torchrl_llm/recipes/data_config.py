"""Data of a recipe: source of the rows, their columns, and the held-out rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchrl._utils import logger

from torchrl_llm._registry import absolute_path, import_named
from torchrl_llm._settings import Group, ensure, naming
from torchrl_llm.data.row_files import MappedRows, Row, load_rows, plain_rows
from torchrl_llm.errors import ConfigError

ROWS = "rows"
"""Name of the task that reads the rows of the group ``data``."""

_SHARE, _MOST = 10, 128
_MOST_COMPARED = 20_000

Source = str | list[str] | None


class ReadsOnce(Group):
    """Base of groups that read rows once and cache them; copies and other processes read again."""

    def once(self, name: str, read: Callable[[], Any]) -> Any:
        """The cached value of a name, read on first use.

        Args:
            name: name of the value.
            read: function that reads it.
        """
        known = vars(self).setdefault("_known", {})
        if name not in known:
            known[name] = read()
        return known[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_known"}


class DataSource(ReadsOnce, key="data"):
    """Source of the rows.

    Attributes:
        source: a CSV, JSON, JSON-lines or Parquet file, several of them, a folder, the name of a
            dataset on the hub, or ``module:name`` of rows in Python. ``data=FILE`` is the short
            form.
        eval_source: source of the held-out rows, as for ``source``; ``None`` for ``eval_split``, or
            for the last rows of ``source``.
        subset: configuration of a dataset on the hub.
        split: split with the training rows, in a hub dataset or a folder; ``None`` for ``train``.
        eval_split: split with the held-out rows; ``None`` for none.
    """

    source: Source = None
    eval_source: Source = None
    subset: str | None = None
    split: str | None = None
    eval_split: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.source, self.eval_source = _absolute(self.source), _absolute(self.eval_source)
        given = [entry.name for entry in fields(self) if getattr(self, entry.name) is not None]
        ensure(
            self.source is not None or not given,
            f"data.{given[0] if given else ''} has no effect without data.source (data=FILE)",
        )
        ensure(
            self.eval_source is None or self.eval_split is None,
            "data.eval_source and data.eval_split both say what is held out; give one",
        )

    def load(self) -> Sequence[Row]:
        """The rows of ``source``.

        Raises:
            DataError: missing or malformed data.
        """
        return self._read(self.source, self.split, "data.source")

    def _read(self, source: Source, split: str | None, key: str) -> Sequence[Row]:
        return self.once(key, lambda: read_source(source, self.subset, split, key=key))

    def load_held_out(self) -> Sequence[Row] | None:
        """The rows of ``eval_source`` or ``eval_split``; ``None`` without either.

        Raises:
            DataError: missing or malformed data.
        """
        if self.eval_split is not None:
            return self._read(self.source, self.eval_split, "data.eval_split")
        if self.eval_source is None:
            return None
        return self._read(self.eval_source, self.split, "data.eval_source")


class DataConfig(DataSource):
    """Your own rows, whose prompts the model answers.

    Attributes:
        prompt: column with the user's message; ``None`` for a column with a usual name (``prompt``,
            ``question``, ``query``, ...).
        answer: column with the correct answer, for the reward; ``None`` for a column with a usual
            name, or for no column if there is none.
        messages: column with whole conversations, instead of ``prompt``.
    """

    prompt: str | None = None
    answer: str | None = None
    messages: str | None = None

    @property
    def columns(self) -> dict[str, str | None]:
        """The columns, as arguments of ``RowsEnv``."""
        return {"prompt": self.prompt, "answer": self.answer, "messages": self.messages}


class _WithData(Protocol):
    """The groups that this module reads."""

    data: DataConfig
    env: Any
    reward: Any


def check_data(config: _WithData) -> None:
    """Reject rows without the task that reads them, and the reverse.

    Args:
        config: configuration of the recipe, with the groups ``data``, ``env`` and ``reward``.

    Raises:
        ConfigError: a key would have no effect.
    """
    own = config.env.dataset == ROWS
    ensure(
        own or config.data == DataConfig(),
        f"data has no effect with env.dataset={config.env.dataset}, whose problems come from the "
        "task or from env.data_files; choose env=rows for rows of your own",
    )
    ensure(
        not own or config.data.source is not None,
        "env=rows needs rows: data=FILE (CSV, JSON, JSON lines or Parquet), a folder, or the name "
        "of a dataset on the hub",
    )
    ensure(
        not own
        or config.reward.function is not None
        or bool(config.reward.components)
        or config.agent.owns_loop,  # the program returns the reward
        "rows of your own need a reward: reward=FILE.py:FUNCTION of (response, answer), or the "
        "name of one (torchrl-llm list rewards), reward=exact for example",
    )
    ensure(
        not own or config.env.data_files is config.env.eval_data_files is None,
        "env.data_files has no effect with env=rows; data.source and data.eval_source say it",
    )


class HeldOut(NamedTuple):
    """Training rows and evaluation rows."""

    train: Sequence[Row]
    held_out: Sequence[Row]


def hold_out(rows: Sequence[Row], num_rows: int | None, *, where: str) -> HeldOut:
    """Split off the last rows.

    Args:
        rows: all rows.
        num_rows: number of held-out rows; ``None`` for a tenth, at most 128.
        where: name of their source, for the error.

    Raises:
        ConfigError: no row would be left.

    Example:
        >>> len(hold_out([{"query": str(n)} for n in range(50)], None, where="rows").held_out)
        5
    """
    wanted = min(_MOST, max(1, len(rows) // _SHARE)) if num_rows is None else num_rows
    split = len(rows) - wanted
    if split < 1:
        raise ConfigError(
            f"eval.num_prompts={wanted} leaves none of the {len(rows)} problems of {where} for "
            "training; lower it, or give held-out problems of their own"
        )
    return HeldOut(_part(rows, range(split)), _part(rows, range(split, len(rows))))


def _part(rows: Sequence[Row], wanted: range) -> Sequence[Row]:
    if isinstance(rows, list):
        return rows[wanted.start : wanted.stop]
    return MappedRows(wanted, rows.__getitem__)  # a slice of a datasets.Dataset holds columns


def shared_prompts(train: Iterable[Any], held_out: Sequence[Any]) -> list[Any]:
    """Return the held-out prompts that are also training prompts.

    Args:
        train: training prompts: texts, or any JSON value; only the first 20,000 are checked.
        held_out: held-out prompts, in the same form.

    Example:
        >>> shared_prompts(["a", "b"], ["b", "c"])
        ['b']
    """
    wanted = {_spelled(prompt) for prompt in held_out if prompt is not None}
    both = {key for key in map(_spelled, islice(train, _MOST_COMPARED)) if key in wanted}
    return [prompt for prompt in held_out if _spelled(prompt) in both]


def _spelled(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return json.dumps(prompt, default=str, sort_keys=True)


def overlap_text(both: Sequence[Any], held_out: Sequence[Any]) -> str:
    """Message about :func:`shared_prompts`.

    Args:
        both: the shared prompts.
        held_out: all held-out prompts.
    """
    return (
        f"{len(both)} of {len(held_out)} held-out prompts are trained on too, {both[0]!r:.80} for "
        "example, and would flatter the accuracy. Leave them out of one of the two"
    )


def tell_overlap(train: Iterable[Any], held_out: Sequence[Any], key: str) -> None:
    """Warn in a run if held-out prompts are also training prompts.

    Args:
        train: as for :func:`shared_prompts`.
        held_out: held-out prompts, in the same form.
        key: key of the data source.
    """
    if both := shared_prompts(train, held_out):
        logger.warning(f"{key}: {overlap_text(both, held_out)}")


def read_source(source: Any, subset: str | None, split: str | None, *, key: str) -> Sequence[Row]:
    """Rows of a source of any kind.

    Args:
        source: as :attr:`DataSource.source`.
        subset: configuration of a hub dataset.
        split: split of a hub dataset or a folder.
        key: dotted key of the setting.

    Raises:
        DataError: missing or malformed data.
        ConfigError: ``module:name`` that cannot be imported.
    """
    if isinstance(source, str) and _names_python(source):
        with naming(key):
            found = import_named(source)
        source = found() if callable(found) else found
    return plain_rows(load_rows(source, name=subset, split=split))


def _names_python(source: str) -> bool:
    return ":" in source and not Path(source).exists() and "://" not in source


def _absolute(source: Source) -> Source:
    """A path that is valid in a process with a different working folder."""
    if source is None or isinstance(source, list):
        return source and [_absolute(each) for each in source]
    if _names_python(source):
        return absolute_path(source)
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
