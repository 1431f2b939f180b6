"""How often is a letter in a text? Ten tiers, from one letter of a word to 26 of 500 letters.

:func:`letter_problem` makes one problem from a generator; the environment makes its rows by index,
so that all conversations of a group are about the same problem and a run resumes exactly.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.envs.datasets.words import word_list
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.letter_counting import LetterCountingRewardParser

_NUM_ROWS = {"train": 100_000, "test": 1_000}


class Tier(NamedTuple):
    """How hard a problem is.

    Attributes:
        lengths: fewest and most letters of the text.
        several: probability that more than one letter is asked for.
        letters: fewest and most letters to count where several are.
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
# With fewer words of a length, words run together.
_FEWEST_WORDS = 20


class LetterProblem(NamedTuple):
    """A text and how often each of some letters is in it.

    Attributes:
        text: lower-case letters without spaces.
        counts: letter to count, in the order in which they are asked for.
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

    Letters are taken from the text with a probability between 0.3 and 0.9 that each problem draws,
    and else from those that are not in it.

    Args:
        rng: where the chance comes from.
        difficulty: 1 to 10.
        words: what texts are made of up to difficulty 5; the words to train on if not given.

    Raises:
        ConfigError: for another difficulty.

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
    # A generator of the standard library takes a string and gives the same numbers everywhere.
    rng = random.Random(f"letters {split} {difficulty} {index}")
    problem = letter_problem(rng, difficulty, word_list(split))
    return {"query": problem.question, "answer": json.dumps(problem.counts)}


@register("tasks", "letter_counting")
class LetterCountingEnv(TaskEnv):
    """Questions such as ``Count r in strawberry``, scored by the share of right counts.

    Rows have ``query`` and ``answer``, a JSON object of the letters and their counts. There are
    100,000 problems to train on and 1,000 held out (``split="test"``), which have words and chance
    of their own; no file and no network is needed.

    Args:
        difficulty: 1 to 10, see :data:`TIERS`.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. Data of your own has the columns ``query``
            and ``answer``.

    Raises:
        ConfigError: for another difficulty or split, or a difficulty beside data of your own, on
            which it would have no effect.

    Example:
        >>> td = LetterCountingEnv(shuffle=False).reset()
        >>> td["query"][0], td["answer"][0]
        ('Count e in vine. Say <answer>n</answer>.', '{"e": 1}')
    """

    COLUMNS = ("query", "answer")

    def __init__(
        self,
        *,
        difficulty: int = 1,
        dataset: Any = None,
        data_files: Any = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        if dataset is None and data_files is None:
            dataset = self._generated(split, difficulty)
        elif difficulty != 1:
            raise ConfigError(f"difficulty={difficulty} has no effect on dataset or data_files")
        super().__init__(dataset=dataset, data_files=data_files, split=split, **kwargs)

    @classmethod
    def default_dataset(cls, split: str | None) -> GeneratedRows:
        """Problems of difficulty 1, of the split ``train`` if not given."""
        return cls._generated(split, 1)

    @staticmethod
    def _generated(split: str | None, difficulty: int) -> GeneratedRows:
        split = "train" if split is None else split
        make = partial(_problem_row, split=split, difficulty=difficulty)
        make(0)  # impossible settings fail here, not in the first batch
        return GeneratedRows(make, _NUM_ROWS[split])

    def make_reward(self) -> LetterCountingRewardParser:
        """See :class:`~torchrl_llm.rewards.letter_counting.LetterCountingRewardParser`."""
        return LetterCountingRewardParser()
