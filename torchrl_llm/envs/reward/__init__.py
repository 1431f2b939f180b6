"""Rewards: a base that makes failures data, and one parser per task."""

from torchrl_llm.envs.reward.answer_block import AnswerBlockParser
from torchrl_llm.envs.reward.arithmetic import ArithmeticRewardParser
from torchrl_llm.envs.reward.base import RewardParser, RewardScore
from torchrl_llm.envs.reward.countdown import CountdownRewardParser
from torchrl_llm.envs.reward.gsm8k import GSM8KRewardParser
from torchrl_llm.envs.reward.ifeval import IFEvalData, IFEvalScoreData, IfEvalScorer
from torchrl_llm.envs.reward.math import MATHRewardParser

__all__ = [
    "AnswerBlockParser",
    "ArithmeticRewardParser",
    "CountdownRewardParser",
    "GSM8KRewardParser",
    "IFEvalData",
    "IFEvalScoreData",
    "IfEvalScorer",
    "MATHRewardParser",
    "RewardParser",
    "RewardScore",
]
