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
    "torchrl_llm.data": ["History", "ContentBase", "add_chat_template", "TopKRewardSelector"],
    "torchrl_llm.data.chat": ["History", "ContentBase", "add_chat_template"],
    "torchrl_llm.data.history": ["History", "ContentBase", "add_chat_template"],
    "torchrl_llm.modules": POLICIES,
    "torchrl_llm.modules.policies": POLICIES,
    "torchrl_llm.envs": ["ChatEnv", "DatasetChatEnv", "GSM8KEnv", "GSM8KRewardParser"],
    "torchrl_llm.envs.transforms": [
        "DataLoadingPrimer",
        "PolicyVersion",
        "RetrieveLogProb",
        "as_nested_tensor",
        "as_padded_tensor",
    ],
    "torchrl_llm.collectors": ["LLMCollector", "RayLLMCollector"],
    "torchrl_llm.collectors.weight_update": ["vLLMUpdater", "vLLMUpdaterV2"],
    "torchrl_llm.objectives": [
        "GRPOLoss",
        "GRPOLossOutput",
        "MCAdvantage",
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
