"""What collectors delivered in each step of a recipe, and what must hold for turns of a tool."""

from itertools import pairwise

import torch

from torchrl_llm.data import Source
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.trainers import BatchSource


def remember_rows(monkeypatch):
    """A list that gets the rows of each step."""
    seen, fill = [], BatchSource.fill

    def remembered(self):
        found = fill(self)
        seen.append(row_list(found))
        return found

    monkeypatch.setattr(BatchSource, "fill", remembered)
    return seen


def check_turns(steps):
    """Ids of a turn begin the next one and nothing of a tool is trained; how many were compared."""
    compared = 0
    for rows in steps:
        turns = {}
        for row in rows:
            turns.setdefault(int(row["traj_id"]), []).append(row)
        for trajectory in turns.values():
            for before, after in pairwise(trajectory):
                full, prompt = before["tokens", "full"], after["tokens", "prompt"]
                assert torch.equal(prompt[: len(full)], full)
                for key in (("log_probs", "full"), ("trace", "policy_version")):
                    assert torch.equal(after[key][: len(full)], before[key])
                compared += 1
            source = trajectory[-1]["trace", "source"]
            trained = trajectory[-1]["masks", "all_assistant_mask"]
            assert torch.equal(trained, source == Source.SAMPLED)
            assert (source == Source.TOOL).any() == (len(trajectory) > 1)
    return compared
