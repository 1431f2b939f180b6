"""The checks in their order, and what runs them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torchrl._utils import logger

from torchrl_llm.data.failures import Failure
from torchrl_llm.errors import TorchRLLLMError
from torchrl_llm.recipes.doctor import data, resources, reward, sampled, settings, template
from torchrl_llm.recipes.doctor.finding import Finding, by_level
from torchrl_llm.recipes.doctor.subject import Subject

_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


class Check(NamedTuple):
    """A check.

    Attributes:
        run: yields what it has to say.
        key: dotted key that is named where the check itself cannot be made.
        needs: dotted keys without which a recipe has nothing to check.
    """

    run: Callable[[Subject], Iterable[Finding]]
    key: str
    needs: tuple[str, ...] = ()


_TOKENS = ("model.chat_template_name",)
_SAMPLES = ("inference_model.max_tokens",)

CHECKS = (
    Check(settings.versions, "train.device"),
    Check(settings.devices, "train.device"),
    Check(settings.learning, "optimizer.lr", ("optimizer.lr", "train_model.dtype")),
    Check(template.vocabulary, template.MODEL, _TOKENS),
    Check(template.markers, template.TEMPLATE, _TOKENS),
    Check(template.turns, template.TEMPLATE, _TOKENS),
    Check(template.end_of_turn, template.TEMPLATE, _TOKENS),
    Check(template.padding, template.MODEL, _TOKENS),
    Check(template.round_trip, template.MODEL, _TOKENS),
    Check(data.prompt_lengths, "env.dataset", _SAMPLES),
    Check(data.answers, "env.dataset", _SAMPLES),
    Check(data.overlap, "env.dataset", ("env.repeats",)),
    Check(data.demonstrations, "data.source", ("data.completion",)),
    Check(reward.known_answers, "reward.function", ("reward.function",)),
    Check(sampled.groups, "env.dataset", ("env.repeats",)),
    Check(resources.needed_memory, "model.name", ("train_model.dtype",)),
    Check(resources.disk, "checkpoint.keep_last", ("checkpoint.keep_last", "train_model.dtype")),
    Check(resources.calibration, resources.BUDGET, ("train_model.dtype",)),
)


def examine(subject: Subject, *, only: Collection[str] | None = None) -> list[Finding]:
    """Run the checks that a configuration needs.

    Args:
        subject: the configuration.
        only: names of checks; ``None`` for all.

    Returns:
        What they found, the worst first.
    """
    found: list[Finding] = []
    with _quiet():
        for check in CHECKS:
            name = check.run.__name__
            if subject.keys.issuperset(check.needs) and (only is None or name in only):
                found += [each._replace(check=name) for each in _made(check, subject)]
    return by_level(found)


def _made(check: Check, subject: Subject) -> Iterator[Finding]:
    """What a check finds; an error that it meets is one as well."""
    try:
        yield from check.run(subject)
    except TorchRLLLMError as error:
        text = str(error)
        named = (key for key in _KEY.findall(text) if key in subject.keys)
        yield Finding("error", next(named, check.key), text)
    except Exception as error:  # of a user's task, tool or model: the other checks go on
        yield Finding("error", check.key, f"{check.run.__name__} ended by\n{Failure.of(error)}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings that a run would log are findings here."""
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
