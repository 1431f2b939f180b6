"""Heads on the hidden states of a causal model: the language-model head in chunks, and a critic.

The forward of a model runs its body and head, applies a factor and a soft-cap, and returns ``[B, T,
V]`` logits. This module finds body and head once, reads the factors from the configuration, and
compares its result with the model's own logits on three tokens. It rejects a model whose logits
differ; the error names the option for using the model's own logits.
:class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer` runs body and head; the arithmetic
is :mod:`torchrl_llm.functional.chunked_head`.

Shape legend: ``B`` rows, ``T`` tokens, ``N`` selected tokens, ``V`` vocabulary, ``D`` hidden size,
``R`` rank of the adapters; for the critic, ``N`` states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_llm import functional as F
from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.scoring import HeadStates, Support
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.logit_form import LogitForm

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
# HyperCLOVA X multiplies by the field that Granite uses as divisor.
_MULTIPLIES_BY_DIVISOR = ("hyperclovax", "hyperclovax_vision_v2")
_UNKNOWN = re.compile(r"^(final_|output_|lm_head_)?logits?_|^lm_head_")
_NOT_LOGITS = ("logit_scale_init_value", "lm_head_bias", "logits_to_keep")
_ADVICE = (
    "TransformersBackend(model, full_logits=True) lets the model make its own logits ([B, T, V] in "
    "memory, and neither value head nor chunk_size)"
)
_PROBE_IDS = (1, 2, 3)
_TRIED: dict[tuple[Any, ...], Any] = {}
_Result = TypeVar("_Result")

GROUPED = "torchrl_llm_grouped"
"""Name of the ``sdpa`` variant for one token per row, used during a sampling step."""


def causal_model(model: nn.Module) -> nn.Module:
    """Return the causal model itself, without a PEFT wrapper around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def can_be_tried(model: nn.Module) -> bool:
    """Return whether a model can run now: its weights are loaded and not sharded.

    Args:
        model: the model.
    """
    return all(p.device.type != "meta" and is_whole(p) for p in model.parameters())


def is_whole(weight: Tensor) -> bool:
    """Return whether a weight is complete: not sharded, and its storage is allocated.

    Args:
        weight: weight of a model.
    """
    return not isinstance(weight, DTensor) and weight.untyped_storage().nbytes() >= weight.nbytes


def tried_once(trial: Callable[..., _Result], model: nn.Module, *arguments: Any) -> _Result:
    """Run a trial once for all models of the same kind, and return its result.

    Args:
        trial: a function of the model.
        model: a causal model, in PEFT or not.
        *arguments: further arguments of the trial.
    """
    config, weight = causal_model(model).config, next(model.parameters())
    built = repr(model), config.to_json_string(), attention_name(model), weight.dtype, weight.device
    key = (trial.__name__, torch.get_float32_matmul_precision(), hash(built))
    if key not in _TRIED:
        _TRIED[key] = trial(model, *arguments)
    return _TRIED[key]


def refuse_learned_prompts(model: nn.Module) -> None:
    """Reject adapters that insert trained states before every row.

    Args:
        model: a causal model, in PEFT or not.

    Raises:
        ConfigError: for prefix tuning, prompt tuning, P-tuning and similar adapters.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ConfigError(
                f"adapter {name!r} is {config.peft_type.value}, which learns a prompt; sampling "
                "and scoring only support a row's own tokens: train layers with LoRA instead"
            )


def attention_name(model: nn.Module) -> str:
    """Return a model's attention implementation, even while a thread samples with :data:`GROUPED`.

    Args:
        model: a causal model, in PEFT or not.
    """
    name = causal_model(model).config.get_text_config(decoder=True)._attn_implementation
    return "sdpa" if name == GROUPED else name or ""


def uses_flash(model: nn.Module) -> bool:
    """Return whether a model uses flash attention, of any version and from any package."""
    return "flash" in attention_name(model)


def check_kernel(model: nn.Module) -> None:
    """Reject an attention whose kernel cannot run on the model's device or in its current mode.

    Args:
        model: a causal model, in PEFT or not.

    Raises:
        ConfigError: flash attention on a CPU or in float32; flex attention with gradients on a CPU.
    """
    causal = causal_model(model)
    weight, name = causal.get_input_embeddings().weight, attention_name(model)
    place, problem = weight.device.type, None
    if uses_flash(model):
        if place == "cpu":
            problem = "runs on a GPU; move the model there first, or load it with 'sdpa'"
        elif (
            weight.dtype == torch.float32
            # FSDP casts the weights that it gathers.
            and not isinstance(weight, DTensor)
            and not torch.is_autocast_enabled(place)
        ):
            problem = (
                "takes bfloat16 or float16; load the model with dtype='bfloat16', or run it under "
                "torch.autocast"
            )
    elif name == "flex_attention" and place == "cpu" and torch.is_grad_enabled():
        problem = "has no backward on a CPU; load the model with 'sdpa', or use torch.no_grad()"
    if problem is not None:
        raise ConfigError(
            f"attn_implementation={name!r} {problem}; the weights are {weight.dtype} on {place!r}"
        )


def model_body(model: nn.Module) -> nn.Module:
    """Return the part of a causal model that computes hidden states.

    Args:
        model: a Hugging Face causal model, in PEFT or not.

    Raises:
        ConfigError: when the model does not separate its body from its head.
    """
    causal = causal_model(model)
    body = getattr(causal, "base_model", causal)
    if body is causal:  # Llama 4's text model is not at the attribute that its class names
        body = getattr(causal, "model", causal)
    if body is causal:
        raise ConfigError(f"{type(causal).__name__} has no body apart from its head; {_ADVICE}")
    return body


class LMHead:
    """Computes log-probs from hidden states with the head of one model.

    It contains only references: the weights belong to the model. A call uses the adapters in their
    current state (enabled, disabled or merged).

    Args:
        module: the output embedding: ``nn.Linear``, possibly wrapped by LoRA or PEFT's
            ``modules_to_save``.
        scale: factor of the logits.
        softcap: cap of the scaled logits.

    Raises:
        ConfigError: the module is of a different kind.

    Example:
        >>> head = LMHead(torch.nn.Linear(4, 7, bias=False))
        >>> head.score(torch.randn(3, 4), torch.tensor([0, 6, 2])).log_probs.shape
        torch.Size([3])
    """

    def __init__(
        self, module: nn.Module, *, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self.module, self.form = module, LogitForm(scale, softcap)
        self._linear()

    @classmethod
    def from_model(cls, model: nn.Module) -> LMHead:
        """Find the head of a Hugging Face causal model and check it against the model's logits.

        The check runs three tokens through the model once, without dropout and gradients. If the
        weights are on the meta device or sharded, the check is skipped.

        Args:
            model: the model, in PEFT or not.

        Raises:
            ConfigError: for an unknown head, adapter or logit field, or if the result differs from
                the model's own logits.
        """
        refuse_learned_prompts(model)
        causal = causal_model(model)
        module = causal.get_output_embeddings()
        if module is None:
            raise ConfigError(f"{type(causal).__name__} has no output embeddings; {_ADVICE}")
        head = cls(module, **_logit_form(causal.config)._asdict())
        body = model_body(model)
        if can_be_tried(model):
            _verify(head, model, body)
        return head

    def score(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        support: Support | None = None,
        chunk_size: int | None = None,
        in_place_head_grad: bool = False,
    ) -> F.HeadScores:
        """Log-probs of targets; see :func:`~torchrl_llm.functional.chunked_log_probs`.

        With a support see :func:`~torchrl_llm.functional.support_log_probs`.

        Args:
            hidden_ND: ``[N, D]`` hidden states that predict the targets.
            targets_N: int64 ``[N]``.
            temperature: a number, or float32 ``[N]``.
            entropy: also return the entropy of each distribution.
            support: score under the distributions restricted to these ids.
            chunk_size: most logits in memory at the same time; ``None`` chooses by device.
            in_place_head_grad: add the weight's gradient in place. This has no effect for a weight
                without gradient, or with a support, whose gradient does not consist of tiles.
        """
        weight, form = self._parts(hidden_ND)
        settings = {
            **form,
            "temperature": temperature,
            "entropy": entropy,
            "chunk_size": chunk_size,
        }
        if support is not None:
            support = support.to(hidden_ND.device)
            return F.support_log_probs(hidden_ND, weight, targets_N, *support, **settings)
        in_place = in_place_head_grad and weight.requires_grad
        return F.chunked_log_probs(
            hidden_ND, weight, targets_N, **settings, in_place_head_grad=in_place
        )

    def greedy_ids(self, hidden_ND: Tensor, chunk_size: int | None = None) -> Tensor:
        """Return the most likely token after each state, int64 ``[N]``.

        Args:
            hidden_ND: ``[N, D]``.
            chunk_size: the most logits alive at once; chosen by device when ``None``.
        """
        weight, form = self._parts(hidden_ND)
        return F.chunked_greedy_ids(hidden_ND, weight, **form, chunk_size=chunk_size)

    def states(self, hidden_ND: Tensor) -> HeadStates:
        """Return detached hidden states, with all tensors that turn them into distributions.

        Args:
            hidden_ND: ``[N, D]``.
        """
        weight, form = self._parts(hidden_ND)
        bias, low_rank = form["bias"], form["low_rank"]
        form["bias"] = None if bias is None else bias.detach()
        form["low_rank"] = None if low_rank is None else tuple(x.detach() for x in low_rank)
        return HeadStates(hidden_ND.detach(), weight.detach(), **form)

    def divergence(
        self,
        hidden_ND: Tensor,
        teacher: HeadStates,
        *,
        direction: Literal["reverse", "forward"] = "reverse",
        temperature: float | Tensor = 1.0,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Compute the divergence; see :func:`~torchrl_llm.functional.chunked_divergence`.

        If the teacher's embedding has more rows than the model's (padding that no tokenizer uses),
        the teacher's distribution is restricted to the model's ids.

        Args:
            hidden_ND: ``[N, D]``.
            teacher: the teacher's states for the same tokens.
            direction: ``"reverse"``, KL(model || teacher), or ``"forward"``, KL(teacher || model).
            temperature: temperature of both distributions: a number, or float32 ``[N]``.
            chunk_size: most logits of each model in memory at the same time.

        Returns:
            ``[N]``, nats.

        Raises:
            ConfigError: the teacher has fewer ids than the model.
        """
        weight, form = self._parts(hidden_ND)
        size, device = weight.shape[0], hidden_ND.device
        if teacher.weight.shape[0] < size:
            raise ConfigError(
                f"the teacher has {teacher.weight.shape[0]} ids and the model {size}: they have "
                "different vocabularies, and a divergence over the vocabulary needs the same one"
            )
        adapter = None
        if teacher.low_rank is not None:
            states, columns = teacher.low_rank
            adapter = states.to(device), columns[:size].to(device)
        return F.chunked_divergence(
            hidden_ND,
            weight,
            teacher.hidden.to(device),
            teacher.weight[:size].to(device),
            direction=direction,
            teacher_bias=None if teacher.bias is None else teacher.bias[:size].to(device),
            teacher_low_rank=adapter,
            teacher_scale=teacher.scale,
            teacher_softcap=teacher.softcap,
            temperature=temperature,
            chunk_size=chunk_size,
            **form,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits ``[..., V]`` of states ``[..., D]``; differentiable, not in chunks."""
        logits = self.module(hidden)
        return self.form.squash(logits if self.form.scale == 1.0 else logits * self.form.scale)

    def _linear(self) -> tuple[nn.Linear, nn.Module | None]:
        """Return the linear layer and the LoRA layer around it, if any."""
        module = self.module
        saved = getattr(module, "modules_to_save", None)
        if saved is not None:
            active = module.active_adapters
            use_saved = active and not module.disable_adapters
            module = saved[active[0]] if use_saved else module.original_module
        lora = module if hasattr(module, "lora_A") else None
        linear = module.base_layer if lora is not None else module
        if not isinstance(linear, nn.Linear) or not linear.weight.dtype.is_floating_point:
            raise ConfigError(
                f"the head is a {type(module).__name__}, not a plain linear layer; {_ADVICE}"
            )
        return linear, lora

    def _parts(self, hidden_ND: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return the current weight and the other terms; adapters may switch between calls."""
        linear, lora = self._linear()
        if isinstance(linear.weight, DTensor):
            raise ConfigError(
                "the head's weight is sharded; apply fully_shard to the CausalScorer, not to the "
                "model or its head, so that body and head run in one forward"
            )
        low_rank = None
        if lora is not None:
            if lora.disable_adapters and lora.merged:
                lora.unmerge()
            if not lora.disable_adapters and not lora.merged:
                low_rank = _adapters(lora, hidden_ND)
        return linear.weight, {"bias": linear.bias, **self.form._asdict(), "low_rank": low_rank}


def _adapters(lora: Any, hidden_ND: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return ``(u, B)``, where ``u @ B.T`` is the sum over the active adapters."""
    states, columns = [], []
    for name in lora.active_adapters:
        if name not in lora.lora_A:
            continue
        if name in lora.lora_variant or lora.lora_B[name].bias is not None:
            raise ConfigError(f"adapter {name!r} of the head is not plain LoRA; {_ADVICE}")
        down = lora.lora_A[name]
        hidden = lora.lora_dropout[name](hidden_ND.to(down.weight.dtype))
        states.append(down(hidden) * lora.scaling[name])
        columns.append(lora.lora_B[name].weight)
    if not states:
        return None
    return torch.cat(states, dim=1), torch.cat(columns, dim=1)


def _logit_form(config: Any) -> LogitForm:
    """Return factor and cap of the logits, from a model's configuration."""
    text = config.get_text_config(decoder=True)
    # Some families (MiniCPM3) compute their factor in a property, which to_dict does not show.
    known = {name: getattr(text, name, None) for name in (*_MULTIPLIERS, *_DIVISORS, *_CAPS)}
    fields = {k: v for k, v in {**text.to_dict(), **known}.items() if isinstance(v, int | float)}
    scale, softcap = 1.0, None
    for name, value in fields.items():
        if name in _MULTIPLIERS or (
            name in _DIVISORS and text.model_type in _MULTIPLIES_BY_DIVISOR
        ):
            scale *= value
        elif name in _DIVISORS:
            scale /= value
        elif name in _CAPS:
            softcap = float(value)
        elif (
            _UNKNOWN.match(name) and name not in _NOT_LOGITS and value not in (1, False)
        ) and "router" not in name:
            raise ConfigError(
                f"the configuration's field {name}={value} is not known to the chunked head; "
                f"{_ADVICE}"
            )
    return LogitForm(float(scale), softcap)


@contextmanager
def sampling_mode(module: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradient checkpointing, which transformers ties to training mode.

    The training flag of every submodule is restored on exit, also after an exception.

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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[float]:
    """Return a context to test a model: no dropout, no gradients, and flags restored on exit.

    Flash attention does not support float32, so a model with such weights runs under autocast.

    Yields:
        The relative error that rounding may cause.
    """
    weight = next(model.parameters())
    exact = torch.get_float32_matmul_precision() == "highest"
    low = weight.dtype not in (torch.float32, torch.float64) or not exact
    cast = uses_flash(model) and weight.dtype in (torch.float32, torch.float64)
    autocast = torch.autocast(weight.device.type, torch.bfloat16, enabled=cast)
    with sampling_mode(model), torch.no_grad(), autocast:
        check_kernel(model)
        yield 5e-2 if low or cast else 1e-4


def _verify(head: LMHead, model: nn.Module, body: nn.Module) -> None:
    device = causal_model(model).get_input_embeddings().weight.device
    ids = torch.tensor([_PROBE_IDS], device=device)
    with evaluating(model) as rounding:
        expected = model(input_ids=ids, use_cache=False).logits.float()
        got = head.logits(body(input_ids=ids, use_cache=False)[0]).float()
    if expected.shape == got.shape:
        error = (expected - got).abs().max() / expected.abs().max().clamp_min(1e-30)
        if error < max(rounding, 1e-3):
            return
        found = f"differ by {error:.1e} of the largest"
    else:
        found = f"have shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    raise ConfigError(
        f"the logits of {type(causal_model(model)).__name__} from its body and head {found}: it "
        f"does something that the chunked head does not know; {_ADVICE}"
    )


class ValueHead(nn.Module):
    r"""The value of a state, :math:`V(s) = w^\top h(s) + b`, from the model's last hidden state.

    The state of a token is its prefix, so :math:`h` is the state that predicts the token. Weight
    and bias start at zero, so the first values are 0, and random weights do not affect the first
    update. In a :class:`~torchrl_llm.modules.backends.TransformersBackend` (or a ``CausalScorer``),
    the head is a part of the scorer and of the policy: ``policy.value_head`` is in the policy's
    ``parameters()`` and ``state_dict()``. The head is not in the model, so ``save_pretrained`` does
    not write it, and weight updates do not send it to a sampler. A run saves the head as a separate
    part: ``TrainingRun(parts={"value_head": policy.value_head, ...})``.

    Values are always float32, for every dtype of the model and under autocast.

    Args:
        hidden_size: ``D``.
        detach: whether to keep the gradient of the value loss out of the model's body.
        device: device of the weights.

    Raises:
        ConfigError: for a size below 1.

    Example:
        >>> head = ValueHead(8)
        >>> head(torch.randn(3, 8))
        tensor([0., 0., 0.], grad_fn=<SqueezeBackward1>)
    """

    @checked
    def __init__(
        self,
        hidden_size: Annotated[int, Ge(1)],
        *,
        detach: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.detach = detach
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    def for_model(cls, model: nn.Module, *, detach: bool = False) -> ValueHead:
        """Create a head for a Hugging Face causal model, on its device.

        Args:
            model: the model, in PEFT or not.
            detach: see the class.

        Raises:
            ConfigError: the model's configuration does not contain the width of its states.

        Example:
            >>> from torchrl_llm.modules import load_model
            >>> ValueHead.for_model(load_model()).linear.weight.shape
            torch.Size([1, 128])
        """
        size = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
        if size is None:
            raise ConfigError(
                f"the configuration of {type(model).__name__} has no hidden_size; pass the width "
                "of its last hidden states to ValueHead"
            )
        return cls(size, detach=detach, device=next(model.parameters()).device)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Return the values ``[N]`` of the states ``[N, D]``, float32."""
        hidden = hidden_ND.detach() if self.detach else hidden_ND
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
