"""Loaders of models and tokenizers: from the hub, a folder or the package itself."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging

from torchrl_llm._imports import require
from torchrl_llm._progress import no_weight_bars
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError, DamagedCheckpointError
from torchrl_llm.modules.continued_adapter import base_of, find_adapter, has_tokenizer
from torchrl_llm.modules.quantization import Bits, loading_options, prepare
from torchrl_llm.modules.weight_files import PICKLED_NAME, WeightFolder

_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model")


def load_model(
    name_or_path: str | PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    lora: Mapping[str, Any] | Any | None = None,
    quantization: Bits | None = None,
    gradient_checkpointing: bool = False,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load a Hugging Face causal language model, in eval mode.

    Args:
        name_or_path: a name on the hub or a folder; ``None`` for the embedded chat model. For a
            LoRA adapter written by PEFT, its base model is loaded too. With ``lora`` the adapter is
            trained further; without ``lora`` it is merged into the weights.
        dtype: dtype of the weights, for example ``"bfloat16"`` or ``torch.bfloat16``; float32 by
            default. For low precision, use autocast over float32 weights.
        attn_implementation: ``"sdpa"``, ``"eager"``, ``"flex_attention"`` or
            ``"flash_attention_2"``; the model's by default.
        lora: a ``peft.LoraConfig``, or its arguments (``r``, ``lora_alpha``, ``lora_dropout``,
            ``target_modules``, ...), to train adapters instead of the weights. For an existing
            adapter, pass ``{}`` or some of the adapter's own values.
        quantization: ``"4bit"`` or ``"8bit"``: round the weights of linear layers to this many bits
            while they are read, see ``torchrl_llm.modules.quantization``. Quantized weights are
            never trained, and no adapter is merged into them.
        gradient_checkpointing: recompute the layers' activations in training instead of storing
            them.
        device: device of the model; the CPU by default.

    Raises:
        ConfigError: the model does not exist; a dtype or LoRA argument is unknown; the package of
            the attention is not installed; or an adapter has no base, does not fit the layers of
            its base, or differs from ``lora``.
        MissingExtraError: ``lora`` or an adapter needs peft, or ``quantization`` needs its package.

    Example:
        >>> load_model().dtype
        torch.float32
    """
    options: dict[str, Any] = {"dtype": _dtype(dtype)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    adapter, base, weights = find_adapter(name_or_path), base_of(name_or_path), None
    if quantization is not None:
        options |= loading_options(quantization, options["dtype"], device or "cpu")
        if adapter is None and base is not None and Path(base).is_dir():
            # Checkpoints of adapters name their base, and may be opened from a different folder.
            name_or_path = base = Path(base).resolve()
    if base is not None and (Path(base) / "config.json").is_file():
        try:
            weights = WeightFolder(base)  # transformers ignores some damage silently
        except DamagedCheckpointError as error:
            raise ConfigError(
                f"{str(base)!r} holds no model that can be loaded: {error}"
            ) from error
    if weights is not None and weights.form == PICKLED_NAME:
        if quantization is not None:
            raise ConfigError(f"quantization reads safetensors, not {PICKLED_NAME}")
        model = _load_state(Path(base), weights, options)
    else:
        model = _load(AutoModelForCausalLM, "model", name_or_path, options)
    if quantization is not None:
        model, device = prepare(model), None  # it was loaded onto its device
    model = _ready(model, lora if adapter is None else None, gradient_checkpointing, device)
    return model if adapter is None else adapter.attach(model, lora).eval()


def load_reward_model(
    name_or_path: str | PathLike[str] | None = None,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    lora: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load a Hugging Face sequence classifier with one output, in eval mode.

    Args:
        name_or_path: as in :func:`load_model`. A causal model gets a new head, drawn from torch's
            random numbers.
        tokenizer: tokenizer that pads the rows; the model gets its pad id. A tokenizer without a
            pad id pads with its end-of-text id.
        dtype: as in :func:`load_model`.
        attn_implementation: as there.
        lora: arguments of ``peft.LoraConfig``; all weights of the head are trained.
        gradient_checkpointing: as in :func:`load_model`.
        device: as there.

    Raises:
        ConfigError: as in :func:`load_model`, for an adapter, or for a model without a classifier.
        MissingExtraError: for ``lora`` without peft.

    Example:
        >>> load_reward_model().score.weight.shape
        torch.Size([1, 128])
    """
    if (adapter := find_adapter(name_or_path)) is not None:
        raise ConfigError(
            f"{adapter.name!r} is an adapter of {adapter.base!r}: merge it into its base "
            "(load_model, then save_pretrained), and pass the merged model"
        )
    options: dict[str, Any] = {"dtype": _dtype(dtype), "num_labels": 1}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    said = logging.get_verbosity()
    logging.set_verbosity_error()  # hide the table of unused language-model weights
    try:
        model = _load(AutoModelForSequenceClassification, "model", name_or_path, options)
    finally:
        logging.set_verbosity(said)
    if tokenizer is not None:
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.get_text_config(decoder=True).pad_token_id = tokenizer.pad_token_id
    lora = lora and {"task_type": "SEQ_CLS", **lora}
    return _ready(model, lora, gradient_checkpointing, device)


def check_reward_model(name_or_path: str | PathLike[str]) -> None:
    """Check by the configuration alone that a model is a trained reward model.

    Args:
        name_or_path: a name on the hub or a folder.

    Raises:
        ConfigError: there is no such model, or it is of a different kind.
    """
    config = _load(AutoConfig, "model", name_or_path, {})
    kinds = config.architectures or []
    if config.num_labels == 1 and any(kind.endswith("SequenceClassification") for kind in kinds):
        return
    raise ConfigError(
        f"{str(name_or_path)!r} is no reward model but {' and '.join(kinds) or 'of no known kind'} "
        f"with {config.num_labels} labels; it must be a sequence classifier of one label, as "
        "torchrl-llm train reward makes of any causal model"
    )


def _ready(
    model: nn.Module,
    lora: Mapping[str, Any] | Any | None,
    gradient_checkpointing: bool,
    device: torch.device | str | None,
) -> nn.Module:
    if device is not None:
        model = model.to(device)
    if gradient_checkpointing:
        # The reentrant form loses gradients if the input needs no gradient, as with LoRA.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora is not None:
        model = _with_lora(model, lora)
    return model.eval()


def empty_model(
    name_or_path: str | PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = torch.float32,
    lora: Mapping[str, Any] | Any | None = None,
) -> nn.Module:
    """Build a model's layers without weight values, on torch's ``meta`` device, for counting.

    Only the configuration is read, so a folder with only ``config.json`` is enough. For an adapter,
    the result is the base model; with ``lora``, it has an adapter of the same form.

    Args:
        name_or_path: as in :func:`load_model`.
        dtype: as there.
        lora: as there.

    Raises:
        ConfigError: as there.

    Example:
        >>> sum(p.numel() for p in empty_model().parameters())
        337792
    """
    config = _load(AutoConfig, "model", name_or_path, {})
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=_dtype(dtype), trust_remote_code=False
            )
        except Exception as error:  # a different kind of model, or impossible sizes
            raise ConfigError(
                f"{str(name_or_path)!r} is no causal language model: {_first_line(error)}"
            ) from error
        adapter = find_adapter(name_or_path)
        if adapter is not None and lora is not None:
            lora = adapter.form(lora)
        return model if lora is None else _with_lora(model, lora)


def empty_reward_model(
    name_or_path: str | PathLike[str], *, dtype: str | torch.dtype = torch.float32
) -> nn.Module:
    """Build the layers of a reward model without weight values, as in :func:`empty_model`.

    Args:
        name_or_path: as in :func:`load_reward_model`.
        dtype: as there.

    Raises:
        ConfigError: there is no such model.
    """
    config = _load(AutoConfig, "model", name_or_path, {"num_labels": 1})
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(
            config, dtype=_dtype(dtype), trust_remote_code=False
        )


def load_tokenizer(name_or_path: str | PathLike[str] | None = None) -> Any:
    """Load a fast tokenizer.

    Args:
        name_or_path: a name on the hub or a folder; ``None`` for the embedded model's. An adapter
            without a tokenizer uses its base's.

    Raises:
        ConfigError: the tokenizer does not exist.

    Example:
        >>> load_tokenizer().is_fast
        True
    """
    adapter = find_adapter(name_or_path)
    if adapter is not None and not has_tokenizer(adapter, _TOKENIZER_FILES):
        name_or_path = adapter.base
    folder = None if name_or_path is None else Path(name_or_path)
    # For some models without a tokenizer file, transformers makes an empty tokenizer.
    if folder and folder.is_dir() and not any(any(folder.glob(each)) for each in _TOKENIZER_FILES):
        files = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise ConfigError(
            f"{str(name_or_path)!r} holds no tokenizer: tokenizer.json is not among its files "
            f"({files})"
            + ("; a run's are in its checkpoints" if (folder / "checkpoints").is_dir() else "")
        )
    return _load(AutoTokenizer, "tokenizer", name_or_path, {})


def context_length(name_or_path: str | PathLike[str] | None = None) -> int | None:
    """Return a model's context length in tokens, from its configuration; reads no weights.

    Args:
        name_or_path: a name on the hub or a folder; ``None`` for the embedded chat model.

    Returns:
        ``None`` if the configuration does not contain it.

    Raises:
        ConfigError: the model does not exist.

    Example:
        >>> context_length()
        2048
    """
    return context_of(_load(AutoConfig, "model", name_or_path, {}))


def context_of(config: Any) -> int | None:
    """Return the longest possible row in tokens, by a model's configuration; ``None`` if unknown.

    Args:
        config: configuration of a Hugging Face model.
    """
    text = config.get_text_config(decoder=True)
    found = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return min((n for n in (*found, rotary_limit(config)) if n), default=None)


def rotary_limit(config: Any) -> int | None:
    """Return the longest row whose log-probs do not depend on its length; ``None`` without limit.

    If one row is longer, LongRoPE and dynamic NTK rotate all positions of the call by different
    angles. Then early tokens of a row depend on later tokens, and rows depend on other rows of the
    call.

    Args:
        config: configuration of a Hugging Face model.
    """
    find = getattr(config, "get_text_config", None)
    text = config if find is None else find(decoder=True)
    ropes = getattr(text, "rope_parameters", None) or {}
    limits = []
    for rope in (ropes, *ropes.values()):  # one, or one for each type of layer
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        if kind == "dynamic":
            limits.append(text.max_position_embeddings)
        elif kind == "longrope" and any(
            rope.get(f"short_{part}") != rope.get(f"long_{part}") for part in ("factor", "mscale")
        ):
            limits.append(rope["original_max_position_embeddings"])
    return min(limits, default=None)


def check_rotary(limit: int | None, tokens: int) -> None:
    """Check that no row is longer than :func:`rotary_limit`.

    Args:
        limit: rotary limit of the model.
        tokens: length of the longest row.

    Raises:
        ConfigError: the rows are too long; the message suggests a solution.
    """
    if limit is not None and tokens > limit:
        raise ConfigError(
            f"rows of {tokens} tokens are beyond the {limit} above which this model's rotary "
            "angles change with the longest row of a call, so that log-probs would depend on later "
            "tokens and on other rows; keep rows and max_length within "
            f"{limit} tokens, or fix the angles in config.json before the model is loaded: for "
            "longrope, make rope_parameters.short_factor (and short_mscale) equal to the long one"
        )


def end_token_ids(name_or_path: str | PathLike[str] | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a response, from tokenizer and the model's two configurations.

    Args:
        name_or_path: a name on the hub or a folder; ``None`` for the embedded chat model.
        tokenizer: tokenizer of the model.

    Raises:
        ConfigError: the model does not exist.
    """
    config = _load(AutoConfig, "model", name_or_path, {})
    path = embedded_model_path() if name_or_path is None else base_of(name_or_path)
    return known_eos(tokenizer, config, _generation_config(path))


def known_eos(*sources: Any) -> tuple[int, ...]:
    """Return all ids that end a response, from tokenizer and configurations together.

    Args:
        sources: objects that may have an ``eos_token_id``.

    Example:
        >>> from types import SimpleNamespace
        >>> known_eos(SimpleNamespace(eos_token_id=[7, 2]), SimpleNamespace(eos_token_id=2), None)
        (2, 7)
    """
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def _load(
    loader: Any, kind: str, name_or_path: str | PathLike[str] | None, options: dict[str, Any]
) -> Any:
    name_or_path = embedded_model_path() if name_or_path is None else name_or_path
    adapter = find_adapter(name_or_path) if kind == "model" else None
    if adapter is not None:
        try:
            return _load(loader, kind, adapter.base, options)
        except ConfigError as error:
            raise ConfigError(
                f"the base of the adapter {adapter.name!r} is missing: {error}; write where it is "
                "into adapter_config.json, as base_model_name_or_path"
            ) from error
    try:
        with no_weight_bars():
            return loader.from_pretrained(name_or_path, trust_remote_code=False, **options)
    except ImportError as error:
        how = f" with {options}" if options else ""
        raise ConfigError(
            f"the {kind} {str(name_or_path)!r} cannot be loaded{how}: a package is missing; "
            f"{str(error).splitlines()[0]}"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # file contents can make transformers raise anything
        raise ConfigError(_missing(kind, str(name_or_path), error)) from error


def _generation_config(name_or_path: str | PathLike[str]) -> GenerationConfig | None:
    """Return the generation configuration of a model; ``None`` if it has none."""
    try:
        return GenerationConfig.from_pretrained(name_or_path)
    except Exception as error:  # as in _load
        file = Path(name_or_path) / "generation_config.json"
        if isinstance(error, OSError) and not file.is_file():
            return None
        raise ConfigError(
            f"the generation_config.json of {str(name_or_path)!r} cannot be read: "
            f"{_first_line(error)}"
        ) from error


def _load_state(folder: Path, weights: WeightFolder, options: dict[str, Any]) -> nn.Module:
    """Load a model with weights from a file that transformers does not look for."""
    config, kind = _load(AutoConfig, "model", folder, {}), type(empty_model(folder))
    options |= {
        "config": config,
        "state_dict": {name: weights.read(name) for name in weights.names},
    }
    with no_weight_bars():
        model = kind.from_pretrained(None, trust_remote_code=False, **options)
    if (generation := _generation_config(folder)) is not None:
        model.generation_config = generation
    return model


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, with its type if the text alone is unclear."""
    text = str(error).strip().partition("\n")[0]
    is_plain = isinstance(error, (OSError, ValueError)) and text
    return text if is_plain else f"{type(error).__name__}: {text}"


def _missing(kind: str, name: str, error: Exception) -> str:
    """Return why a model or tokenizer cannot be loaded from a folder, a file or the hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    path, why = Path(name), _first_line(error)
    if "custom code" in why:
        why = "it needs Python code of its folder (auto_map), which is not run here"
        return f"{name!r} holds no {kind} that can be loaded: {why}; use one that transformers has"
    if path.is_dir():  # empty or incomplete
        return f"{name!r} holds no {kind} that can be loaded: {why}"
    if path.is_file():
        return f"{name!r} is a file; a {kind} is named by its folder, or by its name on the hub"
    if not isinstance(error, (OSError, HFValidationError)):
        return f"{name!r} holds no {kind} that can be loaded: {why}"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set, so that nothing is downloaded, and it is in no cache"
    return (
        f"there is no {kind} {name!r}: neither a folder with one nor a name that the hub could "
        f"deliver ({why})"
    )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype must be a floating type such as 'bfloat16', got {dtype!r}")
    return found


def _with_lora(model: nn.Module, lora: Mapping[str, Any] | Any) -> nn.Module:
    peft = require("peft", extra="peft", feature="lora")
    if isinstance(lora, Mapping):
        try:
            lora = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **lora})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"lora: {error}; its arguments are those of peft.LoraConfig"
            ) from error
    named = lora.target_modules
    for target in named if isinstance(named, (set, list, tuple)) else ():
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            weights = ((name, getattr(m, "weight", None)) for name, m in model.named_modules())
            there = {name.split(".")[-1] for name, w in weights if w is not None and w.ndim == 2}
            raise ConfigError(
                f"lora.target_modules: no layer is named {target!r}; there are "
                f"{', '.join(sorted(there))}"
            )
    try:
        return peft.get_peft_model(model, lora)
    except ValueError as error:
        key = "lora.target_modules" if "arget modules" in str(error) else "lora"
        raise ConfigError(f"{key}: {error}") from error
