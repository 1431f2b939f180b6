"""A TorchRL user's imports work after deleting ``.llm``."""

from __future__ import annotations

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
        "PromptGroupSampler",
        "TopKRewardSelector",
        "TorchRLBufferDataset",
        "add_chat_template",
    ],
    "torchrl_llm.data.replay_buffers": ["PromptGroupSampler", "RayReplayBuffer"],
    "torchrl_llm.data.chat": ["History", "ContentBase", "add_chat_template"],
    "torchrl_llm.data.history": ["History", "ContentBase", "add_chat_template"],
    "torchrl_llm.modules": [*POLICIES, "HFRewardModelWrapper", "TorchRLBufferDataset"],
    "torchrl_llm.modules.policies": POLICIES,
    "torchrl_llm.envs": [
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
        "as_nested_tensor",
        "as_padded_tensor",
    ],
    "torchrl_llm.envs.transforms": [
        "DataLoadingPrimer",
        "KLComputation",
        "KLRewardTransform",
        "PolicyVersion",
        "RayDataLoadingPrimer",
        "RetrieveKL",
        "RetrieveLogProb",
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
    missing = [name for name in PATHS[path] if not hasattr(module, name)]
    assert not missing
    assert set(PATHS[path]) <= set(module.__all__)
