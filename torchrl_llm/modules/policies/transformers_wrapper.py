"""A Hugging Face causal language model as a policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.transformers import TransformersBackend
from torchrl_llm.modules.model_loading import load_model, load_tokenizer
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase


class TransformersWrapper(LLMWrapperBase):
    """Samples and scores with a ``transformers`` model.

    Args:
        model: a causal language model, its name or path, or a backend that exists already.
        tokenizer: a fast tokenizer, its name or path; that of the model by default where the model
            is given by name.
        pad_model_input: score rows padded to one length (``True``), or packed behind each other
            (``False``); by default in the way that is cheapest for the rows. More ways are named by
            ``backend.layout``, see
            :class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`.
        device: move the model there.
        **options: those of :class:`~torchrl_llm.modules.policies.llm_wrapper.LLMWrapperBase`.

    Attributes:
        value_head: the backend's value head, ``None`` without one; see
            :class:`~torchrl_llm.modules.ValueHead`.

    Raises:
        ConfigError: for arguments that are unknown, contradict each other or would have no effect.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, eos_token_id=2)
        >>> policy = TransformersWrapper(Qwen2ForCausalLM(config), input_mode="tokens",
        ...     generate_kwargs={"max_new_tokens": 4, "ignore_eos": True})
        >>> rows = ragged_rows({"prompt": [torch.tensor([5, 6]), torch.tensor([7])]})
        >>> out = policy(TensorDict(tokens=rows, batch_size=[2]))
        >>> [len(row) for row in out["tokens"].get("full", as_list=True)]
        [6, 5]
    """

    def __init__(
        self,
        model: nn.Module | str | TransformersBackend,
        *,
        tokenizer: Any = None,
        pad_model_input: bool | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, str):
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            model = load_model(model)
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        layout = {None: None, True: "padded", False: "packed"}[pad_model_input]
        if not isinstance(model, TransformersBackend):
            model = TransformersBackend(model, tokenizer=tokenizer, layout=layout)
        elif layout not in (None, model.layout):
            raise ConfigError(
                f"pad_model_input={pad_model_input} contradicts the backend's layout "
                f"{model.layout!r}; set backend.layout, or give the model itself"
            )
        if device is not None:
            model.model.to(device)
        super().__init__(model, tokenizer=tokenizer, **options)
        # Registered here, so that parameters() and state_dict() have it; None without one.
        self.value_head = model.value_head
        self._options = options

    @property
    def layouts(self) -> tuple[str, ...]:
        """What ``layout`` may be, see :class:`~torchrl_llm.data.scoring.TokenScorer`."""
        return self.backend.layouts

    @property
    def layout(self) -> str | None:
        """How the backend lays rows out for scoring; may be set."""
        return self.backend.layout

    @layout.setter
    def layout(self, layout: str) -> None:
        self.backend.layout = layout

    def _construction(self) -> dict[str, Any]:
        return {"model": self.backend, "tokenizer": self.tokenizer, **self._options}

    def get_new_version(self, **changes: Any) -> TransformersWrapper:
        """See :meth:`LLMWrapperBase.get_new_version`."""
        if "pad_model_input" in changes and "model" not in changes:
            changes = {"model": self.backend.model, **changes}
        return super().get_new_version(**changes)
