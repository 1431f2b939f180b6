"""Configuration of a model: its address, its options and its prices; and presets.

Presets are in ``presets.json``, with their prices and the date of the prices.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import field, fields, replace
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from torchrl_llm._checked import Ge, Gt
from torchrl_llm._masking import masked
from torchrl_llm._registry import did_you_mean
from torchrl_llm._settings import Count, Group, check_types, ensure, own
from torchrl_llm.errors import ConfigError

_PRESETS = Path(__file__).with_name("presets.json")
_LOCAL_MAX_TOKENS = 256
_COMPLETION_TOKENS = re.compile(r"(?:o\d|gpt-5)(?:[-.].*)?$")


class LLMConfig(Group, kw_only=False):
    """A model at an address, in this process, or scripted.

    Args:
        name: display name.
        model_string: name at the server; or ``local:FOLDER`` (``local:`` for the embedded model),
            or ``scripted:package.module:function``.
        base_url: address of the server; OpenAI's address if not given.
        api_key: the API key; prefer the environment variable.
        api_key_env_var: environment variable of the API key.
        is_multimodal: whether an input may be a list of parts.
        max_tokens: most tokens of an answer.
        input_price_per_million: price of input tokens in US dollars per million; ``None`` if
            unknown.
        output_price_per_million: price of output tokens, in the same unit.
        extra_params: further fields of each request, or arguments of sampling for ``local:``.
        timeout_s: most seconds of a request, including repeated attempts.
        max_retries: number of times that one request is sent again.
        concurrency: concurrent requests, or rows of a batch for ``local:``.

    Raises:
        ConfigError: a value is impossible.

    Example:
        >>> LLMConfig("mine", "my-model", "http://localhost:8000/v1", api_key="secret")
        LLMConfig(name='mine', model_string='my-model', base_url='http://localhost:8000/v1')
    """

    name: str
    model_string: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_env_var: str = "OPENAI_API_KEY"
    is_multimodal: bool = False
    max_tokens: Count = 4096
    input_price_per_million: Annotated[float, Ge(0)] | None = None
    output_price_per_million: Annotated[float, Ge(0)] | None = None
    extra_params: dict[str, Any] = own()
    timeout_s: Annotated[float, Gt(0)] = 120.0
    max_retries: Annotated[int, Ge(0)] = 4
    concurrency: Count = 32

    def __post_init__(self) -> None:
        if self.api_key is not None and not isinstance(self.api_key, str):  # it is never shown
            raise ConfigError(f"api_key must be str or null, got {type(self.api_key).__name__}")
        check_types(self)
        super().__post_init__()
        self.extra_params = copy.deepcopy(self.extra_params)
        ensure(self.model_string != "", "model_string names a model, got ''")

    def __repr__(self) -> str:
        shown = {"name": self.name, "model_string": self.model_string}
        shown |= {"base_url": masked(self.base_url)} if self.base_url else {}
        return f"LLMConfig({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    @property
    def is_remote(self) -> bool:
        """Whether a server answers."""
        kind, separator, _ = self.model_string.partition(":")
        return not separator or kind not in ("local", "scripted")

    @property
    def prices(self) -> tuple[float | None, float | None]:
        """US dollars per million input and output tokens; ``None`` if unknown."""
        return self.input_price_per_million, self.output_price_per_million

    def get_api_key(self) -> str:
        """The API key from the configuration, else from the environment.

        A server on this machine, or a model without a server, needs no key.

        Raises:
            ConfigError: there is no key; the message names the variable.
        """
        key = self.api_key or os.environ.get(self.api_key_env_var)
        if key:
            return key
        if not self.is_remote or _is_on_this_machine(self.base_url):
            return "EMPTY"
        raise ConfigError(
            f"no key for {self.name!r}: set the environment variable {self.api_key_env_var}"
        )

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Make a copy of a preset.

        Args:
            name: name of the preset.

        Raises:
            ConfigError: the name is unknown; the nearest one is suggested.
        """
        if not isinstance(name, str) or name not in _presets():
            hint = did_you_mean(name, _presets())
            raise ConfigError(f"no model {name!r}; there are {', '.join(_presets())}{hint}")
        return cls.from_dict({"name": name, **_presets()[name]["config"]})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a mapping; the other values override values of its ``preset``, if it has one.

        Args:
            data: fields of this class. The default ``name`` is the name of the model; a ``local:``
                model writes at most 256 tokens unless ``max_tokens`` is set.

        Raises:
            ConfigError: a key is unknown (the nearest is suggested), or there is no model.
        """
        values = dict(data)
        base = values.pop("preset", None)
        known = [each.name for each in fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known) or f"; there are {', '.join(known)}"
                raise ConfigError(f"unknown key {key!r} of a model{hint}")
        if base is not None:
            return replace(cls.from_preset(base), **values)
        if "model_string" not in values:
            raise ConfigError(f"a model needs 'model_string' or 'preset', got {sorted(values)}")
        own: dict[str, Any] = {"name": str(values["model_string"])}
        if str(values["model_string"]).startswith("local:"):
            own["max_tokens"] = _LOCAL_MAX_TOKENS
        return cls(**{**own, **values})

    def to_dict(self) -> dict[str, Any]:
        """All fields, including the API key."""
        return {each.name: copy.deepcopy(getattr(self, each.name)) for each in fields(self)}


def _is_on_this_machine(url: str | None) -> bool:
    try:
        host = urlsplit(url or "").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a host name, or not an address
        return False


@cache
def _presets() -> dict[str, Any]:
    return json.loads(_PRESETS.read_text(encoding="utf-8"))["models"]


def preset_prices(name: str) -> tuple[float | None, float | None]:
    """US dollars per million input and output tokens of a preset; ``None`` if unknown.

    Args:
        name: name of the preset.

    Example:
        >>> preset_prices("not-a-preset")
        (None, None)
    """
    return LLMConfig.from_preset(name).prices if name in _presets() else (None, None)


def get_llm_config(name_or_path: str) -> LLMConfig:
    """Get a model by the name of a preset, or from a JSON file.

    Args:
        name_or_path: name of a preset, or path of a file.

    Raises:
        ConfigError: there is no such preset or file, or the file is malformed.

    Example:
        >>> get_llm_config("gpt-4o-mini").model_string
        'gpt-4o-mini'
    """
    path = Path(name_or_path)
    if name_or_path in _presets() or not (path.suffix == ".json" and path.is_file()):
        return LLMConfig.from_preset(name_or_path)
    return LLMConfig.from_dict(read_object(path, "the model"))


def read_object(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: path of the file.
        what: name of the file in errors.

    Raises:
        ConfigError: the file does not exist, or contains something else.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} is a {type(values).__name__}, not a JSON object")
    return values


def list_available_models() -> dict[str, str]:
    """Names of the presets with their descriptions."""
    return {name: each["description"] for name, each in _presets().items()}


def uses_completion_tokens(model_string: str) -> bool:
    """Whether an OpenAI model needs ``max_completion_tokens`` instead of ``max_tokens``.

    Args:
        model_string: name at the server, optionally with a provider before a slash.

    Example:
        >>> [uses_completion_tokens(name) for name in ("o3-mini", "gpt-5", "llama-o1x", "gpt-4o")]
        [True, True, False, False]
    """
    return _COMPLETION_TOKENS.match(model_string.rpartition("/")[2]) is not None
