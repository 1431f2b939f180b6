"""LLM post-training for TorchRL: conversations, policies, collectors, data and losses.

Overview: :mod:`torchrl_llm.envs` builds conversations, :mod:`torchrl_llm.modules` answers them,
:mod:`torchrl_llm.collectors` gathers rows, :mod:`torchrl_llm.data` stores them and
:mod:`torchrl_llm.objectives` turns them into losses. :class:`GRPO` runs all of it on your own model
and data, and :class:`SFT` fine-tunes a model on your conversations.
"""

from __future__ import annotations

import logging as _logging

from torchrl_llm._imports import lazy as _lazy
from torchrl_llm._moved import install as _install_moved
from torchrl_llm._run_log import clean_record as _clean_record

_install_moved()
_logging.getLogger("torchrl").addFilter(_clean_record)  # messages logged here go there
_lazy(__name__)

__version__ = "0.1.0"
