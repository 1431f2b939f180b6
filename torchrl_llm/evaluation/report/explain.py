"""Prints one row: its tokens with their records, and why some tokens are not trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.evaluation.report.row_facts import MASKS, RowFacts, name_of
from torchrl_llm.evaluation.report.token_texts import TokenTexts, visible

_MOST_CHARS = 200
_NUMBERS = ("turn", "version", "log-prob", "advantage", "ratio")


def explain(rows: Any, i: int, *, tokenizer: Any = None, every_token: bool = False) -> None:
    """Print one row: prompt, outcome, and one line per sampled token.

    Args:
        rows: container with ``rows[i]``: a stack of rows, a list, a buffer, a ``RolloutStore``.
        i: index of the row.
        tokenizer: a fast Hugging Face tokenizer, or its name or folder; without it, ids are shown.
        every_token: also print one line per token that was not sampled; by default consecutive
            tokens of the same source share a line.

    Raises:
        IndexError: when there is no such row.
        DataError: when the row has no token ids.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.modules import load_tokenizer
        >>> ids = torch.tensor(load_tokenizer().encode("1+2=3"))
        >>> row = TensorDict(tokens={"full": ids, "prompt": ids[:4]})
        >>> row["log_probs", "full"] = torch.tensor([0.0, 0.0, 0.0, 0.0, -0.5])
        >>> explain([row], 0, tokenizer=load_tokenizer())  # doctest: +NORMALIZE_WHITESPACE
        row 0: 5 tokens, 1 sampled, 1 trained
        <BLANKLINE>
        #   id source  log-prob token
        0-3    prompt           1+2=
        4   21 sampled   -0.500 3
    """
    from rich.console import Console
    from rich.text import Text

    if isinstance(tokenizer, str):
        from torchrl_llm.modules import load_tokenizer

        tokenizer = load_tokenizer(tokenizer)
    facts = RowFacts.of(rows[i])
    texts = TokenTexts(tokenizer).of(facts.token_ids.tolist())
    lines = list(_lines(facts, texts, every_token))
    used = [name for name in lines[0] if any(line[name] for line in lines)] if lines else []
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in used}
    widths["token"] = 0
    told = Text("\n".join([*_head(facts, i), "", ""]))
    for line in [dict(zip(used, used, strict=True)), *lines]:
        for name in used:
            align = ">" if name in _NUMBERS else "<"
            told.append(f"{line[name]:{align}{widths[name]}}", _style(name, line))
            told.append("\n" if name == "token" else " ")
    Console(highlight=False, soft_wrap=True).print(told, end="")


def _head(facts: RowFacts, i: int) -> Iterator[str]:
    named = "" if facts.step is None else f", step {facts.step}"
    trained = int((facts.sampled & (facts.mask_reason == MaskReason.TRAINED)).sum())
    yield (
        f"row {i}{named}: {len(facts.token_ids)} tokens, {int(facts.sampled.sum())} sampled, "
        f"{trained} trained"
    )
    told = {
        "reward": _number(facts.reward),
        "parts": ", ".join(f"{name} {value:.3f}" for name, value in facts.parts.items()),
        "finish": facts.finish,
        "cut": facts.truncation,
        "prompt": facts.prompt,
        "response": facts.response,
        "expected": facts.expected,
        "error": "; ".join(facts.errors),
        "masked": "; ".join(f"{n}, {MASKS.get(c, c)}" for c, n in facts.mask_counts.items()),
    }
    yield from (f"{name + ':':<10}{_line(text)}" for name, text in told.items() if text)


def _line(text: str) -> str:
    text = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 4]} ..."


def _lines(facts: RowFacts, texts: list[str], every_token: bool) -> Iterator[dict[str, str]]:
    """Return the cells of each line of the table, by the titles of their columns."""

    def run_of(at: int) -> Any:
        return at if every_token or facts.sampled[at] else (-1, facts.source[at])

    for _, run in groupby(range(len(texts)), run_of):
        first, *rest = run
        last = rest[-1] if rest else first
        turn, version, reason = (
            int(column[first]) for column in (facts.turns, facts.policy_version, facts.mask_reason)
        )
        yield {
            "#": f"{first}-{last}" if rest else str(first),
            "id": "" if rest else str(facts.token_ids[first]),
            "source": name_of(Source, facts.source[first]),
            "turn": str(turn) if turn >= 0 else "",
            "version": str(version) if version >= 0 else "",
            "log-prob": _number(facts.log_probs[first]),
            "advantage": _number(facts.advantage[first]),
            "ratio": _number(facts.ratio[first]),
            "masked": name_of(MaskReason, reason) if facts.sampled[first] and reason else "",
            "token": _line("".join(texts[first : last + 1])),
        }


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _style(name: str, line: dict[str, str]) -> str:
    """Return the style: dim if not sampled; warm if unlikely, pushed down or masked."""
    if line["source"] == "source":
        return "bold"
    if line["source"] != "sampled":
        return "dim"
    if name in ("token", "log-prob") and line["log-prob"] and float(line["log-prob"]) < -1:
        return "bold red" if float(line["log-prob"]) < -3 else "red"
    if name == "advantage" and line["advantage"]:
        return "green" if float(line["advantage"]) > 0 else "magenta"
    return "yellow" if name == "masked" else ""
