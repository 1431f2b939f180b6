"""Every exported loss with an actor and rows that it is content with."""

from __future__ import annotations

import inspect
import math

import torch
from objectives.rows_helper import TableActor, make_row, make_rows
from torch import nn

import torchrl_llm.objectives as objectives
from torchrl_llm.modules.backends.head import ValueHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import CompositeLoss, GRPOLoss, SFTLoss, TokenLoss

LOSSES = sorted(
    name
    for name in objectives.__all__
    if inspect.isclass(getattr(objectives, name))
    and issubclass(getattr(objectives, name), TokenLoss)
    and not inspect.isabstract(getattr(objectives, name))
)
# Those that read what was sampled; the others learn from what stands in the rows.
POLICY_LOSSES = [
    name for name in LOSSES if issubclass(getattr(objectives, name), objectives.PolicyGradientLoss)
]


def make_loss(name, actor, **settings):
    """The loss of a name with its defaults."""
    if name == "CompositeLoss":
        policy = GRPOLoss(actor, aggregation="prompt_mean", masking_strategy="rlhf", **settings)
        return CompositeLoss({"policy": (1.0, policy), "imitate": (0.5, SFTLoss(actor))})
    if name == "DrGRPOLoss" and settings.get("aggregation", "constant") == "constant":
        settings["constant_length"] = 6
    return getattr(objectives, name)(actor, **settings)


def make_actor(model: nn.Module) -> CausalScorer:
    """A scorer that values tokens too; its value head is not zero."""
    head = ValueHead(model.config.hidden_size)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    return CausalScorer(model, chunk_size=2048, value_head=head)


class TableCritic(TableActor):
    """A table that says a value of each token, too."""

    def token_scores(self, sequences, select, *, extras=None, **options):
        scores = super().token_scores(sequences, select, **options)
        return scores._replace(values=scores.log_probs / 4)


def full_rows(*, seed=0, shapes=((2, 3), (2, 6), (3, 1), (3, 4)), vocab=290):
    """Rows of (prompt, response) tokens, two a prompt, with every column that any loss reads."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for b, (prompt, response) in enumerate(shapes):
        count = prompt + response
        if b % 2 == 0:
            start = torch.randint(3, vocab, (prompt,), generator=generator).tolist()
        ids = start + torch.randint(3, vocab, (response,), generator=generator).tolist()
        old = torch.randn(count, generator=generator) * 0.3 - math.log(vocab)
        noise = torch.randn(5, count, generator=generator) * 0.2
        advantage = torch.randn(count, generator=generator)
        row = make_row(
            ids,
            prompt,
            advantage=advantage,
            old=old,
            prox=old + noise[0],
            ref=old + noise[1],
            group=b // 2,
        )
        for key, value in (
            (("next", "teacher_log_probs", "full"), old + noise[2]),
            (("values", "full"), noise[3]),
            (("value_target", "full"), noise[4] + 0.5),
            ("pair_id", torch.tensor(b // 2)),
            ("is_chosen", torch.tensor(b % 2 == 0)),
            ("ref_log_prob", (old + noise[1])[prompt:].sum()),
            ("kl", torch.tensor(0.2)),
        ):
            row[key] = value
        rows.append(row)
    return make_rows(*rows)
