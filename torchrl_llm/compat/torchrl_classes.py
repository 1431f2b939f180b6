"""TorchRL's older data classes under paths of this package: tokenized datasets, roll-outs.

The classes come from the installed TorchRL, and are imported at first access; this package does not
use them. In this package, training data are rows of an environment
(:class:`~torchrl_llm.envs.DatasetChatEnv`) or
:class:`~torchrl_llm.data.demonstrations.Demonstrations`.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

lazy(__name__)

PROMPT_DATASET = "CarperAI/openai_summarize_tldr"
"""``DEFAULT_DATASET`` of TorchRL's ``prompt``."""
PAIR_DATASET = "CarperAI/openai_summarize_comparisons"
"""``DEFAULT_DATASET`` of TorchRL's ``reward``."""
