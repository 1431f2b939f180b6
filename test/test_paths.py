"""A TorchRL user's imports work after deleting ``.llm``."""

import importlib

import pytest

POLICIES = [
    "ChatHistory",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "Text",
    "Tokens",
    "TransformersWrapper",
    "vLLMWrapper",
]
PATHS = {
    "torchrl_llm.data": [
        "AdaptiveKLController",
        "ConstantKLController",
        "ContentBase",
        "History",
        "PairwiseDataset",
        "PromptData",
        "PromptGroupSampler",
        "PromptTensorDictTokenizer",
        "RewardData",
        "RolloutFromModel",
        "TensorDictTokenizer",
        "TokenizedDatasetLoader",
        "TopKRewardSelector",
        "TorchRLBufferDataset",
        "add_chat_template",
        "create_infinite_iterator",
        "get_dataloader",
    ],
    "torchrl_llm.data.dataset": [
        "TensorDictTokenizer",
        "TokenizedDatasetLoader",
        "create_infinite_iterator",
        "get_dataloader",
    ],
    "torchrl_llm.data.prompt": ["PromptData", "PromptTensorDictTokenizer"],
    "torchrl_llm.data.reward": ["PairwiseDataset", "RewardData", "pre_tokenization_hook"],
    "torchrl_llm.data.utils": ["AdaptiveKLController", "ConstantKLController", "RolloutFromModel"],
    "torchrl_llm.data.replay_buffers": ["PromptGroupSampler", "RayReplayBuffer"],
    "torchrl_llm.data.chat": ["History", "ContentBase", "add_chat_template"],
    "torchrl_llm.data.history": ["History", "ContentBase", "add_chat_template"],
    "torchrl_llm.modules": [*POLICIES, "HFRewardModelWrapper", "TorchRLBufferDataset"],
    "torchrl_llm.modules.policies": POLICIES,
    "torchrl_llm.envs": [
        "AddThinkingPrompt",
        "ChatEnv",
        "DataLoadingPrimer",
        "DatasetChatEnv",
        "GSM8KEnv",
        "GSM8KRewardParser",
        "KLComputation",
        "KLRewardTransform",
        "RayDataLoadingPrimer",
        "RetrieveKL",
        "RetrieveLogProb",
        "TemplateTransform",
        "Tokenizer",
        "as_nested_tensor",
        "as_padded_tensor",
    ],
    "torchrl_llm.envs.transforms": [
        "AddThinkingPrompt",
        "DataLoadingPrimer",
        "IncrementalTokenizer",
        "KLComputation",
        "KLRewardTransform",
        "PolicyVersion",
        "RayDataLoadingPrimer",
        "RetrieveKL",
        "RetrieveLogProb",
        "TemplateTransform",
        "Tokenizer",
        "as_nested_tensor",
        "as_padded_tensor",
    ],
    "torchrl_llm.collectors": ["LLMCollector", "RayLLMCollector"],
    "torchrl_llm.collectors.weight_update": ["vLLMUpdater", "vLLMUpdaterV2"],
    "torchrl_llm.objectives": [
        "CISPOLoss",
        "CISPOLossOutput",
        "DAPO",
        "DAPOLossOutput",
        "DistillationLoss",
        "DistillationLossOutput",
        "GRPOLoss",
        "GRPOLossOutput",
        "LLMLossOutput",
        "MCAdvantage",
        "MCAdvantageSelector",
        "RayMCAdvantage",
        "k3_kl_token_estimate",
        "SFTLoss",
        "SFTLossOutput",
    ],
}


@pytest.mark.parametrize("path", PATHS)
def test_the_names_are_where_they_were(path):
    module = importlib.import_module(path)
    # What `from module import *` gives: a file without __all__ gives its public names.
    public = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
    assert not [name for name in PATHS[path] if not hasattr(module, name) or name not in public]
