"""Parts of dpo.py: configuration, data, reference, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar
from zlib import crc32

import torch
from tensordict import LazyStackedTensorDict
from torch import Tensor

from torchrl_llm._checked import Ge
from torchrl_llm._run_log import rounded_repr
from torchrl_llm._settings import ensure, own
from torchrl_llm.assets import PAIRS_OF_SUMS
from torchrl_llm.data.column_names import joined_prompt
from torchrl_llm.data.demonstrations import Demonstration
from torchrl_llm.data.preferences import Preference, PreferenceColumns, Preferences, preference_rows
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.row_files import Row
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import CheckpointError, DataError
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.objectives import KTOLoss, answer_log_probs, mismatched
from torchrl_llm.recipes import OptimizerConfig, PreferenceLossConfig, RefModelConfig
from torchrl_llm.recipes.builders import autocast, longest_row, make_reference
from torchrl_llm.recipes.data_config import DataSource
from torchrl_llm.recipes.shared_keys import TrainedConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.supervised import READ_FIRST, NumbersConfig, Parts, TrainConfig, parts_of
from torchrl_llm.trainers import EvalConfig, Ranks, Shown, micro_batches
from torchrl_llm.trainers.ranks import ALONE

SHOWN = Shown(
    metric="train/accuracy",
    name="accuracy",
    tokens="train/tokens",
    held_out={"eval/accuracy": "held-out accuracy", "eval/margin": "held-out margin"},
)
"""Metrics that a run shows."""


class PairDataConfig(DataSource):
    """Rows with compared answers.

    Attributes:
        source: a CSV, JSON, JSON-lines or Parquet file, several of them, a folder, the name of a
            dataset on the hub, or ``module:name`` of rows in Python; ``None`` for the pairs of sums
            that ship with the package. ``data=FILE`` does the same.
        prompt: column with the user's message (or the messages before the answer); ``None`` for a
            column with a usual name, or for no column if answers are whole conversations.
        chosen: column with the better answer; ``None`` for a column with a usual name (``chosen``,
            ``preferred``, ``response_j``, ...).
        rejected: column with the worse answer; ``None`` for a column with a usual name.
        tools: column with the tools of a conversation; ``None`` for ``tools``, in the rows that
            have it.
        system_prompt: first message of every conversation.
    """

    names: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected", "tools")

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    tools: str | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None:
            self.source = str(PAIRS_OF_SUMS)

    @property
    def columns(self) -> dict[str, str | None]:
        """The columns, as arguments for ``PreferenceColumns.find``."""
        return {name: getattr(self, name) for name in self.names}


class PreferenceDataConfig(PairDataConfig):
    """Rows with compared answers, or with answers labeled as good or bad.

    Attributes:
        completion: column with the single answer of a row, for ``loss=kto``.
        label: column that tells whether this answer is good.
    """

    names: ClassVar[tuple[str, ...]] = (*PairDataConfig.names, "completion", "label")

    completion: str | None = None
    label: str | None = None


class PreferenceEvalConfig(EvalConfig):
    """Evaluation on held-out rows.

    Attributes:
        num_prompts: number of held-out rows; ``None`` for all rows of ``data.eval_source`` or
            ``data.eval_split``, or else a tenth, at most 128.
    """

    num_prompts: Annotated[int, Ge(0)] | None = None


class PairConfig(TrainedConfig):
    """Settings of every recipe that learns from preferences."""

    data: PairDataConfig
    train: TrainConfig
    eval: PreferenceEvalConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.max_steps is not None:
            self.optimizer.check_warmup(self.train.max_steps)


class PreferenceConfig(PairConfig):
    """All settings of ``dpo.py``; ``seed`` also seeds the order of rows."""

    data: PreferenceDataConfig
    ref_model: RefModelConfig
    optimizer: OptimizerConfig = own(lr=None, scheduler="linear", warmup_steps=0.05)
    loss: PreferenceLossConfig
    logging: NumbersConfig = own(experiment_name="dpo")

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            not self.train.kl_to_ref_coeff,
            "train.kl_to_ref_coeff has no effect: loss.beta holds the policy to its reference",
        )
        ensure(
            self.ref_model == RefModelConfig() or self.loss.needs_reference,
            f"ref_model has no effect with loss={self.loss.type}, which has no reference",
        )
        ensure(
            self.loss.target is not KTOLoss or self.train.batch_size > 1,
            "loss=kto compares the answers of a batch: train.batch_size must be at least 2",
        )


def load_config(values: Mapping[str, Any]) -> PreferenceConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(PreferenceConfig, values)


def load_data(config: PreferenceConfig, tokenizer: Any, *, read_first: int = READ_FIRST) -> Parts:
    """Read the rows of ``data`` and check the first rows; this needs no weights.

    Raises:
        DataError: missing or malformed data, or a row that cannot be learned from.
    """
    columns = PreferenceColumns.find(config.data.load()[0], **config.data.columns)
    ensure(
        columns.label is None or config.loss.target is KTOLoss,
        f"the rows have one answer with a label ({columns.label}), and loss={config.loss.type} "
        "compares two: choose loss=kto, or name data.chosen and data.rejected",
    )
    return parts_with(config, columns, tokenizer, read_first)


def parts_with(
    config: PairConfig, columns: PreferenceColumns, tokenizer: Any, read_first: int
) -> Parts:
    """Read the rows of ``data``, whose columns are known.

    Raises:
        DataError: as for :func:`load_data`.
    """
    make = partial(
        Preferences,
        formatter=ChatFormatter(tokenizer, **config.model.template),
        columns=columns,
        system_prompt=config.data.system_prompt,
        max_seq_len=longest_row(config),
        on_overlong=config.train.on_overlong,
    )

    def asked(row: Row) -> Any:
        if columns.prompt:
            return joined_prompt(row, columns.prompt, columns.before)
        with suppress(DataError):  # a rejected row raises when it is trained
            return columns.parts(row)[0]
        return None

    return parts_of(config.data, config.eval.num_prompts, make, asked, read_first=read_first)


class References:
    """Log-probs of answers under the reference, each computed once; a part of the run.

    If a row has changed (because its data was repaired before a resume), it is computed again.

    Args:
        config: configuration of the recipe.
        reference: scores tokens.
        rows: rows with the answers.
        ranks: the processes, which exchange computed values.
    """

    def __init__(
        self,
        config: PreferenceConfig,
        reference: TokenScorer,
        rows: Preferences,
        ranks: Ranks = ALONE,
    ) -> None:
        self._config, self.reference, self._ranks = config, reference, ranks
        self._values = torch.zeros(len(rows), len(rows.columns.answers))
        # Checksums of the answers with known values.
        self._marks = torch.full_like(self._values, -1, dtype=torch.int64)

    def state_dict(self) -> dict[str, Tensor]:
        """The values computed so far."""
        return {"values": self._values, "marks": self._marks}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the values computed before.

        Raises:
            CheckpointError: they belong to different rows.
        """
        if state["values"].shape != self._values.shape:
            raise CheckpointError(
                f"the checkpoint has reference log-probs of {len(state['values'])} rows, and the "
                f"data has {len(self._values)}"
            )
        self._values, self._marks = state["values"].clone(), state["marks"].clone()

    def scores(self, sequences: Sequence[Tensor], answers: Sequence[Tensor]) -> Tensor:
        """Log-probs without the cache, ``[B]``, nats."""
        return _log_probs(self._config, self.reference, sequences, answers)

    def of(self, batch: Sequence[Preference]) -> Tensor:
        """Log-probs of the answers of rows, one after the other, ``[B]``, nats."""
        marks = {row.index: list(map(_mark, row.answers)) for row in batch}
        missing = [row for row in batch if self._marks[row.index].tolist() != marks[row.index]]
        answers = [answer for row in missing for answer in row.answers]
        found = self.scores([a.token_ids for a in answers], [a.learned for a in answers])
        indices = [row.index for row in missing]
        new = torch.tensor([marks[index] for index in indices]).reshape(-1, self._values.shape[1])
        for known, values, checksums in self._ranks.gather((indices, found.view_as(new), new)):
            self._values[known], self._marks[known] = values, checksums.long()
        return self._values[[row.index for row in batch]].flatten()


def _mark(answer: Demonstration) -> int:
    return crc32(answer.learned.numpy(), crc32(answer.token_ids.numpy()))


def _log_probs(
    config: PreferenceConfig,
    scorer: TokenScorer,
    sequences: Sequence[Tensor],
    answers: Sequence[Tensor],
) -> Tensor:
    with autocast(config):
        budget = config.train.micro_token_budget
        return answer_log_probs(scorer, sequences, answers, token_budget=budget)


class Preparation:
    """Makes rows from a batch, with the inputs of the loss besides the tokens.

    Args:
        config: configuration of the recipe.
        policy: scores tokens before the update.
        references: reference log-probs of these rows; ``None`` for a loss without a reference.
        ranks: the processes.
    """

    def __init__(
        self,
        config: PreferenceConfig,
        policy: TokenScorer,
        references: References | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._config, self._policy, self._ranks = config, policy, ranks
        self.references = references

    @classmethod
    def of(
        cls,
        config: PreferenceConfig,
        policy: TransformersWrapper,
        rows: Preferences,
        ranks: Ranks = ALONE,
    ) -> Preparation:
        """The preparation of some rows.

        Args:
            config: configuration of the recipe.
            policy: the trained policy, or a gathering copy: ranks score at their own pace.
            rows: the rows.
            ranks: the processes.
        """
        references = None
        if config.loss.needs_reference:
            references = References(config, make_reference(config, policy), rows, ranks)
        return cls(config, policy, references, ranks)

    def of_held_out(self, rows: Preferences) -> Preparation:
        """Return the preparation of held-out rows, with the same reference; one process evaluates.

        Args:
            rows: the rows.
        """
        known = self.references
        other = None if known is None else References(self._config, known.reference, rows)
        return Preparation(self._config, self._policy, other)

    def __call__(self, batch: Sequence[Preference]) -> LazyStackedTensorDict | None:
        """The rows of an update; ``None`` if all were dropped."""
        batch = [row for row in batch if row.is_whole]
        rows = preference_rows(batch)
        if self.references is not None:
            scores = self.references.of(batch)
            if rows is not None:
                rows["ref_log_prob"] = scores
        if self._config.loss.target is KTOLoss:
            divergence = self._divergence(rows)
            if rows is not None:
                rows["kl"] = torch.full((len(rows),), divergence)
        return rows

    def _divergence(self, rows: LazyStackedTensorDict | None) -> float:
        """Mean log-ratio of mismatched answers, over all ranks."""
        sums = {"ratios": 0.0, "answers": 0.0}
        if rows is not None:
            answers = [m.bool() for m in read_rows(rows, ("masks", "all_assistant_mask"))]
            made = mismatched(read_rows(rows, ("tokens", "full")), answers)
            ratios = _log_probs(self._config, self._policy, *made) - self.references.scores(*made)
            sums = {"ratios": float(ratios.double().sum()), "answers": float(len(ratios))}
        sums = self._ranks.sums(sums)
        return sums["ratios"] / max(1.0, sums["answers"])


@dataclass(frozen=True, kw_only=True)
class HeldOutPreferences:
    """How well the model distinguishes held-out answers.

    Attributes:
        loss: the objective.
        accuracy: share of the pairs whose chosen answer has the larger implicit reward.
        margin: mean difference of the implicit rewards; ``None`` for answers with a label.
    """

    loss: float
    accuracy: float
    margin: float | None
    conversations: tuple[str, ...] = ()

    __repr__ = rounded_repr

    def metrics(self) -> dict[str, float]:
        """The numbers, named ``eval/...``."""
        names = ("loss", "accuracy", "margin")
        values = {f"eval/{name}": getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def make_evaluation(
    config: PreferenceConfig,
    held_out: Preferences | None,
    policy: TransformersWrapper,
    training: Preparation,
) -> Callable[[], HeldOutPreferences] | None:
    """The loss of the held-out rows, and how well the model distinguishes their answers."""
    if held_out is None:
        return None
    loss = config.loss.build(policy)
    rows, prepare = list(held_out), training.of_held_out(held_out)

    @torch.no_grad()
    def run() -> HeldOutPreferences:
        ready = prepare(rows)
        counts, total = loss.normalizer(ready), None
        budget, layout = config.train.micro_token_budget, policy.layout
        for piece in micro_batches(ready, budget=budget, layout=layout):
            with autocast(config):
                output = loss(piece, normalizer=counts)
            total = output if total is None else total + output
        found = {name: float(value) for name, value in total.metrics().items()}
        return HeldOutPreferences(
            loss=float(total.total_loss()), accuracy=found["accuracy"], margin=found.get("margin")
        )

    return run
