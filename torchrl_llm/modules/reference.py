"""Reference policy without a second model: the policy itself with its adapters switched off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm._imports import require
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase


class AdapterDisabled(TokenScorer):
    """Scores tokens with a PEFT policy whose adapters are off: the base model, at no memory.

    For a policy that trains LoRA adapters the base weights are what training started from, so that
    they serve as the reference of a KL term. The adapters are on again, and every parameter takes
    gradients as before, when the call returns or raises. Scoring never builds a graph: with
    gradient checkpointing the layers would be computed again with the adapters on.

    What the scorer of the policy knows of the model is kept: temperature, chunks, layout. Sampling
    in other threads waits meanwhile; the trainer must not score in another thread.

    Args:
        policy: a policy wrapper, a backend or a ``CausalScorer`` over a ``peft.PeftModel``.

    Raises:
        ConfigError: when there is no PEFT model, or one that cannot be switched off exactly: prompt
            learning, trained biases (``LoraConfig(bias=...)``).
        MissingExtraError: without peft.

    Example:
        >>> from torchrl_llm.modules import TransformersBackend, load_model
        >>> policy = TransformersBackend(load_model(lora={"target_modules": "all-linear"}))
        >>> reference = AdapterDisabled(policy)
        >>> ids, select = [torch.tensor([3, 4])], [torch.tensor([False, True])]
        >>> plain = TransformersBackend(load_model()).token_scores(ids, select).log_probs
        >>> bool(torch.allclose(reference.token_scores(ids, select).log_probs, plain, atol=1e-5))
        True
    """

    def __init__(self, policy: TokenScorer) -> None:
        self.policy = policy
        backend = policy.backend if isinstance(policy, LLMWrapperBase) else policy
        self._backend = backend if isinstance(backend, Backend) else None
        self._model = _peft_model(policy, self._backend)

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`~torchrl_llm.data.scoring.TokenScorer.token_scores`; never differentiable.

        Raises:
            ConfigError: while adapters are merged into the base weights.
        """
        with self._switched_off(), torch.no_grad():
            return self.policy.token_scores(
                sequences, select, temperature=temperature, entropy=entropy, extras=extras
            )

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        alone = nullcontext() if self._backend is None else self._backend.exclusive()
        with alone:
            if any(getattr(layer, "merged", False) for layer in self._model.modules()):
                raise ConfigError(
                    "adapters are merged into the base weights, so the reference is not there; "
                    "unmerge them before scoring with it"
                )
            # PEFT freezes what it switches off and makes all of it trainable when it comes back.
            before = [(p, p.requires_grad) for p in self._model.parameters()]
            try:
                with self._model.disable_adapter():
                    yield
            finally:
                for parameter, trains in before:
                    parameter.requires_grad_(trains)


def _peft_model(policy: TokenScorer, backend: Backend | None) -> Any:
    peft = require("peft", extra="peft", feature="AdapterDisabled")
    root = policy if backend is None else backend.module
    modules = root.modules() if isinstance(root, nn.Module) else ()
    model = next((module for module in modules if isinstance(module, peft.PeftModel)), None)
    if model is None:
        raise ConfigError(
            f"{type(policy).__name__} holds no PEFT model whose adapters could be switched off; "
            "load the policy with lora=..., or use a second model as the reference"
        )
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise ConfigError(f"adapter {name!r} is learned prompts, not layers to switch off")
        if getattr(config, "bias", "none") != "none":
            raise ConfigError(
                f"adapter {name!r} trains biases of the base model (bias={config.bias!r}), which "
                "stay when it is off; use bias='none', or a second model as the reference"
            )
    return model
