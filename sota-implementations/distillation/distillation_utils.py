"""Parts of the distillation recipe: its configuration, its teachers, its problems by domain.

:mod:`torchrl_llm.recipes.builders` builds policy and evaluation, as for every recipe.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tensordict import TensorDict

from torchrl_llm._checked import Ge, Gt
from torchrl_llm._settings import Count, Group, ensure, naming, own
from torchrl_llm.algorithms import Algorithm, make_mopd, make_opd
from torchrl_llm.data import ChatHistory, History
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs import ArithmeticEnv, TaskEnv
from torchrl_llm.envs.datasets.number_tasks import addition_pairs, addition_problem
from torchrl_llm.evaluation import Evaluation, evaluate
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.objectives import SFTLoss
from torchrl_llm.recipes import EnvConfig, OptimizerConfig
from torchrl_llm.recipes.builders import device_of, make_envs, make_step_buffer
from torchrl_llm.recipes.shared_keys import SampledConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.trainers import make_optimizer, make_scheduler, optimize, save_pretrained
from torchrl_llm.trainers.run_config import LoggingConfig

# Sums with a carry from the units, and sums without.
DOMAINS = ("carry", "plain")


class TeacherConfig(Group, key="teacher"):
    """The teachers.

    Attributes:
        by_domain: one teacher per domain of the task; otherwise one teacher for all rows.
        name: folder or hub name of the single teacher; ``None`` makes it at the start, by
            fine-tuning ``model.name`` on correct answers.
        carry: with ``by_domain``, folder or hub name of the teacher of sums that carry; ``None``
            makes it at the start, from correct answers to only such problems.
        plain: the same for the teacher of sums that do not carry.
        max_steps: optimizer steps to make a teacher.
        batch_size: correct answers per step.
        lr: peak learning rate; it falls linearly to zero.
    """

    by_domain: bool = False
    name: str | None = None
    carry: str | None = None
    plain: str | None = None
    max_steps: Count = 40
    batch_size: Count = 64
    lr: Annotated[float, Gt(0)] = 1e-3

    @property
    def names(self) -> dict[str, str | None]:
        """Domain to the folder or name of its teacher; ``None`` if the teacher has to be made."""
        if self.by_domain:
            return {"carry": self.carry, "plain": self.plain}
        return {"all": self.name}

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.name is None or not self.by_domain,
            "teacher.name has no effect with teacher.by_domain=true: name teacher.carry and "
            "teacher.plain",
        )
        ensure(
            self.carry is None is self.plain or self.by_domain,
            "teacher.carry and teacher.plain have no effect without teacher.by_domain=true",
        )


class LossConfig(Group, key="loss"):
    """How the student learns; see :class:`~torchrl_llm.objectives.OnPolicyDistillationLoss`.

    Attributes:
        estimator: ``advantage``, ``k2`` or ``full_vocabulary``.
        coeff: weight of the divergence.
        outcome_coeff: weight of the reward's advantage in the group; with 0 the reward is not read.
    """

    estimator: Literal["advantage", "k2", "full_vocabulary"] = "full_vocabulary"
    coeff: Annotated[float, Gt(0)] = 1.0
    outcome_coeff: Annotated[float, Ge(0)] = 0.0


class DistillationConfig(SampledConfig):
    """All settings of ``sota-implementations/distillation``; ``seed`` seeds teachers, too."""

    env: EnvConfig = own(repeats=2)
    teacher: TeacherConfig
    optimizer: OptimizerConfig = own(scheduler="linear")
    loss: LossConfig
    logging: LoggingConfig = own(experiment_name="distillation")

    def __post_init__(self) -> None:
        super().__post_init__()
        here = self.env.dataset == "arithmetic"
        ensure(
            here or not self.teacher.by_domain,
            f"teacher.by_domain=true needs a task with domains, and {self.env.dataset!r} has none; "
            "see AdditionByDomain in distillation_utils.py",
        )
        ensure(
            here or None not in self.teacher.names.values(),
            f"teachers are made on the spot for additions only: give teacher.name for "
            f"{self.env.dataset!r}",
        )
        ensure(
            self.loss.outcome_coeff == 0 or self.env.repeats >= 2,
            "loss.outcome_coeff compares the answers to a prompt: env.repeats must be at least 2, "
            f"got {self.env.repeats}",
        )
        ensure(
            self.loss.outcome_coeff > 0 or not self.reward.components,
            "reward.components without effect: with loss.outcome_coeff=0 no reward is read",
        )
        ensure(
            not (self.teacher.by_domain and self.reward.components),
            "reward.components does not go with teacher.by_domain=true, whose problems are made "
            "for this recipe",
        )
        ensure(
            self.train.kl_to_ref_coeff == 0,
            "train.kl_to_ref_coeff has no effect: the teacher is the reference",
        )


def load_config(values: Mapping[str, Any]) -> DistillationConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(DistillationConfig, values)


# -- problems -------------------------------------------------------------------------------------


def domain_of(first: int, second: int) -> str:
    """Domain of a sum."""
    return "carry" if first % 10 + second % 10 >= 10 else "plain"


def pairs_of(split: str, domain: str) -> list[tuple[int, int]]:
    """The pairs of summands of a split, of one domain or of all."""
    return [pair for pair in addition_pairs(split) if domain in ("all", domain_of(*pair))]


class AdditionByDomain(ArithmeticEnv):
    """Additions whose rows name their domain, in a column of the data."""

    COLUMNS = (*ArithmeticEnv.COLUMNS, "domain")

    @classmethod
    def default_dataset(cls, split: str | None) -> GeneratedRows:
        """The problems of a split, each with its domain."""
        pairs = addition_pairs("train" if split is None else split)
        return GeneratedRows(
            lambda index: {**addition_problem(*pairs[index]), "domain": domain_of(*pairs[index])},
            len(pairs),
        )


def make_problems(
    config: DistillationConfig, policy: TransformersWrapper
) -> tuple[TaskEnv, TaskEnv | None]:
    """The training environment, and the environment of the held-out prompts."""
    if not config.teacher.by_domain:
        return make_envs(config, policy)
    system = {"system_prompt": config.env.system_prompt}
    env = AdditionByDomain(
        split="train",
        **system,
        num_envs=config.rows_per_batch,
        repeats=config.env.repeats,
        group_repeats=True,
        seed=config.seed,
        tokenizer=policy.tokenizer,
    )
    if not config.eval.num_prompts:
        return env, None
    num_envs = min(config.eval.batch_size, config.eval.num_prompts)
    held_out = {"split": "test", "shuffle": False, "num_envs": num_envs, **system}
    return env, AdditionByDomain(**held_out, tokenizer=policy.tokenizer)


# -- teachers -------------------------------------------------------------------------------------


def make_teachers(
    config: DistillationConfig, folder: Path, say: Callable[[str], None]
) -> dict[str, TransformersWrapper]:
    """The teachers by domain; made teachers stay in the folder for a resumed run."""
    teachers = {}
    for domain, name in config.teacher.names.items():
        if name is None:
            name = str(folder / domain)
            if not Path(name).exists():
                say(f"making the teacher of {domain!r}: {config.teacher.max_steps} steps")
                make_teacher(config, domain, Path(name))
        with naming("teacher.name" if domain == "all" else f"teacher.{domain}"):
            tokenizer = load_tokenizer(name)
            model = load_model(name, dtype=config.train_model.dtype, device=device_of(config))
        teachers[domain] = TransformersWrapper(model.requires_grad_(False), tokenizer=tokenizer)
    return teachers


def make_teacher(config: DistillationConfig, domain: str, folder: Path) -> None:
    """Fine-tune the student's initial model on correct answers of one domain, and save it."""
    model = load_model(config.model.name, device=device_of(config)).train()
    tokenizer = load_tokenizer(config.model.name)
    wanted = config.teacher
    loss = SFTLoss(TransformersWrapper(model, tokenizer=tokenizer))
    optimizer = make_optimizer(model.parameters(), name="AdamW", lr=wanted.lr)
    scheduler = make_scheduler(
        optimizer, name="linear", warmup_steps=wanted.max_steps // 10, total_steps=wanted.max_steps
    )
    pairs = pairs_of("train", domain)
    generator = torch.Generator().manual_seed(config.seed)
    size = (wanted.max_steps, wanted.batch_size)
    drawn = torch.randint(len(pairs), size, generator=generator).tolist()
    batches = (right_answers([pairs[i] for i in of_step]) for of_step in drawn)
    optimize(loss, batches, optimizer, scheduler, max_norm=1.0)
    # Written atomically, so that a resumed run never loads an incomplete teacher.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_pretrained(partial, model, tokenizer)
    partial.rename(folder)


def right_answers(pairs: list[tuple[int, int]]) -> TensorDict:
    """Conversations with a sum as question and its result as answer."""
    chats = []
    for first, second in pairs:
        problem = addition_problem(first, second)
        chats.append(
            [
                {"role": "user", "content": problem["query"]},
                {"role": "assistant", "content": problem["answer"]},
            ]
        )
    history = ChatHistory(full=History.from_chats(chats), batch_size=[len(chats)])
    return TensorDict({"history": history}, batch_size=[len(chats)])


def measure(
    config: DistillationConfig, policies: Mapping[str, TransformersWrapper]
) -> dict[str, dict[str, Evaluation]]:
    """Greedy held-out accuracy of each policy per domain; empty for tasks without domains."""
    if config.env.dataset != "arithmetic" or not config.eval.num_prompts:
        return {}
    found: dict[str, dict[str, Evaluation]] = {name: {} for name in policies}
    for domain in (*DOMAINS, "all"):
        problems = [addition_problem(*pair) for pair in pairs_of("test", domain)]
        number = min(len(problems), config.eval.num_prompts)
        for name, policy in policies.items():
            env = ArithmeticEnv(
                dataset=problems,
                shuffle=False,
                num_envs=min(config.eval.batch_size, number),
                tokenizer=policy.tokenizer,
            )
            limit = config.inference_model.max_tokens
            greedy = policy.get_new_version(
                generate_kwargs={"max_new_tokens": limit, "temperature": 0.0}
            )
            found[name][domain] = evaluate(env, greedy, num_prompts=number)
    return found


def accuracies(title: str, found: Mapping[str, Mapping[str, Evaluation]]) -> str:
    """A line for each policy."""
    lines = [title]
    for name, results in found.items():
        parts = [f"{domain} {result.accuracy:.3f}" for domain, result in results.items()]
        lines.append(f"  {name:<16}" + "  ".join(parts))
    return "\n".join(lines)


# -- the step -------------------------------------------------------------------------------------


def make_algorithm(
    config: DistillationConfig,
    policy: TransformersWrapper,
    teachers: Mapping[str, TransformersWrapper],
) -> Algorithm:
    """On-policy distillation from one teacher, or from the teacher of each row's domain."""
    if not config.teacher.by_domain and not config.loss.outcome_coeff:
        settings = {"estimator": config.loss.estimator, "coeff": config.loss.coeff}
        return make_opd(policy, teachers["all"], **settings)
    return make_mopd(
        policy,
        teachers if config.teacher.by_domain else teachers["all"],
        group_size=config.env.repeats,
        **asdict(config.loss),
    )


def make_buffer(config: DistillationConfig, algorithm: Algorithm) -> ReplayBuffer:
    """A buffer for the training rows of one step."""
    return algorithm.append_to(make_step_buffer(config))
