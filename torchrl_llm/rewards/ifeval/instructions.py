"""Registers instructions, checks them, and computes the verdicts on a response.

Instructions do not depend on environments, rows or rewards. They are registered under the names of
the datasets (``"length_constraints:number_words"``), and :func:`check` calls them with arguments
from a row. A mistake in a row (an unknown name, a missing argument, an unknown relation) raises
``RewardError`` and is never a verdict.

Strict and loose (arXiv:2311.07911, section 2.2): strictly, the unchanged response must follow the
instruction. Loosely, at least one of eight forms of the response must follow it. This allows an
opening sentence ("Sure, here it is:"), a closing sentence, and markup with stars.

Next: ``torchrl_llm.rewards.ifeval.paper_instructions`` has the instructions;
:mod:`torchrl_llm.rewards.ifeval.ifeval_scorer` turns verdicts into rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_type_hints

from torchrl_llm._registry import did_you_mean
from torchrl_llm.errors import RewardError

Relation = Literal["at least", "less than"]

INSTRUCTIONS: dict[str, Instruction] = {}
"""The instructions by name."""


def holds(count: int, relation: Relation, bound: int) -> bool:
    """Whether a count satisfies a relation.

    Example:
        >>> holds(3, "at least", 3), holds(3, "less than", 3)
        (True, False)
    """
    return count >= bound if relation == "at least" else count < bound


def _read_int(value: Any) -> int:
    # Tables with missing values store whole numbers as floats.
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 0:
        raise ValueError("a whole number of at least 0")
    return int(value)


def _read_str(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a string that is not empty")
    return value


def _read_words(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
        raise ValueError("a list with at least one string")
    return [_read_str(word) for word in value]


def _read_relation(value: Any) -> Relation:
    if value not in ("at least", "less than"):
        raise ValueError("'at least' or 'less than'")
    return value


_READERS: dict[Any, Callable[[Any], Any]] = {
    int: _read_int,
    str: _read_str,
    list[str]: _read_words,
    Relation: _read_relation,
}


class Instruction:
    """A named check.

    Args:
        name: the name in datasets, ``"family:kind"``.
        function: takes the response, and keyword-only arguments annotated ``int``, ``str``,
            ``list[str]`` or ``Relation``; returns whether the response follows the instruction.
    """

    def __init__(self, name: str, function: Callable[..., bool]) -> None:
        self.name = name
        self.function = function

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Name and type of each argument."""
        hints = get_type_hints(self.function)
        parameters = list(inspect.signature(self.function).parameters)[1:]
        return {name: hints[name] for name in parameters}

    def read(self, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
        """Convert the arguments for the function.

        Args:
            arguments: arguments in a row; ``None`` values count as missing.

        Raises:
            RewardError: for a missing, unknown or wrongly typed argument.
        """
        given = {k: v for k, v in (arguments or {}).items() if v is not None}
        if given.keys() != self.arguments.keys():
            raise RewardError(
                f"{self.name} takes the arguments {sorted(self.arguments)}, got {sorted(given)}"
            )
        read = {}
        for name, value in given.items():
            try:
                read[name] = _READERS[self.arguments[name]](value)
            except ValueError as error:
                raise RewardError(f"{self.name}: {name} must be {error}, got {value!r}") from None
        return read

    def follows(self, response: str, arguments: Mapping[str, Any] | None = None) -> bool:
        """Whether a response follows it; always false for a response without visible characters.

        Args:
            response: what the model wrote.
            arguments: arguments in a row, see :meth:`read`.

        Raises:
            RewardError: for arguments that do not belong to this instruction.
        """
        read = self.read(arguments)
        return bool(response.strip()) and bool(self.function(response, **read))


def instruction(name: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Register a function as the instruction with this name; use it for your own functions.

    Example:
        >>> @instruction("example:polite")
        ... def is_polite(response: str, *, word: str) -> bool:
        ...     return word in response
        >>> check("example:polite", "Yes, please.", {"word": "please"})
        True
        >>> _ = INSTRUCTIONS.pop("example:polite")
    """

    def register(function: Callable[..., bool]) -> Callable[..., bool]:
        if name in INSTRUCTIONS:
            raise ValueError(f"there is an instruction {name!r} already")
        INSTRUCTIONS[name] = Instruction(name, function)
        return function

    return register


def find(name: Any) -> Instruction:
    """Look up an instruction by name.

    Raises:
        RewardError: for a name that is not registered.
    """
    if isinstance(name, str) and name in INSTRUCTIONS:
        return INSTRUCTIONS[name]
    hint = did_you_mean(name, INSTRUCTIONS)
    raise RewardError(f"unknown instruction {name!r}, there are {len(INSTRUCTIONS)}{hint}")


def check(name: str, response: str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether a response follows one instruction.

    Args:
        name: a key of ``INSTRUCTIONS``.
        response: what the model wrote.
        arguments: arguments of the instruction; ``None`` values count as missing.

    Raises:
        MissingExtraError: when a package of the extra ``ifeval`` is needed and missing.
        RewardError: for an unknown name or wrong arguments.

    Example:
        >>> from torchrl_llm.rewards.ifeval import check
        >>> check("punctuation:no_comma", "Neither this nor that.")
        True
    """
    return find(name).follows(response, arguments)


class Verdict(NamedTuple):
    """Which instructions of a prompt a response follows.

    Attributes:
        strict: one flag per instruction, for the unchanged response.
        loose: one flag per instruction, for the best loose form; true if ``strict`` is true.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def loose_forms(response: str) -> list[str]:
    r"""Return the forms of a response for the loose verdict; the response itself is the first.

    The forms are the response, the response without its first line, without its last line and
    without both lines, and each of these without stars. Equal forms are returned once.

    Example:
        >>> loose_forms("Sure:\n*yes*")
        ['Sure:\n*yes*', '*yes*', 'Sure:', 'Sure:\nyes', 'yes']
    """
    lines = response.split("\n")
    parts = (lines, lines[1:], lines[:-1], lines[1:-1])
    forms = [response, *("\n".join(part).strip() for part in parts[1:])]
    forms += [form.replace("*", "") for form in forms]
    return [form for form in dict.fromkeys(forms) if form.strip()]


def verify(
    response: str, instruction_ids: Sequence[str], arguments: Iterable[Mapping[str, Any] | None]
) -> Verdict:
    r"""Compute both verdicts on every instruction of a prompt.

    Args:
        response: what the model wrote.
        instruction_ids: names of the instructions.
        arguments: arguments of each instruction; ``None`` values count as missing.

    Raises:
        MissingExtraError: when a package of the extra ``ifeval`` is needed and missing.
        RewardError: for an unknown instruction, wrong arguments, or no instruction.

    Example:
        >>> verify("Sure, so:\nno comma here", ["punctuation:no_comma"], [{}])
        Verdict(strict=(False,), loose=(True,))
    """
    arguments = list(arguments)
    if not instruction_ids or len(instruction_ids) != len(arguments):
        raise RewardError(
            "a prompt needs as many arguments as instructions, and at least one of them; got "
            f"{len(instruction_ids)} instructions and {len(arguments)} arguments"
        )
    forms = loose_forms(response)
    strict, loose = [], []
    for name, given in zip(instruction_ids, arguments, strict=True):
        found = find(name)
        strict.append(found.follows(response, given))
        # The response is its own first form.
        loose.append(strict[-1] or any(found.follows(form, given) for form in forms[1:]))
    return Verdict(tuple(strict), tuple(loose))
