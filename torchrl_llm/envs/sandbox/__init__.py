"""Sandboxes: running code that a model wrote, apart from the trainer and its machine.

:func:`make_sandbox` chooses; each sandbox is also constructed by its own name.
"""

from __future__ import annotations

from typing import Literal

from torchrl_llm.envs.sandbox.base import Limits, Sandbox, SandboxResult, SandboxSession
from torchrl_llm.envs.sandbox.bubblewrap import BubblewrapSandbox

__all__ = [
    "BubblewrapSandbox",
    "Limits",
    "Sandbox",
    "SandboxResult",
    "SandboxSession",
    "make_sandbox",
]


def make_sandbox(
    kind: Literal["auto", "bubblewrap"] = "auto", limits: Limits | None = None
) -> Sandbox:
    return BubblewrapSandbox(limits)
