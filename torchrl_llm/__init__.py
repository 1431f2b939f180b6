"""LLM post-training for TorchRL: tokens, log-probs and their record, from environment to loss.

Where to go: :mod:`torchrl_llm.envs` builds conversations, :mod:`torchrl_llm.modules` answers them,
:mod:`torchrl_llm.collectors` gathers rows, :mod:`torchrl_llm.data` stores them and
:mod:`torchrl_llm.objectives` turns them into losses. :class:`GRPO` runs all of it on your own model
and data, and :class:`SFT` fine-tunes a model on your conversations.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy as _lazy
from torchrl_llm._moved import install as _install_moved

_install_moved()
__getattr__ = _lazy(__name__, {"torchrl_llm.recipes.front": "GRPO SFT"})

__version__ = "0.1.0"
