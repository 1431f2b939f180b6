"""Credit: from rewards to advantages, as inverse transforms of a replay buffer."""

from __future__ import annotations

from torchrl_llm.objectives.credit.base import CreditAssigner
from torchrl_llm.objectives.credit.batch import BatchStatistics
from torchrl_llm.objectives.credit.comparing import ComparingCredit
from torchrl_llm.objectives.credit.gae import GAEAdvantage
from torchrl_llm.objectives.credit.group import (
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
)
from torchrl_llm.objectives.credit.normalized import BatchNormalizedReturn
from torchrl_llm.objectives.credit.ray import RayMCAdvantage
from torchrl_llm.objectives.credit.returns import (
    ConstantCredit,
    EpisodicReturn,
    MonteCarloReturn,
    PerStepReward,
)
from torchrl_llm.objectives.credit.selection import MCAdvantageSelector
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
