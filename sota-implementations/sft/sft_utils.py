"""Parts of the SFT recipes: configuration, data, reference, evaluation.

:mod:`torchrl_llm.recipes.builders` builds the policy, as for every recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from tensordict import LazyStackedTensorDict
from torchrl._utils import logger

from torchrl_llm._checked import Ge
from torchrl_llm._run_log import rounded_repr
from torchrl_llm._settings import Count, ensure, own
from torchrl_llm.data.column_names import check_named, joined_prompt
from torchrl_llm.data.demonstrations import (
    Demonstration,
    DemonstrationColumns,
    Demonstrations,
    learned_rows,
)
from torchrl_llm.data.messages import message_text
from torchrl_llm.data.row_files import MappedRows, Row
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.datasets.rows_env import plain_value
from torchrl_llm.envs.transforms import RetrieveLogProb
from torchrl_llm.evaluation import Evaluation, HeldOutLoss, held_out_loss
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes import (
    OptimizerConfig,
    RefModelConfig,
    RewardComponentsConfig,
    SFTLossConfig,
)
from torchrl_llm.recipes.builders import (
    autocast,
    greedy_evaluation,
    load_policy,
    longest_row,
    make_reference,
)
from torchrl_llm.recipes.data_config import DataSource
from torchrl_llm.recipes.groups import SUPERVISED_RATES
from torchrl_llm.recipes.reward_config import add_components, make_reward
from torchrl_llm.recipes.shared_keys import TrainedConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.supervised import NumbersConfig, Parts, TrainConfig, parts_of
from torchrl_llm.trainers import EvalConfig, Shown

SHOWN = Shown(
    metric="train/loss_sft",
    name="loss",
    tokens="train/tokens",
    held_out={"eval/loss": "held-out loss", "eval/accuracy": "held-out greedy accuracy"},
)
"""Metrics that a run shows."""


class DemonstrationConfig(DataSource):
    """Your own conversations for training.

    Attributes:
        prompt: column with the user's message (or the messages before the answer); ``None`` for a
            column with a usual name (``prompt``, ``question``, ``query``, ``instruction``, ...).
        completion: column with the answer to learn; ``None`` for a column with a usual name
            (``completion``, ``response``, ``output``, ``solution``, ``answer``, ...).
        messages: column with whole conversations, instead of ``prompt`` and ``completion``;
            ``None`` for ``messages`` or ``conversations`` if neither of these two keys is set.
        tools: column with the tools of a conversation, a list of schemas or its JSON text; ``None``
            for ``tools``, in the rows that have it.
        answer: column with the correct answer, for ``reward``; ``None`` for the completion (the
            last turn of the conversation).
        system_prompt: first message of every conversation.
    """

    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    tools: str | None = None
    answer: str | None = None
    system_prompt: str | None = None


class AnswerEvalConfig(EvalConfig):
    """Evaluation on held-out rows.

    Attributes:
        num_prompts: number of held-out rows; ``None`` for all rows of ``data.eval_source`` or
            ``data.eval_split``, or else a tenth, at most 128.
        max_tokens: most tokens of a greedy answer.
    """

    num_prompts: Annotated[int, Ge(0)] | None = None
    max_tokens: Count = 128


class SFTGroups(TrainedConfig):
    """Settings that ``sft.py`` and ``imitate.py`` share; ``seed`` also seeds the order of rows."""

    rates = SUPERVISED_RATES

    train: TrainConfig
    ref_model: RefModelConfig
    optimizer: OptimizerConfig = own(lr=None, scheduler="linear", warmup_steps=0.05)
    loss: SFTLossConfig = own(reduction="token_mean")
    logging: NumbersConfig = own(experiment_name="sft")
    eval: AnswerEvalConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss.check_reference(self.train.kl_to_ref_coeff, self.ref_model)
        if self.train.max_steps is not None:
            self.optimizer.check_warmup(self.train.max_steps)


class SFTConfig(SFTGroups):
    """All settings of ``sft.py``."""

    data: DemonstrationConfig
    reward: RewardComponentsConfig

    @property
    def answers(self) -> bool:
        """Whether the model answers held-out prompts for a reward."""
        return bool(self.reward.function or self.reward.components)

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            self.data.source is not None,
            "there is nothing to learn from: data=FILE (CSV, JSON, JSON lines or Parquet), a "
            "folder, or the name of a dataset on the hub",
        )
        ensure(
            self.reward.on_all_invalid == "error",
            "reward.on_all_invalid has no effect: no step learns from the reward",
        )
        judge = "reward=NAME or FILE.py:FUNCTION, which judges answers to the held-out prompts"
        self.data.only("answer", self.answers, f"without {judge}")
        for name in ("max_tokens", "batch_size"):
            self.eval.only(name, self.answers, f"without {judge}")


def load_config(values: Mapping[str, Any]) -> SFTConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(SFTConfig, values)


def load_data(config: SFTConfig, tokenizer: Any) -> Parts:
    """Read the rows of ``data`` and check the first rows; this needs no weights.

    Raises:
        DataError: missing or malformed data, or a row that cannot be learned from.
    """
    data = config.data
    names = {key: getattr(data, key) for key in ("prompt", "completion", "messages", "tools")}
    columns = DemonstrationColumns.find(data.load()[0], **names)
    check_named(data.load()[0], answer=data.answer)
    make = partial(
        make_demonstrations, config, tokenizer, columns=columns, system_prompt=data.system_prompt
    )

    def asked(row: Row) -> Any:
        talk = row.get(columns.messages)
        said = joined_prompt(row, columns.prompt, columns.before) if columns.prompt else talk
        return said[:-1] if isinstance(talk, list) else said

    return parts_of(data, config.eval.num_prompts, make, asked)


def make_demonstrations(
    config: SFTGroups, tokenizer: Any, rows: Sequence[Row], **settings: Any
) -> Demonstrations:
    """Training rows for the configured model.

    Raises:
        ConfigError: ``train.max_seq_len`` is longer than the model's context.
    """
    return Demonstrations(
        rows,
        ChatFormatter(tokenizer, **config.model.template),
        max_seq_len=longest_row(config),
        on_overlong=config.train.on_overlong,
        **settings,
    )


def make_policy(config: SFTGroups, tokenizer: Any) -> TransformersWrapper:
    """The model that learns."""
    return load_policy(
        config, tokenizer, **config.model.template, on_overlong=config.train.on_overlong
    )


class Preparation:
    """Makes rows from a batch, with the log-probs of the reference if the loss reads them."""

    def __init__(self, config: SFTGroups, policy: TransformersWrapper) -> None:
        self._config = config
        self._reference: RetrieveLogProb | None = None
        if config.loss.needs_reference(config.train.kl_to_ref_coeff):
            self._reference = RetrieveLogProb(
                make_reference(config, policy), token_budget=config.train.micro_token_budget
            )

    def __call__(self, batch: Sequence[Demonstration]) -> list[LazyStackedTensorDict]:
        """The rows of an update, in a list; empty if no row of the batch is trained."""
        rows = learned_rows(batch)
        if rows is None or self._reference is None:
            return [] if rows is None else [rows]
        with autocast(self._config):
            return [self._reference(rows)]


@dataclass(frozen=True, kw_only=True)
class HeldOutEvaluation(HeldOutLoss):
    """Loss on the held-out answers, and the model's own answers.

    Attributes:
        answers: its answers; ``None`` without a reward.
    """

    answers: Evaluation | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of the prompts that it answers correctly."""
        return None if self.answers is None else self.answers.accuracy

    @property
    def conversations(self) -> tuple[str, ...]:
        """The first few, as text."""
        return () if self.answers is None else self.answers.conversations

    __repr__ = rounded_repr

    def metrics(self) -> dict[str, float]:
        """The numbers, named ``eval/...``."""
        return super().metrics() | ({} if self.answers is None else self.answers.metrics())


def make_evaluation(
    config: SFTConfig, held_out: Demonstrations | None, policy: TransformersWrapper
) -> Callable[[], HeldOutEvaluation] | None:
    """Loss on the held-out rows and, with a reward, accuracy of greedy answers to them."""
    if held_out is None:
        return None
    rows, answer = list(held_out), None
    if long := sum(row.overlong for row in rows):
        logger.warning(
            f"{long} of the {len(rows)} held-out rows have more than {held_out.max_seq_len} tokens "
            f"(train.max_seq_len): with train.on_overlong={held_out.on_overlong}, eval/loss is "
            + ("without them" if held_out.on_overlong == "drop" else "of their first tokens")
        )
    if config.answers:
        answer = greedy_evaluation(
            config,
            make_answer_env(config, held_out, policy.tokenizer),
            policy,
            max_tokens=config.eval.max_tokens,
            max_turns=1,
        )

    def run() -> HeldOutEvaluation:
        with autocast(config):
            loss = held_out_loss(policy, rows, token_budget=config.train.micro_token_budget)
        return HeldOutEvaluation(**vars(loss), answers=None if answer is None else answer())

    return run


def make_answer_env(config: SFTConfig, held_out: Demonstrations, tokenizer: Any) -> TaskEnv:
    """An environment whose prompts are the messages before the last answer of each held-out row."""
    ensure(
        not any(held_out.tools(index) for index in range(len(held_out))),
        "reward has no effect on rows with tools: a held-out prompt is answered in one turn, "
        "without tools",
    )

    def problem(index: int) -> Row:
        messages, row = held_out.messages(index), held_out.rows[index]
        while messages[-1]["role"] != "assistant":
            messages.pop()
        said = message_text(messages.pop())
        return {
            "query": messages,
            "answer": said if config.data.answer is None else row[config.data.answer],
            "row": plain_value(row),
        }

    env = TaskEnv(
        dataset=MappedRows(range(len(held_out)), problem),
        reward=make_reward(config.reward, alone=True),
        num_envs=min(config.eval.batch_size, len(held_out)),
        shuffle=False,
        tokenizer=tokenizer,
    )
    return env if config.reward.function is None else add_components(env, config.reward.components)
