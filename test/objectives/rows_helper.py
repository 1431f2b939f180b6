"""Rows and actors for the tests of the losses."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.functional import reinforce
from torchrl_llm.objectives.policy_loss import PolicyGradientLoss, Surrogate

LOG2 = math.log(2)
BOTH = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)]
)


class TableActor(nn.Module, TokenScorer):
    """The log-prob of a token is a parameter of its id; the entropy is a constant."""

    def __init__(self, log_probs, entropy=0.5):
        super().__init__()
        self.table = nn.Parameter(torch.as_tensor(log_probs, dtype=torch.float32).clone())
        self.entropy = entropy
        self.seen = None

    def token_scores(self, sequences, select, *, temperature=1.0, entropy=False, extras=None):
        self.seen = {"temperature": temperature, "sequences": sequences, "select": select}
        ids = torch.cat([s[m] for s, m in zip(sequences, select, strict=True)])
        log_probs = self.table[ids]
        return TokenScores(log_probs, log_probs * 0 + self.entropy if entropy else None)


class Reinforce(PolicyGradientLoss):
    def surrogate(self, tokens):
        loss = reinforce(tokens.log_probs, tokens.advantage)
        return Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))


def make_row(
    ids,
    prompt,
    *,
    advantage=1.0,
    old=-1.0,
    ref=None,
    trace=True,
    temperature=None,
    truncated=None,
    reason=None,
    prox=None,
    group=None,
):
    """One row: ``prompt`` tokens of prompt, the rest sampled, as a policy writes it."""
    ids = torch.tensor(ids)
    sampled = torch.arange(len(ids)) >= prompt
    tokens = {"full": ids, "prompt": ids[:prompt], "response": ids[prompt:]}
    if temperature is not None:
        tokens["temperature"] = torch.tensor(temperature)
    if truncated is not None:
        tokens["truncated_support"] = torch.tensor(truncated)
    old = torch.as_tensor(old, dtype=torch.float32).expand(len(ids))
    row = {
        "tokens": TensorDict(tokens),
        "log_probs": TensorDict({"full": torch.where(sampled, old, 0.0)}),
        "masks": TensorDict(
            {
                "all_attention_mask": torch.ones(len(ids), dtype=torch.bool),
                "all_assistant_mask": sampled,
            }
        ),
        "advantage": torch.as_tensor(advantage, dtype=torch.float32).reshape(-1, 1),
    }
    if ref is not None:
        ref = torch.as_tensor(ref, dtype=torch.float32).expand(len(ids)).clone()
        row["next"] = TensorDict({"ref_log_probs": TensorDict({"full": ref})})
    if prox is not None:
        prox = torch.as_tensor(prox, dtype=torch.float32).expand(len(ids)).clone()
        row["prox_log_probs"] = TensorDict({"full": prox})
    if group is not None:
        row["group_id"] = torch.tensor(group)
    if trace:
        reasons = torch.where(sampled, MaskReason.TRAINED, MaskReason.NOT_SAMPLED).to(torch.int8)
        if reason is not None:
            reasons = torch.tensor(reason, dtype=torch.int8)
        row["trace"] = TensorDict(
            {
                "source": torch.where(sampled, Source.SAMPLED, Source.PROMPT).to(torch.int8),
                "turn": torch.where(sampled, 0, -1).to(torch.int16),
                "policy_version": torch.where(sampled, 0, -1).to(torch.int32),
                "mask_reason": reasons,
            }
        )
    return TensorDict(row)


def make_rows(*rows):
    return lazy_rows(list(rows))


def double(td):
    """The rows with every float column in float64, as tests to 1e-8 need them."""
    return td.apply(lambda x: x.double() if x.is_floating_point() else x)


def pad(rows, side="right", junk=0):
    """The same rows as dense tensors, with junk where there is padding."""
    length = max(row["tokens", "full"].shape[0] for row in rows)

    def padded(key, value):
        out = []
        for row in rows:
            data = row[key]
            gap = data.new_full((length - data.shape[0], *data.shape[1:]), value)
            out.append(torch.cat([gap, data] if side == "left" else [data, gap]))
        return torch.stack(out)

    per_token = rows[0]["advantage"].shape[0] > 1
    width = max(row["tokens", "prompt"].shape[0] for row in rows)
    prompts = [row["tokens", "prompt"] for row in rows]
    prompts = [torch.cat([p.new_full((width - len(p),), junk), p]) for p in prompts]
    td = {
        "tokens": TensorDict({"full": padded(("tokens", "full"), junk)}, [len(rows)]),
        "log_probs": TensorDict({"full": padded(("log_probs", "full"), junk)}, [len(rows)]),
        "masks": TensorDict(
            {
                "all_attention_mask": padded(("masks", "all_attention_mask"), False),
                "all_assistant_mask": padded(("masks", "all_assistant_mask"), bool(junk)),
            },
            [len(rows)],
        ),
        "advantage": padded("advantage", junk)
        if per_token
        else torch.stack([row["advantage"] for row in rows]),
    }
    td["tokens"]["prompt"] = torch.stack(prompts)
    if "trace" in rows[0]:
        names = ("source", "turn", "policy_version", "mask_reason")
        td["trace"] = TensorDict({n: padded(("trace", n), 3) for n in names}, [len(rows)])
    return TensorDict(td, [len(rows)])


def two_rows(**settings):
    """Sampled at log-prob -1: ids 1 and 2 (advantage 1), id 3 (advantage -2)."""
    return make_rows(
        make_row([5, 1, 2], 1, advantage=1.0, **settings),
        make_row([5, 6, 3], 2, advantage=-2.0, **settings),
    )


def actor(**log_probs):
    """Ratios: id 1: 1, id 2: 2 (clipped), id 3: 1/2 (clipped)."""
    table = torch.full((8,), -9.0)
    for name, value in {"t1": -1.0, "t2": -1.0 + LOG2, "t3": -1.0 - LOG2, **log_probs}.items():
        table[int(name[1:])] = value
    return TableActor(table)


RATIOS = {1: 1.21, 2: 1.0, 3: 0.64}


def three_rows(dtype=torch.float32, **advantages):
    """Ids 1 and 2 (advantage 2); id 3, a response of one token (advantage -1); a masked row."""
    rows = make_rows(
        make_row([5, 1, 2], 1, advantage=advantages.get("first", 2.0)),
        make_row([5, 6, 3], 2, advantage=-1.0),
        make_row([5, 4, 4, 4], 1, advantage=math.nan, old=math.nan, reason=[1, 5, 5, 5]),
    )
    return double(rows) if dtype is torch.float64 else rows


def ratio_actor(dtype=torch.float32):
    """Gives the ids of ``three_rows`` the ratios ``RATIOS``."""
    model = TableActor(torch.full((8,), -9.0)).to(dtype)
    with torch.no_grad():
        for token, ratio in RATIOS.items():
            model.table[token] = -1 + math.log(ratio)
    return model


def by_hand(loss_type, dtype, rows=None, **settings):
    """Output of a loss on ``three_rows`` and the gradient of the log-probs of ids 1, 2 and 3."""
    model = ratio_actor(dtype)
    output = loss_type(model, **settings)(three_rows(dtype) if rows is None else rows)
    output.total_loss().backward()
    assert output.loss_objective.dtype is dtype
    # Nothing else is touched, the tokens of the masked row least of all.
    assert not model.table.grad[[0, 4, 5, 6, 7]].any()
    return output, model.table.grad[1:4].tolist()
