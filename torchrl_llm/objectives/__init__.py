"""Losses over rows of tokens, and the advantage estimators that go with them.

A loss reads rows and asks a :class:`~torchrl_llm.data.scoring.TokenScorer` for log-probs; it never
names a model class. Its mathematics lives in :mod:`torchrl_llm.functional`.
"""

from __future__ import annotations

from torchrl_llm.objectives.composite_loss import (
    CompositeLoss,
    CompositeLossOutput,
    CompositeNormalizer,
)
from torchrl_llm.objectives.correction import Correction
from torchrl_llm.objectives.credit import (
    BatchNormalizedReturn,
    ConstantCredit,
    CreditAssigner,
    EpisodicReturn,
    GAEAdvantage,
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
    MCAdvantageSelector,
    MonteCarloReturn,
    PerStepReward,
    RayMCAdvantage,
    SPOAdvantage,
    TeacherKL,
)
from torchrl_llm.objectives.distillation_losses import (
    DistillationLoss,
    DistillationLossOutput,
    OnPolicyDistillationLoss,
    OnPolicyDistillationLossOutput,
    k3_kl_token_estimate,
)
from torchrl_llm.objectives.grpo import (
    DAPO,
    DAPOLossOutput,
    DrGRPOLoss,
    GRPOLoss,
    GRPOLossOutput,
)
from torchrl_llm.objectives.invariance import InvarianceReport, check_invariance
from torchrl_llm.objectives.policy_loss import (
    PolicyGradientLoss,
    PolicyLossOutput,
    PolicyLossSettings,
)
from torchrl_llm.objectives.ppo import PPOLoss, PPOLossOutput
from torchrl_llm.objectives.sft import SFTLoss, SFTLossOutput, minor_sft_loss, sft_loss
from torchrl_llm.objectives.surrogate_losses import (
    CISPOLoss,
    CISPOLossOutput,
    GMPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    ReinforceLoss,
    ReinforcePlusPlusLoss,
    SAPOLoss,
    TOPRLoss,
)
from torchrl_llm.objectives.token_loss import LLMLossOutput, TokenLoss

__all__ = [
    "DAPO",
    "BatchNormalizedReturn",
    "CISPOLoss",
    "CISPOLossOutput",
    "CompositeLoss",
    "CompositeLossOutput",
    "CompositeNormalizer",
    "ConstantCredit",
    "Correction",
    "CreditAssigner",
    "DAPOLossOutput",
    "DistillationLoss",
    "DistillationLossOutput",
    "DrGRPOLoss",
    "EpisodicReturn",
    "GAEAdvantage",
    "GMPOLoss",
    "GRPOLoss",
    "GRPOLossOutput",
    "GSPOLoss",
    "GSPOTokenLoss",
    "HybridNormalizedReturn",
    "InvarianceReport",
    "LLMLossOutput",
    "LeaveOneOutAdvantage",
    "MCAdvantage",
    "MCAdvantageSelector",
    "MonteCarloReturn",
    "OnPolicyDistillationLoss",
    "OnPolicyDistillationLossOutput",
    "PPOLoss",
    "PPOLossOutput",
    "PerStepReward",
    "PolicyGradientLoss",
    "PolicyLossOutput",
    "PolicyLossSettings",
    "RayMCAdvantage",
    "ReinforceLoss",
    "ReinforcePlusPlusLoss",
    "SAPOLoss",
    "SFTLoss",
    "SFTLossOutput",
    "SPOAdvantage",
    "TOPRLoss",
    "TeacherKL",
    "TokenLoss",
    "check_invariance",
    "k3_kl_token_estimate",
    "minor_sft_loss",
    "sft_loss",
]
