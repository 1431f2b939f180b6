"""Write a text backwards: words in a row, reversed letter by letter."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.envs.datasets.words import word_list
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.text_reversal import TextReversalRewardParser

_NUM_ROWS = {"train": 100_000, "test": 1_000}


def reversal_problem(index: int, *, split: str = "train", max_words: int = 3) -> Mapping[str, str]:
    """A row: one to ``max_words`` words of the split and the same text backwards.

    Args:
        index: number of the problem; the same one gives the same row everywhere.
        split: ``"train"`` or ``"test"``, which share no word.
        max_words: at most so many words.

    Raises:
        ConfigError: for another split, or a text without words.

    Example:
        >>> reversal_problem(0)["answer"]
        'noil noitadnuof'
    """
    if max_words < 1:
        raise ConfigError(f"max_words must be at least 1, got {max_words}")
    # A generator of the standard library takes a string and gives the same numbers everywhere.
    rng = random.Random(f"reversal {split} {max_words} {index}")
    text = " ".join(rng.choices(word_list(split), k=rng.randint(1, max_words)))
    query = f"Write this backwards, letter by letter: {text}\nSay <answer>...</answer>."
    return {"query": query, "answer": text[::-1]}


@register("tasks", "text_reversal")
class TextReversalEnv(TaskEnv):
    """Texts to be written backwards, scored by how much of the answer is right.

    Rows have ``query`` and ``answer``, the text backwards. There are 100,000 problems to train on
    and 1,000 held out (``split="test"``), which have words of their own; no file and no network is
    needed.

    Args:
        max_words: at most so many words in a text.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. Data of your own has the columns ``query``
            and ``answer``.

    Raises:
        ConfigError: for another split or a text without words, or ``max_words`` beside data of your
            own, on which it would have no effect.

    Example:
        >>> td = TextReversalEnv(shuffle=False, max_words=1).reset()
        >>> td["answer"][0]
        'eenk'
    """

    COLUMNS = ("query", "answer")

    def __init__(
        self,
        *,
        max_words: int = 3,
        dataset: Any = None,
        data_files: Any = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        if dataset is None and data_files is None:
            dataset = self._generated(split, max_words)
        elif max_words != 3:
            raise ConfigError(f"max_words={max_words} has no effect on dataset or data_files")
        super().__init__(dataset=dataset, data_files=data_files, split=split, **kwargs)

    @classmethod
    def default_dataset(cls, split: str | None) -> GeneratedRows:
        """Texts of up to three words, of the split ``train`` if not given."""
        return cls._generated(split, 3)

    @staticmethod
    def _generated(split: str | None, max_words: int) -> GeneratedRows:
        split = "train" if split is None else split
        make = partial(reversal_problem, split=split, max_words=max_words)
        make(0)  # impossible settings fail here, not in the first batch
        return GeneratedRows(make, _NUM_ROWS[split])

    def make_reward(self) -> TextReversalRewardParser:
        """See :class:`~torchrl_llm.rewards.text_reversal.TextReversalRewardParser`."""
        return TextReversalRewardParser()
