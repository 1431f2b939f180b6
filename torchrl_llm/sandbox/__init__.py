"""Sandboxes: running code that a model wrote, apart from the trainer and its machine.

:func:`make_sandbox` chooses; each sandbox is also constructed by its own name.
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
    """Make a sandbox of some kind, or the strongest that this machine has.

    Args:
        kind: ``"bubblewrap"``, ``"subprocess"`` or ``"container"``. ``"auto"`` takes bubblewrap
            where it works, and else a plain process with limits, with a warning that says what that
            leaves open; a container is used only where it is asked for, since it needs an image.
        limits: of each run; ``None`` for the defaults.

    Raises:
        ConfigError: an unknown kind.
        ResourceError: this machine does not have what was asked for.

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
