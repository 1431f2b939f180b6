"""Fixtures of the tests that want a GPU."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device():
    """The GPU; the CPU in a rehearsal (``TORCHRL_LLM_REHEARSE=cpu``)."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if os.environ.get("TORCHRL_LLM_REHEARSE") == "cpu":
        return torch.device("cpu")
    pytest.skip("needs a GPU")
