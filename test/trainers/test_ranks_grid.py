"""Two real processes with gloo make the updates of one: every loss, layout and cut into pieces.

The rows are ragged and unequally many tokens a rank; in a second update one rank has none, and in a
third it has no batch at all.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from models_helper import make_tiny_model
from objectives.rows_helper import make_row, make_rows

from torchrl_llm.modules import ValueHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import CompositeLoss, Correction, GRPOLoss, PPOLoss, SFTLoss
from torchrl_llm.trainers import Ranks, make_optimizer, optimize
from torchrl_llm.trainers.ranks import add_gradients, shard

LOSSES = {
    "token_mean": {"correction": Correction(type="tis")},
    "prompt_mean": {"kl_to_ref_coeff": 0.3},
    "sequence_mean": {"entropy_coeff": 0.1, "kl_to_ref_coeff": 0.3, "kl_estimator": "k2"},
    "sequence_sum": {"kl_to_inference_coeff": 0.2},
    "constant": {"constant_length": 7},
    "composite": {},
    "ppo": {},
    "sft": {},
}
LAYOUTS = ("padded", "bucketed", "packed", "shared", "auto")
BUDGETS = (None, 24)
# Rows of each rank in each of three updates: a group on both, then none on one, then no batch.
SHARES = (([0, 1, 2, 6], [3, 4, 5]), ([], [1, 2, 4]), ([0, 5], None))
CASES = [
    ("ddp", "token_mean", "padded", None),
    ("ddp", "prompt_mean", "shared", 24),
    ("fsdp2", "sequence_mean", "packed", 24),
    ("fsdp2", "prompt_mean", "bucketed", 24),
    ("fsdp2", "ppo", "auto", None),
]


def rows():
    torch.manual_seed(3)
    prompts = ([5, 7, 9], [5, 7, 9], [8], [8], [5, 7, 9], [4] * 9, [8])
    out = []
    for number, prompt in enumerate(prompts):
        ids = prompt + torch.randint(3, 290, (2 + 3 * number % 11,)).tolist()
        noise = torch.randn(4, len(ids)) * 0.3
        row = make_row(
            ids,
            len(prompt),
            advantage=float(torch.randn(())),
            old=noise[0] - 5,
            prox=noise[1] - 5,
            ref=noise[2] - 5,
            group=prompts.index(prompt),
            reason=[1] * len(prompt) + [5] * (len(ids) - len(prompt)) if number == 6 else None,
        )
        row["values"] = row["value_target"] = noise[3]
        out.append(row)
    return out


@functools.cache
def make_scorer(sharded):
    """One for all cases of a process: its weights are never changed."""
    model = make_tiny_model(initializer_range=0.05)
    head = ValueHead.for_model(model)
    torch.nn.init.ones_(head.linear.weight)
    scorer = CausalScorer(model, value_head=head)
    if sharded:
        shard(scorer, model, device=torch.device("cpu"))
    return scorer


def make_loss(name, scorer):
    if name == "composite":
        policy = GRPOLoss(scorer, aggregation="prompt_mean")
        return CompositeLoss({"policy": (1.0, policy), "imitate": (0.2, SFTLoss(scorer))})
    if name == "ppo":
        loss = PPOLoss(scorer)
        loss.set_keys(value="values", value_target="value_target")
        return loss
    if name == "sft":
        return SFTLoss(scorer)
    return GRPOLoss(scorer, aggregation=name, **LOSSES[name])


def updates(case, ranks, shares):
    """Metrics and gradients of the updates; those of one process without ranks."""
    parallel, name, layout, budget = case
    scorer = make_scorer(ranks is not None and parallel == "fsdp2")
    scorer.layout = layout
    optimizer = make_optimizer(scorer.parameters(), name="SGD", lr=0.0)
    seen = []

    def look(*_):
        grads = {
            n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
            for n, p in scorer.named_parameters()
            if p.grad is not None
        }
        seen.append(grads)

    optimizer.register_step_pre_hook(look)
    everything, results = rows(), []
    given = [None if s is None else [everything[i] for i in s] for s in shares]
    batches = [make_rows(*part) if part else None for part in given]
    while batches and batches[-1] is None:
        batches.pop()  # a rank that has ended earlier than another
    for batch in batches if ranks is None else [None]:
        metrics = optimize(
            make_loss(name, scorer),
            batches if ranks is not None else [batch],
            optimizer,
            max_norm=100.0,
            budget=budget,
            layout=layout,
            **({} if ranks is None else {"ranks": ranks}),
        )
        results.append(metrics)
    return results, seen


def rank_main(rank, cases, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    ranks = Ranks(rank=rank, world=2)
    for number, case in enumerate(cases):
        found = updates(case, ranks, [share[rank] for share in SHARES])
        torch.save(found, folder / f"{rank}-{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_two(cases, folder):
    """What both ranks found for each case."""
    # Forked, so that the ranks need not import everything once more.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(r, cases, folder)) for r in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=600)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], "see what a rank has printed"
    names = [(rank, number) for rank in (0, 1) for number in range(len(cases))]
    return {name: torch.load(folder / "{}-{}.pt".format(*name)) for name in names}


def check(cases, folder):
    found = run_two(cases, folder)
    whole = [sorted([*(first or []), *(second or [])]) for first, second in SHARES]
    expected = {}
    for number, case in enumerate(cases):
        # The layout and the cut of one process change nothing: test_microbatch shows that.
        key = case[1]
        if key not in expected:
            expected[key] = updates(("none", key, "padded", None), None, whole)
        metrics, gradients = expected[key]
        for rank in (0, 1):
            (of_ranks,), theirs = found[rank, number]
            for name in metrics[0]:
                mean = sum(each[name] for each in metrics) / len(metrics)
                assert of_ranks[name] == pytest.approx(mean, rel=1e-5, abs=1e-6), (case, name)
            assert len(theirs) == len(gradients) == 3
            for own, other in zip(theirs, gradients, strict=True):
                assert own.keys() == other.keys(), case
                largest = max(float(g.abs().max()) for g in other.values())
                for name in other:
                    off = float((own[name] - other[name]).abs().max())
                    assert off <= 1e-6 * largest, (case, name, off, largest)


def test_updates_of_two_ranks_are_those_of_one(tmp_path):
    check(CASES, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_every_loss_layout_and_budget(parallel, tmp_path):
    check([(parallel, *rest) for rest in itertools.product(LOSSES, LAYOUTS, BUDGETS)], tmp_path)


def test_a_weight_that_no_rank_has_a_gradient_of_keeps_none():
    parameter = torch.nn.Parameter(torch.ones(1))
    add_gradients([parameter], Ranks())
    assert parameter.grad is None
