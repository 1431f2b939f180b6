"""Reference policies without a second model: the policy with adapters off, or as loaded."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm._imports import require
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase

_REFERENCE = "reference"


class _SwitchedAdapter(TokenScorer):
    """Scores tokens with a PEFT policy whose adapters are switched during the call."""

    def __init__(self, policy: TokenScorer) -> None:
        self.policy = policy
        backend = policy.backend if isinstance(policy, LLMWrapperBase) else policy
        self._backend = backend if isinstance(backend, Backend) else None
        self._model = _peft_model(policy, self._backend)

    @abc.abstractmethod
    def _switch(self) -> AbstractContextManager[Any]:
        """Switch the adapters to the reference's state for the duration of the context."""

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
            ConfigError: adapters are merged into the base weights.
        """
        with self._switched(), torch.no_grad():
            return self.policy.token_scores(
                sequences, select, temperature=temperature, entropy=entropy, extras=extras
            )

    @contextmanager
    def _switched(self) -> Iterator[None]:
        alone = nullcontext() if self._backend is None else self._backend.exclusive()
        with alone:
            if any(getattr(layer, "merged", False) for layer in self._model.modules()):
                raise ConfigError(
                    "adapters are merged into the base weights, so the reference is not there; "
                    "unmerge them before scoring with it"
                )
            # PEFT freezes adapters that it switches off, and makes them fully trainable when they
            # return.
            before = [(p, p.requires_grad) for p in self._model.parameters()]
            try:
                with self._switch():
                    yield
            finally:
                for parameter, trains in before:
                    parameter.requires_grad_(trains)


class AdapterDisabled(_SwitchedAdapter):
    """Scores tokens with the base model of a PEFT policy (adapters off), at no extra memory.

    If a policy trains new LoRA adapters, it starts from the base weights, so these serve as the
    reference of a KL term. After the call, also after an error, the adapters are on again and every
    parameter requires gradients as before. Scoring never builds a graph, because with gradient
    checkpointing the layers would be computed again with the adapters on.

    The settings of the policy's scorer (temperature, chunks, layout) apply. Sampling in other
    threads waits during the call. The trainer must not score in another thread at the same time.

    Args:
        policy: a policy wrapper, a backend or a ``CausalScorer`` over a ``peft.PeftModel``.

    Raises:
        ConfigError: the model is not a PEFT model, or its adapter cannot be switched off exactly:
            prompt learning, trained biases (``LoraConfig(bias=...)``).
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

    def _switch(self) -> AbstractContextManager[Any]:
        return self._model.disable_adapter()


class AdapterAsLoaded(_SwitchedAdapter):
    """Scores tokens with a PEFT policy and a frozen copy of its current adapter.

    Use it for a policy that continues to train an existing adapter. The reference is that adapter
    on its base, as at the start of training. A frozen copy of the adapter, without dropout, is
    added to the model under the name ``reference``. The copy is active during scoring only. It is
    not trained, and is not in any checkpoint. All else is as in :class:`AdapterDisabled`.

    Args:
        policy: as in :class:`AdapterDisabled`. A second reference of the same model shares the copy
            of the first.

    Raises:
        ConfigError: as in :class:`AdapterDisabled`.
        MissingExtraError: without peft.

    Example:
        >>> from torchrl_llm.modules import TransformersBackend, load_model
        >>> policy = TransformersBackend(load_model(lora={"target_modules": "all-linear"}))
        >>> reference = AdapterAsLoaded(policy)
        >>> ids, select = [torch.tensor([3, 4])], [torch.tensor([False, True])]
        >>> before = policy.token_scores(ids, select).log_probs.detach()
        >>> for name, weight in policy.module.named_parameters():
        ...     if "lora_B.default" in name:
        ...         _ = nn.init.normal_(weight)
        >>> torch.equal(reference.token_scores(ids, select).log_probs, before)
        True
    """

    def __init__(self, policy: TokenScorer) -> None:
        super().__init__(policy)
        self._active = self._model.active_adapter
        if _REFERENCE in self._model.peft_config:
            return
        peft = require("peft", extra="peft", feature="AdapterAsLoaded")
        config = copy.deepcopy(self._model.peft_config[self._active])
        config.inference_mode, config.lora_dropout = True, 0.0
        trains = {name for name, p in self._model.named_parameters() if p.requires_grad}
        with torch.random.fork_rng():  # PEFT draws random weights, which the copy replaces
            self._model.add_adapter(_REFERENCE, config)
        state = peft.get_peft_model_state_dict(self._model, adapter_name=self._active)
        peft.set_peft_model_state_dict(self._model, state, adapter_name=_REFERENCE)
        self._model.set_adapter(self._active)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name in trains)

    @contextmanager
    def _switch(self) -> Iterator[None]:
        self._model.set_adapter(_REFERENCE)
        try:
            yield
        finally:
            self._model.set_adapter(self._active)


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
