"""Configurations of runs, and models that are scripted, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from torchrl_llm.rewards import ScriptedTextModel

ROOT = Path(__file__).parents[2]
DATA = ROOT / "sota-implementations" / "langmarl" / "data"
WORLD = "scripted:torchrl_llm.langmarl.scripted_world"


def scripted(name, module=WORLD, **more):
    """A scripted model with prices of nothing."""
    prices = {"input_price_per_million": 0.0, "output_price_per_million": 0.0}
    return {"name": name, "model_string": f"{module}:{name}", **prices, **more}


def settings(folder, **changes):
    """A run in the scripted world, three agents, ten episodes an iteration."""
    given = {
        "env": "language",
        "task_type": "qa",
        "benchmark_path": str(DATA),
        "num_agents": 3,
        "num_iterations": 3,
        "trajectories_per_iteration": 10,
        "actor_llm": scripted("actor"),
        "critic_llm": scripted("critic"),
        "optimizer_llm": scripted("optimizer"),
        "experiment_dir": str(folder / "experiments"),
        "checkpoint_dir": str(folder / "policies"),
    }
    return given | changes


def written(folder, **changes):
    """The file of such a configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(settings(folder, **changes)))
    return path


class Recorder(ScriptedTextModel):
    """Answers by a function of the prompt, and keeps what it was asked."""

    def __init__(self, answer):
        super().__init__(lambda messages: answer(messages[-1]["content"]))
        self.asked, self.limits = [], []

    def answer(self, conversations, *, max_tokens=None, **more):
        self.asked += conversations
        self.limits.append(max_tokens)
        return super().answer(conversations, max_tokens=max_tokens, **more)

    @property
    def prompt(self):
        return self.asked[-1][-1]["content"]
