"""One row in a terminal: its tokens with what is known of each, and why some are not trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.evaluation.report.row_facts import MASKS, RowFacts, name_of
from torchrl_llm.evaluation.report.token_texts import TokenTexts, visible

_MOST_CHARS = 200
_SAID_BY_SOURCE = (MaskReason.TRAINED, MaskReason.NOT_SAMPLED)
_TITLES = (
    *("#", "id", "source", "turn", "version", "log-prob", "advantage", "ratio", "mask", "token"),
)
_NUMBERS = ("turn", "version", "log-prob", "advantage", "ratio")


def explain(rows: Any, i: int, *, tokenizer: Any = None, every_token: bool = False) -> None:
    """Print one row: what was asked, what came of it, and a line for each token that was sampled.

    Args:
        rows: what ``rows[i]`` is a row of: a stack of rows, a list, a buffer, a ``RolloutStore``.
        i: index of the row.
        tokenizer: a fast Hugging Face tokenizer, or name or folder of one; ids are shown without.
        every_token: whether tokens that were not sampled have lines of their own too; else those of
            one source are one line.

    Raises:
        IndexError: there is no such row.
        DataError: it has no token ids.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> from torchrl_llm.modules import load_tokenizer
        >>> tokens = {"full": torch.tensor(load_tokenizer().encode("1+2=3"))}
        >>> row = TensorDict(tokens={**tokens, "prompt": tokens["full"][:4]})
        >>> row["log_probs", "full"] = torch.tensor([0.0, 0.0, 0.0, 0.0, -0.5])
        >>> explain(lazy_rows([row]), 0, tokenizer=load_tokenizer())  # doctest: +NORMALIZE_WHITESPACE
        row 0: 5 tokens, 1 sampled, 1 trained
        <BLANKLINE>
        #   id source  log-prob token
        0-3    prompt           1+2=
        4   21 sampled   -0.500 3
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if isinstance(tokenizer, str):
        from torchrl_llm.modules import load_tokenizer

        tokenizer = load_tokenizer(tokenizer)
    facts = RowFacts.of(rows[i])
    texts = TokenTexts(tokenizer).of(facts.token_ids.tolist())
    lines = list(_lines(facts, texts, every_token))
    used = [n for n, name in enumerate(_TITLES) if name == "token" or any(x[n] for x in lines)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (_TITLES[n] for n in used):
        right = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=right, overflow="fold", no_wrap=name != "token")
    for line in lines:
        table.add_row(*(Text(line[n], _style(_TITLES[n], line)) for n in used))
    console = Console(highlight=False)
    for text in _head(facts, i):
        console.print(Text(text))
    console.print()
    console.print(table)


def _head(facts: RowFacts, i: int) -> Iterator[str]:
    where = {"step": facts.step, "group": facts.group_id, "trajectory": facts.traj_id}
    named = ", ".join(f"{name} {at}" for name, at in where.items() if at is not None)
    trained = int((facts.sampled & (facts.mask_reason == MaskReason.TRAINED)).sum())
    yield (
        f"row {i}" + (f", {named}" if named else "") + f": {len(facts.token_ids)} tokens, "
        f"{int(facts.sampled.sum())} sampled, {trained} trained"
    )
    parts = ", ".join(f"{name} {value:.3f}" for name, value in facts.parts.items())
    told = {
        "reward": "" if math.isnan(facts.reward) else f"{facts.reward:.3f}",
        "parts": parts,
        "finish": ", ".join(filter(None, [facts.finish, facts.truncation and "episode cut"])),
        "prompt": facts.prompt,
        "response": facts.response,
        "expected": facts.expected,
        "error": "; ".join(facts.errors),
    }
    for name, text in told.items():
        if text:
            yield f"{name + ':':<10}{_line(text)}"
    for code, count in facts.mask_counts.items():
        yield f"{'masked:':<10}{count} sampled tokens: {MASKS.get(code, f'code {code}')}"


def _line(text: str) -> str:
    text = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 4]} ..."


def _lines(facts: RowFacts, texts: list[str], every_token: bool) -> Iterator[tuple[str, ...]]:
    """The texts of each line of the table."""

    def run_of(at: int) -> Any:
        alone = every_token or facts.sampled[at]
        return at if alone else (-1, facts.source[at], facts.mask_reason[at])

    for _, group in groupby(range(len(texts)), run_of):
        span = list(group)
        first, last = span[0], span[-1]
        reason = int(facts.mask_reason[first])
        yield (
            str(first) if first == last else f"{first}-{last}",
            str(facts.token_ids[first]) if first == last else "",
            name_of(Source, int(facts.source[first])),
            _known(facts.turns[first]),
            _known(facts.policy_version[first]),
            _number(facts.log_probs[first]),
            _number(facts.advantage[first]),
            _number(facts.ratio[first]),
            "" if reason in _SAID_BY_SOURCE else _mask(reason),
            _line("".join(texts[first : last + 1])),
        )


def _mask(code: int) -> str:
    return name_of(MaskReason, code).replace("_", " ")


def _known(number: Any) -> str:
    return "" if number < 0 else str(number)


def _number(value: np.float32) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _style(name: str, line: tuple[str, ...]) -> str:
    """Dim where nothing was sampled; warm where it was unlikely, pushed down or masked."""
    told = dict(zip(_TITLES, line, strict=True))
    if told["source"] != "sampled":
        return "dim"
    if name in ("token", "log-prob") and told["log-prob"] and float(told["log-prob"]) < -1:
        return "bold red" if float(told["log-prob"]) < -3 else "red"
    if name == "advantage" and told["advantage"]:
        return "green" if float(told["advantage"]) > 0 else "magenta"
    return "yellow" if name == "mask" else ""
