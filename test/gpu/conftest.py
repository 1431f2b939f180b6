"""The device of the tests with the marker ``gpu``."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    """CUDA; the CPU in a rehearsal, which goes through the same code."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TORCHRL_LLM_REHEARSE") == "cpu":
        return torch.device("cpu")
    pytest.skip("needs CUDA; run pytest -m gpu there, or with TORCHRL_LLM_REHEARSE=cpu anywhere")


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    """Of weights and states."""
    return getattr(torch, request.param)
