"""Attributes of policies that users of TorchRL read; they answer from options and arguments.

What a policy needs for its work is in :class:`~torchrl_llm.modules.policies.LLMWrapperBase`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from tensordict.utils import NestedKey

# Weak on both sides, and not in the policy: that is pickled, and a weak reference cannot be.
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
    """Mixin of a policy with ``options``, ``in_keys``, ``out_keys``, ``names`` and ``backend``.

    Those of its options are there under their own names: ``attention_mask_key``,
    ``chat_template``, ``chat_template_name``, ``history_key``, ``log_probs_key``, ``masks_key``,
    ``prefer_tokens``, ``text_key``, ``tokenizer_kwargs`` and ``tokens_key``. ``return_history``,
    ``return_text``, ``return_tokens`` and ``return_masks`` say which of them are written; ids and
    masks always are.
    """

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The constructor's generation arguments, under the common names."""
        return dict(self._generate_kwargs)

    @property
    def input_key(self) -> NestedKey:
        """Where the rows are, ``in_keys[0]``."""
        return self.in_keys[0]

    @property
    def batching(self) -> bool:
        """Whether the requests of several threads run together."""
        return self.batcher is not None

    @property
    def padding_value(self) -> int:
        """The same as ``pad_token_id``."""
        return self.pad_token_id

    @property
    def device(self) -> torch.device | None:
        """Where the model's weights are; ``None`` where they are not in this process."""
        weights = None if self.backend.module is None else self.backend.module.parameters()
        return None if weights is None else next(weights).device

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Names of the nodes with log-probs."""
        return [self.names.log_probs]

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """A policy writes no parameters of distributions.

        Raises:
            NotImplementedError: always, as in TorchRL; ``get_dist`` makes distributions.
        """
        raise NotImplementedError("a policy writes no logits; call get_dist(...) for them")

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Where the sampled tokens are."""
        return [(self.names.tokens, "response")]

    def register_collector(self, collector: Any) -> None:
        """Remember the collector that runs this policy, weakly.

        Args:
            collector: what :attr:`collector` returns as long as it exists.
        """
        _COLLECTORS[self] = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector, ``None`` without one."""
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
