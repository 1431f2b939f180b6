"""One HTML page of a run: curves, a list of rollouts, and each of them token by token.

The page is whole: no server, no network, no build. What models wrote is compressed into one block
of base64, so none of it is markup, and the page's own script puts it in place as text only. A
content security policy forbids every other script, style, picture and connection.

Next: ``view.js`` is that script; :mod:`torchrl_llm.evaluation.report.row_facts` reads the rows.
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
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from torchrl_llm.data.enums import FinishReason, MaskReason, Source
from torchrl_llm.evaluation.report.row_facts import MASKS, RowFacts
from torchrl_llm.evaluation.report.token_texts import CONTINUED, TokenTexts, visible

Series = tuple[Sequence[int], Sequence[float]]

PANELS: dict[str, tuple[str, ...]] = {
    "Reward": ("train/reward", "eval/reward"),
    "Held-out accuracy": ("eval/accuracy", "train/success"),
    "KL, nats a token": ("train/kl_approx", "train/kl_to_inference", "train/kl_to_ref"),
    "Response length, tokens": ("train/response_length", "eval/response_length"),
    "Entropy, nats": ("train/entropy",),
    "Clip fraction": ("train/clip_fraction", "train/correction_masked"),
    "Age of the weights, versions": ("train/policy_age_mean", "train/policy_age_max"),
    "Tokens of each step": tuple(
        f"train/tokens_{fate}"
        for fate in (
            *("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost"),
            "pending",
        )
    ),
}
"""Title of a drawing to the metrics in it. The last one is the ledger, whose parts add up."""

LEDGER = list(PANELS)[-1]

_MOST_LABELS = 30
_PLACE = re.compile(r"\{\{([a-z-]+)\}\}")
_WORDS = {int(code): words for code, words in MASKS.items()}


def rollout_page(
    rows: Iterable[TensorDictBase],
    *,
    tokenizer: Any = None,
    metrics: Mapping[str, Series] | None = None,
    title: str = "rollouts",
    facts: Mapping[str, Any] | None = None,
    notices: Sequence[str] = (),
) -> str:
    """Draw rows and metrics as a page that any browser opens, offline.

    Args:
        rows: each without batch dimension, in the order in which they are listed; may be none.
        tokenizer: a fast Hugging Face tokenizer; without it tokens are shown as ids.
        metrics: name to steps and values.
        title: of the page.
        facts: what to say of the run below its title.
        notices: sentences that the reader should see first.

    Returns:
        The HTML.

    Raises:
        DataError: a row has no token ids.

    Example:
        >>> page = rollout_page([], metrics={"train/reward": ([1, 2], [0.25, 0.5])}, title="<run>")
        >>> "<title>&lt;run&gt;</title>" in page, "http" in page.replace("http-equiv", "")
        (True, False)
    """
    data = _Columns()
    strings = _Strings()
    header = {
        "title": visible(title),
        "facts": {name: visible(str(value)) for name, value in (facts or {}).items()},
        "notices": list(notices),
        "panels": _panels(metrics or {}, data),
        "ledger": LEDGER,
        "sources": [source.name.lower() for source in Source],
        "finishes": [reason.name.lower() for reason in FinishReason],
        "masks": [reason.name.lower().replace("_", " ") for reason in MaskReason],
        "reasons": [_WORDS[code] for code in range(len(_WORDS))],
        "continued": CONTINUED,
        "tokenizer": tokenizer is not None,
    } | _read_rows(rows, TokenTexts(tokenizer), data, strings)
    header |= {"strings": strings.texts, "columns": data.places}
    return _fill(title, data.packed(header))


class _Strings:
    """Every text of the page once; columns hold its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        """Number of a text, -1 for none."""
        if text is None:
            return -1
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(visible(text))
        return self._numbers[text]


class _Columns:
    """Arrays in one block of bytes, with where each begins."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str, int, int]] = {}
        self._parts: list[bytes] = []
        self._end = 0

    def add(self, name: str, values: Any, dtype: str) -> None:
        """Append a column; ``dtype`` is a little-endian one of NumPy's."""
        array = np.ascontiguousarray(values, dtype=dtype)
        self.places[name] = (dtype, self._end, array.size)
        data = array.tobytes()
        self._parts += [data, bytes(-len(data) % 8)]
        self._end += len(data) + -len(data) % 8

    def packed(self, header: Mapping[str, Any]) -> str:
        """Length of the header, the header, and the columns; compressed."""
        head = json.dumps(header, allow_nan=False).encode()
        head += b" " * (-(len(head) + 8) % 8)
        whole = b"".join([len(head).to_bytes(8, "little"), head, *self._parts])
        return base64.b64encode(gzip.compress(whole, 6, mtime=0)).decode()


def _panels(metrics: Mapping[str, Series], data: _Columns) -> list[dict[str, Any]]:
    drawn = {title: [n for n in names if n in metrics] for title, names in PANELS.items()}
    taken = {name for names in drawn.values() for name in names}
    rest = {name: [name] for name in metrics if name not in taken}
    for name, (steps, values, *_) in metrics.items():
        data.add(f"{name} steps", steps, "<i4")
        data.add(f"{name} values", values, "<f8")
    return [
        {"title": title, "names": names, "more": title in rest}
        for title, names in (drawn | rest).items()
        if names
    ]


_ROW_TYPES = {"reward": "<f4", "advantage": "<f4", "masked": "<u2"}
_TOKEN_TYPES = {
    "token_ids": "<i4",
    "source": "<i1",
    "turns": "<i2",
    "policy_version": "<i4",
    "mask_reason": "<i1",
    "log_probs": "<f4",
    "advantage": "<f4",
    "ratio": "<f4",
}


def _read_rows(
    rows: Iterable[TensorDictBase], texts: TokenTexts, data: _Columns, strings: _Strings
) -> dict[str, Any]:
    table: list[dict[str, Any]] = []
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in (*_TOKEN_TYPES, "text")}
    parts: list[dict[str, float]] = []
    labels: list[dict[str, str]] = []
    chats: list[list[tuple[int, int]]] = []
    for row in rows:
        facts = RowFacts.of(row)
        table.append(_row_columns(facts, strings))
        parts.append(facts.parts)
        labels.append(facts.labels)
        chats.append([(strings.number(r), strings.number(t)) for r, t in facts.messages])
        shown = texts.of(facts.token_ids.tolist())
        tokens["text"].append(np.array([strings.number(text) for text in shown], dtype="<i4"))
        for name in _TOKEN_TYPES:
            tokens[name].append(getattr(facts, name))
    for name in table[0] if table else ():
        data.add(f"row {name}", [each[name] for each in table], _ROW_TYPES.get(name, "<i4"))
    for name, columns in tokens.items() if table else ():
        data.add(f"token {name}", np.concatenate(columns), _TOKEN_TYPES.get(name, "<i4"))
    names = list(dict.fromkeys(name for each in parts for name in each))
    for name in names:
        data.add(f"part {name}", [each.get(name, math.nan) for each in parts], "<f4")
    told = _telling(labels)
    for name in told:
        data.add(f"label {name}", [strings.number(each.get(name)) for each in labels], "<i4")
    lengths = [len(column) for column in tokens["text"]]
    data.add("starts", np.concatenate([[0], np.cumsum(lengths)]), "<i4")
    data.add("chat starts", np.concatenate([[0], np.cumsum([len(c) for c in chats])]), "<i4")
    data.add("chat roles", [role for chat in chats for role, _ in chat], "<i4")
    data.add("chat texts", [text for chat in chats for _, text in chat], "<i4")
    return {"num_rows": len(table), "parts": names, "labels": told}


def _row_columns(facts: RowFacts, strings: _Strings) -> dict[str, Any]:
    def known(number: int | None) -> int:
        return -1 if number is None else number

    advantages = facts.advantage[~np.isnan(facts.advantage)]
    return {
        "step": known(facts.step),
        "group": strings.number(None if facts.group_id is None else str(facts.group_id)),
        "trajectory": strings.number(None if facts.traj_id is None else str(facts.traj_id)),
        "turn": known(facts.turn),
        "reward": facts.reward,
        "advantage": advantages.mean() if advantages.size else math.nan,
        "finish": strings.number(facts.finish),
        "truncation": strings.number(facts.truncation),
        "error": strings.number("\n".join(facts.errors)),
        "prompt": strings.number(facts.prompt),
        "response": strings.number(facts.response),
        "expected": strings.number(facts.expected),
        "sampled": int(facts.sampled.sum()),
        "masked": sum(1 << code for code in facts.mask_counts if 0 <= code < 16),
        "num_masked": sum(facts.mask_counts.values()),
    }


def _telling(labels: Sequence[Mapping[str, str]]) -> list[str]:
    """Labels that tell rows apart, and have few enough values to choose from."""
    values: dict[str, set[str | None]] = {}
    for name in dict.fromkeys(name for each in labels for name in each):
        values[name] = {each.get(name) for each in labels}
    return [name for name, found in values.items() if 2 <= len(found) <= _MOST_LABELS]


def _fill(title: str, packed: str) -> str:
    folder = files(__package__)
    page, style, script = (
        (folder / f"view.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
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
