"""Parts of reward-model.py: configuration, data, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from preference_utils import PairConfig, PairDataConfig, parts_with
from torch import Tensor

from torchrl_llm import modules
from torchrl_llm._checked import Ge
from torchrl_llm._run_log import rounded_repr
from torchrl_llm._settings import Group, ensure, naming, own
from torchrl_llm.data.preferences import PreferenceColumns, Preferences
from torchrl_llm.data.row_transform import pieces_under_budget
from torchrl_llm.data.scoring import last_values
from torchrl_llm.functional import bradley_terry, calibration_error
from torchrl_llm.modules.backends import ClassifierScorer
from torchrl_llm.recipes import OptimizerConfig
from torchrl_llm.recipes.builders import autocast, device_of
from torchrl_llm.recipes.groups import SUPERVISED_RATES
from torchrl_llm.recipes.parallel import spread, twin_of
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.recipes.supervised import READ_FIRST, NumbersConfig, Parts
from torchrl_llm.trainers import Shown

SHOWN = Shown(
    metric="train/accuracy",
    name="accuracy",
    tokens="train/tokens",
    held_out={
        "eval/accuracy": "held-out accuracy",
        "eval/calibration_error": "held-out calibration error",
    },
    opens="AutoModelForSequenceClassification",
)
"""Metrics that a run shows."""


class RewardDataConfig(PairDataConfig):
    """Pairs of compared answers.

    Attributes:
        margin: column with a number that tells how much better the chosen answer is; ``None`` for
            ``margin``, if rows have it.
    """

    names: ClassVar[tuple[str, ...]] = (*PairDataConfig.names, "margin")

    margin: str | None = None


class RewardLossConfig(Group, key="loss"):
    """How the two scores of a pair are compared, see ``torchrl_llm.objectives.RewardLoss``.

    Attributes:
        centering: weight of the squared sum of the two scores, which keeps scores around 0
            (arXiv:2312.09244 uses 0.01); 0 for none.
    """

    centering: Annotated[float, Ge(0)] = 0.0


class RewardTrainingConfig(PairConfig):
    """All settings of ``reward-model.py``; ``seed`` also seeds the order of rows."""

    rates = SUPERVISED_RATES

    data: RewardDataConfig
    optimizer: OptimizerConfig = own(lr=None, scheduler="linear", warmup_steps=0.05)
    loss: RewardLossConfig
    logging: NumbersConfig = own(experiment_name="reward")

    def __post_init__(self) -> None:
        super().__post_init__()
        ensure(
            not self.train.kl_to_ref_coeff,
            "train.kl_to_ref_coeff has no effect: a reward model has no reference",
        )
        ensure(
            self.train_model.logprob_chunk_size is None,
            "train_model.logprob_chunk_size has no effect: a reward model makes no logits",
        )
        ensure(
            self.model.quantization is None,
            "model.quantization has no effect: a reward model is trained in full precision",
        )


def load_config(values: Mapping[str, Any]) -> RewardTrainingConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(RewardTrainingConfig, values)


def load_data(
    config: RewardTrainingConfig, tokenizer: Any, *, read_first: int = READ_FIRST
) -> Parts:
    """Read the pairs of ``data`` and check the first pairs; this needs no weights.

    Raises:
        DataError: missing or malformed data, or a row that cannot be learned from.
    """
    columns = PreferenceColumns.find(config.data.load()[0], **config.data.columns)
    ensure(
        columns.label is None,
        f"the rows have one answer with a label ({columns.label}), and a reward model learns from "
        "two: name data.chosen and data.rejected",
    )
    return parts_with(config, columns, tokenizer, read_first)


def make_scorer(config: RewardTrainingConfig, tokenizer: Any) -> ClassifierScorer:
    """The trained model, with its existing one-number head, or a new one."""
    wanted = config.train_model
    with naming("model.name"):
        model = modules.load_reward_model(
            config.model.name,
            tokenizer,
            dtype=wanted.dtype,
            attn_implementation=wanted.attn_implementation,
            gradient_checkpointing=wanted.gradient_checkpointing,
            lora=wanted.lora.arguments,
            device=device_of(config),
        )
        return ClassifierScorer(model.train(), layout=config.train.packing)


def make_learner(config: RewardTrainingConfig, scorer: ClassifierScorer) -> ClassifierScorer:
    """The trained module: the shards of the scorer with fsdp2, else the scorer itself."""
    if config.train.parallel != "fsdp2":
        return scorer
    (model,) = twin_of(scorer.model)
    learner = ClassifierScorer(model, layout=scorer.layout)
    spread(config, learner, scorer)
    return learner


@dataclass(frozen=True, kw_only=True)
class HeldOutPairs:
    """How well the model distinguishes held-out answers.

    Attributes:
        loss: Bradley-Terry, without margins and centering.
        accuracy: share of the pairs whose chosen answer has the larger score.
        margin: mean difference of the scores.
        score: mean of all scores.
        calibration_error: expected calibration error of the probability given by the margin.
    """

    loss: float
    accuracy: float
    margin: float
    score: float
    calibration_error: float
    conversations: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen_P: Tensor, rejected_P: Tensor) -> HeldOutPairs:
        """The result for the scores of pairs, ``[P]`` each."""
        margins = chosen_P - rejected_P
        return cls(
            loss=float(bradley_terry(chosen_P, rejected_P).mean()),
            accuracy=float((margins > 0).double().mean()),
            margin=float(margins.mean()),
            score=float((chosen_P + rejected_P).mean() / 2),
            calibration_error=float(calibration_error(margins)),
        )

    __repr__ = rounded_repr

    def metrics(self) -> dict[str, float]:
        """The numbers, named ``eval/...``."""
        names = ("loss", "accuracy", "margin", "score", "calibration_error")
        return {f"eval/{name}": getattr(self, name) for name in names}


def make_evaluation(
    config: RewardTrainingConfig, held_out: Preferences | None, scorer: ClassifierScorer
) -> Callable[[], HeldOutPairs] | None:
    """A function that measures how well the model distinguishes the held-out answers."""
    if held_out is None:
        return None
    pairs = [pair for pair in held_out if pair.is_whole]

    def run() -> HeldOutPairs:
        scores = [
            _scores(config, scorer, [pair.answers[side].token_ids for pair in pairs])
            for side in (0, 1)
        ]
        return HeldOutPairs.of(*scores)

    return run


@torch.no_grad()
def _scores(
    config: RewardTrainingConfig, scorer: ClassifierScorer, sequences: Sequence[Tensor]
) -> Tensor:
    lengths, budget = [len(ids) for ids in sequences], config.train.micro_token_budget
    parts = []
    with modules.sampling_mode(scorer.model), autocast(config):
        for piece in pieces_under_budget(range(len(sequences)), lengths, budget):
            rows = [sequences[row] for row in piece]
            parts.append(last_values(scorer, rows, pad_id=scorer.pad_id).cpu())
    return torch.cat(parts)
