from torchrl_llm.objectives.answer_loss import (
    AnswerLoss as AnswerLoss,
    PairLoss as PairLoss,
    PairLossOutput as PairLossOutput,
    answer_log_probs as answer_log_probs,
)
from torchrl_llm.objectives.cispo import CISPOLoss as CISPOLoss, CISPOLossOutput as CISPOLossOutput
from torchrl_llm.objectives.composite_loss import (
    CompositeLoss as CompositeLoss,
    CompositeLossOutput as CompositeLossOutput,
    CompositeNormalizer as CompositeNormalizer,
)
from torchrl_llm.objectives.correction import Correction as Correction
from torchrl_llm.objectives.cpo import (
    CPOLoss as CPOLoss,
    ORPOLoss as ORPOLoss,
    SimPOLoss as SimPOLoss,
)
from torchrl_llm.objectives.credit import (
    BatchNormalizedReturn as BatchNormalizedReturn,
    BestWorst as BestWorst,
    ConstantCredit as ConstantCredit,
    CreditAssigner as CreditAssigner,
    EpisodicReturn as EpisodicReturn,
    GAEAdvantage as GAEAdvantage,
    HybridNormalizedReturn as HybridNormalizedReturn,
    LeaveOneOutAdvantage as LeaveOneOutAdvantage,
    MCAdvantage as MCAdvantage,
    MCAdvantageSelector as MCAdvantageSelector,
    MonteCarloReturn as MonteCarloReturn,
    PerStepReward as PerStepReward,
    RayMCAdvantage as RayMCAdvantage,
    SPOAdvantage as SPOAdvantage,
    TeacherKL as TeacherKL,
)
from torchrl_llm.objectives.dapo import DAPO as DAPO, DAPOLossOutput as DAPOLossOutput
from torchrl_llm.objectives.distillation import (
    DistillationLoss as DistillationLoss,
    DistillationLossOutput as DistillationLossOutput,
    k3_kl_token_estimate as k3_kl_token_estimate,
)
from torchrl_llm.objectives.dpo import DPOLoss as DPOLoss
from torchrl_llm.objectives.dr_grpo import DrGRPOLoss as DrGRPOLoss
from torchrl_llm.objectives.gmpo import GMPOLoss as GMPOLoss
from torchrl_llm.objectives.grpo import GRPOLoss as GRPOLoss, GRPOLossOutput as GRPOLossOutput
from torchrl_llm.objectives.gspo import GSPOLoss as GSPOLoss, GSPOTokenLoss as GSPOTokenLoss
from torchrl_llm.objectives.invariance import (
    InvarianceReport as InvarianceReport,
    check_invariance as check_invariance,
)
from torchrl_llm.objectives.kto import (
    KTOLoss as KTOLoss,
    KTOLossOutput as KTOLossOutput,
    mismatched as mismatched,
)
from torchrl_llm.objectives.on_policy_distillation import (
    OnPolicyDistillationLoss as OnPolicyDistillationLoss,
    OnPolicyDistillationLossOutput as OnPolicyDistillationLossOutput,
)
from torchrl_llm.objectives.online_dpo import OnlineDPOLoss as OnlineDPOLoss
from torchrl_llm.objectives.policy_loss import (
    PolicyGradientLoss as PolicyGradientLoss,
    PolicyLossOutput as PolicyLossOutput,
    PolicyLossSettings as PolicyLossSettings,
)
from torchrl_llm.objectives.ppo import PPOLoss as PPOLoss, PPOLossOutput as PPOLossOutput
from torchrl_llm.objectives.reinforce import ReinforceLoss as ReinforceLoss
from torchrl_llm.objectives.reinforce_plus_plus import (
    ReinforcePlusPlusLoss as ReinforcePlusPlusLoss,
)
from torchrl_llm.objectives.reward import (
    RewardLoss as RewardLoss,
    RewardLossOutput as RewardLossOutput,
)
from torchrl_llm.objectives.sapo import SAPOLoss as SAPOLoss
from torchrl_llm.objectives.sft import (
    SFTLoss as SFTLoss,
    SFTLossOutput as SFTLossOutput,
    minor_sft_loss as minor_sft_loss,
    sft_loss as sft_loss,
)
from torchrl_llm.objectives.token_loss import LLMLossOutput as LLMLossOutput, TokenLoss as TokenLoss
from torchrl_llm.objectives.topr import TOPRLoss as TOPRLoss
