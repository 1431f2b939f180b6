"""The glossary of metrics holds what runs write, no more and no less, and names keys that exist.

``recipes.script.read_metrics`` holds the columns of every other recipe's run to it, too.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes.glossary import FOLDER, GROUPS, METRICS
from recipes.grpo_helper import SMALL
from recipes.script import run_main
from tensordict import NonTensorData, TensorDict

import torchrl_llm.objectives as objectives
from torchrl_llm.collectors.staleness import age_metrics
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import ERROR_KEYS, WORLD, Failure
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.langmarl.report import metrics_table
from torchrl_llm.objectives import CompositeLossOutput, LLMLossOutput, SFTLossOutput
from torchrl_llm.recipes.command_keys import KeyTable
from torchrl_llm.recipes.sampling_engine import canary_metrics
from torchrl_llm.trainers import LossMeter, rollout_metrics
from torchrl_llm.trainers.metrics import memory_metrics
from torchrl_llm.weights.canary_rule import CanaryReport

RECIPES = Path(__file__).parents[2] / "sota-implementations"
CONFIGS = [path for path in RECIPES.glob("*/config/*.yaml") if path.stem != "common"]
# What langmarl/both.py writes in a language step; test/langmarl/test_both.py runs it.
OF_LANGUAGE_STEPS = {"train/language_won", "train/language_changed_won", "perf/language_s"}
# What stands for the variable parts of names in the runs below.
PARTS = {
    "component": ("task", "length"),
    "tool": ("calculator",),
    "term": ("imitate",),
    "metric": ("loss_sft",),
    "player": ("player",),
    "seat": ("X", "O"),
    "passive": ("O",),
    "name": ("reward",),
    "returned": ("right",),
    "k": ("2",),
}
STEP = ["train.max_steps=1", "eval.num_prompts=8", "logging.progress=false"]
RUNS = {
    "grpo/grpo-sync.py": [
        *SMALL,
        "env=calculator",
        "reward.kl_coeff=0.05",
        "train.max_seq_len=60",
        "train.on_overlong=truncate",
        "curriculum.order=band",
        "reward.components.length={longest: 3, unit: characters, cushion: 2, weight: 0.1}",
    ],
    "expert-iteration/expert-iteration.py": ["train.prompts_per_batch=4", "eval.repeats=2"],
    "self-play/self-play.py": [
        "agents.imitate_steps=0",
        "agents.shared=true",
        "train.prompts_per_batch=2",
        "env.max_steps=3",
        "env.options.stop_on_invalid=false",
        "optimizer.warmup_steps=0",
    ],
    "sft/sft.py": ["data=sums.csv", "reward=exact"],
    "preference/dpo.py": ["train.batch_size=4", "loss=kto"],
    "preference/reward-model.py": ["train.batch_size=4"],
}


def spelled_out(name):
    """The names that an entry stands for in the runs below."""
    names = [name]
    for part, values in PARTS.items():
        names = [n.replace(f"<{part}>", value) for n in names for value in values]
    return set(names)


def outputs(base=LLMLossOutput):
    """Classes of loss outputs that have fields."""
    for cls in base.__subclasses__():
        yield from outputs(cls)
        if "__dataclass_fields__" in vars(cls) and cls is not CompositeLossOutput:
            yield cls


def of_losses():
    """What losses write: every field of every output."""
    for name in objectives.__all__:
        getattr(objectives, name)  # imports the file of each
    terms = {"imitate": SFTLossOutput(loss_sft=torch.ones(()))}
    made = [CompositeLossOutput(terms, {"imitate": 0.5})]
    for cls in outputs():
        fields = cls.__dataclass_fields__
        values = {name: torch.ones(3 if name == "ess_moments" else ()) for name in fields}
        made.append(cls(**values, batch_size=[]))
    names = set()
    for output in made:
        meter = LossMeter()
        meter.add(output)
        meter.close()
        names |= meter.metrics().keys()
    return names


def of_a_world_that_failed():
    failed = Failure.of(OSError("gone"), WORLD)
    row = TensorDict(
        tokens={"response": torch.arange(3), "finish_reason": torch.tensor(FinishReason.STOP)},
        next={
            "reward": torch.tensor([[0.0]]),
            "reward_valid": torch.tensor(False),
            "done": torch.tensor([True]),
            "program": NonTensorData({"right": 1.0}),
            "error": TensorDict(dict(zip(ERROR_KEYS, failed, strict=True))),
        },
    )
    return rollout_metrics(lazy_rows([row])).keys()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Every column that is written anywhere."""
    names = of_losses() | of_a_world_that_failed() | age_metrics({0: 1}).keys()
    report = CanaryReport(difference=0.0, rounding=1.0, followed=None)
    names |= canary_metrics(SimpleNamespace(report=report)).keys()
    names |= set(metrics_table([]).strip().split(",")) | OF_LANGUAGE_STEPS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**20)
        names |= memory_metrics().keys()
    for script, settings in RUNS.items():
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("run")
            (folder / "sums.csv").write_text("question,answer\n" + "What is 20+22?,42\n" * 16)
            patch.chdir(folder)
            table = run_main(patch, RECIPES / script, folder, *settings, *STEP)
        # Of one policy among several, every metric has a name of its own.
        names |= {re.sub("^train/player/.*", "train/player/reward", name) for name in table[0]}
    return names


def test_the_glossary_has_every_column_that_is_written_and_no_other(written):
    known = set().union(*map(spelled_out, METRICS))
    assert written == known


def test_an_entry_says_what_it_is_its_unit_what_is_normal_and_what_to_do():
    for name, told in METRICS.items():
        assert list(told) == ["unit", "what", "normal", "otherwise"], name
        assert all(isinstance(text, str) and text for text in told.values()), name


def test_the_page_shows_every_group_once():
    shown = re.findall(r"^\.\. metrics:: (\w+)$", (FOLDER / "metrics.rst").read_text(), re.M)
    assert shown == list(GROUPS)


def test_keys_and_metrics_that_entries_name_exist():
    keys = {key for path in CONFIGS for key in KeyTable.read(path.parent, path.stem).keys}
    groups = {key.split(".")[0] for key in keys}
    found = 0
    for name, told in METRICS.items():
        for literal in re.findall("``-?(.+?)``", " ".join(told.values())):
            word = re.split("[ =]", literal)[0]
            if word.split("/")[0] in ("train", "eval", "perf"):
                assert word in METRICS, f"{name} names {word}"
            elif word.split(".")[0] in groups and "." in word:
                assert word in keys or word.startswith("reward.components.<"), f"{name}: {word}"
                found += 1
    assert found > 50
