from torchrl_llm.rewards.answer_block import AnswerBlockParser as AnswerBlockParser
from torchrl_llm.rewards.code import (
    CodeProblem as CodeProblem,
    CodeResult as CodeResult,
    CodeRewardParser as CodeRewardParser,
    CodeRunner as CodeRunner,
    FilesRewardParser as FilesRewardParser,
    HumanEvalRewardParser as HumanEvalRewardParser,
)
from torchrl_llm.rewards.composite_reward import (
    CompositeReward as CompositeReward,
    TokenRewards as TokenRewards,
    WrittenReward as WrittenReward,
)
from torchrl_llm.rewards.form_rewards import (
    FormatReward as FormatReward,
    LengthReward as LengthReward,
)
from torchrl_llm.rewards.function_reward import (
    FunctionReward as FunctionReward,
    as_reward as as_reward,
)
from torchrl_llm.rewards.ifeval import (
    IFEvalData as IFEvalData,
    IFEvalScoreData as IFEvalScoreData,
    IfEvalScorer as IfEvalScorer,
)
from torchrl_llm.rewards.judge import (
    JudgeReward as JudgeReward,
    read_score as read_score,
    read_verdict as read_verdict,
)
from torchrl_llm.rewards.math_reward import MATHRewardParser as MATHRewardParser
from torchrl_llm.rewards.model_reward import ModelReward as ModelReward
from torchrl_llm.rewards.number_rewards import (
    ArithmeticRewardParser as ArithmeticRewardParser,
    CountdownRewardParser as CountdownRewardParser,
    GSM8KRewardParser as GSM8KRewardParser,
)
from torchrl_llm.rewards.reward_components import Component as Component
from torchrl_llm.rewards.reward_parser import RewardParser as RewardParser
from torchrl_llm.rewards.reward_scorer import (
    BatchScorer as BatchScorer,
    RewardScore as RewardScore,
    Sample as Sample,
    Scorer as Scorer,
)
from torchrl_llm.rewards.text_models import (
    EndpointTextModel as EndpointTextModel,
    ScriptedTextModel as ScriptedTextModel,
    TextAnswer as TextAnswer,
    TextModel as TextModel,
    Usage as Usage,
    WrapperTextModel as WrapperTextModel,
)
from torchrl_llm.rewards.text_rewards import (
    ContainsReward as ContainsReward,
    ExactReward as ExactReward,
)
from torchrl_llm.rewards.word_rewards import (
    LetterCountingRewardParser as LetterCountingRewardParser,
    TextReversalRewardParser as TextReversalRewardParser,
)
