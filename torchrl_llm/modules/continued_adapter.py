"""Finds an existing LoRA adapter and its base model, and combines the two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from torchrl_llm._imports import require
from torchrl_llm._settings import ensure
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.quantization import is_quantized

_CONFIG = "adapter_config.json"
_FEATURE = "a model that is an adapter"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in the form that PEFT saves.

    Attributes:
        name: its folder, or its name on the hub.
        base: its base model.
        config: content of its ``adapter_config.json``.
    """

    name: str
    base: str
    config: Mapping[str, Any]

    def changed(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that contradict the adapter's, with the adapter's values.

        Args:
            wanted: arguments of ``peft.LoraConfig``. Dropout may differ, because no weight depends
                on it.
        """
        given = {name: value for name, value in wanted.items() if name != "lora_dropout"}
        own = {name: self.config.get(name) for name in given}
        return {name: own[name] for name, value in given.items() if not _equal(value, own[name])}

    def form(self, lora: Mapping[str, Any] | Any) -> Any:
        """Return its ``peft.LoraConfig``, for further training.

        Args:
            lora: arguments of that class, or an instance. Each argument except ``lora_dropout``
                must equal the adapter's or be left out.

        Raises:
            ConfigError: they contradict the adapter.
            MissingExtraError: without peft.
        """
        peft = require("peft", extra="peft", feature=_FEATURE)
        wanted = dict(lora if isinstance(lora, Mapping) else lora.to_diff_dict())
        ensure(
            not (wrong := self.changed(wanted)),
            f"lora: the adapter {self.name!r} has {wrong}: leave these out, or begin another "
            f"adapter on {self.base!r}",
        )
        config = peft.PeftConfig.from_pretrained(self.name)
        config.lora_dropout = wanted.get("lora_dropout", config.lora_dropout)
        config.inference_mode = False
        return config

    def attach(self, model: nn.Module, lora: Mapping[str, Any] | Any | None) -> nn.Module:
        """Add the adapter to the base: for further training, or merged into the base's weights.

        Args:
            model: the base.
            lora: as in :meth:`form`; ``None`` merges the adapter, which is not possible with
                quantized weights.

        Raises:
            ConfigError: as in :meth:`form`, or for weights that do not fit the base.
            MissingExtraError: without peft.
        """
        peft = require("peft", extra="peft", feature=_FEATURE)
        config = self.form({} if lora is None else lora)
        try:
            joined = peft.PeftModelForCausalLM(model, config)
            found = joined.load_adapter(
                self.name, "default", is_trainable=lora is not None, torch_device="cpu"
            )
        # Missing layers, different shapes, a damaged or missing file.
        except Exception as error:
            raise ConfigError(f"{self._misfit}: {str(error).strip()[:500]}") from error
        lacking, unknown = found.missing_keys, found.unexpected_keys
        ensure(not lacking, f"{self._misfit}: it lacks {', '.join(lacking[:3])}")
        ensure(not unknown, f"{self._misfit}: no layer takes {', '.join(unknown[:3])}")
        if lora is not None:
            return joined
        return joined.requires_grad_(False) if is_quantized(model) else _merged(joined)

    @property
    def _misfit(self) -> str:
        return (
            f"the adapter {self.name!r} does not go on {self.base!r}, which its {_CONFIG} names as "
            "its base (base_model_name_or_path)"
        )


def find_adapter(name_or_path: str | PathLike[str] | None) -> Adapter | None:
    """Find the adapter of that name; return ``None`` if the name is a model or unknown.

    Args:
        name_or_path: a folder, or a name on the hub; ``None`` for the embedded chat model.

    Raises:
        ConfigError: the adapter cannot be used with a causal language model, or names no base.

    Example:
        >>> find_adapter(None) is None
        True
    """
    file = None if name_or_path is None else _config_file(name_or_path)
    if file is None:
        return None
    what = f"{str(name_or_path)!r} is an adapter"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} whose {_CONFIG} cannot be read: {error}") from error
    ensure(isinstance(config, dict), f"{what} whose {_CONFIG} is no mapping")
    kind, task = config.get("peft_type"), config.get("task_type")
    ensure(kind == "LORA", f"{what} of the type {kind}; only LORA can be trained on or merged here")
    ensure(
        task in (None, "CAUSAL_LM"),
        f"{what} for task_type={task}, and this is for causal language models (CAUSAL_LM)",
    )
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    ensure(
        isinstance(base, str) and bool(base),
        f"{what} of a model that it does not name: write its folder or its name on the hub into "
        f"{_CONFIG}, as base_model_name_or_path",
    )
    ensure(
        revision in (None, "main") or Path(base).is_dir(),
        f"{what} of the revision {revision} of {base}: download that, and name its folder in "
        f"{_CONFIG}, as base_model_name_or_path",
    )
    ensure(
        _config_file(base) is None,
        f"{what} of {base!r}, which is an adapter itself: merge that into its base, and name the "
        f"merged model in {_CONFIG}, as base_model_name_or_path",
    )
    return Adapter(str(name_or_path), base, config)


def base_of(name_or_path: str | PathLike[str] | None) -> str | PathLike[str] | None:
    """Return the base model of an adapter; return other names unchanged.

    Args:
        name_or_path: as in :func:`find_adapter`.

    Example:
        >>> base_of("Qwen/Qwen3-0.6B")
        'Qwen/Qwen3-0.6B'
    """
    adapter = find_adapter(name_or_path)
    return name_or_path if adapter is None else adapter.base


def _config_file(name_or_path: str | PathLike[str]) -> Path | None:
    """Find an adapter's configuration; a folder with a model's configuration is a model."""
    path = Path(name_or_path)
    if path.exists():
        file = path / _CONFIG
        return file if file.is_file() and not (path / "config.json").is_file() else None
    if _hub_file(name_or_path, "config.json") is not None:
        return None
    return _hub_file(name_or_path, _CONFIG)


def _hub_file(name: str | PathLike[str], file: str) -> Path | None:
    from transformers.utils import cached_file

    try:
        return Path(cached_file(str(name), file))
    except (OSError, ValueError):  # loading the model reports a wrong name
        return None


def has_tokenizer(adapter: Adapter, patterns: tuple[str, ...]) -> bool:
    """Return whether an adapter includes a tokenizer.

    Args:
        adapter: the adapter.
        patterns: patterns of tokenizer file names.
    """
    folder = Path(adapter.name)
    if folder.is_dir():
        return any(any(folder.glob(each)) for each in patterns)
    return _hub_file(adapter.name, "tokenizer_config.json") is not None


def _equal(wanted: Any, own: Any) -> bool:
    is_names = isinstance(wanted, (list, tuple, set)) and isinstance(own, list)
    return set(wanted) == set(own) if is_names else wanted == own


def _merged(model: Any) -> nn.Module:
    base = model.get_base_model()
    tensors = [id(p) for _, p in base.named_parameters(remove_duplicate=False)]
    for layer in base.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if tensors.count(id(weight)) > 1:  # or the merge would change the embeddings too
            layer.base_layer.weight = nn.Parameter(weight.detach().clone())
            for config in (base.config, base.config.get_text_config()):
                config.tie_word_embeddings = False
    merged: nn.Module = model.merge_and_unload()
    return merged.requires_grad_(True)
