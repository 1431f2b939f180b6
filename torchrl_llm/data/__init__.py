"""Data: conversations, tokens with their record, and the parts of replay buffers."""

from __future__ import annotations

from torchrl_llm._imports import lazy
from torchrl_llm.data.column import Chat, Column
from torchrl_llm.data.containers import (
    ChatHistory,
    LogProbs,
    Masks,
    Text,
    Tokens,
    TokenSupport,
    TokenTrace,
)
from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.history import ContentBase, History, add_chat_template, remove_chat_template
from torchrl_llm.data.kl_controllers import AdaptiveKLController, ConstantKLController, KLController
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.replay_buffers.group_sampler import PromptGroupSampler
from torchrl_llm.data.scoring import HeadStates, ScoreExtras, Support, TokenScorer, TokenScores
from torchrl_llm.data.token_facts import TokenFact, register_fact, unregister_fact

__all__ = [
    "AdaptiveKLController",
    "Chat",
    "ChatHistory",
    "Column",
    "ConstantKLController",
    "ContentBase",
    "FinishReason",
    "HeadStates",
    "History",
    "KLController",
    "LogProbs",
    "MaskReason",
    "Masks",
    "PairwiseDataset",
    "PromptData",
    "PromptGroupSampler",
    "PromptTensorDictTokenizer",
    "RewardData",
    "RolloutFromModel",
    "ScoreExtras",
    "Source",
    "Support",
    "TensorDictTokenizer",
    "Text",
    "TokenFact",
    "TokenRecord",
    "TokenScorer",
    "TokenScores",
    "TokenSupport",
    "TokenTrace",
    "TokenizedDatasetLoader",
    "Tokens",
    "TopKRewardSelector",
    "TorchRLBufferDataset",
    "TruncationReason",
    "add_chat_template",
    "create_infinite_iterator",
    "get_dataloader",
    "register_fact",
    "remove_chat_template",
    "unregister_fact",
]

_LAZY = {
    "torchrl_llm.compat.buffer_dataset": "TorchRLBufferDataset",
    "torchrl_llm.compat.prompt_data": "PromptData PromptTensorDictTokenizer",
    "torchrl_llm.compat.reward_data": "PairwiseDataset RewardData",
    "torchrl_llm.compat.rollout_from_model": "RolloutFromModel",
    "torchrl_llm.compat.tokenized_dataset": (
        "TensorDictTokenizer TokenizedDatasetLoader create_infinite_iterator get_dataloader "
    ),
    "torchrl_llm.compat.topk_selector": "TopKRewardSelector",
}
__getattr__ = lazy(__name__, _LAZY)
