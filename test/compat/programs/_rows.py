"""Rows as a policy writes them, and the gradient of a loss."""

from __future__ import annotations

import torch
from _shared import model
from tensordict import TensorDict, lazy_stack

PROMPT = 3
# how far the sampler's log-prob is below the model's: the last two are outside of any clip range
SHIFTS = [0.0, 0.1, -0.1, 0.3, 0.5, -0.9, 0.05]


def log_probs(ids):
    with torch.no_grad():
        logits = model()(ids[None]).logits[0, :-1].float()
    found = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])


def row(ids, advantage, shift=1.0, **more):
    """A row as a policy writes it, whose sampler differed from the model."""
    ids = torch.tensor(ids)
    current = log_probs(ids)
    assistant = torch.arange(len(ids)) >= PROMPT
    return TensorDict(
        tokens={"full": ids, "prompt": ids[:PROMPT], "response": ids[PROMPT:]},
        masks={"all_attention_mask": torch.ones_like(assistant), "all_assistant_mask": assistant},
        log_probs={"full": current - shift * torch.tensor(SHIFTS)[: len(ids)]},
        advantage=torch.full((1, 1), advantage),
        next={"ref_log_probs": {"full": current - 0.2}},
        **more,
    )


def masked(rows, mask):
    return rows.set(("masks", "all_assistant_mask"), mask)


def ragged(shift=1.0):
    return lazy_stack(
        [row([11, 12, 13, 14, 15, 16, 17], 1.0, shift), row([21, 22, 23, 24, 25], -2.0, shift)]
    )


def dense(shift=1.0):
    rows = [
        row([11, 12, 13, 14, 15, 16, 17], 1.0, shift),
        row([21, 22, 23, 24, 25, 26, 27], -2.0, shift),
    ]
    return torch.stack(rows)


def gradient_norm(loss):
    model().zero_grad()
    loss.backward()
    squares = [p.grad.square().sum() for p in model().parameters() if p.grad is not None]
    model().zero_grad()
    return torch.stack(squares).sum().sqrt()
