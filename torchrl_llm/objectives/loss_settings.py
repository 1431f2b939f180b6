"""Arguments that the policy-gradient losses share, and how a loss declares bounds of its ratio.

A loss of one's own takes ``**settings: Unpack[PolicyLossSettings]`` for what it only hands on to
:class:`~torchrl_llm.objectives.PolicyGradientLoss`; a mistyped name still fails, there.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.correction import Correction
from torchrl_llm.objectives.loss_rows import MaskingStrategy
from torchrl_llm.objectives.policy_loss import KLEstimator


class PolicyLossSettings(TypedDict, total=False):
    """What any policy-gradient loss takes beside its own arguments and the aggregation.

    The meanings are those of :class:`~torchrl_llm.objectives.PolicyGradientLoss`.
    """

    constant_length: int | None
    count_empty_rows: bool
    correction: Correction | None
    device: torch.device | str | None
    entropy_bonus: bool | None
    entropy_coeff: float | None
    kl_estimator: KLEstimator
    kl_mask_threshold: float | None
    kl_to_inference_coeff: float | None
    kl_to_ref_coeff: float | None
    masking_strategy: MaskingStrategy


class Bounds:
    """An attribute ``(low, high)`` of a loss that may be assigned between steps.

    A plain number stands for both.

    Args:
        max_low: ``low`` may be at most this; ``None`` for no limit.
        open_low: whether ``low=None``, no lower bound, is allowed.

    Raises:
        ConfigError: on assignment of bounds that are negative or beyond the limit.

    Example:
        >>> class Loss:
        ...     clip_epsilon = Bounds(max_low=1.0)
        >>> loss = Loss()
        >>> loss.clip_epsilon = 0.2
        >>> loss.clip_epsilon
        (0.2, 0.2)
    """

    def __init__(self, *, max_low: float | None = None, open_low: bool = False) -> None:
        self.max_low, self.open_low = max_low, open_low

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember under which name the loss has it."""
        self.name = name

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        """The pair ``(low, high)``."""
        return self if loss is None else loss.__dict__[f"_{self.name}"]

    def __set__(self, loss: Any, value: float | tuple[float | None, float]) -> None:
        """Check and store."""
        pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
        if not (len(pair) == 2 and self._low(pair[0]) and _at_least_zero(pair[1])):
            limit = "" if self.max_low is None else f" <= {self.max_low}"
            raise ConfigError(
                f"{self.name} must be a number or (low, high) with 0 <= low{limit} and 0 <= high, "
                f"got {value!r}"
            )
        low = None if pair[0] is None else float(pair[0])
        loss.__dict__[f"_{self.name}"] = (low, float(pair[1]))

    def _low(self, value: float | None) -> bool:
        if value is None:
            return self.open_low
        return _at_least_zero(value) and (self.max_low is None or value <= self.max_low)


def _at_least_zero(value: object) -> bool:
    return isinstance(value, int | float) and value >= 0
