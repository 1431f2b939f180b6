"""Rewards: a base that makes failures data, one parser per task, and components to add up."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.rewards.answer_block": "AnswerBlockParser",
    "torchrl_llm.rewards.code": (
        "CodeProblem CodeResult CodeRewardParser CodeRunner HumanEvalRewardParser"
    ),
    "torchrl_llm.rewards.composite_reward": "CompositeReward TokenRewards WrittenReward",
    "torchrl_llm.rewards.form_rewards": "FormatReward LengthReward",
    "torchrl_llm.rewards.function_reward": "FunctionReward as_reward",
    "torchrl_llm.rewards.ifeval": "IFEvalData IFEvalScoreData IfEvalScorer",
    "torchrl_llm.rewards.judge": "JudgeReward read_score read_verdict",
    "torchrl_llm.rewards.math_reward": "MATHRewardParser",
    "torchrl_llm.rewards.number_rewards": (
        "ArithmeticRewardParser CountdownRewardParser GSM8KRewardParser"
    ),
    "torchrl_llm.rewards.reward_components": "Component",
    "torchrl_llm.rewards.reward_parser": "RewardParser",
    "torchrl_llm.rewards.reward_scorer": "BatchScorer RewardScore Sample Scorer",
    "torchrl_llm.rewards.text_models": (
        "EndpointGrader EndpointTextModel Grader ScriptedTextModel TextAnswer TextModel Usage "
        "WrapperGrader WrapperTextModel"
    ),
    "torchrl_llm.rewards.text_rewards": "ContainsReward ExactReward",
    "torchrl_llm.rewards.word_rewards": "LetterCountingRewardParser TextReversalRewardParser",
}
__getattr__ = lazy(__name__, _LAZY)
