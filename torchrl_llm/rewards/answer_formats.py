r"""Finds the answer to a word problem in a response, by tags, marks, filters or the last number.

If the prompt asks for an ``<answer>`` block, the model writes it. Base models and models with
few-shot prompts write ``#### 18`` or ``The answer is 18.``; some models write ``\boxed{18}``. Many
published accuracies of GSM8K use the filters of lm-evaluation-harness; this module has them under
the same names.

The module only finds the answer. :class:`~torchrl_llm.rewards.GSM8KRewardParser` and
:class:`~torchrl_llm.rewards.MATHRewardParser` decide whether it is correct.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from torchrl_llm.rewards.reward_parser import extract_block

AnswerFormat = Literal["tags", "auto", "flexible-extract", "strict-match"]
HARNESS_FORMATS = ("flexible-extract", "strict-match")

# Largest length of a boxed answer.
_MAX_BOX = 2000
# Largest number of boxes that are searched, from the end, for a complete box.
_MAX_BOXES = 32
_BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?=[{\d])")
# lm-evaluation-harness ends the generation at these strings, before its filters read the response.
_HARNESS_STOPS = re.compile(r"Question:|</s>|<\|im_end\|>")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# The start of a next problem, which a base model may write after its answer.
_NEXT_PROBLEM = re.compile(r"\n[ \t]{0,8}(?:Question|Problem|Q):")
# Allowed between the mark of an answer and its number: markup, currency, a sign.
_TO_NUMBER = r"(?=(?:[\s$€£*_`~(+−–-]|\\[(\[$]|\\text|about|approximately|exactly|only){0,8}\.?\d)"
_MARK = re.compile(
    r"(?P<tag><answer>)|(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))"
    # A numbered heading of the fourth level is not an answer.
    rf"|####(?!\s{{0,4}}\d{{1,3}}[.):]\s+\S){_TO_NUMBER}"
    r"|(?P<words>\banswer(?:(?:\s{1,3}[\w']{1,20}){0,4}?[\s*_]{1,4}is\b|[\s*_]{0,4}[:=])"
    rf"[\s*_:=]{{0,6}}{_TO_NUMBER})",
    re.IGNORECASE,
)
# Text after a number that changes the meaning of the number.
_REST = re.compile(
    r"[,;:(.]\s+(?![\d$-]|or\b|and\b)|"
    r"\s(?:after|as|at|because|each|every|for|from|in|of|per|since|so|which|with)\s"
)


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{...}`` of a text, or ``None``.

    Args:
        text: any text. Braces inside the box must match; escaped braces do not count. A box without
            braces (``\boxed 5``) holds one digit, as in TeX.

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
    """Extract the answer to a GSM8K problem, like a filter of lm-evaluation-harness.

    These are the filters of the harness's task ``gsm8k``, version 3. ``strict-match`` takes the
    first ``#### `` that is followed by a number; ``flexible-extract`` takes the last text that
    looks like a number. Both filters also search the reasoning, and ignore text after a string at
    which the harness stops generation (``Question:``).

    Args:
        response: what the model wrote.
        answer_format: one of ``HARNESS_FORMATS``.

    Returns:
        The answer in the form of :func:`harness_spelling`; ``None`` if it has no digit.

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
    r"""Return an answer as lm-evaluation-harness compares it: ``18`` is not ``18.00``.

    Args:
        answer: an answer of a model, or a solution in the dataset.

    Example:
        >>> harness_spelling("It is 2 * 9 = $18.\n#### 1,018.")
        '1018'
    """
    return re.sub("[,$]", "", answer).rpartition("#### ")[2].strip().removesuffix(".")


def marked_answer(response: str) -> tuple[str, bool]:
    r"""Return the text after the last answer mark of a response.

    Marks are ``<answer>``, ``####``, ``\boxed`` and words such as ``The answer is`` or ``Answer:``;
    the last two kinds count only before a number. If a response has several marks, the last mark
    counts. If the last mark is incomplete, there is no answer. The search ignores text that a base
    model writes after its answer (a new ``Question:``). It also ignores the reasoning (up to
    ``</think>``, or after an unclosed ``<think>``).

    Args:
        response: what the model wrote.

    Returns:
        With a mark, the text after it and ``True``; the text is empty for an incomplete mark.
        Without a mark, the searched text and ``False``; then the last number of this text is the
        answer.

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
