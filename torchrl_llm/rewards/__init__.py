"""Rewards: a base that makes failures data, one parser per task, and components to add up."""

from torchrl_llm.rewards.answer_block import AnswerBlockParser
from torchrl_llm.rewards.code import (
    CodeProblem,
    CodeResult,
    CodeRewardParser,
    CodeRunner,
    HumanEvalRewardParser,
)
from torchrl_llm.rewards.composite_reward import CompositeReward, TokenRewards, WrittenReward
from torchrl_llm.rewards.form_rewards import FormatReward, LengthReward
from torchrl_llm.rewards.ifeval import IFEvalData, IFEvalScoreData, IfEvalScorer
from torchrl_llm.rewards.judge import (
    EndpointGrader,
    Grader,
    JudgeReward,
    WrapperGrader,
    read_score,
    read_verdict,
)
from torchrl_llm.rewards.math_reward import MATHRewardParser
from torchrl_llm.rewards.number_rewards import (
    ArithmeticRewardParser,
    CountdownRewardParser,
    GSM8KRewardParser,
)
from torchrl_llm.rewards.reward_components import BatchScorer, Component, Sample, Scorer
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.word_rewards import LetterCountingRewardParser, TextReversalRewardParser

__all__ = [
    "AnswerBlockParser",
    "ArithmeticRewardParser",
    "BatchScorer",
    "CodeProblem",
    "CodeResult",
    "CodeRewardParser",
    "CodeRunner",
    "Component",
    "CompositeReward",
    "CountdownRewardParser",
    "EndpointGrader",
    "FormatReward",
    "GSM8KRewardParser",
    "Grader",
    "HumanEvalRewardParser",
    "IFEvalData",
    "IFEvalScoreData",
    "IfEvalScorer",
    "JudgeReward",
    "LengthReward",
    "LetterCountingRewardParser",
    "MATHRewardParser",
    "RewardParser",
    "RewardScore",
    "Sample",
    "Scorer",
    "TextReversalRewardParser",
    "TokenRewards",
    "WrapperGrader",
    "WrittenReward",
    "read_score",
    "read_verdict",
]
