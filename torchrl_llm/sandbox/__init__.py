"""Sandboxes, which run a model's code isolated from the trainer and its machine.

:func:`make_sandbox` chooses a kind; each class can also be constructed directly.
"""

from __future__ import annotations

from typing import Literal

from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox.bubblewrap import BubblewrapSandbox
from torchrl_llm.sandbox.container_sandbox import ContainerSandbox
from torchrl_llm.sandbox.interface import Limits, Sandbox, SandboxResult, SandboxSession
from torchrl_llm.sandbox.subprocess_sandbox import SubprocessSandbox

__all__ = [
    "BubblewrapSandbox",
    "ContainerSandbox",
    "Limits",
    "Sandbox",
    "SandboxResult",
    "SandboxSession",
    "SubprocessSandbox",
    "make_sandbox",
]

SandboxKind = Literal["auto", "bubblewrap", "subprocess", "container"]
_KINDS = {
    "bubblewrap": BubblewrapSandbox,
    "subprocess": SubprocessSandbox,
    "container": ContainerSandbox,
}


def make_sandbox(kind: SandboxKind = "auto", limits: Limits | None = None) -> Sandbox:
    """Make a sandbox of a given kind, or the strongest kind of this machine.

    Args:
        kind: ``"bubblewrap"``, ``"subprocess"`` or ``"container"``. ``"auto"`` uses bubblewrap if
            it works, otherwise a plain process with limits and a warning about its gaps. ``"auto"``
            never uses a container, because a container needs an image.
        limits: limits of each run; ``None`` for the defaults.

    Raises:
        ConfigError: for an unknown kind.
        ResourceError: when this machine does not support the requested kind.

    Example:
        >>> make_sandbox().run_python("print(6 * 7)").stdout.strip()  # doctest: +SKIP
        '42'
    """
    if kind == "auto":
        try:
            return BubblewrapSandbox(limits)
        except ResourceError:
            return SubprocessSandbox(limits)
    if kind not in _KINDS:
        raise ConfigError(f"kind must be 'auto' or one of {sorted(_KINDS)}, got {kind!r}")
    return _KINDS[kind](limits)
