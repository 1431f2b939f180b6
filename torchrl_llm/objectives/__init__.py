"""Losses over rows of tokens, and the advantage estimators that go with them.

A loss reads rows and asks a :class:`~torchrl_llm.data.scoring.TokenScorer` for log-probs; it never
names a model class. Its mathematics lives in :mod:`torchrl_llm.functional`.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.objectives.composite_loss": (
        "CompositeLoss CompositeLossOutput CompositeNormalizer"
    ),
    "torchrl_llm.objectives.correction": "Correction",
    "torchrl_llm.objectives.credit": (
        "BatchNormalizedReturn ConstantCredit CreditAssigner EpisodicReturn GAEAdvantage "
        "HybridNormalizedReturn LeaveOneOutAdvantage MCAdvantage MCAdvantageSelector "
        "MonteCarloReturn PerStepReward RayMCAdvantage SPOAdvantage TeacherKL"
    ),
    "torchrl_llm.objectives.distillation_losses": (
        "DistillationLoss DistillationLossOutput OnPolicyDistillationLoss "
        "OnPolicyDistillationLossOutput k3_kl_token_estimate"
    ),
    "torchrl_llm.objectives.clipped_losses": (
        "DAPO DAPOLossOutput DrGRPOLoss GRPOLoss GRPOLossOutput PPOLoss PPOLossOutput"
    ),
    "torchrl_llm.objectives.invariance": "InvarianceReport check_invariance",
    "torchrl_llm.objectives.policy_loss": "PolicyGradientLoss PolicyLossOutput PolicyLossSettings",
    "torchrl_llm.objectives.sft": "SFTLoss SFTLossOutput minor_sft_loss sft_loss",
    "torchrl_llm.objectives.surrogate_losses": (
        "CISPOLoss CISPOLossOutput GMPOLoss GSPOLoss GSPOTokenLoss ReinforceLoss "
        "ReinforcePlusPlusLoss SAPOLoss TOPRLoss"
    ),
    "torchrl_llm.objectives.token_loss": "LLMLossOutput TokenLoss",
}
__getattr__ = lazy(__name__, _LAZY)
