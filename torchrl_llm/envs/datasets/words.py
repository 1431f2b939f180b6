"""English words for generated tasks: a few hundred short nouns, every fifth of them held out."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torchrl_llm.errors import ConfigError

_FILE = Path(__file__).parents[2] / "assets" / "words.txt"


@cache
def word_list(split: str) -> tuple[str, ...]:
    """The words of a split, in a fixed order.

    Args:
        split: ``"train"``, or ``"test"`` for those that are never trained on.

    Raises:
        ConfigError: for another split.

    Example:
        >>> train, test = word_list("train"), word_list("test")
        >>> len(train), len(test), set(train) & set(test)
        (504, 126, set())
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
    words = _FILE.read_text(encoding="utf-8").split()
    return tuple(word for i, word in enumerate(words) if (i % 5 == 0) == (split == "test"))
