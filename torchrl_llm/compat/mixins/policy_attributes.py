"""Attributes of policies for users of TorchRL, computed from options and arguments.

:class:`~torchrl_llm.modules.policies.LLMWrapperBase` contains the attributes that a policy needs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from tensordict.utils import NestedKey

# Weak on both sides, and outside the policy: a policy is pickled, and a weak reference cannot be.
_COLLECTORS: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()
_OPTIONS = (
    "attention_mask_key",
    "chat_template",
    "chat_template_name",
    "history_key",
    "log_probs_key",
    "masks_key",
    "prefer_tokens",
    "text_key",
    "tokenizer_kwargs",
    "tokens_key",
)


class WrapperAttributes:
    """Mixin for a policy with ``options``, ``in_keys``, ``out_keys``, ``names`` and ``backend``.

    Its options are available under their own names: ``attention_mask_key``, ``chat_template``,
    ``chat_template_name``, ``history_key``, ``log_probs_key``, ``masks_key``, ``prefer_tokens``,
    ``text_key``, ``tokenizer_kwargs`` and ``tokens_key``. ``return_history``, ``return_text``,
    ``return_tokens`` and ``return_masks`` tell which of them are written; ids and masks are always
    written.
    """

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The constructor's generation arguments, under the common names."""
        return dict(self._generate_kwargs)

    @property
    def input_key(self) -> NestedKey:
        """Key of the rows, ``in_keys[0]``."""
        return self.in_keys[0]

    @property
    def batching(self) -> bool:
        """Whether requests of several threads are batched."""
        return self.batcher is not None

    @property
    def padding_value(self) -> int:
        """The same as ``pad_token_id``."""
        return self.pad_token_id

    @property
    def device(self) -> torch.device | None:
        """Device of the model's weights; ``None`` if they are not in this process."""
        weights = None if self.backend.module is None else self.backend.module.parameters()
        return None if weights is None else next(weights).device

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Keys of the nodes with log-probs."""
        return [self.names.log_probs]

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """Not available: a policy writes no parameters of distributions.

        Raises:
            NotImplementedError: always, as in TorchRL; ``get_dist`` makes distributions.
        """
        raise NotImplementedError("a policy writes no logits; call get_dist(...) for them")

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Keys of the sampled tokens."""
        return [(self.names.tokens, "response")]

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector that runs this policy.

        Args:
            collector: the collector, which :attr:`collector` returns as long as it exists.
        """
        _COLLECTORS[self] = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector, or ``None``."""
        found = _COLLECTORS.get(self)
        return None if found is None else found()


def _option(name: str) -> property:
    return property(lambda self: getattr(self.options, name))


def _written(node: str) -> property:
    return property(lambda self: any(k[0] == getattr(self.names, node) for k in self.out_keys))


for _name in _OPTIONS:
    setattr(WrapperAttributes, _name, _option(_name))
for _name in ("history", "text", "tokens", "masks"):
    setattr(WrapperAttributes, f"return_{_name}", _written(_name))
