"""Figures for several samples per prompt: pass@k and majority@k.

Samples are records of :func:`~torchrl_llm.evaluation.answer_record`. The mean over samples, avg@k,
equals the accuracy for every ``k``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from torchrl_llm.data.input_modes import message_text
from torchrl_llm.evaluation.evaluate import pass_at_k
from torchrl_llm.rewards.answer_formats import harness_answer, harness_spelling, marked_answer

Record = Mapping[str, Any]


def sample_sizes(num_samples: int) -> list[int]:
    """Return the values of ``k``: powers of two from 2 on, and the number of samples.

    Args:
        num_samples: number of samples of a prompt.

    Example:
        >>> sample_sizes(10), sample_sizes(1)
        ([2, 4, 8, 10], [])
    """
    powers = (2**exponent for exponent in range(1, num_samples.bit_length()))
    return sorted({*powers, num_samples} - {1})


def figures_at_k(groups: Sequence[Sequence[Record]]) -> dict[str, list[float]]:
    """Compute ``pass@k`` and ``majority@k`` of each prompt, for each ``k`` of :func:`sample_sizes`.

    Args:
        groups: the samples of each prompt, in the order in which they were drawn.

    Returns:
        Maps a name to one value per prompt, each in [0, 1]; the mean of the values is the figure.

    Example:
        >>> def sample(text, success):
        ...     return {"text": text, "success": success, "valid": True}
        >>> figures_at_k([[sample("#### 4", True), sample("#### 5", False)]])
        {'pass@2': [1.0], 'majority@2': [0.5]}
    """
    right = [[bool(each["success"] and each["valid"]) for each in group] for group in groups]
    votes = [[answer_vote(each) for each in group] for group in groups]
    found = {}
    for k in sample_sizes(min(map(len, groups))):
        found[f"pass@{k}"] = [pass_at_k(sum(each), len(each), k) for each in right]
        found[f"majority@{k}"] = [
            majority_at_k(theirs, own, k) for theirs, own in zip(votes, right, strict=True)
        ]
    return found


def majority_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Return whether the most frequent answer of ``k`` samples is correct (arXiv:2203.11171).

    The result is an average over disjoint blocks of ``k`` samples, in their order, so the estimate
    is unbiased and no sample counts twice. Answers with equally many votes share the result
    equally.

    Args:
        votes: the answer of each sample; ``None`` for no answer, which is not a vote.
        right: whether each answer is correct.
        k: number of samples of a block, at most the number of samples.

    Example:
        >>> majority_at_k(["4", "5", "4", "5"], [True, False, True, False], 3)
        1.0
        >>> majority_at_k(["4", "5", "4", "5"], [True, False, True, False], 2)
        0.5
    """
    runs = []
    for start in range(0, len(votes) - k + 1, k):
        given: dict[str, list[bool]] = defaultdict(list)
        for vote, is_right in zip(votes[start : start + k], right[start : start + k], strict=True):
            if vote is not None:
                given[vote].append(is_right)
        most = max(map(len, given.values()), default=0)
        # Two samples with the same answer may differ in correctness, if the reward uses more than
        # the answer.
        runs.append(fmean([fmean(each) for each in given.values() if len(each) == most] or [0.0]))
    return fmean(runs)


def answer_vote(record: Record) -> str | None:
    """Return the vote of a sample: its marked answer, its last number, or its whole text.

    Numbers are compared by value, other texts without case and spacing. An incomplete mark is not a
    vote. See :func:`~torchrl_llm.rewards.answer_formats.marked_answer`.

    Args:
        record: record of the sample.

    Example:
        >>> answer_vote({"text": "So it is <answer>$1,200.00</answer>"})
        '1200.0'
        >>> answer_vote({"text": "I give up"})
        'i give up'
    """
    chat = record.get("messages")
    text, is_marked = marked_answer(message_text(chat[-1]) if chat else record["text"])
    if not is_marked:
        text = harness_answer(text, "flexible-extract") or text
    try:
        return str(float(harness_spelling(text)))
    except ValueError:
        return " ".join(text.casefold().split()) or None
