"""Answers as plain data: one record a conversation, for a JSON-lines file that people read later.

Next: :func:`torchrl_llm.evaluation.evaluate` hands out the rows that become records here;
``sota-implementations/evaluate`` writes them.
"""

from __future__ import annotations

import math
from typing import Any

from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from torchrl_llm.evaluation.evaluate import Outcome

# Tensors that environments and policies write, beside the columns of the data.
_OWN = {"done", "terminated", "truncated", "truncation_reason", "group_id", "traj_id", "turn"}
_OWN |= {"step_count", "policy_version", "_step"}


def answer_record(row: TensorDictBase, outcome: Outcome) -> dict[str, Any]:
    """What was asked, what was answered and what came of it, as JSON takes it.

    Args:
        row: the last turn of a conversation, without batch dimension.
        outcome: what came of the conversation.

    Returns:
        ``messages`` (the whole conversation) or ``text``, ``query``, the :class:`Outcome` field by
        field (``reward`` is ``None`` where it is invalid), ``error``, the short columns of the data
        set (``task_id``, ``key``, ...), and ``scores`` where the reward wrote some.
    """
    record: dict[str, Any] = {}
    for name, value in row.items():
        if is_non_tensor(value) and isinstance(value.data, (str, int, float, bool)):
            record[name] = value.data
        elif isinstance(value, Tensor) and value.numel() == 1 and name not in _OWN:
            record[name] = value.item()
    history = row.get("history", None)
    if history is None:
        record["text"] = row.get(("text", "full"))
    else:
        record["messages"] = [_message(message) for message in history.full.chats[0]]
    record |= outcome._asdict()
    if not outcome.valid:
        error = row.get(("next", "error"), {"type": "", "message": ""})
        record |= {"reward": None, "error": f"{error['type']}: {error['message']}"}
    scores = row.get(("next", "ifeval_score"), None)
    if scores is not None:
        record["scores"] = {name: value.tolist() for name, value in scores.items()}
    return record


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what only the environment needs, and what was sampled where it differs."""
    same = message.get("raw") == message.get("content")
    left_out = {"is_complete", "raw"} if same else {"is_complete"}
    return {name: value for name, value in message.items() if name not in left_out}


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Chance that one of ``k`` samples is right, without bias (arXiv:2107.03374, eq. 1).

    ``1 - C(n - c, k) / C(n, k)`` with ``n`` samples of which ``c`` are right.

    Args:
        num_right: ``c``.
        num_samples: ``n``.
        k: at most ``n``.

    Raises:
        ValueError: for impossible counts.

    Example:
        >>> pass_at_k(1, 4, 1), pass_at_k(1, 4, 2), pass_at_k(3, 4, 2)
        (0.25, 0.5, 1.0)
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"expected 0 <= num_right <= num_samples and 1 <= k <= num_samples, got {num_right}, "
            f"{num_samples} and k={k}"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
