"""What each of two ranks computes, in a module that a process of its own can import."""

from __future__ import annotations

import torch
import torch.distributed as dist
from objectives.rows_helper import TableActor, make_row, make_rows
from torch.nn.parallel import DistributedDataParallel

from torchrl_llm.objectives import CompositeLoss, Correction, GRPOLoss, SFTLoss
from torchrl_llm.trainers.ranks import Ranks, leave_group, sum_counts

SETTINGS = {
    "token_mean": {"correction": Correction(type="tis")},
    "prompt_mean": {"kl_to_ref_coeff": 0.3},
    "sequence_mean": {"entropy_coeff": 0.1, "kl_to_ref_coeff": 0.3, "kl_estimator": "k2"},
    "sequence_sum": {"kl_to_inference_coeff": 0.2},
    "constant": {"constant_length": 7},
    "composite": {},
}
# Ragged, unequal shares, a prompt with rows on both ranks, and a row of which nothing counts.
RANKS = ([0, 1, 2], [3, 4])


def rows():
    torch.manual_seed(3)
    ids = ([5, 1, 2], [5, 6, 3, 3, 4], [5, 2], [5, 1, 4, 2], [5, 1])
    out = []
    for b, row in enumerate(ids):
        out.append(
            make_row(
                row,
                1,
                advantage=float(torch.randn(())),
                old=torch.randn(len(row)) * 0.5 - 1,
                prox=torch.randn(len(row)) * 0.5 - 1,
                ref=torch.randn(len(row)) * 0.5 - 1,
                group=b % 2,
                reason=[1, 5] if b == 4 else None,
            )
        )
    return out


def make_loss(aggregation):
    table = torch.linspace(-2, -0.2, 8, dtype=torch.double)
    actor = TableActor(table).double()
    if aggregation == "composite":
        policy, imitate = GRPOLoss(actor, aggregation="prompt_mean"), SFTLoss(actor)
        return CompositeLoss({"policy": (1.0, policy), "imitate": (0.2, imitate)})
    return GRPOLoss(actor, aggregation=aggregation, **SETTINGS[aggregation])


def rank_main(rank, folder, results):
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    ranks, mine = Ranks(rank=rank, world=2), make_rows(*[rows()[b] for b in RANKS[rank]])
    answer = {}
    for aggregation in SETTINGS:
        loss = DistributedDataParallel(make_loss(aggregation))
        normalizer = sum_counts(ranks.gather(loss.module.normalizer(mine)))
        output = loss(mine, normalizer=normalizer)
        (output.total_loss() * dist.get_world_size()).backward()
        first, second = ranks.gather(output.detach())
        metrics = {k: v.item() for k, v in (first + second).metrics().items()}
        gradient = loss.module.actor_network.table.grad.tolist()
        answer[aggregation] = (normalizer, gradient, metrics)
    results.put((rank, answer))
    leave_group()
