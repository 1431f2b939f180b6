"""LLM post-training for TorchRL: tokens, log-probs and their record, from environment to loss.

Where to go: :mod:`torchrl_llm.envs` builds conversations, :mod:`torchrl_llm.modules` answers them,
:mod:`torchrl_llm.collectors` gathers rows, :mod:`torchrl_llm.data` stores them and
:mod:`torchrl_llm.objectives` turns them into losses.
"""

from __future__ import annotations

from torchrl_llm._moved import install as _install_moved

_install_moved()

__version__ = "0.1.0"
