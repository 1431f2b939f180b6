"""Credit: from rewards to advantages, as inverse transforms of a replay buffer."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.objectives.credit.comparing": (
        "ComparingCredit ComparingOptions MCAdvantageSelector"
    ),
    "torchrl_llm.objectives.credit.credit_assigner": "BatchStatistics CreditAssigner CreditOptions",
    "torchrl_llm.objectives.credit.group_credit": (
        "BatchNormalizedReturn HybridNormalizedReturn LeaveOneOutAdvantage MCAdvantage "
        "RayMCAdvantage"
    ),
    "torchrl_llm.objectives.credit.return_credit": (
        "ConstantCredit EpisodicReturn GAEAdvantage MonteCarloReturn PerStepReward"
    ),
    "torchrl_llm.objectives.credit.spo": "SPOAdvantage",
    "torchrl_llm.objectives.credit.teacher": "TeacherKL",
}
__getattr__ = lazy(__name__, _LAZY)
