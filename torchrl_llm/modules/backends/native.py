"""Generation arguments of transformers beyond the common ones, as its own logits processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

__all__ = ["NATIVE_ARGUMENTS", "native_processors"]

_Builder = Callable[[Any, int, tuple[int, ...]], Any]

_BUILDERS: dict[str, _Builder] = {
    "min_new_tokens": lambda value, prompt, eos: lp.MinNewTokensLengthLogitsProcessor(
        prompt, value, list(eos)
    ),
    "no_repeat_ngram_size": lambda value, prompt, eos: lp.NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, prompt, eos: lp.NoBadWordsLogitsProcessor(value, list(eos)),
    "sequence_bias": lambda value, prompt, eos: lp.SequenceBiasLogitsProcessor(value),
    "suppress_tokens": lambda value, prompt, eos: lp.SuppressTokensLogitsProcessor(value),
    "begin_suppress_tokens": lambda value, prompt, eos: lp.SuppressTokensAtBeginLogitsProcessor(
        value, prompt
    ),
    "typical_p": lambda value, prompt, eos: lp.TypicalLogitsWarper(mass=value),
    "epsilon_cutoff": lambda value, prompt, eos: lp.EpsilonLogitsWarper(value),
    "eta_cutoff": lambda value, prompt, eos: lp.EtaLogitsWarper(value),
}

NATIVE_ARGUMENTS = frozenset({*_BUILDERS, "logits_processor"})
"""Names that the Transformers backend takes beside the common ones, spelled as in ``generate``."""


def native_processors(
    arguments: Mapping[str, Any], prompt_length: int, end_ids: tuple[int, ...]
) -> LogitsProcessorList:
    """Processors for the arguments given, in transformers' own order.

    They see logits before temperature and truncation.

    Args:
        arguments: names of :data:`NATIVE_ARGUMENTS` and their values.
        prompt_length: tokens of the longest (padded) prompt.
        end_ids: ids that end a response.

    Example:
        >>> [type(p).__name__ for p in native_processors({"suppress_tokens": [3]}, 4, (2,))]
        ['SuppressTokensLogitsProcessor']
    """
    built = [
        build(arguments[name], prompt_length, end_ids)
        for name, build in _BUILDERS.items()
        if name in arguments
    ]
    return LogitsProcessorList([*built, *arguments.get("logits_processor", ())])
