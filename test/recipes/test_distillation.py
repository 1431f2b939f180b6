"""The distillation recipe as a user runs it: the real script, the embedded model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from recipes.script import run_main

from torchrl_llm.envs.datasets.number_tasks import addition_pairs
from torchrl_llm.objectives import OnPolicyDistillationLoss
from torchrl_llm.recipes.builders import make_policy

FOLDER = Path(__file__).parents[2] / "sota-implementations" / "distillation"
SCRIPT = FOLDER / "distillation.py"
SMALL = [
    "teacher.max_steps=8",
    "teacher.batch_size=32",
    "train.prompts_per_batch=16",
    "eval.num_prompts=32",
    "logging.progress=false",
]


@pytest.fixture
def run(monkeypatch):
    return lambda folder, *overrides: run_main(monkeypatch, SCRIPT, folder, *SMALL, *overrides)


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("distillation_utils")


def settings(**groups):
    config = OmegaConf.load(FOLDER / "config" / "distillation.yaml")
    task = OmegaConf.load(FOLDER / "config" / "env" / "arithmetic.yaml")
    merged = OmegaConf.merge(config, task, OmegaConf.create(groups))
    return {
        k: v for k, v in OmegaConf.to_container(merged).items() if k not in ("defaults", "hydra")
    }


def column(table, name):
    return [float(row[name]) for row in table if row[name]]


def test_the_student_comes_closer_to_its_teacher_and_gets_better(run, tmp_path):
    table = run(
        tmp_path, "train.max_steps=10", "train.prompts_per_batch=32", "teacher.max_steps=20"
    )
    gaps = column(table, "train/kl_to_teacher")
    assert len(gaps) == 10
    assert gaps[-1] < gaps[0] / 2
    accuracy = column(table, "eval/accuracy")
    assert accuracy[-1] > accuracy[0] + 0.1
    assert column(table, "train/tokens_trained") == column(table, "train/tokens_generated")
    assert (tmp_path / "checkpoints" / "step_000010" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ("loss.estimator=advantage", "loss.outcome_coeff=0.5"),
        ("loss.estimator=full_vocabulary",),
    ],
)
def test_each_row_learns_from_the_teacher_of_its_domain(run, tmp_path, capsys, overrides):
    quick = ["teacher.max_steps=3", "train.max_steps=2", "eval.num_prompts=8"]
    quick.append("optimizer.warmup_steps=0")
    table = run(tmp_path, "teacher.by_domain=true", *quick, *overrides)
    gaps = column(table, "train/kl_to_teacher")
    assert len(gaps) == 2
    assert all(gap > 0 for gap in gaps)
    assert {path.name for path in (tmp_path / "teachers").iterdir()} == {"carry", "plain"}
    lines = "".join(capsys.readouterr()).splitlines()
    shown = {line.split()[0]: line.split()[2::2] for line in lines if line.startswith("  ")}
    assert set(shown) >= {"carry", "plain", "student"}


def test_a_teacher_may_be_a_folder_and_is_left_as_it_is(run, tmp_path):
    quick = ["teacher.max_steps=1", "train.max_steps=1", "eval.num_prompts=0"]
    quick.append("optimizer.warmup_steps=0")
    run(tmp_path / "first", *quick)
    teacher = tmp_path / "first" / "teachers" / "all"
    before = (teacher / "model.safetensors").read_bytes()
    run(tmp_path / "second", *quick, f"teacher.name={teacher}")
    assert not (tmp_path / "second" / "teachers").exists()
    assert (teacher / "model.safetensors").read_bytes() == before


def test_every_problem_has_one_domain_and_a_teacher_sees_its_own_alone(utils):
    for split in ("train", "test"):
        carry, plain = (utils.pairs_of(split, domain) for domain in utils.DOMAINS)
        assert sorted([*carry, *plain]) == sorted(addition_pairs(split))
        assert all(first % 10 + second % 10 >= 10 for first, second in carry)
    data = utils.AdditionByDomain.default_dataset("test")
    assert data[0].keys() == {"query", "answer", "domain"}


def test_the_two_losses_are_those_of_one_teacher_and_of_several(utils):
    config = utils.load_config(settings(loss={"estimator": "advantage"}))
    torch.manual_seed(0)
    policy = make_policy(config)
    one = utils.make_algorithm(config, policy, {"all": make_policy(config)})
    assert isinstance(one.loss, OnPolicyDistillationLoss)
    assert [type(scorer).__name__ for scorer in one.scorers] == ["RetrieveTeacherLogProb"]
    config = utils.load_config(settings(teacher={"by_domain": True}, loss={"outcome_coeff": 0.5}))
    teachers = {domain: make_policy(config) for domain in utils.DOMAINS}
    several = utils.make_algorithm(config, policy, teachers)
    assert several.loss.teachers.keys() == teachers.keys()
    assert several.loss.outcome_coeff == 0.5
    assert several.credit.group_size == config.env.repeats


def test_every_key_of_its_own_is_in_its_yaml(utils):
    config = utils.load_config(settings())
    for group in ("teacher", "loss"):
        assert settings()[group].keys() == vars(getattr(config, group)).keys()
