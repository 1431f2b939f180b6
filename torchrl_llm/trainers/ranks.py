"""One batch spread over ranks: what it is divided by, and what it came to.

A mean over the tokens, sequences or prompts of a batch is over the *whole* batch, wherever its rows
are. Each rank computes its rows' loss with the counts of all ranks (:func:`global_normalizer`); the
ranks' losses then add up to that of the batch, as those of micro-batches do. DDP and FSDP average
gradients over ranks instead of adding them, so the loss is multiplied by the number of ranks:

.. code-block:: python

    normalizer = global_normalizer(loss.normalizer(rows_of_this_rank))
    for piece in pieces:
        output = loss(piece, normalizer=normalizer)
        (output.total_loss() * dist.get_world_size()).backward()
        meter.add(sum_over_ranks(output))

Every rank needs as many micro-batches as the others, for each of them is a collective call; a rank
that runs out goes on with rows of which no token counts. Without ``torch.distributed`` both
functions give back what they are given.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from torchrl_llm.functional import Normalizer
from torchrl_llm.objectives.composite_loss import CompositeNormalizer
from torchrl_llm.objectives.token_loss import LLMLossOutput

Counts = TypeVar("Counts", Normalizer, CompositeNormalizer)


def _in_group(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def global_normalizer(normalizer: Normalizer, group: dist.ProcessGroup | None = None) -> Normalizer:
    """Counts of the rows of all ranks together. All ranks have to call it.

    Args:
        normalizer: counts of this rank's rows; ``Normalizer(0, 0)`` (with ``group_tokens={}`` for
            ``prompt_mean``) for none. Rows of one prompt may be on several ranks.
        group: the ranks; all by default.

    Raises:
        ValueError: when some ranks count prompt groups and some do not.

    Example:
        >>> global_normalizer(Normalizer(10, 2))
        Normalizer(num_tokens=10, num_sequences=2, group_tokens=None)
    """
    if not _in_group(group):
        return normalizer
    everyone: list[Any] = [None] * dist.get_world_size(group)
    # The counts are Python numbers and dictionaries: an object of a few bytes a rank.
    dist.all_gather_object(everyone, normalizer, group=group)
    total, *others = everyone
    for counts in others:
        total = total.plus(counts)
    return total


def sum_over_ranks(output: LLMLossOutput, group: dist.ProcessGroup | None = None) -> LLMLossOutput:
    """The sum of the loss outputs of all ranks, without gradients. All ranks have to call it.

    Args:
        output: output of a loss that was computed with the :func:`global_normalizer`.
        group: the ranks; all by default.

    Returns:
        The output of the whole batch, on every rank.

    Example:
        >>> import torch
        >>> from torchrl_llm.objectives import SFTLossOutput
        >>> sum_over_ranks(SFTLossOutput(loss_sft=torch.ones(()))).loss_sft
        tensor(1.)
    """
    total = output.detach().clone()
    if _in_group(group):
        for value in total.leaves():
            dist.all_reduce(value, group=group)
    return total
