from torchrl_llm.rewards.ifeval.ifeval_scorer import (
    IFEvalData as IFEvalData,
    IFEvalExample as IFEvalExample,
    IFEvalScoreData as IFEvalScoreData,
    IfEvalScorer as IfEvalScorer,
)
from torchrl_llm.rewards.ifeval.instructions import (
    INSTRUCTIONS as INSTRUCTIONS,
    Instruction as Instruction,
    Verdict as Verdict,
    check as check,
    instruction as instruction,
    loose_forms as loose_forms,
    verify as verify,
)
