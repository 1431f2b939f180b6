"""Generated tasks about the letters of words: counting letters, writing a text backwards.

Problems are computed from their index. So all conversations of a group have the same problem, and a
run resumes exactly. The words are a few hundred short English nouns; every fifth word is held out.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import TaskEnv, check_split
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.word_rewards import LetterCountingRewardParser, TextReversalRewardParser

_NUM_ROWS = {"train": 100_000, "test": 1_000}


class Tier(NamedTuple):
    """How hard a problem is.

    Attributes:
        lengths: fewest and most letters of the text.
        several: probability that the question is about more than one letter.
        letters: fewest and most letters to count in such a question.
    """

    lengths: tuple[int, int]
    several: float
    letters: tuple[int, int]


TIERS = (
    Tier((3, 8), 0.0, (1, 1)),
    Tier((5, 12), 0.5, (1, 2)),
    Tier((8, 18), 0.6, (2, 3)),
    Tier((10, 25), 0.8, (3, 5)),
    Tier((15, 35), 0.9, (5, 8)),
    Tier((40, 80), 1.0, (8, 12)),
    Tier((80, 150), 1.0, (12, 20)),
    Tier((150, 250), 1.0, (18, 26)),
    Tier((250, 400), 1.0, (25, 26)),
    Tier((400, 500), 1.0, (26, 26)),
)
"""Difficulty 1 to 10; up to 5 the text is made of words, from 6 on it is random letters."""

_LAST_TIER_OF_WORDS = 5
# With fewer words of one length, several words are joined.
_FEWEST_WORDS = 20


class LetterProblem(NamedTuple):
    """A text, and the counts of some letters in it.

    Attributes:
        text: lower-case letters without spaces.
        counts: count of each letter, in the order of the question.
    """

    text: str
    counts: dict[str, int]

    @property
    def question(self) -> str:
        """The user's message."""
        form = "n" if len(self.counts) == 1 else json.dumps(dict.fromkeys(self.counts, "n"))
        return f"Count {', '.join(self.counts)} in {self.text}. Say <answer>{form}</answer>."


def letter_problem(
    rng: random.Random, difficulty: int = 1, words: Sequence[str] | None = None
) -> LetterProblem:
    """A problem.

    Each letter to count is in the text with a probability that the problem draws between 0.3 and
    0.9; otherwise it is a letter that is not in the text.

    Args:
        rng: random generator.
        difficulty: 1 to 10.
        words: words of the texts up to difficulty 5; the training words if not given.

    Raises:
        ConfigError: for an unknown difficulty.

    Example:
        >>> problem = letter_problem(random.Random(0))
        >>> problem.question
        'Count o in onion. Say <answer>n</answer>.'
    """
    if not 1 <= difficulty <= len(TIERS):
        raise ConfigError(f"difficulty must be between 1 and {len(TIERS)}, got {difficulty}")
    tier = TIERS[difficulty - 1]
    if difficulty > _LAST_TIER_OF_WORDS:
        text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*tier.lengths)))
    else:
        text = _text(rng, *tier.lengths, word_list("train") if words is None else words)
    wanted = 1
    if rng.random() < tier.several:
        wanted = rng.randint(max(2, tier.letters[0]), tier.letters[1])
    return LetterProblem(text, {letter: text.count(letter) for letter in _pick(rng, text, wanted)})


def _text(rng: random.Random, shortest: int, longest: int, words: Sequence[str]) -> str:
    fitting = [word for word in words if shortest <= len(word) <= longest]
    if len(fitting) >= _FEWEST_WORDS:
        return rng.choice(fitting)
    length, text = rng.randint(shortest, longest), ""
    while len(text) < length:
        text += rng.choice(words)
    return text[:longest]


def _pick(rng: random.Random, text: str, wanted: int) -> list[str]:
    present = sorted(set(text))
    absent = sorted(set(string.ascii_lowercase) - set(text))
    bias = rng.uniform(0.3, 0.9)
    letters = []
    for _ in range(wanted):
        from_text = present and (not absent or rng.random() < bias)
        pool = present if from_text else absent
        letters.append(pool.pop(rng.randrange(len(pool))))
    return letters


def _problem_row(index: int, *, split: str, difficulty: int) -> Mapping[str, str]:
    # The standard library's generator accepts a string and gives the same numbers everywhere.
    rng = random.Random(f"letters {split} {difficulty} {index}")
    problem = letter_problem(rng, difficulty, word_list(split))
    return {"query": problem.question, "answer": json.dumps(problem.counts)}


def _checked_rows(make: Callable[[int], Mapping[str, str]], split: str) -> GeneratedRows:
    make(0)  # impossible settings fail at construction, not in the first batch
    return GeneratedRows(make, _NUM_ROWS[split])


@register("tasks", "letter_counting")
class LetterCountingEnv(TaskEnv):
    """Questions such as ``Count r in strawberry``, scored by the share of correct counts.

    Rows have ``query`` and ``answer``, a JSON object of the letters and their counts. There are
    100,000 problems to train on and 1,000 held out (``split="test"``), which have separate words
    and random numbers; no file and no network is needed.

    Args:
        difficulty: 1 to 10, see ``TIERS``.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. Your own data has the columns ``query`` and
            ``answer``.

    Raises:
        ConfigError: for an unknown difficulty or split, or a difficulty next to your own data,
            where it would have no effect.

    Example:
        >>> td = LetterCountingEnv(shuffle=False).reset()
        >>> td["query"][0], td["answer"][0]
        ('Count e in vine. Say <answer>n</answer>.', '{"e": 1}')
    """

    COLUMNS = ("query", "answer")
    REWARD = LetterCountingRewardParser
    NEEDS_LARGER_MODEL = True

    def __init__(self, *, difficulty: int = 1, **kwargs: Any) -> None:
        self.settings = {"difficulty": difficulty}
        super().__init__(**kwargs)

    @classmethod
    def generate(cls, split: str, difficulty: int = 1) -> GeneratedRows:
        """Problems of a split."""
        return _checked_rows(partial(_problem_row, split=split, difficulty=difficulty), split)


def reversal_problem(index: int, *, split: str = "train", max_words: int = 3) -> Mapping[str, str]:
    """A row: one to ``max_words`` words of the split and the same text backwards.

    Args:
        index: number of the problem; the same one gives the same row everywhere.
        split: ``"train"`` or ``"test"``, which share no word.
        max_words: maximum number of words in the text.

    Raises:
        ConfigError: for an unknown split, or a text without words.

    Example:
        >>> reversal_problem(0)["answer"]
        'noil noitadnuof'
    """
    if max_words < 1:
        raise ConfigError(f"max_words must be at least 1, got {max_words}")
    # The standard library's generator accepts a string and gives the same numbers everywhere.
    rng = random.Random(f"reversal {split} {max_words} {index}")
    text = " ".join(rng.choices(word_list(split), k=rng.randint(1, max_words)))
    query = f"Write this backwards, letter by letter: {text}\nSay <answer>...</answer>."
    return {"query": query, "answer": text[::-1]}


@register("tasks", "text_reversal")
class TextReversalEnv(TaskEnv):
    """Texts to be written backwards, scored by how much of the answer is correct.

    Rows have ``query`` and ``answer``, the text backwards. There are 100,000 problems to train on
    and 1,000 held out (``split="test"``), which have separate words; no file and no network is
    needed.

    Args:
        max_words: maximum number of words in a text.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. Your own data has the columns ``query`` and
            ``answer``.

    Raises:
        ConfigError: for an unknown split or a text without words, or ``max_words`` next to your own
            data, where it would have no effect.

    Example:
        >>> td = TextReversalEnv(shuffle=False, max_words=1).reset()
        >>> td["answer"][0]
        'eenk'
    """

    COLUMNS = ("query", "answer")
    REWARD = TextReversalRewardParser
    NEEDS_LARGER_MODEL = True

    def __init__(self, *, max_words: int = 3, **kwargs: Any) -> None:
        self.settings = {"max_words": max_words}
        super().__init__(**kwargs)

    @classmethod
    def generate(cls, split: str, max_words: int = 3) -> GeneratedRows:
        """Texts of a split."""
        return _checked_rows(partial(reversal_problem, split=split, max_words=max_words), split)


_FILE = Path(__file__).parents[2] / "assets" / "words.txt"


@cache
def word_list(split: str) -> tuple[str, ...]:
    """The words of a split, in a fixed order.

    Args:
        split: ``"train"``, or ``"test"`` for the words that are never trained on.

    Raises:
        ConfigError: for an unknown split.

    Example:
        >>> train, test = word_list("train"), word_list("test")
        >>> len(train), len(test), set(train) & set(test)
        (504, 126, set())
    """
    check_split(split)
    words = _FILE.read_text(encoding="utf-8").split()
    return tuple(word for i, word in enumerate(words) if (i % 5 == 0) == (split == "test"))
