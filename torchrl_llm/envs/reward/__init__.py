"""Rewards: a base that makes failures data, one parser per task, and components to add up."""

from torchrl_llm.envs.reward.answer_block import AnswerBlockParser
from torchrl_llm.envs.reward.arithmetic import ArithmeticRewardParser
from torchrl_llm.envs.reward.base import RewardParser, RewardScore
from torchrl_llm.envs.reward.code import CodeProblem, CodeResult, CodeRewardParser, CodeRunner
from torchrl_llm.envs.reward.components import BatchScorer, Component, Sample, Scorer
from torchrl_llm.envs.reward.composite import CompositeReward
from torchrl_llm.envs.reward.countdown import CountdownRewardParser
from torchrl_llm.envs.reward.format import FormatReward
from torchrl_llm.envs.reward.graders import EndpointGrader, WrapperGrader
from torchrl_llm.envs.reward.gsm8k import GSM8KRewardParser
from torchrl_llm.envs.reward.humaneval import HumanEvalRewardParser
from torchrl_llm.envs.reward.ifeval import IFEvalData, IFEvalScoreData, IfEvalScorer
from torchrl_llm.envs.reward.judge import Grader, JudgeReward, read_score, read_verdict
from torchrl_llm.envs.reward.length import LengthReward
from torchrl_llm.envs.reward.letter_counting import LetterCountingRewardParser
from torchrl_llm.envs.reward.math import MATHRewardParser
from torchrl_llm.envs.reward.text_reversal import TextReversalRewardParser
from torchrl_llm.envs.reward.token_rewards import TokenRewards
from torchrl_llm.envs.reward.written import WrittenReward

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
