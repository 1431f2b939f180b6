"""Losses of pairs without a reference: CPO, SimPO and ORPO."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.functional.preferences import log_odds
from torchrl_llm.objectives.answer_loss import Answers, PairLoss, SFTTokens


@register("preference_losses", "cpo")
class CPOLoss(PairLoss):
    r"""Contrastive preference optimization: compares a pair's log-probs, plus cross-entropy.

    arXiv:2401.08417, :math:`-\log \sigma(\beta (\log \pi_c - \log \pi_r))` plus the cross-entropy
    of the chosen answer, which takes the role of DPO's reference. With ``form="ipo"`` it compares
    means per token.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        sft_coeff: weight of the cross-entropy of the chosen answers; TRL's ``cpo_alpha``.
        **settings: further arguments of :class:`~torchrl_llm.objectives.PairLoss`.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> from torchrl_llm.modules import load_model
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> CPOLoss(CausalScorer(load_model())).sft_coeff
        1.0
    """

    def __init__(
        self, actor_network: nn.Module | TokenScorer, *, sft_coeff: float = 1.0, **settings: Any
    ) -> None:
        super().__init__(actor_network, sft_coeff=sft_coeff, **settings)

    def compared(self, answers: Answers) -> Tensor:
        """Return the log-prob of each answer; for IPO, its mean per token."""
        return answers.log_prob / answers.length if self.form == "ipo" else answers.log_prob


@register("preference_losses", "simpo")
class SimPOLoss(PairLoss):
    r"""SimPO, :math:`-\log \sigma(\beta (m_c - m_r) - \gamma)` of the mean log-probs per token.

    arXiv:2405.14734. In TRL this is ``CPOTrainer`` with ``loss_type="simpo"``, ``cpo_alpha=0``, and
    ``simpo_gamma`` is ``target_margin``.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        beta: slope.
        target_margin: :math:`\gamma`, target difference of the implicit rewards.
        label_smoothing: share of pairs whose answers are assumed to be swapped.
        sft_coeff: weight of the cross-entropy of the chosen answers; 0 for none.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> from torchrl_llm.modules import load_model
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> SimPOLoss(CausalScorer(load_model())).target_margin
        1.0
    """

    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        beta: float = 2.0,
        target_margin: float = 1.0,
        label_smoothing: float = 0.0,
        sft_coeff: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            beta=beta,
            target_margin=target_margin,
            label_smoothing=label_smoothing,
            sft_coeff=sft_coeff,
            device=device,
        )

    def compared(self, answers: Answers) -> Tensor:
        """Return the mean log-prob per token of each answer."""
        return answers.log_prob / answers.length


@register("preference_losses", "orpo")
class ORPOLoss(PairLoss):
    r"""ORPO: the cross-entropy of the chosen answer, and the odds ratio of the pair.

    arXiv:2403.07691. The loss is :math:`\lambda (-\log \sigma(o_c - o_r))` plus the cross-entropy,
    where :math:`o` are the log-odds of the mean log-prob per token. In TRL and in the authors'
    code, the cross-entropy includes the tokens of the prompt: ``sft_tokens="conversation"``.

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        odds_coeff: :math:`\lambda`, the weight of the odds ratio; TRL's ``beta``.
        sft_coeff: weight of the cross-entropy of the chosen answers.
        sft_tokens: tokens of that cross-entropy: the ``"answer"``, or the whole ``"conversation"``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> from torchrl_llm.modules import load_model
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> ORPOLoss(CausalScorer(load_model())).sft_coeff
        1.0
    """

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        *,
        odds_coeff: Annotated[float, Gt(0)] = 0.1,
        sft_coeff: Annotated[float, Ge(0)] = 1.0,
        sft_tokens: SFTTokens = "answer",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            actor_network, beta=1.0, sft_coeff=sft_coeff, sft_tokens=sft_tokens, device=device
        )
        self.pair_coeff = float(odds_coeff)

    def compared(self, answers: Answers) -> Tensor:
        """Return the log-odds of the mean log-prob per token of each answer."""
        return log_odds(answers.log_prob / answers.length)
