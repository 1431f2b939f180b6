"""Switch one module between training and sampling, and back to exactly where it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["sampling_mode"]


@contextmanager
def sampling_mode(module: nn.Module) -> Iterator[None]:
    """Dropout off, and with it gradient checkpointing, which transformers ties to training mode.

    The training flag of every submodule is put back on exit, also after an exception.

    Args:
        module: the model, shared with the trainer or not.

    Example:
        >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)).train()
        >>> with sampling_mode(model):
        ...     print(model[0].training)
        False
        >>> model[0].training
        True
    """
    training = [child for child in module.modules() if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True
