"""Checks of the data: lengths of prompts, empty answers, prompts that are held out and trained."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchrl_llm.recipes.doctor.finding import Finding, Level
from torchrl_llm.recipes.doctor.subject import Subject
from torchrl_llm.rewards import RewardParser

_SECONDS = 3.0  # that rows are read for, of a dataset of any size
_ON_OVERLONG: dict[str, Level] = {"error": "error", "drop": "warning", "truncate": "warning"}


def prompt_lengths(subject: Subject) -> Iterator[Finding]:
    """Prompts fit, and so do the answers behind them."""
    name = "env.on_overlong" if "env.on_overlong" in subject.keys else "eval.on_overlong"
    policy, room = subject.flat[name], subject.flat["inference_model.max_tokens"]
    for task in subject.tasks:
        encoded = subject.formatter.encode_batch(task.prompts)
        lengths = sorted(len(each.token_ids) for each in encoded)
        count, longest, context = len(lengths), subject.longest_prompt, subject.context
        over = sum(longest is not None and length > longest for length in lengths)
        tight = sum(context is not None and length + room > context for length in lengths) - over
        what = f"{task.name}: prompts have {lengths[0]} to {lengths[-1]} tokens"
        if over:
            fate = {"error": "the run ends at the first", "drop": "they are not answered"}
            limit = "env.max_prompt_length" if longest != (context or 0) - 1 else "the context"
            yield Finding(
                _ON_OVERLONG[policy],
                name,
                f"{what}, and {over / count:.0%} of {count} are longer than the {longest} that "
                f"{limit} allows: {fate.get(policy, 'their beginning is cut off')} "
                f"({name}={policy}). Shorten them, or take a model with a larger context",
            )
        if tight > 0:
            yield Finding(
                "warning",
                "inference_model.max_tokens",
                f"{what}: {tight / count:.0%} of {count} leave less than the {room} tokens of "
                f"inference_model.max_tokens in a context of {context}; their answers are cut "
                f"after {max(context - lengths[-1], 0)} at the worst",
            )
        if not over and not tight:
            fits = "" if context is None else f", and {room} of an answer fit into {context}"
            yield Finding("ok", task.data_key, f"{what}{fits}")


def answers(subject: Subject) -> Iterator[Finding]:
    """Rows have answers where the reward compares with one."""
    for task in subject.tasks:
        rewards = [each for each in task.env.transform if isinstance(each, RewardParser)]
        rows = _rows(task.env)
        if not rows or not any(each.needs_answer for each in rewards):
            continue
        seen = list(_in_time(rows))
        empty = [at for at, row in seen if row.get("answer") is None or row["answer"] == ""]
        empty += [
            at
            for at, row in seen
            if isinstance(row.get("answer"), str) and row["answer"] and not row["answer"].strip()
        ]
        if empty:
            key = "data.answer" if task.data_key == "data.source" else task.data_key
            yield Finding(
                "error" if len(empty) == len(seen) else "warning",
                key,
                f"{task.name}: {len(empty)} of {len(seen)} rows have an empty answer, row "
                f"{min(empty) + 1} first, and the reward compares with it. Name another column, or "
                "leave these rows out",
            )


def overlap(subject: Subject) -> Iterator[Finding]:
    """No held-out prompt is one that is trained on."""
    for task in subject.tasks:
        if task.held_out is not None and _rows(task.env) and _rows(task.held_out):
            train = (row.get("query") for _, row in _in_time(_rows(task.env)))
            held_out = [row.get("query") for _, row in _in_time(_rows(task.held_out))]
            yield from _overlap(train, held_out, task.data_key)


def demonstrations(subject: Subject) -> Iterator[Finding]:
    """Rows of a recipe that learns from written answers: they can be read, and are apart."""
    train, held_out = subject.demonstrations
    seen = [each for _, each in _in_time(train)]
    lengths = sorted(len(each.token_ids) for each in seen)
    long = sum(each.overlong for each in seen)
    what = f"{len(train):,} rows; the first {len(seen):,} have {lengths[0]} to {lengths[-1]} tokens"
    if long:
        policy = subject.config.train.on_overlong
        yield Finding(
            "warning",
            "train.max_length",
            f"{what}, and {long / len(seen):.0%} are too long (train.on_overlong={policy})",
        )
    else:
        yield Finding("ok", "data.source", what)
    if held_out is not None:
        asked = [train.messages(at)[:-1] for at in range(len(seen))]
        wanted = [held_out.messages(at)[:-1] for at, _ in _in_time(held_out)]
        yield from _overlap(asked, wanted, "data.eval_source")


def _overlap(train: Iterable[Any], held_out: Sequence[Any], key: str) -> Iterator[Finding]:
    known = {_text(query) for query in train}
    both = [query for query in held_out if _text(query) in known]
    if both:
        yield Finding(
            "warning",
            key,
            f"{len(both)} of {len(held_out)} held-out prompts are trained on too, {both[0]!r:.80} "
            "for example: held-out accuracy would be that of what was learned by heart. Take them "
            "out of one of the two",
        )
    else:
        size = f"{len(held_out)} held-out prompts, none of them among {len(known):,} of training"
        yield Finding("ok", key, size)


def _text(query: Any) -> str:
    return query if isinstance(query, str) else json.dumps(query, default=str, sort_keys=True)


def _rows(env: Any) -> Sequence[Any]:
    """The rows of an environment; none where it reads something else than a sequence."""
    return getattr(env.primer.dataloader, "rows", ())


def _in_time(rows: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Rows with their index, as many as a few seconds give."""
    end = time.monotonic() + _SECONDS
    for at in range(len(rows)):
        yield at, rows[at]
        if time.monotonic() > end:
            return
