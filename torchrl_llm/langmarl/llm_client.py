"""Client of one model, with a system prompt and an input; and a counter of tokens.

The client uses a :class:`~torchrl_llm.rewards.TextModel`: a server, a model in this process or a
function. :mod:`torchrl_llm.langmarl.calls` records and counts the calls of a run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from torchrl_llm._imports import require
from torchrl_llm._registry import import_named
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import calls
from torchrl_llm.langmarl.calls import Asked, Prices
from torchrl_llm.langmarl.llm_config import LLMConfig, preset_prices, uses_completion_tokens
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.rewards.text_models import (
    EndpointTextModel,
    Messages,
    ScriptedTextModel,
    TextAnswer,
    TextModel,
    WrapperTextModel,
)

_OPENAI = "https://api.openai.com/v1"


def make_text_model(config: LLMConfig) -> TextModel:
    """Make the model of a configuration.

    Args:
        config: its ``model_string`` is ``local:FOLDER`` (``local:`` for the embedded model),
            ``scripted:package.module:function``, or the name of a model at ``base_url``.

    Raises:
        ConfigError: a server has no key, a function does not exist, or settings have no effect.

    Example:
        >>> make_text_model(LLMConfig("up", "scripted:builtins:str")).name
        'up'
    """
    kind, separator, rest = config.model_string.partition(":")
    if separator and kind == "scripted":
        if config.extra_params:
            raise ConfigError(f"extra_params have no effect on {config.model_string!r}")
        return ScriptedTextModel(
            import_named(rest), name=config.name, concurrency=config.concurrency
        )
    if separator and kind == "local":
        if config.base_url is not None:
            raise ConfigError(
                f"base_url has no effect on {config.model_string!r}, which no server answers"
            )
        wrapper = _wrapper(rest, config.max_tokens, json.dumps(config.extra_params, sort_keys=True))
        return WrapperTextModel(wrapper, batch_size=config.concurrency, name=config.name)
    return _endpoint(config)


def _endpoint(config: LLMConfig) -> EndpointTextModel:
    field = "max_tokens"
    if uses_completion_tokens(config.model_string):
        field = "max_completion_tokens"
    url = (config.base_url or _OPENAI).rstrip("/")
    return EndpointTextModel(
        url if urlsplit(url).path else f"{url}/v1",
        config.model_string,
        api_key=config.get_api_key(),
        options={field: config.max_tokens, **config.extra_params},
        timeout=config.timeout_s,
        max_retries=config.max_retries,
        concurrency=config.concurrency,
        path="/chat/completions",
        max_tokens_field=field,
    )


@lru_cache(maxsize=4)
def _loaded(folder: str) -> tuple[Any, Any]:
    path = folder or str(embedded_model_path())
    return load_model(path), load_tokenizer(path)


@lru_cache(maxsize=16)
def _wrapper(folder: str, max_tokens: int, options: str) -> TransformersWrapper:
    """Wrapper of the model in a folder; roles with the same folder share its weights."""
    model, tokenizer = _loaded(folder)
    try:
        return TransformersWrapper(
            model,
            tokenizer=tokenizer,
            input_mode="history",
            generate=True,
            on_overlong="drop",
            generate_kwargs={"max_new_tokens": max_tokens, **json.loads(options)},
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"extra_params={options}: {error}") from error


class LLMClient:
    """Client that calls a model with a system prompt and an input.

    Args:
        llm_config: configuration of the model.
        model: model to use instead of the configured one.

    Attributes:
        tracker: counts the tokens of this client.

    Raises:
        ConfigError: as in :func:`make_text_model`.

    Example:
        >>> from torchrl_llm.rewards import ScriptedTextModel
        >>> echo = ScriptedTextModel(lambda messages: messages[-1]["content"])
        >>> client = LLMClient(LLMConfig("echo", "echo"), model=echo)
        >>> client.chat("Repeat.", "Hello")
        'Hello'
        >>> client.chat_with_usage("Repeat.", "Hello")
        ('Hello', {'input': 3, 'output': 2})
    """

    def __init__(self, llm_config: LLMConfig, *, model: TextModel | None = None) -> None:
        self.config = llm_config
        prices = Prices(*llm_config.prices)
        variable = llm_config.api_key_env_var if llm_config.is_remote else ""
        self.asked = Asked(model or make_text_model(llm_config), llm_config.name, prices, variable)
        self.tracker = TokenTracker(llm_config.name, *prices)
        self._raw: Any = None
        # All calls, including those of other threads, belong to the scope in which the client was
        # made.
        self._place = calls.here()

    def messages(self, system_prompt: str, user_input: Any) -> Messages:
        """Make a conversation from a system prompt and an input.

        Args:
            system_prompt: empty for none.
            user_input: a text; for a multimodal model also a list of parts in OpenAI's format.

        Raises:
            ConfigError: parts were given to a text-only model.
        """
        if not isinstance(user_input, str) and not self.config.is_multimodal:
            raise ConfigError(
                f"{self.config.name!r} takes texts, got {type(user_input).__name__}; set "
                "is_multimodal for a model that takes parts"
            )
        user = {"role": "user", "content": user_input}
        return ({"role": "system", "content": system_prompt}, user) if system_prompt else (user,)

    def chat(self, system_prompt: str, user_input: Any, max_tokens: int | None = None) -> str:
        """Get the text of an answer.

        Args:
            system_prompt: first message; empty for none.
            user_input: the input.
            max_tokens: most tokens; the configuration's if not given.

        Raises:
            TorchRLLLMError: all attempts failed.
        """
        return self.chat_with_usage(system_prompt, user_input, max_tokens)[0]

    def chat_with_usage(
        self, system_prompt: str, user_input: Any, max_tokens: int | None = None
    ) -> tuple[str, dict[str, int]]:
        """Get the text of an answer and the token counts.

        Args:
            system_prompt: first message; empty for none.
            user_input: the input.
            max_tokens: most tokens; the configuration's if not given.

        Returns:
            The stripped text, and the token counts ``input`` and ``output``.

        Raises:
            TorchRLLLMError: all attempts failed.
        """
        answer = self.answer(system_prompt, user_input, max_tokens)
        usage = answer.usage
        return answer.text.strip(), {"input": usage.input_tokens, "output": usage.output_tokens}

    def answer(
        self, system_prompt: str, user_input: Any, max_tokens: int | None = None
    ) -> TextAnswer:
        """Get an answer with all its data.

        Args:
            system_prompt: first message; empty for none.
            user_input: the input.
            max_tokens: most tokens; the configuration's if not given.

        Raises:
            TorchRLLLMError: all attempts failed.
        """
        messages = self.messages(system_prompt, user_input)
        answer = calls.ask(self.asked, messages, max_tokens=max_tokens, place=self._place)
        self.tracker.add_usage(answer.usage.input_tokens, answer.usage.output_tokens)
        return answer

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt for a model in this process; ``None`` for any other model."""
        model = self.asked.model
        return model.wrapper.longest_prompt if isinstance(model, WrapperTextModel) else None

    def count_tokens(self, system_prompt: str, user_input: Any) -> int:
        """Count the tokens of a prompt for a model in this process.

        Args:
            system_prompt: first message; empty for none.
            user_input: the input.
        """
        messages = self.messages(system_prompt, user_input)
        return len(self.asked.model.wrapper.formatter.encode(list(messages)).token_ids)

    @property
    def raw_client(self) -> Any:
        """OpenAI's own client of the same server, created at first access.

        Raises:
            MissingExtraError: the package ``openai`` is not installed.
            ConfigError: the model is not on a server.
        """
        if self.config.model_string.partition(":")[0] in ("local", "scripted"):
            raise ConfigError(f"{self.config.model_string!r} is not on a server")
        if self._raw is None:
            openai = require("openai", extra="openai", feature="LLMClient.raw_client")
            key, url = self.config.get_api_key(), self.config.base_url
            self._raw = openai.OpenAI(api_key=key, base_url=url)
        return self._raw


class TokenTracker:
    """Counts tokens and their cost; thread-safe.

    Args:
        model: name of the preset with the prices.
        input_price: US dollars per million input tokens, instead of the preset's; 0.0 is a valid
            price.
        output_price: price of output tokens, in the same unit.

    Example:
        >>> tracker = TokenTracker("mine", input_price=1.0, output_price=2.0)
        >>> tracker.add_usage(1_000_000, 500_000)
        >>> tracker.get_stats()["cost_usd"], tracker.estimate_cost(0, 1_000_000)
        (2.0, 2.0)
    """

    def __init__(
        self,
        model: str = "gpt-4o-mini",
        input_price: float | None = None,
        output_price: float | None = None,
    ) -> None:
        known = preset_prices(model)
        given = (input_price, output_price)
        pairs = zip(given, known, strict=True)
        self.model = model
        self._prices = Prices(*(own if own is not None else preset for own, preset in pairs))
        self._lock = threading.Lock()
        self._input = self._output = 0

    def add_usage(self, input_tokens: int, output_tokens: int) -> None:
        """Count tokens.

        Args:
            input_tokens: tokens of inputs.
            output_tokens: tokens of answers.
        """
        with self._lock:
            self._input += input_tokens
            self._output += output_tokens

    def get_stats(self) -> dict[str, Any]:
        """Model, tokens and costs so far."""
        with self._lock:
            read, written = self._input, self._output
        input_cost, output_cost = self._prices.costs(self.model, read, written)
        return {
            "model": self.model,
            "input_tokens": read,
            "output_tokens": written,
            "total_tokens": read + written,
            "input_cost_usd": input_cost,
            "output_cost_usd": output_cost,
            "cost_usd": input_cost + output_cost,
        }

    def estimate_cost(self, input_tokens: int, output_tokens: int) -> float:
        """Cost of tokens in US dollars, without counting them.

        Args:
            input_tokens: tokens of inputs.
            output_tokens: tokens of answers.
        """
        return sum(self._prices.costs(self.model, input_tokens, output_tokens))

    def reset(self) -> None:
        """Reset the counts to 0."""
        with self._lock:
            self._input = self._output = 0

    def get_summary_string(self) -> str:
        """Tokens and costs so far, as one line."""
        stats: Mapping[str, Any] = self.get_stats()
        return (
            f"{stats['model']}: {stats['input_tokens']:,} input and {stats['output_tokens']:,} "
            f"output tokens, ${stats['cost_usd']:.4f}"
        )
