"""One HTML page of a run: curves, a list of rollouts, and each rollout token by token.

The page is a single file that needs no server, network or build. The texts of models are compressed
into one block of base64, so they are never markup. The script of the page inserts them as text
only. A content security policy forbids every other script, style, picture and connection.

Next: ``view.js`` is the script, and ``curves.js`` draws curves;
:mod:`torchrl_llm.evaluation.report.row_facts` reads the rows.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDictBase

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.evaluation.report.row_facts import MASKS, RowFacts, name_of
from torchrl_llm.evaluation.report.token_texts import CONTINUED, TokenTexts, visible

Series = tuple[Sequence[int], Sequence[float]]

_FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost", "pending")
LEDGER = "Tokens of each step"
PANELS = {
    "Reward": ("train/reward", "eval/reward"),
    "Held-out accuracy": ("train/success", "eval/accuracy"),
    "KL, nats a token": ("train/kl_approx", "train/kl_to_inference", "train/kl_to_ref"),
    "Response length, tokens": ("train/response_length", "eval/response_length"),
    "Entropy, nats": ("train/entropy",),
    "Clip fraction": ("train/clip_fraction", "train/correction_masked"),
    "Age of the weights, versions": ("train/policy_age_mean", "train/policy_age_max"),
    LEDGER: tuple(f"train/tokens_{fate}" for fate in _FATES),
}
"""Maps a drawing's title to its metrics; the ledger's metrics add up, so they are stacked."""

_MOST_LABELS = 30
_PLACE = re.compile(r"\{\{([a-z-]+)\}\}")
_TYPES = {"reward": "<f4", "advantage": "<f4", "log_probs": "<f4", "ratio": "<f4"}
_TYPES |= {"source": "<i1", "mask_reason": "<i1", "turns": "<i2", "masked": "<u2"}
_TOKEN_FACTS = ("token_ids", "source", "turns", "policy_version", "mask_reason")
_TOKEN_FACTS += ("log_probs", "advantage", "ratio")


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        title: title above the table.
        header: a title for each column.
        rows: rows of texts; the first text of a row is its name.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def rollout_page(
    rows: Iterable[TensorDictBase | RowFacts],
    *,
    tokenizer: Any = None,
    metrics: Mapping[str, Series] | None = None,
    title: str = "rollouts",
    facts: Mapping[str, Any] | None = None,
    notices: Sequence[str] = (),
    tables: Sequence[Table] = (),
    by_prompt: bool = False,
    runs: Mapping[str, Mapping[str, Series]] | None = None,
    language: Mapping[str, Any] | None = None,
) -> str:
    """Draw rows and metrics as a page that any browser can open offline.

    Args:
        rows: rows without batch dimension, in the order of the list; may be empty.
        tokenizer: a fast Hugging Face tokenizer; without it, tokens are shown as ids.
        metrics: maps a name to steps and values.
        title: title of the page.
        facts: facts of the run, shown below the title.
        notices: sentences that are shown first.
        tables: tables above the curves.
        by_prompt: whether the list has one line for each prompt when the page opens.
        runs: for a comparison, maps the label of each run to its metrics. Each metric has one
            drawing with a curve of each run. Rows belong to the run that their label ``run`` names.
        language: result of ``language_run.read_language_run``.

    Returns:
        The HTML.

    Raises:
        DataError: when a row has no token ids.

    Example:
        >>> page = rollout_page([], metrics={"train/reward": ([1, 2], [0.25, 0.5])}, title="<run>")
        >>> "<title>&lt;run&gt;</title>" in page
        True
    """
    data, strings = _Columns(), _Strings()
    header = {
        "title": visible(title),
        "facts": {name: visible(str(value)) for name, value in (facts or {}).items()},
        "notices": [visible(notice) for notice in notices],
        "panels": _panels(metrics or {}, data) + _run_panels(runs or {}, data),
        "tables": [
            {"title": visible(title), "rows": [[*map(visible, row)] for row in (header, *cells)]}
            for title, header, cells in tables
        ],
        "runs": [*(runs or {})],
        "by_prompt": by_prompt,
        "ledger": LEDGER,
        "sources": [name_of(Source, code) for code in Source],
        "masks": [name_of(MaskReason, code) for code in MaskReason],
        "reasons": [MASKS[code] for code in MaskReason],
        "continued": CONTINUED,
        "tokenizer": tokenizer is not None,
        "language": language,
    } | _read_rows(rows, TokenTexts(tokenizer), data, strings)
    header |= {"strings": strings.texts, "columns": data.places}
    return _fill(title, data.packed(header))


class _Strings:
    """Stores every text of the page once; columns hold the numbers of the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        """Return the number of a text, -1 for no text."""
        if text is None:
            return -1
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(visible(text))
        return self._numbers[text]


class _Columns:
    """Arrays in one block of bytes, and the position of each array."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str, int, int]] = {}
        self._parts: list[bytes] = []
        self._end = 0

    def add(self, name: str, values: Any, dtype: str = "<i4") -> None:
        """Append a column with a little-endian NumPy dtype."""
        data = np.asarray(values, dtype=dtype).tobytes()
        self.places[name] = (dtype, self._end, len(data) // int(dtype[2:]))
        self._parts += [data, bytes(-len(data) % 8)]
        self._end += len(data) + -len(data) % 8

    def packed(self, header: Mapping[str, Any]) -> str:
        """Return the length of the header, the header and the columns, compressed."""
        head = json.dumps(header, allow_nan=False).encode()
        head += b" " * (-(len(head) + 8) % 8)
        whole = b"".join([len(head).to_bytes(8, "little"), head, *self._parts])
        return base64.b64encode(gzip.compress(whole, 6, mtime=0)).decode()


def _panels(metrics: Mapping[str, Series], data: _Columns) -> list[dict[str, Any]]:
    known = {name: pair for name, pair in metrics.items() if len(pair[0])}
    drawn = {title: [n for n in names if n in known] for title, names in PANELS.items()}
    taken = {name for names in drawn.values() for name in names}
    for name, (steps, values, *_) in known.items():
        data.add(f"{name} steps", steps)
        data.add(f"{name} values", values, "<f8")
    return [
        {"title": title, "names": names, "more": title not in PANELS}
        for title, names in (drawn | {n: [n] for n in known if n not in taken}).items()
        if names
    ]


def _run_panels(runs: Mapping[str, Mapping[str, Series]], data: _Columns) -> list[dict[str, Any]]:
    """Make a drawing for each metric, with a curve of each run that has the metric."""
    shown = {name for title, names in PANELS.items() if title != LEDGER for name in names}
    panels = []
    for metric in ordered_metrics(runs.values()):
        curves = {run: found[metric] for run, found in runs.items() if metric in found}
        for run, (steps, values, *_) in curves.items():
            data.add(f"{run} {metric} steps", steps)
            data.add(f"{run} {metric} values", values, "<f8")
        names = [f"{run} {metric}" for run in curves]
        panel = {"title": metric, "names": names, "labels": [*map(visible, curves)]}
        panels.append(panel | {"more": metric not in shown})
    return panels


def ordered_metrics(runs: Iterable[Mapping[str, Series]]) -> list[str]:
    """Return the names of the metrics of some runs, in the order in which the page draws them.

    Args:
        runs: metrics of each run, by name.
    """
    known = dict.fromkeys(name for metrics in runs for name, pair in metrics.items() if pair[0])
    first = [name for names in PANELS.values() for name in names if name in known]
    return [*first, *(name for name in known if name not in first)]


def _read_rows(
    rows: Iterable[TensorDictBase | RowFacts], texts: TokenTexts, data: _Columns, strings: _Strings
) -> dict[str, Any]:
    read = [row if isinstance(row, RowFacts) else RowFacts.of(row) for row in rows]
    if read:
        of_rows = [_row_columns(facts, strings) for facts in read]
        for name in of_rows[0]:
            values = [columns[name] for columns in of_rows]
            data.add(f"row {name}", values, _TYPES.get(name, "<i4"))
        shown = (text for facts in read for text in texts.of(facts.token_ids.tolist()))
        data.add("token text", np.fromiter(map(strings.number, shown), dtype="<i4"))
        for name in _TOKEN_FACTS:
            values = np.concatenate([getattr(facts, name) for facts in read])
            data.add(f"token {name}", values, _TYPES.get(name, "<i4"))
    parts = list(dict.fromkeys(name for facts in read for name in facts.parts))
    for name in parts:
        data.add(f"part {name}", [facts.parts.get(name, math.nan) for facts in read], "<f4")
    labels = []
    for name in dict.fromkeys(name for facts in read for name in facts.labels):
        values = [strings.number(facts.labels.get(name)) for facts in read]
        if 2 <= len(set(values)) <= _MOST_LABELS:  # worth a filter
            labels.append(name)
            data.add(f"label {name}", values)
    data.add("starts", list(accumulate((len(facts.token_ids) for facts in read), initial=0)))
    data.add("chat starts", list(accumulate((len(facts.messages) for facts in read), initial=0)))
    said = [message for facts in read for message in facts.messages]
    data.add("chat roles", [strings.number(role) for role, _ in said])
    data.add("chat texts", [strings.number(text) for _, text in said])
    return {"num_rows": len(read), "parts": parts, "labels": labels}


def _row_columns(facts: RowFacts, strings: _Strings) -> dict[str, Any]:
    def text(value: Any) -> int:
        return strings.number(None if value is None else str(value))

    trained = facts.advantage[~np.isnan(facts.advantage)]
    return {
        "step": -1 if facts.step is None else facts.step,
        "turn": -1 if facts.turn is None else facts.turn,
        "group": text(facts.group_id),
        "trajectory": text(facts.traj_id),
        "reward": facts.reward,
        "advantage": trained.mean() if trained.size else math.nan,
        "finish": text(facts.finish),
        "truncation": text(facts.truncation),
        "error": text("\n".join(facts.errors)),
        "prompt": text(facts.prompt),
        "response": text(facts.response),
        "expected": text(facts.expected),
        "sampled": int(facts.sampled.sum()),
        "masked": sum(1 << code for code in facts.mask_counts if 0 <= code < 16),
        "num_masked": sum(facts.mask_counts.values()),
    }


def _fill(title: str, packed: str) -> str:
    folder = files(__package__)
    page, style, script, curves, language = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("view.html", "view.css", "view.js", "curves.js", "language.js")
    )
    script = script.replace("{{curves}}", curves).replace("{{language}}", language)
    values = {
        "title": html.escape(visible(title)),
        "style-hash": _hash(style),
        "script-hash": _hash(script),
        "style": style,
        "script": script,
        "data": packed,
    }
    return _PLACE.sub(lambda found: values[found[1]], page)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
