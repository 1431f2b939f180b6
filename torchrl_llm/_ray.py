"""Ray, behind one door: started or not, with limits on every wait and errors of our own.

No other file imports ``ray`` but through :func:`require_ray`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import ResourceError, WorkerError

__all__ = ["CALL_TIMEOUT_S", "START_TIMEOUT_S", "check_resources", "get", "require_ray"]

CALL_TIMEOUT_S = 300.0
"""Seconds that a call of an actor may take unless its caller says otherwise."""

START_TIMEOUT_S = 300.0
"""Seconds that the creation of an actor may take unless its caller says otherwise."""


def require_ray(feature: str, *, running: bool = True) -> ModuleType:
    """Import Ray, or say how to install or start it.

    Args:
        feature: what needs it; begins the error message.
        running: also insist that ``ray.init`` was called.

    Raises:
        MissingExtraError: it is not installed.
        ResourceError: it is not running.
    """
    ray = require("ray", extra="ray", feature=feature)
    if running and not ray.is_initialized():
        raise ResourceError(
            f"{feature} needs a running Ray: call ray.init() first (ray.init(address='auto') joins "
            "the cluster of this machine)"
        )
    return ray


def get(refs: Any, *, timeout_s: float, what: str) -> Any:
    """``ray.get`` with a limit and with our errors.

    Args:
        refs: one object reference or a list of them.
        timeout_s: most seconds to wait.
        what: what is waited for; begins the error message.

    Raises:
        WorkerError: the actor died, is not reachable, or did not answer in time.
        Exception: what the actor's own code raised.
    """
    ray = require_ray(what)
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise WorkerError(f"{what}: no answer within {timeout_s:g} s") from None
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise WorkerError(f"{what}: {type(error).__name__}: {error}") from None
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None


def check_resources(what: str, bundles: list[dict[str, float]]) -> None:
    """Compare what is about to be started with what the cluster has, before anything hangs.

    Args:
        what: what is about to be started.
        bundles: resources of each actor, as ``{"CPU": 1, "GPU": 0.5}``.

    Raises:
        ResourceError: they do not suffice; the message says how many are needed and free.
    """
    ray = require_ray(what)
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    free, whole = ray.available_resources(), ray.cluster_resources()
    short = {name: amount for name, amount in total.items() if amount > free.get(name, 0.0) + 1e-6}
    if short:
        wanted = ", ".join(
            f"{amount:g} {name} ({free.get(name, 0.0):g} of {whole.get(name, 0.0):g} free)"
            for name, amount in sorted(short.items())
        )
        raise ResourceError(
            f"{what} needs {wanted} for its {len(bundles)} actors; start Ray with more, or ask for "
            "less for each"
        )
