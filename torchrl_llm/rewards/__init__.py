"""Rewards: a base that makes failures data, one parser per task, and components to add up."""

from torchrl_llm.rewards.answer_block import AnswerBlockParser
from torchrl_llm.rewards.arithmetic import ArithmeticRewardParser
from torchrl_llm.rewards.code import (
    CodeProblem,
    CodeResult,
    CodeRewardParser,
    CodeRunner,
    HumanEvalRewardParser,
)
from torchrl_llm.rewards.composite_reward import CompositeReward
from torchrl_llm.rewards.countdown import CountdownRewardParser
from torchrl_llm.rewards.format_reward import FormatReward
from torchrl_llm.rewards.graders import EndpointGrader, WrapperGrader
from torchrl_llm.rewards.gsm8k import GSM8KRewardParser
from torchrl_llm.rewards.ifeval import IFEvalData, IFEvalScoreData, IfEvalScorer
from torchrl_llm.rewards.judge import Grader, JudgeReward, read_score, read_verdict
from torchrl_llm.rewards.length_penalty import LengthReward
from torchrl_llm.rewards.letter_counting import LetterCountingRewardParser
from torchrl_llm.rewards.math import MATHRewardParser
from torchrl_llm.rewards.reward_components import BatchScorer, Component, Sample, Scorer
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.text_reversal import TextReversalRewardParser
from torchrl_llm.rewards.token_rewards import TokenRewards
from torchrl_llm.rewards.written_reward import WrittenReward

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
