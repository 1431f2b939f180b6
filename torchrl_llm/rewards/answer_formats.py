r"""How the answer to a word problem is found in a response: tags, marks, a last number, filters.

A model that was asked for an ``<answer>`` block writes one. Base models and few-shot prompts end in
``#### 18`` or ``The answer is 18.``, others in ``\boxed{18}``. Published accuracies of GSM8K are
often those of the filters of lm-evaluation-harness, which are here under their names.

It says where an answer stands, and not whether it is right:
:class:`~torchrl_llm.rewards.GSM8KRewardParser`, :class:`~torchrl_llm.rewards.MATHRewardParser`.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from torchrl_llm.rewards.reward_parser import extract_block

AnswerFormat = Literal["tags", "auto", "flexible-extract", "strict-match"]
HARNESS_FORMATS = ("flexible-extract", "strict-match")

# No boxed answer is longer.
_MAX_BOX = 2000
# Boxes that are looked at, from the end, until one is complete.
_MAX_BOXES = 32
_BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?=[{\d])")
# Generation ends at these in lm-evaluation-harness, before its filters see the response.
_HARNESS_STOPS = re.compile(r"Question:|</s>|<\|im_end\|>")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# The next problem of a prompt with examples, which a base model goes on to pose.
_NEXT_PROBLEM = re.compile(r"\n[ \t]{0,8}(?:Question|Problem|Q):")
# What may stand between the mark of an answer and its number: markup, currency, a sign.
_TO_NUMBER = r"(?=(?:[\s$€£*_`~(+−–-]|\\[(\[$]|\\text|about|approximately|exactly|only){0,8}\.?\d)"
_MARK = re.compile(
    r"(?P<tag><answer>)|(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))"
    # A numbered heading of the fourth level is no answer.
    rf"|####(?!\s{{0,4}}\d{{1,3}}[.):]\s+\S){_TO_NUMBER}"
    r"|(?P<words>\banswer(?:(?:\s{1,3}[\w']{1,20}){0,4}?[\s*_]{1,4}is\b|[\s*_]{0,4}[:=])"
    rf"[\s*_:=]{{0,6}}{_TO_NUMBER})",
    re.IGNORECASE,
)
# Where the rest of a sentence says something else than the number.
_REST = re.compile(
    r"[,;:(.]\s+(?![\d$-]|or\b|and\b)|"
    r"\s(?:after|as|at|because|each|every|for|from|in|of|per|since|so|which|with)\s"
)


def last_boxed(text: str) -> str | None:
    r"""The contents of the last ``\boxed{...}`` of a text, ``None`` where there is none.

    Args:
        text: any text. Braces inside the box must match; escaped ones do not count. A box without
            braces (``\boxed 5``) holds one digit, as TeX has it.

    Example:
        >>> last_boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}} it is")
        '\\frac{1}{2}'
    """
    for box in reversed(deque(_BOX.finditer(text), maxlen=_MAX_BOXES)):
        if text[box.end()] != "{":
            return text[box.end()]
        end = _closing_brace(text, box.end())
        if end is not None:
            return text[box.end() + 1 : end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start : start + _MAX_BOX], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return start + brace.start()
    return None


def harness_answer(response: str, answer_format: str) -> str | None:
    """What a filter of lm-evaluation-harness takes out of a response to a problem of GSM8K.

    These are the filters of its task ``gsm8k``, version 3. ``strict-match`` takes the first
    ``#### `` that a number follows, ``flexible-extract`` the last thing that looks like a number.
    Both look at the reasoning, too; neither looks behind a string at which the harness ends
    generation (``Question:``).

    Args:
        response: what the model wrote.
        answer_format: one of ``HARNESS_FORMATS``.

    Returns:
        The answer as :func:`harness_spelling` has it, ``None`` where it has no digit.

    Example:
        >>> text = "She has #### 1,200. That is $30 each."
        >>> harness_answer(text, "strict-match"), harness_answer(text, "flexible-extract")
        ('1200', '30')
    """
    stop = _HARNESS_STOPS.search(response)
    response = response if stop is None else response[: stop.start()]
    if answer_format == "strict-match":
        found = _STRICT.search(response)
    else:
        found = next(iter(deque(_FLEXIBLE.finditer(response), maxlen=1)), None)
    answer = None if found is None else harness_spelling(found[found.lastindex])
    return answer if answer and re.search("[0-9]", answer) else None


def harness_spelling(answer: str) -> str:
    r"""An answer as lm-evaluation-harness compares it, digit for digit: ``18`` is not ``18.00``.

    Args:
        answer: of a model, or a solution of the dataset.

    Example:
        >>> harness_spelling("It is 2 * 9 = $18.\n#### 1,018.")
        '1018'
    """
    return re.sub("[,$]", "", answer).rpartition("#### ")[2].strip().removesuffix(".")


def marked_answer(response: str) -> tuple[str, bool]:
    r"""The text that a response gives as its answer, behind the last mark of one.

    Marks are ``<answer>``, ``####``, ``\boxed`` and words such as ``The answer is`` or
    ``Answer:``, the last two kinds only in front of a number. The last mark counts, so that an
    answer that lists several gives one; it counts even if it is broken off, and then there is no
    answer. What a base model writes after its answer (another ``Question:``) is not looked at, nor
    is its reasoning (up to ``</think>``, or behind a ``<think>`` that nothing closes).

    Args:
        response: what the model wrote.

    Returns:
        The text, empty for a mark that is broken off, and ``True``. Without a mark, all that is
        looked at and ``False``: its last number is the answer.

    Example:
        >>> marked_answer("#### 1 and then #### 18 eggs")
        ('18 eggs', True)
        >>> marked_answer("So it is 18.")
        ('So it is 18.', False)
    """
    text = response.rpartition("</think>")[2].partition("<think>")[0].strip()
    following = _NEXT_PROBLEM.search(text)
    text = text if following is None else text[: following.start()]
    mark = next(iter(deque(_MARK.finditer(text), maxlen=1)), None)
    if mark is None:
        return text, False
    if mark["tag"] or mark["box"]:
        rest = text[mark.start() :]
        found = extract_block(rest, "answer") if mark["tag"] else last_boxed(rest)
        return found or "", True
    line = text[mark.end() : mark.end() + _MAX_BOX].strip().partition("\n")[0].partition("<")[0]
    rest = _REST.search(line) if mark["words"] else None
    return (line if rest is None else line[: rest.start()]), True
