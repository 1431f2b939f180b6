r"""The reward of MATH: whether the answer is mathematically equal to the reference.

This module decides equal texts and different whole numbers. The package ``math-verify`` compares
everything else in a worker process. The reason is that a model will sometimes write
``9^{9^{9^9}}``, and neither a signal nor a thread can stop that computation.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._imports import require
from torchrl_llm._registry import FullSignature, register
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.answer_block import AnswerBlockParser
from torchrl_llm.rewards.answer_formats import last_boxed
from torchrl_llm.rewards.reward_runner import call_reward
from torchrl_llm.sandbox.workers import WorkerPool

_CHECK = (Path(__file__).with_name("math_check.py"), "same_mathematics")
_PREPARE = "load_library"
_MEMORY_BYTES = 2 << 30
# Ten times the longest reference of the dataset.
_MAX_LENGTH = 2000
_WHOLE = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")
_SPELLINGS = (
    (
        re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;:> ]|\\(?:quad|qquad)(?![A-Za-z])|\\?\$|~"),
        "",
    ),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\^\{?\\circ\}?|\\%|%|(?<=\d)\s*(?:percent|dollars)$"), ""),
    (re.compile(r"\\frac([0-9])([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(sqrt)([0-9])"), r"\\\1{\2}"),
    (re.compile(r"_\{([0-9]+)\}"), r"_\1"),
    # "3 1/2" is not 31/2.
    (re.compile(r"(?<![0-9])\s+|\s+(?![0-9])"), ""),
)
# Plain notation to LaTeX.
_SIGNS = str.maketrans(
    {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∩": r"\cap "}
    | {"×": r"\times ", "·": r"\cdot ", "±": r"\pm ", "°": r"^\circ ", "−": "-"}
    | {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "¼": r"\frac{1}{4}", "²": "^2", "³": "^3"}
)
_WORDS = (
    (re.compile(r"\A(?:the )?(?:final )?answer(?: is|:)+\s*(?=\S)", re.IGNORECASE), ""),
    (re.compile(r"\A(\*\*|`)(.*)\1\Z", re.DOTALL), r"\2"),
    (re.compile(r"√\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√([0-9]+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}|∅"), r"\\emptyset "),
    (re.compile(r"\\[dt]?(frac|binom)\s+([0-9])\s*([0-9])"), r"\\\1{\2}{\3}"),
    # 1 000 000, then 1 1/2 and 1e3
    (re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)"), lambda found: found[0].replace(" ", "")),
    (re.compile(r"(?<![\d./])(\d+) +(\d+)/(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)"), r"\1\\cdot 10^{\2}"),
    (
        re.compile(
            r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\s*\}?\s*[)}]?"
        ),
        r"\\\1\\left(\\frac{\2\\pi}{180}\\right)",
    ),
    # ]1,2[ is (1,2)
    (
        re.compile(r"([\[\]])([^\[\](),;]+)[,;]([^\[\](),;]+)([\[\]])"),
        lambda m: "[("[m[1] == "]"] + f"{m[2]},{m[3]}" + "])"[m[4] == "["],
    ),
)
_BROKEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# A letter, an equals sign and a value.
_NAMED = re.compile(r"\s*([A-Za-z])\s*=")
# Two adjacent numbers; a number after a subscript is an argument: \log_2 8.
_TWO_NUMBERS = re.compile(r"(?<![A-Za-z}] )(?<![\d_])\d+\s+\d")
_BRACKETS = re.compile(r"\\[{}]|\\.|[][(){},]", re.DOTALL)
# A number in a different base: its digits and the base.
_BASED = re.compile(r"[0-9A-Z]+_[0-9]+")
# A quantity and its unit: any unit in \text{}, or a known unit without it.
_QUANTITY = re.compile(
    r"(?P<value>.*[\d}\])])\s*"
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*(?P<text>[A-Za-z][A-Za-z ./]*)\}"
    r"|(?:\\ |\s)\s*(?P<word>[A-Za-z][A-Za-z /]*))\s*(?:\^\s*\{?(?P<power>[23])\}?)?\s*\.?",
    re.DOTALL,
)
# Synonyms of a unit per line.
_UNIT_NAMES = (
    "mm millimeter millimetre,cm centimeter centimetre,m meter metre,km kilometer kilometre,"
    "in inch inche,ft foot feet,yd yard,mi mile,mg milligram,g gram,kg kilogram,oz ounce,lb pound,"
    "s sec second,min minute,h hr hour,day,week,month,year yr,ml milliliter millilitre,"
    "l liter litre,gal gallon,mph mile_per_hour,kph km/h kmh kilometer_per_hour,"
    "m/s meter_per_second,degree deg,radian rad,dollar,cent,euro,unit"
)
_UNITS = {each: names.split()[0] for names in _UNIT_NAMES.split(",") for each in names.split()}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
# Units that are written as a sign.
_UNIT_SIGNS = (
    (re.compile(r"\\circ\s*\}?\s*\Z"), "degree"),
    (re.compile(r"%\s*\Z"), "percent"),
    (re.compile(r"\A\s*\\\$"), "dollar"),
)


@register("rewards", "math")
class MATHRewardParser(AnswerBlockParser):
    r"""Reward 1.0 for the correct answer in an ``<answer>`` block, 0.1 for a wrong one, else 0.0.

    An answer may be in a ``\boxed{}`` inside the block. It is correct if it equals the reference as
    text, up to spaces and spelling (``√2``, ``**5**``, ``the answer is 5``). It is also correct if
    the package ``math-verify`` finds both mathematically equal: ``1/2`` equals ``\frac{2}{4}``.
    Some pairs that ``math-verify`` accepts are wrong: a tuple and a set, different units (one unit
    may be left out), and decimals that differ in the first 12 places (``0.333333`` is not ``1/3``).
    If the comparison exceeds its time limit or 2 GiB of memory, the reward is invalid. An answer of
    more than 2,000 characters is wrong.

    Args:
        args: arguments of :class:`~torchrl_llm.rewards.AnswerBlockParser`.
        boxed: without an answer block, use a ``\boxed{}`` after the reasoning as the answer; for
            models that were trained to answer in this form.
        num_workers: number of processes that compare answers, about 80 MB each; parsers of this
            process with the same number share them.
        timeout: time limit of one comparison in seconds.
        kwargs: keyword arguments of :class:`~torchrl_llm.rewards.AnswerBlockParser`.

    Raises:
        MissingExtraError: when ``math-verify`` is not installed.

    Example:
        >>> parser = MATHRewardParser()
        >>> parser.score(r"<answer>\boxed{\dfrac12}</answer>", r"\frac{1}{2}").reward
        1.0
        >>> parser.score("<answer>3</answer>", "4").reward, parser.score("4", "4").reward
        (0.1, 0.0)
    """

    __signature__ = FullSignature()

    @checked
    def __init__(
        self,
        *args: Any,
        boxed: bool = False,
        num_workers: Annotated[int, Ge(1)] = 2,
        timeout: Annotated[float, Gt(0)] = 5.0,
        **kwargs: Any,
    ) -> None:
        require("math_verify", extra="math", feature="MATHRewardParser")
        super().__init__(*args, num_threads=num_workers, **kwargs)
        self.boxed = boxed
        # A thread waits for its process; the process enforces the limit.
        self.comparison_timeout = timeout

    @staticmethod
    def extract_boxed(text: str) -> str:
        r"""Return the contents of the last ``\boxed{...}``, or the stripped text without one."""
        boxed = last_boxed(text)
        return text.strip() if boxed is None else boxed

    @staticmethod
    def normalize_answer(answer: str) -> str:
        r"""Normalise an answer: remove TeX that does not change its meaning.

        Removes spaces, ``\left``, dollar, degree and percent signs, a full stop at the end and ``x
        =``. Replaces ``\dfrac`` by ``\frac``.

        Example:
            >>> MATHRewardParser.normalize_answer(r"x = \left( 3, \dfrac12 \right).")
            '(3,\\frac{1}{2})'
        """
        for pattern, spelling in _SPELLINGS:
            answer = pattern.sub(spelling, answer)
        answer = answer.removesuffix(".")
        return re.sub(r"^[A-Za-z]=(?=.)", "", answer)

    @classmethod
    def answers_match(
        cls, predicted: str, reference: str, *, timeout: float = 5.0, num_workers: int = 2
    ) -> bool:
        r"""Whether an answer, boxed or not, is mathematically equal to a reference.

        Args:
            predicted: answer of the model.
            reference: the correct answer.
            timeout: time limit of the comparison in seconds.
            num_workers: see :class:`MATHRewardParser`.

        Raises:
            RewardTimeoutError: when the comparison took longer.
            RewardError: when the comparison failed.

        Example:
            >>> MATHRewardParser.answers_match("0.5", r"\frac{1}{2}")
            True
        """
        answer, truth = cls.extract_boxed(predicted), cls.extract_boxed(reference)
        if not answer or len(answer) > _MAX_LENGTH or _BROKEN_BOX.search(answer):
            return False
        answer, unit = _quantity(_as_latex(answer))
        truth, wanted_unit = _quantity(_as_latex(truth))
        if unit and wanted_unit and unit != wanted_unit:
            return False
        names = _NAMED.match(answer), _NAMED.match(truth)
        if not all(names) or names[0][1] == names[1][1]:  # x=5 is not y=5
            spelled, wanted = cls.normalize_answer(answer), cls.normalize_answer(truth)
            if spelled == wanted:
                return True
            if _TWO_NUMBERS.search(answer) or _TWO_NUMBERS.search(truth):
                return False
            if {_is_ordered(spelled), _is_ordered(wanted)} == {True, False}:
                return False
            if _BASED.fullmatch(spelled) and _BASED.fullmatch(wanted):
                return False  # the comparison ignores subscripts
            if _WHOLE.fullmatch(spelled) and _WHOLE.fullmatch(wanted):
                return int(spelled.replace(",", "")) == int(wanted.replace(",", ""))
        return _same_mathematics(answer, truth, timeout, num_workers)

    def read_truth(self, answer: Any) -> str:
        """Return the reference.

        Raises:
            RewardError: when the reference is not a text.
        """
        if not isinstance(answer, str) or not answer.strip():
            raise RewardError(f"the answer of the row must be a text, got {answer!r}")
        return answer

    def read_response(self, response: str) -> tuple[str | None, str | None]:
        """Split a response into reasoning and answer; boxed answers may count."""
        think, block = super().read_response(response)
        if block is None and self.boxed:
            block = last_boxed(response.rpartition("</think>")[2])
        return think, block

    def is_right(self, block: str, truth: str) -> bool:
        """Whether the block is mathematically equal to the reference."""
        return self.answers_match(
            block, truth, timeout=self.comparison_timeout, num_workers=self.num_threads
        )


def _as_latex(answer: str) -> str:
    """Remove Markdown and introductory words from an answer, and write signs as LaTeX."""
    answer = answer.translate(_SIGNS)
    for pattern, latex in _WORDS:
        answer = pattern.sub(latex, answer)
    return answer.strip()


def _quantity(answer: str) -> tuple[str, str]:
    """Split an answer into its quantity and its unit (empty if there is no unit)."""
    found = _QUANTITY.fullmatch(answer)
    words = (
        [] if found is None else (found["text"] or found["word"]).lower().replace(".", "").split()
    )
    power = (found and found["power"]) or "".join(_POWERS.get(word, "") for word in words)
    name = "_".join(
        word if word in _UNITS else word.removesuffix("s") for word in words if word not in _POWERS
    )
    if name and (found["text"] or name in _UNITS):
        unit = _UNITS.get(name, name)
        return found["value"], "" if unit == "unit" else unit + power
    return answer, next((unit for sign, unit in _UNIT_SIGNS if sign.search(answer)), "")


def _is_ordered(answer: str) -> bool | None:
    """``True`` for a tuple or an interval, ``False`` for a set or a list, ``None`` otherwise."""
    depth, closed, commas = 0, 0, [False, False]
    for mark in _BRACKETS.finditer(answer):
        if mark[0] in ("(", "[", "{", "\\{"):
            depth += 1
        elif mark[0] in (")", "]", "}", "\\}"):
            depth -= 1
            closed = closed or (mark.end() if depth == 0 else 0)
        elif mark[0] == "," and depth in (0, 1):
            commas[depth] = True
    if commas[0]:
        return None if "=" in answer else False
    if not commas[1] or closed != len(answer):
        return None
    return True if answer[0] in "([" else False if answer.startswith(("\\{", "{")) else None


@cache
def _pool(num_workers: int) -> WorkerPool:
    return WorkerPool(_CHECK, num_workers=num_workers, memory_bytes=_MEMORY_BYTES, prepare=_PREPARE)


@lru_cache(maxsize=8192)
def _same_mathematics(answer: str, truth: str, timeout: float, num_workers: int) -> bool:
    """Compare, with a cache, because the responses of a group often have the same answer."""
    return call_reward(_pool(num_workers), answer, truth, timeout=timeout)
