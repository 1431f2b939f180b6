"""Two real processes with gloo make the updates of one: every loss, layout and cut into pieces.

The rows are ragged and unequally many tokens a rank; in a second update one rank has none, and in a
third it has no batch at all.
"""

import itertools

import pytest
import torch
from fork_server import run_both_ranks
from trainers.ranks_grid_helper import (
    BUDGETS,
    CASES,
    LAYOUTS,
    LOSSES,
    MODEL_CASES,
    SHARES,
    rank_main,
    updates,
)

from torchrl_llm.trainers.ranks import Ranks, add_gradients


def run_two(cases, folder):
    """What both ranks found for each case."""
    run_both_ranks(rank_main, cases, folder)
    names = [(rank, number) for rank in (0, 1) for number in range(len(cases))]
    return {name: torch.load(folder / "{}-{}.pt".format(*name)) for name in names}


def check(cases, folder):
    found = run_two(cases, folder)
    whole = [sorted([*(first or []), *(second or [])]) for first, second in SHARES]
    expected = {}
    for number, case in enumerate(cases):
        # The layout and the cut of one process change nothing: test_microbatch shows that.
        # Nor do layers that are computed again.
        model = [kind for kind in case[4:] if kind != "checkpointing"]
        key = (case[1], *model)
        if key not in expected:
            expected[key] = updates(("none", case[1], "padded", None, *model), None, whole)
        metrics, gradients = expected[key]
        for rank in (0, 1):
            (of_ranks,), theirs = found[rank, number]
            for name in metrics[0]:
                mean = sum(each[name] for each in metrics) / len(metrics)
                assert of_ranks[name] == pytest.approx(mean, rel=1e-6, abs=1e-6), (case, name)
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
def test_adapters_and_layers_that_are_computed_again(tmp_path):
    pytest.importorskip("peft")
    check(MODEL_CASES, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_every_loss_layout_and_budget(parallel, tmp_path):
    check([(parallel, *rest) for rest in itertools.product(LOSSES, LAYOUTS, BUDGETS)], tmp_path)


def test_a_weight_that_no_rank_has_a_gradient_of_keeps_none():
    parameter = torch.nn.Parameter(torch.ones(1))
    add_gradients([parameter], Ranks())
    assert parameter.grad is None
