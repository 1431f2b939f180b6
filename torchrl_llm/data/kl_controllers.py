"""Coefficients of a KL penalty: constant, or adapted to keep the divergence at a target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import isfinite
from statistics import fmean
from typing import Annotated, Any

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._log import tell_once
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import adapted_kl_coefficient


class KLController(ABC):
    """The coefficient of a divergence penalty, updated from measured divergences.

    Pass a controller to a KL transform as its coefficient. The transform penalises every batch of
    rows with the current ``coef``, then calls :meth:`update` with the divergences of these rows.

    Args:
        coef: the first coefficient.
        model: an object whose ``kl_coef`` is always set to the coefficient.

    Attributes:
        coef: the current coefficient.

    Raises:
        ConfigError: for a negative coefficient, or a model without ``kl_coef``.
    """

    @checked
    def __init__(self, coef: Annotated[float, Ge(0)], model: Any = None) -> None:
        if model is not None and not hasattr(model, "kl_coef"):
            raise ConfigError(f"{type(model).__name__} has no attribute kl_coef to control")
        self.model = model
        self._set(float(coef))

    def _set(self, coef: float) -> None:
        self.coef = coef
        if self.model is not None:
            self.model.kl_coef = coef

    @abstractmethod
    def update(self, kl_values: Sequence[float]) -> float:
        """Update the coefficient from measured divergences.

        Args:
            kl_values: one value per response, in nats: the divergence of the sampling policy from
                the reference.

        Returns:
            The new coefficient.
        """

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient of :meth:`state_dict`."""
        self._set(float(state["coef"]))


class ConstantKLController(KLController):
    """A constant coefficient.

    Args:
        kl_coef: the coefficient.
        model: an object whose ``kl_coef`` is set to it.

    Example:
        >>> ConstantKLController(kl_coef=0.1).update([3.0, 5.0])
        0.1
    """

    @checked
    def __init__(self, *, kl_coef: Annotated[float, Ge(0)], model: Any = None) -> None:
        super().__init__(kl_coef, model)

    def update(self, kl_values: Sequence[float] | None = None) -> float:
        """See :class:`KLController`."""
        return self.coef


class AdaptiveKLController(KLController):
    r"""Raises the coefficient if the divergence is above a target, and lowers it if below.

    The rule is that of arXiv:1909.08593, section 2.2. As in the code of the paper, the gain of an
    update with ``n`` responses is :math:`K_\beta = n / \mathrm{horizon}`. So an update counts in
    proportion to its number of responses, for any batch size. In torchrl_llm the gain is at most 1,
    so that one update changes the coefficient by at most a fifth. In the paper's code, an update
    could change its sign.

    TorchRL's controller of this name takes penalties (divergence times coefficient, negated). This
    controller takes divergences.

    Args:
        init_kl_coef: the first coefficient, above 0.
        target: the desired divergence, in nats per response; 6 in the paper.
        horizon: number of responses after which an error has its full effect; 10000 in the paper's
            code.
        model: an object whose ``kl_coef`` is always set to the coefficient.

    Raises:
        ConfigError: a coefficient, target or horizon is not positive.

    Example:
        >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100)
        >>> round(controller.update([12.0] * 10), 6), round(controller.update([3.0] * 10), 6)
        (0.102, 0.09996)
    """

    @checked
    def __init__(
        self,
        *,
        init_kl_coef: Annotated[float, Gt(0)],
        target: Annotated[float, Gt(0)],
        horizon: Annotated[float, Gt(0)],
        model: Any = None,
    ) -> None:
        super().__init__(init_kl_coef, model)
        self.target, self.horizon = target, horizon

    def update(self, kl_values: Sequence[float]) -> float:
        """See :class:`KLController`; an empty sequence changes nothing.

        Raises:
            DataError: a value is NaN or infinite.
        """
        values = [float(value) for value in kl_values]
        if not values:
            return self.coef
        if not all(map(isfinite, values)):
            raise DataError(f"a divergence is NaN or infinite among {len(values)} responses")
        gain = min(len(values) / self.horizon, 1.0)
        kl = fmean(values)
        if kl < 0:
            tell_once(
                "an AdaptiveKLController got divergences below 0 on average: it takes the "
                "divergences themselves (TorchRL's takes penalties, -coef * divergence)"
            )
        self._set(adapted_kl_coefficient(self.coef, kl, target=self.target, gain=gain))
        return self.coef
