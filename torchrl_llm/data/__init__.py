"""Data: conversations, tokens with their record, and the parts of replay buffers."""

from __future__ import annotations

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
from torchrl_llm.data.dataset import (
    TensorDictTokenizer,
    TokenizedDatasetLoader,
    create_infinite_iterator,
    get_dataloader,
)
from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.history import (
    ContentBase,
    History,
    add_chat_template,
    remove_chat_template,
)
from torchrl_llm.data.interop import TorchRLBufferDataset
from torchrl_llm.data.kl_controllers import AdaptiveKLController, ConstantKLController, KLController
from torchrl_llm.data.prompt import PromptData, PromptTensorDictTokenizer
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.replay_buffers.sampler import PromptGroupSampler
from torchrl_llm.data.reward import PairwiseDataset, RewardData
from torchrl_llm.data.rollout_from_model import RolloutFromModel
from torchrl_llm.data.scoring import HeadStates, ScoreExtras, Support, TokenScorer, TokenScores
from torchrl_llm.data.topk import TopKRewardSelector

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
    "remove_chat_template",
]
