"""The checks in their order, and the function that runs them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from torchrl._utils import logger

from torchrl_llm.data.failures import Failure
from torchrl_llm.errors import TemplateError, TorchRLLLMError
from torchrl_llm.recipes.doctor import data, machine, program, reward, template
from torchrl_llm.recipes.doctor.finding import Finding, by_level, error
from torchrl_llm.recipes.doctor.subject import Subject

_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


class Check(NamedTuple):
    """A function that yields findings, the key for its errors ("" for the data), its condition."""

    run: Callable[[Subject], Iterable[Finding]]
    key: str
    needs: str = ""


_TRAINED, _SAMPLED = "train_model.dtype", "inference_model.max_tokens"

CHECKS = (
    Check(machine.versions, "train.device"),
    Check(machine.devices, "train.device"),
    Check(template.vocabulary, template.MODEL, template.TEMPLATE),
    Check(data.prompt_lengths, "", _SAMPLED),
    Check(data.answers, "", _SAMPLED),
    Check(data.overlap, "", "env.repeats"),
    Check(data.demonstrations, "", "data.completion"),
    Check(data.pairs, "", "data.chosen"),
    Check(template.markers, template.TEMPLATE, template.TEMPLATE),
    Check(template.turns, template.TEMPLATE, template.TEMPLATE),
    Check(template.end_of_turn, template.TEMPLATE, template.TEMPLATE),
    Check(template.padding, template.MODEL, template.TEMPLATE),
    Check(template.round_trip, template.MODEL, template.TEMPLATE),
    Check(reward.known_answers, "reward.function", "reward.function"),
    Check(machine.learning, "optimizer.lr", _TRAINED),
    Check(program.session, program.KEY, program.KEY),
    Check(reward.groups, "env.dataset", "env.repeats"),
    Check(machine.needed_memory, "model.name", _TRAINED),
    Check(machine.disk, "checkpoint.keep_last", _TRAINED),
    Check(machine.calibration, machine.BUDGET, _TRAINED),
)
"""All checks, in the order in which they are made."""


def examine(subject: Subject, *, only: Collection[str] | None = None) -> list[Finding]:
    """Run the checks that a configuration needs.

    Args:
        subject: the configuration.
        only: names of checks; ``None`` for all.

    Returns:
        Their findings, the worst first.
    """
    found: list[Finding] = []
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # warnings of a run become findings
    try:
        for check in CHECKS:
            name = check.run.__name__
            if check.needs in (*subject.keys, "") and (only is None or name in only):
                found += [each._replace(check=name) for each in _made(check, subject)]
    finally:
        logger.setLevel(before)
    return by_level(found)


def _made(check: Check, subject: Subject) -> Iterator[Finding]:
    """Return the findings of a check; an error in the check is a finding, too."""
    try:
        yield from check.run(subject)
    except Exception as why:  # error of a user's task, tool or model: the other checks continue
        known = isinstance(why, TorchRLLLMError)
        named = (key for key in _KEY.findall(str(why)) if known and key in subject.keys)
        key = check.key or subject.data_key
        key = template.TEMPLATE if isinstance(why, TemplateError) else key
        yield error(next(named, key), str(why) if known else str(Failure.of(why)))
