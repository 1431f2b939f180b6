from torchrl_llm.objectives.credit.best_worst import BestWorst as BestWorst
from torchrl_llm.objectives.credit.comparing import (
    ComparingCredit as ComparingCredit,
    ComparingOptions as ComparingOptions,
    MCAdvantageSelector as MCAdvantageSelector,
)
from torchrl_llm.objectives.credit.credit_assigner import (
    BatchStatistics as BatchStatistics,
    CreditAssigner as CreditAssigner,
    CreditOptions as CreditOptions,
)
from torchrl_llm.objectives.credit.group_credit import (
    BatchNormalizedReturn as BatchNormalizedReturn,
    HybridNormalizedReturn as HybridNormalizedReturn,
    LeaveOneOutAdvantage as LeaveOneOutAdvantage,
    MCAdvantage as MCAdvantage,
    RayMCAdvantage as RayMCAdvantage,
)
from torchrl_llm.objectives.credit.return_credit import (
    ConstantCredit as ConstantCredit,
    EpisodicReturn as EpisodicReturn,
    GAEAdvantage as GAEAdvantage,
    MonteCarloReturn as MonteCarloReturn,
    PerStepReward as PerStepReward,
)
from torchrl_llm.objectives.credit.spo import SPOAdvantage as SPOAdvantage
from torchrl_llm.objectives.credit.teacher import TeacherKL as TeacherKL
