from torchrl_llm.objectives.clipped_losses import (
    DAPO as DAPO,
    DAPOLossOutput as DAPOLossOutput,
    DrGRPOLoss as DrGRPOLoss,
    GRPOLoss as GRPOLoss,
    GRPOLossOutput as GRPOLossOutput,
    PPOLoss as PPOLoss,
    PPOLossOutput as PPOLossOutput,
)
from torchrl_llm.objectives.composite_loss import (
    CompositeLoss as CompositeLoss,
    CompositeLossOutput as CompositeLossOutput,
    CompositeNormalizer as CompositeNormalizer,
)
from torchrl_llm.objectives.correction import Correction as Correction
from torchrl_llm.objectives.credit import (
    BatchNormalizedReturn as BatchNormalizedReturn,
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
from torchrl_llm.objectives.distillation_losses import (
    DistillationLoss as DistillationLoss,
    DistillationLossOutput as DistillationLossOutput,
    OnPolicyDistillationLoss as OnPolicyDistillationLoss,
    OnPolicyDistillationLossOutput as OnPolicyDistillationLossOutput,
    k3_kl_token_estimate as k3_kl_token_estimate,
)
from torchrl_llm.objectives.invariance import (
    InvarianceReport as InvarianceReport,
    check_invariance as check_invariance,
)
from torchrl_llm.objectives.policy_loss import (
    PolicyGradientLoss as PolicyGradientLoss,
    PolicyLossOutput as PolicyLossOutput,
    PolicyLossSettings as PolicyLossSettings,
)
from torchrl_llm.objectives.sft import (
    SFTLoss as SFTLoss,
    SFTLossOutput as SFTLossOutput,
    minor_sft_loss as minor_sft_loss,
    sft_loss as sft_loss,
)
from torchrl_llm.objectives.surrogate_losses import (
    CISPOLoss as CISPOLoss,
    CISPOLossOutput as CISPOLossOutput,
    GMPOLoss as GMPOLoss,
    GSPOLoss as GSPOLoss,
    GSPOTokenLoss as GSPOTokenLoss,
    ReinforceLoss as ReinforceLoss,
    ReinforcePlusPlusLoss as ReinforcePlusPlusLoss,
    SAPOLoss as SAPOLoss,
    TOPRLoss as TOPRLoss,
)
from torchrl_llm.objectives.token_loss import LLMLossOutput as LLMLossOutput, TokenLoss as TokenLoss
