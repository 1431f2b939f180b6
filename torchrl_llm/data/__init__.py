"""Data: conversations, tokens with their record, and the parts of replay buffers."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.compat.buffer_dataset": "TorchRLBufferDataset",
    "torchrl_llm.compat.topk_selector": "TopKRewardSelector",
    "torchrl_llm.compat.torchrl_classes": (
        "create_infinite_iterator get_dataloader PairwiseDataset PromptData "
        "PromptTensorDictTokenizer RewardData RolloutFromModel TensorDictTokenizer "
        "TokenizedDatasetLoader"
    ),
    "torchrl_llm.data.chat": "Chat",
    "torchrl_llm.data.column": "Column",
    "torchrl_llm.data.views": "ChatHistory LogProbs Masks Text Tokens TokenSupport TokenTrace",
    "torchrl_llm.data.enums": "FinishReason MaskReason Source TruncationReason",
    "torchrl_llm.data.history": "add_chat_template ContentBase History remove_chat_template",
    "torchrl_llm.data.kl_controllers": "AdaptiveKLController ConstantKLController KLController",
    "torchrl_llm.data.record": "TokenRecord",
    "torchrl_llm.data.replay_buffers.group_sampler": "PromptGroupSampler",
    "torchrl_llm.data.rollout_store": "RolloutStore RolloutWriter",
    "torchrl_llm.data.scoring": "HeadStates ScoreExtras Support TokenScorer TokenScores",
    "torchrl_llm.data.token_facts": "register_fact TokenFact unregister_fact",
}
__getattr__ = lazy(__name__, _LAZY)
