"""Log-probs and distributions of whole rows for inspection, as in TorchRL's policies.

Losses call ``token_scores``, which never builds logits over the vocabulary.

Shape legend: ``B`` rows, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints

from torchrl_llm.errors import ConfigError

# TorchRL's arguments that describe the result of get_dist.
_FORM = {
    "as_padded_tensor": (None, True),
    "as_nested_tensor": (None, False),
    "padding_value": (None, 0, 0.0),
    "padding_side": ("left", "right"),
    "layout": (None, torch.strided),
}


def check_form(form: Mapping[str, Any]) -> str:
    """Raise unless logits are dense and padded with 0.0; returns the padding side.

    Args:
        form: TorchRL's arguments of ``get_dist`` by name.

    Raises:
        ConfigError: a value requests a different form.
        TypeError: a name is unknown.
    """
    for name, value in form.items():
        if name not in _FORM:
            raise TypeError(f"get_dist() has no argument {name!r}; the form takes {sorted(_FORM)}")
        if value not in _FORM[name]:
            raise ConfigError(
                f"{name} must be one of {_FORM[name]}, got {value!r}: logits are dense [B, T, V], "
                "padded with 0.0; cut them by the mask for other forms"
            )
    return form.get("padding_side", "left")


class TokenDistribution(Categorical):
    """Distribution of each token: index ``t`` is p(x_t | x_<t), not the model's next token.

    Args:
        logits: float ``[B, T, V]``.
        mask: bool ``[B, T]``; results are 0.0 outside of it.

    Example:
        >>> dist = TokenDistribution(torch.zeros(1, 2, 4), torch.tensor([[False, True]]))
        >>> dist.log_prob(torch.tensor([[3, 3]]))
        tensor([[ 0.0000, -1.3863]])
    """

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)
        self.mask = mask

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs, float ``[B, T]`` in nats, of int64 ``[B, T]``, 0.0 outside the mask."""
        return torch.where(self.mask, super().log_prob(value), 0.0)

    def entropy(self) -> Tensor:
        """Entropies, float ``[B, T]`` in nats, 0.0 outside the mask."""
        return torch.where(self.mask, super().entropy(), 0.0)


class LogProbDistribution(Distribution):
    """Known log-probs of known tokens, as a distribution.

    Args:
        log_probs: float ``[B, T]`` in nats.
        mask: bool ``[B, T]``; log-probs outside of it are 0.0. All tokens by default.

    Example:
        >>> LogProbDistribution(torch.tensor([[0.0, -1.5]])).log_prob()
        tensor([[ 0.0000, -1.5000]])
    """

    arg_constraints: ClassVar[dict] = {}
    support = constraints.nonnegative_integer

    def __init__(self, log_probs: Tensor, mask: Tensor | None = None) -> None:
        super().__init__(batch_shape=log_probs.shape, validate_args=False)
        self.mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
        self.log_probs = log_probs

    def log_prob(self, value: Tensor | None = None) -> Tensor:
        """The log-probs, 0.0 outside the mask.

        Args:
            value: the tokens of the log-probs, int64 ``[B, T]``; only the shape is checked.

        Raises:
            ValueError: the tokens have a different shape.
        """
        if value is not None and value.shape != self.log_probs.shape:
            raise ValueError(
                f"these log-probs belong to tokens of shape {tuple(self.log_probs.shape)}, got "
                f"{tuple(value.shape)}"
            )
        return torch.where(self.mask, self.log_probs, 0.0)


class WrapperDistributions:
    """Mixin for a policy with ``token_scores`` and ``backend.logits``.

    ``_whole_rows(tensordict, mask_key, side)`` returns the rows to score, with ``token_ids``,
    ``select``, ``temperature``, ``extras()``, ``spread(rows)`` and ``restricted(logits)``.
    """

    def log_prob(self, tensordict: TensorDictBase, mask_key: NestedKey | None = None) -> Tensor:
        """Log-probs of whole rows, with gradients where they are enabled.

        Args:
            tensordict: rows as for ``generate=False``, even if this policy generates in
                ``forward``.
            mask_key: mask of the tokens to score, such as ``("masks", "all_assistant_mask")``; all
                but the first of each row by default.

        Returns:
            float32 ``[B, T]`` in nats, aligned with the ids of padded rows, and padded on the right
            for ragged ones; 0.0 at padding, at the first token and outside the mask.
        """
        rows = self._whole_rows(tensordict, mask_key)
        scores = self.token_scores(
            rows.token_ids, rows.select, temperature=rows.temperature, extras=rows.extras()
        )
        mask = rows.spread(rows.select).to(scores.log_probs.device)
        empty = torch.zeros(mask.shape, device=mask.device)
        return empty.masked_scatter(mask, scores.log_probs)

    def get_dist(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        logits_key: NestedKey = "logits",
        mask_key: NestedKey | None = None,
        **form: Any,
    ) -> TokenDistribution:
        """The distribution of each token of whole rows.

        It holds logits over the whole vocabulary, ``[B, T, V]``, and is for inspection; losses use
        ``token_scores``, which never builds them.

        Args:
            tensordict: see :meth:`log_prob`.
            tensordict_out: if given, the logits are written to it under ``logits_key``.
            logits_key: key of the logits in ``tensordict_out``.
            mask_key: see :meth:`log_prob`.
            form: TorchRL's ``padding_side`` of ragged rows (``"left"``, the default, or
                ``"right"``; padded ones stay where they are); and its ``as_padded_tensor``,
                ``as_nested_tensor``, ``padding_value`` and ``layout``, which may only request the
                returned form: dense logits, 0.0 at padding.

        Raises:
            ConfigError: a different form is requested.
        """
        side = check_form(form)
        rows = self._whole_rows(tensordict, mask_key, side)
        logits = self.backend.logits(rows.token_ids).float()
        temperature = rows.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[:, None, None].to(logits.device)
        # The logits after token t are of token t + 1; nothing predicts the first.
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1] / temperature], dim=1)
        lengths = [ids.shape[0] for ids in rows.token_ids]
        cut = [x[:length] for x, length in zip(shifted, lengths, strict=True)]
        shifted = rows.spread(rows.restricted(cut))
        if tensordict_out is not None:
            tensordict_out.set(logits_key, shifted)
        return TokenDistribution(shifted, rows.spread(rows.select).to(shifted.device))
