"""Advantages of groups, and the choice of candidates."""

from __future__ import annotations

import torch
from _shared import read, show
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage, MCAdvantageSelector


def turns(group, *rewards):
    """A trajectory of one row per reward."""
    done = torch.arange(len(rewards)) == len(rewards) - 1
    next_ = {"reward": torch.tensor(rewards)[:, None], "done": done[:, None]}
    return TensorDict(
        query=lazy_stack([TensorDict()] * len(rewards))
        if group is None
        else [group] * len(rewards),
        group=torch.full((len(rewards),), len(str(group))),
        next=TensorDict(next_, [len(rewards)]),
        batch_size=[len(rewards)],
    )


def advantages_of_a_group():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0))
    show(estimator.inv(turns("a", 1.0))["advantage"].flatten())


def the_shape_of_advantages():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0))
    show(estimator.inv(turns("a", 1.0))["advantage"].shape)


def advantages_of_turns_by_default():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0, 1.0))
    show(estimator.inv(turns("a", 1.0, 3.0))["advantage"].flatten())


def advantages_of_turns_by_themselves():
    estimator = MCAdvantage(2, trajectory_return=None)
    estimator.inv(turns("a", 0.0, 1.0))
    show(estimator.inv(turns("a", 1.0, 3.0))["advantage"].flatten())


def advantages_of_whole_trajectories():
    for how in ("sum", "max", "mean"):
        estimator = MCAdvantage(2, trajectory_return=how)
        estimator.inv(turns("a", 0.0, 1.0))
        show(estimator.inv(turns("a", 1.0, 3.0))["advantage"].flatten())


def advantages_by_another_key():
    estimator = MCAdvantage(2, "group", advantage_key="adv")
    estimator.inv(turns("a", 0.0))
    show(estimator.inv(turns("b", 1.0))["adv"].flatten(), estimator.prompt_key)


def advantages_of_several_groups_at_once():
    estimator = MCAdvantage(2)
    out = estimator.inv(
        torch.cat([turns("a", 0.0), turns("b", 2.0), turns("a", 1.0), turns("b", 4.0)])
    )
    show(out.shape, out["advantage"].flatten())


def advantages_in_a_buffer():
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2), batch_size=2)
    buffer.extend(turns("a", 0.0))
    show(len(buffer))
    buffer.extend(turns("a", 1.0))
    show(len(buffer), buffer[:]["advantage"].flatten())


def a_trajectory_that_is_not_done():
    rows = turns("a", 0.0, 1.0)
    rows["next", "done"] = torch.zeros(2, 1).bool()
    MCAdvantage(2).inv(rows)


def groups_outside_of_the_bounds_are_dropped():
    estimator = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    show(estimator.inv(turns("a", 0.0)), estimator.inv(turns("a", 0.0)))
    show(estimator.inv(turns("a", 0.0)), estimator.inv(turns("a", 1.0)).shape)


def candidates_are_chosen():
    estimator = MCAdvantage(
        2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9), candidate_group_size=3
    )
    show(estimator.inv(turns("a", 0.0)), estimator.inv(turns("a", 0.0)))
    show(sorted(estimator.inv(turns("a", 1.0))["advantage"].flatten().tolist()))


def counts_of_groups():
    estimator = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    for reward in (0.0, 1.0, 0.0, 0.0, 1.0):
        estimator.inv(turns("a", reward))
    names = "completed_groups written_groups dropped_groups queued_groups queued_trajectories"
    show({name: estimator.get_stats()[name] for name in names.split()})


def counts_are_attributes():
    estimator = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    for reward in (0.0, 1.0, 0.0, 0.0, 1.0):
        estimator.inv(turns("a", reward))
    show(estimator.completed_groups, estimator.written_groups, estimator.dropped_groups)
    show(estimator.queued_groups, estimator.queued_trajectories, estimator.completed_trajectories)


def every_count():
    estimator = MCAdvantage(2, trajectory_return="sum")
    for reward in (0.0, 1.0, 0.5):
        estimator.inv(turns("a", reward))
    show({name: float(value) for name, value in estimator.get_stats().items()})


def counting_from_zero():
    estimator = MCAdvantage(2)
    for reward in (0.0, 1.0):
        estimator.inv(turns("a", reward))
    estimator.reset_stats()
    show(estimator.get_stats()["completed_groups"])


def groups_that_never_fill_are_given_up():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0))
    estimator.clear_queues()
    show(estimator.get_stats()["queued_groups"], estimator.inv(turns("a", 1.0)))


def attributes_of_advantages():
    estimator = MCAdvantage(3, advantage_key="adv", verbose=True, trajectory_return="sum")
    show(estimator.grpo_size, estimator.advantage_key, estimator.rewards_key, estimator.done_key)
    show(estimator.verbose, estimator.keep_return_bounds, estimator.trajectory_return)


def the_selector():
    candidates = TensorDict({"return": torch.tensor([0.0, 0.0, 0.0, 1.0])}, [4])
    for how in ("first", "uniform", "balanced"):
        selector = MCAdvantageSelector(how)
        show(selector.select(candidates, group_size=2))
        show(selector.select(candidates, group_size=2, keep_return_bounds=(0.1, 0.9)))


class ByTheFirstTurn(MCAdvantageSelector):
    """Reads whole trajectories, as its ``in_keys`` ask."""

    def select(self, candidates, *, group_size, keep_return_bounds=None):
        rewards = candidates["trajectories", "next", "reward"]
        show(rewards.shape, rewards.flatten())
        return sorted(rewards.flatten(1)[:, 0].argsort(descending=True)[:group_size].tolist())


def chosen_by(selector):
    options = {"candidate_group_size": 3, "candidate_selection_min_size": 3}
    estimator = MCAdvantage(2, candidate_selector=selector, trajectory_return="sum", **options)
    for first, last in ((1.0, 0.0), (0.0, 5.0), (2.0, 4.0)):
        written = estimator.inv(turns("a", first, last))
    show([float(row["next", "reward"]) for row in written.reshape(-1).unbind(0)])


def a_selector_that_chooses_by_another_number():
    numbers = {"return": torch.tensor([0.0, 1.0, 2.0]), "length": torch.tensor([5.0, 1.0, 3.0])}
    selector = MCAdvantageSelector("uniform", in_keys=["length"])
    show(sorted(selector.select(TensorDict(numbers, [3]), group_size=2)))


def the_selector_with_too_few():
    candidates = TensorDict({"return": torch.tensor([0.0])}, [1])
    MCAdvantageSelector().select(candidates, group_size=2)


PROGRAMS = {
    "advantages_wait_for_a_group": lambda: show(MCAdvantage(2).inv(turns("a", 1.0))),
    "bounds_without_returns_of_trajectories": lambda: MCAdvantage(
        2, keep_return_bounds=(0.1, 0.9), trajectory_return=None
    ),
    "bounds_that_do_not_increase": lambda: MCAdvantage(
        2, keep_return_bounds=(0.9, 0.1), trajectory_return="sum"
    ),
    "the_group_key_by_default": lambda: show(MCAdvantage(3).prompt_key),
    "candidates_by_default": lambda: show(
        MCAdvantage(3).candidate_group_size, MCAdvantage(3).candidate_selection_min_size
    ),
    "a_group_of_one": lambda: MCAdvantage(1, trajectory_return="sum"),
    "a_selector_that_reads_trajectories": lambda: chosen_by(
        ByTheFirstTurn(in_keys=[("trajectories", "next", "reward")])
    ),
    "a_selector_that_reads_returns_and_trajectories": lambda: chosen_by(
        ByTheFirstTurn(in_keys=["return", ("trajectories", "next", "reward")])
    ),
    "a_selector_of_several_numbers_by_a_strategy": lambda: chosen_by(
        MCAdvantageSelector("uniform", in_keys=[("trajectories", "next", "reward")])
    ),
    "a_selector_without_keys": lambda: MCAdvantageSelector(in_keys=[]),
    "an_unknown_selection": lambda: MCAdvantageSelector("best"),
    "keys_of_advantages": lambda: read(
        MCAdvantage(3, "query"), "in_keys", "out_keys", "prompt_key"
    ),
    "the_selector_by_default": lambda: read(
        MCAdvantageSelector(), "strategy", "max_combinations", "in_keys"
    ),
}
"""Programs of one expression."""
