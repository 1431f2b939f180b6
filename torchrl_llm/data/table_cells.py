"""Original values of table cells, undoing the conversions of NumPy, pandas, torch and Arrow.

NumPy, torch and pandas have their own number types, a data frame writes a missing cell as NaN and
converts its column to floats, and Arrow gives all structs of a column the same fields.

Next: :func:`torchrl_llm.data.row_files.load_rows` reads tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any

_PLAIN = (str, int, bool, dict, list)
# Types that :mod:`torchrl_llm.data.wire` writes without conversion.
_KEPT = (str, int, float, bool, bytes, Decimal, date, datetime, time, timedelta)
_MISSING = ("NAType", "NaTType")


def plain_cell(value: Any) -> Any:
    """A cell without types of NumPy, torch and pandas; ``None`` if it is missing.

    Args:
        value: of any type. An array or a tensor becomes a number, a date or lists.

    Example:
        >>> import torch
        >>> plain_cell(torch.tensor(3)), plain_cell(float("nan")), plain_cell("NaN")
        (3, None, 'NaN')
    """
    if type(value) in _PLAIN:
        return value
    if str(getattr(value, "dtype", "")) in ("torch.float16", "torch.float32"):
        value = value.detach().cpu().numpy()
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("M", "m"):  # nanoseconds would become integers
        value = value.astype({"M": "datetime64[us]", "m": "timedelta64[us]"}[kind])
    elif kind == "f" and not value.shape:
        value = narrow_float(value)
    elif kind == "O":  # pandas converts Arrow's lists to them
        return [_without_missing(each) for each in value.tolist()]
    for plain in ("tolist", "to_pydatetime", "to_pytimedelta"):
        value = getattr(value, plain)() if hasattr(value, plain) else value
    is_nan = isinstance(value, float) and math.isnan(value)
    return None if is_nan or type(value).__name__ in _MISSING else value


def narrow_float(value: Any) -> float:
    """A NumPy float of any width with the digits that were written.

    Args:
        value: one number.

    Example:
        >>> import numpy
        >>> numpy.float32(0.1).item(), narrow_float(numpy.float32(0.1))
        (0.10000000149011612, 0.1)
    """
    return float(value.astype(str))


def _without_missing(value: Any) -> Any:
    """A nested cell without the fields that Arrow adds to its structs."""
    value = plain_cell(value)
    if isinstance(value, Mapping):
        own = {name: _without_missing(each) for name, each in value.items()}
        return {name: each for name, each in own.items() if each is not None}
    return value


def plain_value(value: Any) -> Any:
    """A value of a table in built-in Python types, so that rows can be sent to other processes.

    Args:
        value: of any type; everything except numbers, text, dates, bytes and collections becomes
            its ``str``.
    """
    value = plain_cell(value)
    if value is None or type(value) in _KEPT:
        return value
    if isinstance(value, Mapping):
        return {str(name): plain_value(each) for name, each in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(map(plain_value, value))
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), str(value))


def plain_row(
    row: Mapping[str, Any],
    whole: Collection[str] = (),
    columns: Collection[str] | None = None,
    narrow: Mapping[str, Any] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """A copy of a row, with plain cells.

    Args:
        row: a row of a table.
        whole: result of :func:`whole_columns`.
        columns: names of the columns to convert; all by default.
        narrow: NumPy type of each column of floats that is stored with lower precision.

    Example:
        >>> plain_row({"query": "a", "answer": 30.0}, ["answer"])
        {'query': 'a', 'answer': 30}
    """
    made = copy(row) if isinstance(row, dict) else dict(row)  # a FileRow keeps its location
    for name in row if columns is None else columns:
        if name in row:
            cell = plain_cell(row[name])
            if isinstance(cell, float) and name in whole:
                cell = int(cell)
            elif isinstance(cell, float) and name in narrow:
                cell = narrow_float(narrow[name](cell))
            made[name] = cell
    return made


def uncertain_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Columns with cells that :func:`plain_row` may change.

    Args:
        rows: the rows of a table.
    """
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).add(type(value))
    return [name for name, found in kinds.items() if found.difference(_PLAIN, (type(None),))]


def whole_columns(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[str]:
    """Integer columns that were converted to floats because of a missing cell.

    Args:
        rows: the rows of a table.
        columns: names of the columns to check.

    Example:
        >>> rows = [{"a": 30.0, "b": 1.0}, {"a": None, "b": 2.0}]
        >>> whole_columns(rows, ["a", "b"])  # nothing is missing in b: its floats are meant
        ['a']
    """
    return [name for name in columns if _are_whole(plain_cell(row.get(name)) for row in rows)]


def _are_whole(cells: Iterable[Any]) -> bool:
    missing = floats = False
    for cell in cells:
        missing |= cell is None
        floats |= isinstance(cell, float)
        is_number = isinstance(cell, (int, float)) and not isinstance(cell, bool)
        if cell is not None and not (is_number and float(cell).is_integer()):
            return False
    return missing and floats


def without_padding(value: Any, feature: Any) -> Any:
    """A cell without the fields that Arrow adds from other structs of its column.

    Args:
        value: a cell of a ``datasets.Dataset``.
        feature: its type there. Values of a JSON type are kept unchanged, because it adds no
            fields.

    Example:
        >>> without_padding({"a": 1, "b": None}, {"a": "int64", "b": "int64"})
        {'a': 1}
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        own = {name: each for name, each in value.items() if each is not None}
        return {name: without_padding(each, feature.get(name)) for name, each in own.items()}
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, Sequence) and not isinstance(value, str):
        return [without_padding(each, inner) for each in value]
    return value


def holds_structs(feature: Any) -> bool:
    """Whether a column of a ``datasets.Dataset`` contains structs at any level.

    Args:
        feature: the column's type.
    """
    if isinstance(feature, Mapping):
        return True
    inner = getattr(feature, "feature", None)
    return inner is not None and holds_structs(inner)
