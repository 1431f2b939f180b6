"""Rows with rewards for the tests of the rules of credit."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.nodes import cell
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer

NAN = float("nan")


def row(
    reward,
    *,
    group=0,
    traj=None,
    done=True,
    valid=None,
    agent=None,
    query=None,
    tokens=3,
    turn=None,
    truncated=None,
    finish=None,
    dtype=torch.float32,
):
    """A row of one sampled turn; ``reward`` may be a list, one value a response token."""
    rewards = torch.tensor(reward if isinstance(reward, list) else [reward], dtype=dtype)
    made = TensorDict(
        {
            "tokens": TensorDict(
                {
                    "prompt": torch.arange(2),
                    "response": torch.arange(tokens),
                    "full": torch.arange(tokens + 2),
                }
            ),
            "next": TensorDict({"reward": rewards.view(-1, 1), "done": torch.tensor([done])}),
        }
    )
    if query is None:
        made["group_id"] = torch.tensor(group)
    else:
        made["query"] = cell(query)
    if traj is not None:
        made["traj_id"] = torch.tensor(traj)
    if turn is not None:
        made["turn"] = torch.tensor(turn)
    if valid is not None:
        made["next", "reward_valid"] = torch.tensor([valid])
    if truncated is not None:
        made["next", "truncated"] = torch.tensor([truncated])
        made["next", "terminated"] = torch.tensor([done and not truncated])
    if finish is not None:
        made["tokens", "finish_reason"] = torch.tensor(int(FinishReason[finish]))
    if agent is not None:
        made["agent"] = cell(agent)
    return made


def write(credit, *batches):
    """A buffer behind an advantage estimator, after some writes."""
    buffer = ReplayBuffer(transform=credit)
    for rows in batches:
        buffer.extend(lazy_rows(rows))
    return buffer


def advantages(buffer):
    """The advantage of each row; a list where it is one per token."""
    if not len(buffer):
        return []
    columns = [r["advantage"] for r in buffer[:].unbind(0)]
    return [c.item() if c.numel() == 1 else c.flatten().tolist() for c in columns]
