"""Checks of the data: lengths of prompts, empty answers, held-out prompts in the training data."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torchrl_llm.data.demonstrations import Demonstration
from torchrl_llm.data.row_files import MappedRows
from torchrl_llm.errors import DataError
from torchrl_llm.modules.policies.context_limit import longest_prompt
from torchrl_llm.recipes.builders import longest_row
from torchrl_llm.recipes.data_config import overlap_text, shared_prompts
from torchrl_llm.recipes.doctor.finding import Finding, error, ok, warning
from torchrl_llm.recipes.doctor.subject import Subject
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.rewards import RewardParser

# Number of rows to read from a dataset of any size, and the time limit.
_MOST_ROWS, _SECONDS = 20_000, 2.0
_FATES = {
    "error": "the run ends at the first",
    "drop": "they are not answered",
    "truncate": "their beginning is cut off",
}


def prompt_lengths(subject: Subject) -> Iterator[Finding]:
    """Check that prompts fit into the context, together with their answers."""
    key = "env.on_overlong" if "env.on_overlong" in subject.keys else "eval.on_overlong"
    fate, room = subject.flat[key], subject.flat["inference_model.max_tokens"]
    context = subject.context
    longest = longest_prompt(context, subject.flat.get("env.max_prompt_length"))
    for task in subject.tasks:
        encoded = subject.formatter.encode_batch(task.prompts)
        lengths = sorted(len(each.token_ids) for each in encoded)
        over = [n for n in lengths if longest is not None and n > longest]
        tight = [n for n in lengths if context is not None and n + room > context and n not in over]
        what = f"{task.name}: prompts have {lengths[0]} to {lengths[-1]} tokens"
        if over:
            yield (error if fate == "error" else warning)(
                key,
                f"{what}, {len(over) / len(lengths):.0%} of {len(lengths)} more than the {longest} "
                f"that are allowed: {_FATES[fate]} ({key}={fate}). Shorten them, or allow more",
            )
        if tight:
            yield warning(
                "inference_model.max_tokens",
                f"{what}: {len(tight) / len(lengths):.0%} of {len(lengths)} leave less than {room} "
                f"of {context} tokens for an answer, the longest {context - tight[-1]}",
            )
        if not over and not tight:
            fits = "" if context is None else f", and {room} of an answer fit into {context}"
            yield ok(task.data_key, f"{what}{fits}")


def answers(subject: Subject) -> Iterator[Finding]:
    """Check that rows have answers if the reward compares with them."""
    for task in subject.tasks:
        rewards = [each for each in task.env.transform if isinstance(each, RewardParser)]
        if not any(each.needs_answer for each in rewards):
            continue
        seen = [row.get("answer") for row in _some(_rows(task.env))]
        empty = [at for at, answer in enumerate(seen, 1) if not str(answer or "").strip()]
        if empty:
            yield (error if len(empty) == len(seen) else warning)(
                "data.answer" if task.data_key == "data.source" else task.data_key,
                f"{task.name}: the answer, which the reward compares with, is empty in "
                f"{len(empty)} of {len(seen)} rows, row {empty[0]} first. Name another column, or "
                "leave them out",
            )


def overlap(subject: Subject) -> Iterator[Finding]:
    """Check that no held-out prompt is a training prompt, and that the task suits this model."""
    (task,) = subject.tasks
    if subject.config.model.name is None and task_class(task.name).NEEDS_LARGER_MODEL:
        yield warning(
            "model.name",
            f"{task.name} is a task for a larger model than the one of the package: name another",
        )
    if task.held_out is not None:
        parts = (_some(_rows(env)) for env in (task.env, task.held_out))
        # In games all rows have the same empty query, and differ in their other columns.
        asked = ([row.get("query") or row for row in rows] for rows in parts)
        yield from _overlap(*asked, task.data_key)


def demonstrations(subject: Subject) -> Iterator[Finding]:
    """Check that rows with written answers, to imitate, are readable and do not overlap."""
    if "data.chosen" in subject.keys:
        return  # the check ``pairs`` reads them
    train, held_out = subject.demonstrations
    seen = _some(train)
    lengths = sorted(len(each.token_ids) for each in seen if len(each.token_ids))
    long = sum(each.overlong for each in seen)
    what = f"the first {len(seen)} of {len(train)} rows have {lengths[0]} to {lengths[-1]} tokens"
    if long:
        fate = f"{long} were longer (train.on_overlong={subject.config.train.on_overlong})"
        yield warning("train.max_seq_len", f"{what}; {fate}")
    else:
        yield ok("data.source", what)
    if held_out is not None:
        parts = [
            [part.messages(at)[:-1] for at in range(min(len(part), len(seen)))]
            for part in (train, held_out)
        ]
        yield from _overlap(*parts, "data.eval_source")


def pairs(subject: Subject) -> Iterator[Finding]:
    """Check that compared answers are readable, fit, and differ; and that no prompts overlap."""
    prompts: list[list[str]] = []
    for part in filter(None, subject.pairs):
        seen, faults = _readable(part)
        whole = [each for each in seen if each.is_whole]
        usable = [each for each in whole if len({*map(_ids, each.answers)}) == len(each.answers)]
        number = len(seen) + sum(map(len, faults))
        total = f"of {'the first ' * (number < len(part))}{number} rows"
        total += " held out" * bool(prompts)
        for texts in faults:
            what = f"{len(texts)} {total} cannot be read, and the run ends at the first: {texts[0]}"
            yield error("data.source", what)
        if equal := len(whole) - len(usable):
            what = f"{equal} {total} have two equal answers, and teach nothing"
            yield warning("data.source", what)
        cut = sum(any(answer.overlong for answer in each.answers) for each in whole)
        if cut or len(whole) < len(seen):
            what = f"{len(seen) - len(whole)} {total} are left out, and {cut} cut at their end: "
            what += f"they are longer than {longest_row(subject.config)} tokens"
            yield warning("train.max_seq_len", what)
        if not usable:
            yield error("data.source", f"none {total} can be learned from")
            return
        lengths = [len(answer.token_ids) for each in usable for answer in each.answers]
        what = f"{len(usable)} {total} can be learned from; prompt and answer have "
        yield ok("data.source", f"{what}{min(lengths)} to {max(lengths)} tokens")
        starts = [each.answers[0] for each in usable]
        texts = [each.token_ids[: int(each.learned.nonzero()[0])] for each in starts]
        prompts.append([subject.formatter.decode(ids) for ids in texts])
    if len(prompts) > 1:
        yield from _overlap(*prompts, "data.eval_source")


def _ids(answer: Demonstration) -> tuple[int, ...]:
    return tuple(answer.token_ids.tolist())


def _readable(rows: Sequence[Any]) -> tuple[list[Any], list[list[str]]]:
    """Return readable rows among the first rows, and the faults of the others, grouped."""
    faults = defaultdict(list)

    def read(at: int) -> Any:
        try:
            return rows[at]
        except DataError as why:
            faults[re.sub(r"\d+", "", str(why))].append(str(why))

    seen = _some(MappedRows(range(len(rows)), read))
    return [row for row in seen if row is not None], list(faults.values())


def _overlap(train: list[Any], held_out: list[Any], key: str) -> Iterator[Finding]:
    if both := shared_prompts(train, held_out):
        yield warning(key, overlap_text(both, held_out))
    elif held_out:
        yield ok(key, f"none of {len(held_out)} held-out prompts is among {len(train)} of training")


def _rows(env: Any) -> Sequence[Any]:
    """The rows of an environment; none if it does not read a sequence."""
    return getattr(env.primer.dataloader, "rows", ())


def _some(rows: Sequence[Any]) -> list[Any]:
    """The first rows, up to the time limit."""
    end, found = time.monotonic() + _SECONDS, []
    for at in range(min(len(rows), _MOST_ROWS)):
        found.append(rows[at])
        if time.monotonic() > end:
            break
    return found
