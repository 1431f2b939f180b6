"""Divergence from a reference that scores the rows itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite

from torchrl_llm.data.kl_controllers import KLController
from torchrl_llm.data.row_transform import Path, RowView
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.envs.transforms.kl.kl_transform import KLReduction, KLTransform, Sources
from torchrl_llm.envs.transforms.retrieve_log_prob import RetrieveLogProb
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.kl import KLEstimator

_RECORDED = "from_collector"


class RetrieveKL(KLTransform):
    """Scores rows with a reference (and with a policy), measures and penalises the divergence.

    The reference's log-probs are kept under ``("next", *ref_log_probs_full_key)``, where losses
    look for them. For the reference take a second model, or the policy with its adapters off
    (:class:`~torchrl_llm.modules.AdapterDisabled`); for log-probs that are stored already take
    :class:`KLComputation`.

    Args:
        gen_model: ``"from_collector"``: the log-probs that the policy recorded when it sampled,
            which costs nothing; or a model that scores the rows again.
        ref_model: the reference.
        gen_model_factory: makes the model instead.
        ref_model_factory: makes the reference instead.
        assistant_only: score the assistant's tokens only, or all tokens with a prefix. What is
            penalised are the sampled ones either way.
        device: move the models there once.
        gen_log_probs_full_key: where the log-probs of the policy are, or go when a model scores:
            by default ``("log_probs", "full")`` in the row, or ``("gen_log_probs", "full")`` under
            ``"next"``.
        ref_log_probs_full_key: where those of the reference go.
        kl_key: see :class:`~torchrl_llm.envs.transforms.kl.kl_transform.KLTransform`, as for all
        others. add_to_reward: see there.
        coeff: see there.
        reduction: see there.
        estimator: see there.
        reward_key: see there.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.
        DataError: for rows that lack a column that is needed.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         return TokenScores(torch.full((sum(int(s.sum()) for s in select),), -0.75))
        >>> ids = torch.arange(3)
        >>> row = TensorDict(
        ...     tokens={"full": ids, "response": ids[1:]},
        ...     masks={"all_assistant_mask": ids > 0},
        ...     log_probs={"full": torch.tensor([0.0, -0.5, -0.5])},
        ...     next={"reward": torch.ones(1, 1)},
        ... )
        >>> RetrieveKL(ref_model=Coin(), coeff=0.1)(row)["next", "reward"].item()
        0.949999988079071
    """

    def __init__(
        self,
        gen_model: TokenScorer | Literal["from_collector"] = _RECORDED,
        ref_model: TokenScorer | None = None,
        *,
        gen_model_factory: Callable[[], TokenScorer] | None = None,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        assistant_only: bool = True,
        device: torch.device | str | None = None,
        gen_log_probs_full_key: NestedKey | None = None,
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: str = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | KLController = 1.0,
        reduction: KLReduction = "sum",
        estimator: KLEstimator = "k1",
        reward_key: NestedKey = ("next", "reward"),
    ) -> None:
        super().__init__(
            coeff=coeff,
            add_to_reward=add_to_reward,
            reduction=reduction,
            estimator=estimator,
            reward_key=reward_key,
            kl_key=kl_key,
        )
        if gen_model_factory is not None:
            if gen_model != _RECORDED:
                raise ConfigError("give gen_model or gen_model_factory, not both")
            gen_model = gen_model_factory()
        options = {"assistant_only": assistant_only, "device": device}
        self.reference = RetrieveLogProb(
            made(ref_model, ref_model_factory), log_probs_full_key=ref_log_probs_full_key, **options
        )
        self.generator = None
        self.gen_log_probs_full_key = gen_log_probs_full_key or ("log_probs", "full")
        if not isinstance(gen_model, str):
            self.gen_log_probs_full_key = gen_log_probs_full_key or ("gen_log_probs", "full")
            self.generator = RetrieveLogProb(
                gen_model, log_probs_full_key=self.gen_log_probs_full_key, **options
            )
        elif gen_model != _RECORDED:
            raise ConfigError(f"gen_model must be a model or {_RECORDED!r}, got {gen_model!r}")

    def sources(self, rows: RowView) -> Sources:
        """Scores of the reference, and of the policy or what it recorded."""
        columns = self.reference.columns(rows)
        if self.generator is None:
            gen = rows.read(self.gen_log_probs_full_key, "the policy writes it when it samples")
        else:
            own = self.generator.columns(rows)
            gen, columns = own[self.generator.written], {**columns, **own}
        return Sources(gen, columns[self.reference.written], columns)

    def _scored(self) -> list[RetrieveLogProb]:
        return [self.reference, *([] if self.generator is None else [self.generator])]

    def empty_columns(self) -> dict[Path, Tensor]:
        """No token has a log-prob or divergence yet."""
        empty = super().empty_columns()
        for part in self._scored():
            empty |= part.empty_columns()
        return empty

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds log-probs and divergences."""
        for part in self._scored():
            observation_spec = part.transform_observation_spec(observation_spec)
        return super().transform_observation_spec(observation_spec)


def made(model: TokenScorer | None, factory: Callable[[], TokenScorer] | None) -> TokenScorer:
    """A reference that is given, or made here.

    Args:
        model: the model.
        factory: makes one.

    Raises:
        ConfigError: unless there is exactly one of the two.
    """
    if (model is None) == (factory is None):
        raise ConfigError("give a reference: ref_model or ref_model_factory, and not both")
    return factory() if model is None else model
