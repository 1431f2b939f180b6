"""Credit: from rewards to advantages, as inverse transforms of a replay buffer."""

from __future__ import annotations

from torchrl_llm.objectives.credit.comparing import ComparingCredit, MCAdvantageSelector
from torchrl_llm.objectives.credit.credit_assigner import BatchStatistics, CreditAssigner
from torchrl_llm.objectives.credit.gae_credit import GAEAdvantage
from torchrl_llm.objectives.credit.group_credit import (
    BatchNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
    RayMCAdvantage,
)
from torchrl_llm.objectives.credit.return_credit import (
    ConstantCredit,
    EpisodicReturn,
    MonteCarloReturn,
    PerStepReward,
)
from torchrl_llm.objectives.credit.spo import SPOAdvantage
from torchrl_llm.objectives.credit.teacher import TeacherKL

__all__ = [
    "BatchNormalizedReturn",
    "BatchStatistics",
    "ComparingCredit",
    "ConstantCredit",
    "CreditAssigner",
    "EpisodicReturn",
    "GAEAdvantage",
    "HybridNormalizedReturn",
    "LeaveOneOutAdvantage",
    "MCAdvantage",
    "MCAdvantageSelector",
    "MonteCarloReturn",
    "PerStepReward",
    "RayMCAdvantage",
    "SPOAdvantage",
    "TeacherKL",
]
