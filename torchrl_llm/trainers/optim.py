"""Optimizers by name, learning-rate schedules with warm-up, and one clipped step.

The named optimizer is the one that is built, and an argument that it does not take is an error.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from torchrl_llm.errors import ConfigError

# LBFGS needs a closure and SparseAdam sparse gradients: neither can take the recipe's step.
_UNUSABLE = ("Optimizer", "LBFGS", "SparseAdam")


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, name: str, lr: float, **arguments: Any
) -> torch.optim.Optimizer:
    """The optimizer of :mod:`torch.optim` with that name, over the parameters that train.

    Args:
        parameters: parameters; those without ``requires_grad`` are left out.
        name: class name in ``torch.optim``, as ``"AdamW"``.
        lr: learning rate.
        **arguments: further arguments of that class; ``None`` means its own default. One that the
            class does not take is refused.

    Raises:
        ConfigError: no such optimizer, an argument that it does not take, or nothing to train.

    Example:
        >>> make_optimizer(nn.Linear(2, 2).parameters(), name="SGD", lr=0.1, momentum=0.9).defaults[
        ...     "momentum"
        ... ]
        0.9
    """
    names = [
        key
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and key not in _UNUSABLE
    ]
    if name not in names:
        nearest = difflib.get_close_matches(name, names, 1, 0.0)[0]
        raise ConfigError(
            f"optimizer.name: torch.optim has no usable {name!r}; nearest: {nearest!r}"
        )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter requires a gradient: there is nothing to optimize")
    optimizer = getattr(torch.optim, name)
    accepted = inspect.signature(optimizer).parameters
    given = {key: value for key, value in arguments.items() if value is not None}
    for key in given:
        if key not in accepted:
            raise ConfigError(f"optimizer.{key} has no effect: {name} does not take it")
    if "fused" in accepted and all(p.is_floating_point() and p.numel() for p in trained):
        # One kernel for all parameters: on small models a plain loop outweighs the backward.
        given.setdefault("fused", True)
    return optimizer(trained, lr=lr, **given)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Name of a schedule to its factor, given the share of the run after the warm-up, 0 to 1."""


def schedule_factor(step: int, *, name: str, warmup_steps: int, total_steps: int) -> float:
    """Factor on the learning rate at an optimizer step.

    Args:
        step: optimizer steps already taken.
        name: one of :data:`SCHEDULES`: ``constant``, ``linear`` (to zero at ``total_steps``) or
            ``cosine`` (half a period).
        warmup_steps: steps of a linear rise from ``1 / warmup_steps`` to 1.
        total_steps: steps of the whole run.

    Example:
        >>> [schedule_factor(s, name="linear", warmup_steps=2, total_steps=6) for s in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    check_schedule(name)
    return SCHEDULES[name](min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))


def check_schedule(name: str) -> None:
    """Refuse the name of a schedule that there is not.

    Args:
        name: one of :data:`SCHEDULES`.

    Raises:
        ConfigError: another name.
    """
    if name not in SCHEDULES:
        *most, last = SCHEDULES
        known = f"{', '.join(most)} or {last}"
        raise ConfigError(f"optimizer.scheduler must be {known}, got {name!r}")


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, name: str, warmup_steps: int = 0, total_steps: int
) -> LambdaLR:
    """A schedule of the learning rate over the optimizer steps of a run.

    Args:
        optimizer: the optimizer whose learning rate is scaled.
        name: see :func:`schedule_factor`.
        warmup_steps: see :func:`schedule_factor`.
        total_steps: see :func:`schedule_factor`.
    """
    return LambdaLR(
        optimizer,
        lambda step: schedule_factor(
            step, name=name, warmup_steps=warmup_steps, total_steps=total_steps
        ),
    )


def clipped_step(
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR | None = None,
    *,
    max_norm: float | None = None,
) -> Tensor:
    """Clip the gradients, step optimizer and schedule, clear the gradients.

    Args:
        optimizer: holds parameters with gradients.
        scheduler: stepped after the optimizer.
        max_norm: bound on the norm of all gradients together; ``None`` only measures it.

    Returns:
        Norm of the gradients before clipping, a scalar. Where it is not finite no parameter is
        changed: one broken batch does not end a long run, and the norm in the metrics shows it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    bound = math.inf if max_norm is None else max_norm
    norm = nn.utils.clip_grad_norm_(parameters, bound)
    if torch.isfinite(norm):
        optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
