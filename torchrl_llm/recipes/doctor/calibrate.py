"""Search for the largest ``train.micro_token_budget``: by doubling, then bisection.

The search depends only on whether a budget fits. With several ranks each rank tries a budget
itself, and all continue with a budget that fits on every rank, so that no rank waits for one that
ran out of memory.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchrl_llm.recipes import builders
from torchrl_llm.trainers import Ranks, make_optimizer
from torchrl_llm.trainers.optimizers import in_training


def largest(
    fits: Callable[[int], bool], low: int, high: int, *, agree: Callable[[bool], bool] = bool
) -> int:
    """The largest budget that fits, within an eighth.

    Args:
        fits: tries a budget on this rank, and returns whether it fits.
        low: smallest useful budget, at most ``high``.
        high: largest budget.
        agree: returns whether it fits on all ranks, from the result of this rank; called once after
            each try.

    Returns:
        A budget that fits; 0 if not even ``low`` fits.

    Example:
        >>> largest(lambda budget: budget <= 700, 64, 4096)
        640
        >>> largest(lambda budget: True, 64, 4096), largest(lambda budget: False, 64, 4096)
        (4096, 0)
    """
    if not agree(fits(low)):
        return 0
    above = high + 1
    while low < high:
        tried = min(2 * low, high)
        if not agree(fits(tried)):
            above = tried
            break
        low = tried
    while above <= high and above - low > max(low // 8, 1):
        tried = (low + above) // 2
        low, above = (tried, above) if agree(fits(tried)) else (low, tried)
    return low


def all_ranks(fine: bool) -> bool:
    """Whether a budget fits on every rank of ``torchrun``, or on this process if it is alone.

    Args:
        fine: result of this rank.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return all(Ranks(world=world).gather(fine))


class Trial:
    """Forward, backward and optimizer step with a given number of tokens; learning rate 0.

    Args:
        config: configuration of a training recipe.
        policy: the trained policy.
        row_tokens: tokens per row.
    """

    def __init__(self, config: Any, policy: Any, row_tokens: int) -> None:
        self._config, self._policy, self._row_tokens = config, policy, row_tokens
        arguments = config.optimizer.arguments | {"lr": 0.0}
        self._optimizer = make_optimizer(policy, **arguments)

    def __call__(self, budget: int) -> bool:
        """Whether a micro-batch of ``budget`` tokens fits; it has at least one row."""
        try:
            self._train(budget)
            return True
        except (MemoryError, RuntimeError) as error:  # the errors of a GPU and of a CPU
            if not re.search("out of memory|can't allocate memory", str(error)):
                raise
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        return False

    def _train(self, budget: int) -> None:
        length = max(2, min(self._row_tokens, budget))
        ids = torch.arange(length) % self._policy.tokenizer.vocab_size
        sequences = [ids] * max(1, budget // length)
        trained = [torch.arange(length) > 0] * len(sequences)
        with builders.autocast(self._config):
            loss = self._policy.token_scores(sequences, trained).log_probs.mean()
        loss.backward()
        with in_training(self._optimizer):
            self._optimizer.step()
