"""Parts of the SFT recipes: configuration, data, reference, evaluation.

The policy is built by :mod:`torchrl_llm.recipes.builders`, as that of every recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Annotated, Any, NamedTuple

from tensordict import LazyStackedTensorDict
from torchrl._utils import logger

from torchrl_llm._checked import Ge
from torchrl_llm._settings import Count, ensure, own
from torchrl_llm.data.column_names import check_named, joined_prompt
from torchrl_llm.data.demonstrations import (
    Demonstration,
    DemonstrationColumns,
    Demonstrations,
    learned_rows,
)
from torchrl_llm.data.messages import message_text
from torchrl_llm.data.row_files import MappedRows, Row, RowLoader
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.datasets.rows_env import plain_value
from torchrl_llm.envs.transforms import RetrieveLogProb
from torchrl_llm.evaluation import Evaluation, HeldOutLoss, held_out_loss
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes import (
    ForwardConfig,
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
from torchrl_llm.recipes.data_config import DataSource, hold_out, tell_overlap
from torchrl_llm.recipes.groups import SUPERVISED_RATES
from torchrl_llm.recipes.reward_config import add_components, make_reward
from torchrl_llm.recipes.shared_keys import TrainedConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.trainers import EvalConfig, LoggingConfig, Ranks, Shown
from torchrl_llm.trainers.kept_rollouts import Kept

SHOWN = Shown(
    metric="train/loss_sft",
    name="loss",
    tokens="train/tokens",
    held_out={"eval/loss": "held-out loss", "eval/accuracy": "held-out greedy accuracy"},
)
"""What is shown of a run."""

# Rows that are read before the first step, which takes a few seconds; the others are looked at when
# it is their turn.
_READ_FIRST = 10_000


class DemonstrationConfig(DataSource):
    """Conversations of one's own to learn from.

    Attributes:
        prompt: column with the user's message (or the messages before the answer); ``None`` for one
            with a usual name (``prompt``, ``question``, ``query``, ``instruction``, ...).
        completion: column with what is to be answered; ``None`` likewise (``completion``,
            ``response``, ``output``, ``solution``, ``answer``, ...).
        messages: column with whole conversations, instead of the two; ``None`` for ``messages`` or
            ``conversations`` where neither of the two is named.
        tools: column with the tools of a conversation, a list of schemas or the same as JSON;
            ``None`` for ``tools``, in the rows that have it.
        answer: column with what ``reward`` compares; ``None`` for the completion, the last turn of
            the conversation.
        system_prompt: first message of every conversation.
    """

    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    tools: str | None = None
    answer: str | None = None
    system_prompt: str | None = None


class TrainConfig(ForwardConfig):
    """The loop.

    Attributes:
        max_steps: optimizer steps; ``None`` for as many as ``max_epochs`` takes.
        max_epochs: passes over the rows; ``None`` for as many as ``max_steps`` takes, and 1 without
            it. With both the run ends with what comes first.
        batch_size: rows an optimizer step.
    """

    max_steps: Count | None = None
    max_epochs: Count | None = None
    batch_size: Count = 32

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole run.

        Args:
            num_rows: of the data.
        """
        epochs = self.max_epochs or (1 if self.max_steps is None else None)
        limits = [self.max_steps, epochs and epochs * -(-num_rows // self.batch_size)]
        return min(limit for limit in limits if limit is not None)


class AnswerEvalConfig(EvalConfig):
    """Evaluation on rows that are held out.

    Attributes:
        num_prompts: rows that are held out; ``None`` for all rows of ``data.eval_source`` or
            ``data.eval_split``, or else a tenth, at most 128.
        max_tokens: of a greedy answer.
    """

    num_prompts: Annotated[int, Ge(0)] | None = None
    max_tokens: Count = 128


class NumbersConfig(LoggingConfig):
    """Where numbers go.

    Attributes:
        samples: always ``None``; no answers are sampled to learn from.
        rollouts: always ``none``, likewise.
    """

    samples: int | None = None
    rollouts: Kept = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(self.samples is None, "logging.samples has no effect: nothing learns from samples")
        ensure(
            self.rollouts == "none", "logging.rollouts has no effect: nothing learns from samples"
        )


class SFTGroups(TrainedConfig):
    """What ``sft.py`` and ``imitate.py`` can both be told; ``seed`` seeds the order of rows too."""

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
    """Everything that ``sft.py`` can be told."""

    data: DemonstrationConfig
    reward: RewardComponentsConfig

    @property
    def answers(self) -> bool:
        """Whether the model answers held-out prompts, for a reward to judge."""
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
        for key, value, default in (
            ("data.answer", self.data.answer, None),
            ("eval.max_tokens", self.eval.max_tokens, AnswerEvalConfig.max_tokens),
            ("eval.batch_size", self.eval.batch_size, EvalConfig.batch_size),
        ):
            ensure(
                self.answers or value == default,
                f"{key} has no effect without reward=NAME or FILE.py:FUNCTION, which judges "
                "answers to the held-out prompts",
            )


def load_config(values: Mapping[str, Any]) -> SFTConfig:
    """Validate a composed configuration; an unknown key names the nearest valid one."""
    return from_mapping(SFTConfig, values)


class Data(NamedTuple):
    """Demonstrations to learn, and those that are held out (``None`` for none)."""

    train: Demonstrations
    held_out: Demonstrations | None


def load_data(config: SFTConfig, tokenizer: Any) -> Data:
    """Read the rows of ``data`` and look at the first of them; no weights are needed for it.

    Raises:
        DataError: missing or malformed data, or a row that cannot be learned from.
    """
    data, wanted = config.data, config.eval.num_prompts
    rows, held_out, cut = data.load(), None, False
    if wanted != 0:
        held_out = data.load_held_out()
        if cut := held_out is None:
            rows, held_out = hold_out(rows, wanted, where="data.source")
    names = {key: getattr(data, key) for key in ("prompt", "completion", "messages", "tools")}
    columns = DemonstrationColumns.find(rows[0], **names)
    check_named(rows[0], answer=data.answer)
    make = partial(
        make_demonstrations, config, tokenizer, columns=columns, system_prompt=data.system_prompt
    )
    found = Data(make(rows, name=_name(data.source)), None)
    if held_out is not None:
        where = data.source if cut or data.eval_split is not None else data.eval_source
        first = len(rows) + 1 if cut else 1
        held_out = make(_first(held_out, wanted), name=_name(where), first_row=first, held_out=True)
        found = found._replace(held_out=held_out)
    for part in found:
        if part is not None:
            part.check(_READ_FIRST)
    if held_out is not None:
        asked = (_asked(part.rows, columns) for part in found)
        tell_overlap(next(asked), list(next(asked)), "data.source" if cut else "data.eval_source")
    return found


def _asked(rows: Sequence[Row], columns: DemonstrationColumns) -> Iterator[Any]:
    """What stands in front of the last message of each row."""
    for row in rows:
        talk = row.get(columns.messages)
        asked = joined_prompt(row, columns.prompt, columns.before) if columns.prompt else talk
        yield asked[:-1] if isinstance(talk, list) else asked


def _name(source: Any) -> str:
    return " + ".join(source) if isinstance(source, list) else source


def _first(rows: Sequence[Row], number: int | None) -> Sequence[Row]:
    """The first rows of any sequence, or all of them."""
    return rows if number is None else MappedRows(range(min(number, len(rows))), rows.__getitem__)


def make_demonstrations(
    config: SFTGroups, tokenizer: Any, rows: Sequence[Row], **settings: Any
) -> Demonstrations:
    """Rows as the configured model is to learn them.

    Raises:
        ConfigError: longer rows are allowed than the model's context holds.
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
        config,
        tokenizer,
        **config.model.template,
        on_overlong=config.train.on_overlong,
    )


def batches(loader: RowLoader) -> Iterator[list[Demonstration]]:
    """The batches of one epoch after the other, from where the loader is."""
    return chain.from_iterable(repeat(loader))


def batch_metrics(
    batch: Sequence[Demonstration], loader: RowLoader, ranks: Ranks
) -> dict[str, float]:
    """Tokens of a batch, rows that were too long, and how many epochs are done."""
    counts = {
        "train/tokens": sum(len(each.token_ids) for each in batch),
        "train/tokens_trained": sum(int(each.learned.sum()) for each in batch),
        "train/overlong": sum(each.overlong for each in batch),
    }
    return ranks.sums(counts) | {"train/epoch": loader.epoch + loader.index / len(loader.rows)}


class Preparation:
    """Makes rows of a batch, with the log-probs of the reference where the loss reads them."""

    def __init__(self, config: SFTGroups, policy: TransformersWrapper) -> None:
        self._config = config
        self._reference: RetrieveLogProb | None = None
        if config.loss.needs_reference(config.train.kl_to_ref_coeff):
            self._reference = RetrieveLogProb(
                make_reference(config, policy), token_budget=config.train.micro_token_budget
            )

    def __call__(self, batch: Sequence[Demonstration]) -> list[LazyStackedTensorDict]:
        """The rows of an update, in a list; an empty one where nothing of the batch is learned."""
        rows = learned_rows(batch)
        if rows is None or self._reference is None:
            return [] if rows is None else [rows]
        with autocast(self._config):
            return [self._reference(rows)]


@dataclass(frozen=True, kw_only=True)
class HeldOutEvaluation(HeldOutLoss):
    """Predictions of the held-out answers, and what the model answers itself.

    Attributes:
        answers: what it answers; ``None`` without a reward.
    """

    answers: Evaluation | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of the prompts that it answers rightly."""
        return None if self.answers is None else self.answers.accuracy

    @property
    def conversations(self) -> tuple[str, ...]:
        """The first few, as text."""
        return () if self.answers is None else self.answers.conversations

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
    """An environment that asks what stands before the last answer of each held-out row."""
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
