"""Strict and loose verdicts on a response (arXiv:2311.07911, section 2.2).

Strict: the response as it is follows the instruction. Loose: at least one of eight forms of it
does, which forgives an opening sentence ("Sure, here it is:"), a closing one, and markup by stars.

Next: :mod:`torchrl_llm.rewards.ifeval.ifeval_scorer` turns verdicts into rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval.instructions import find

# Four times the longest answer that a prompt asks for; each instruction reads it nine times.
_LONGEST = 1 << 15


class Verdict(NamedTuple):
    """Which instructions of a prompt a response follows.

    Attributes:
        strict: one flag an instruction, of the response as it is.
        loose: one flag an instruction, of the best of its forms; true wherever ``strict`` is.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def loose_forms(response: str) -> list[str]:
    r"""The forms of a response that the loose verdict looks at, the response itself first.

    Without its first line, without its last line, without both, and each of these without stars.
    Forms that are equal are given once.

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
    response: str,
    instruction_ids: Sequence[str],
    arguments: Iterable[Mapping[str, Any] | None],
) -> Verdict:
    r"""Both verdicts on every instruction of a prompt.

    A response of more than 32,768 characters follows none.

    Args:
        response: what the model wrote.
        instruction_ids: names of the instructions.
        arguments: of each instruction; ``None`` values count as not given.

    Raises:
        RewardError: for an unknown instruction, wrong arguments, or none at all.

    Example:
        >>> verify("Sure:\nno comma here", ["change_case:english_lowercase"], [{}])
        Verdict(strict=(False,), loose=(True,))
    """
    arguments = list(arguments)
    if not instruction_ids or len(instruction_ids) != len(arguments):
        raise RewardError(
            "a prompt needs as many arguments as instructions, and at least one of them; got "
            f"{len(instruction_ids)} instructions and {len(arguments)} arguments"
        )
    if len(response) > _LONGEST:
        return Verdict(*[(False,) * len(arguments)] * 2)
    forms = loose_forms(response)
    strict, loose = [], []
    for name, given in zip(instruction_ids, arguments, strict=True):
        instruction = find(name)
        strict.append(instruction.follows(response, given))
        # The response is its own first form.
        loose.append(strict[-1] or any(instruction.follows(form, given) for form in forms[1:]))
    return Verdict(tuple(strict), tuple(loose))
