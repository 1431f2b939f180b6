"""Policy of evaluate.py for a server: by token ids, or by chat completions."""

from __future__ import annotations

import os
from typing import Any

from evaluate_config import EvaluateConfig, SamplerConfig, check_chat

from torchrl_llm._http import HTTPClient, server_root
from torchrl_llm._settings import ensure, naming
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import (
    ChatServerPolicy,
    LLMWrapperBase,
    OpenAIBackend,
    end_token_ids,
    vLLMWrapper,
)
from torchrl_llm.modules.backends.openai_protocol import model_card
from torchrl_llm.recipes.builders import make_tokenizer
from torchrl_llm.trainers import say

# Long enough for a restarting server, short enough for a wrong address.
_START_S = 10.0
_KEYS = (
    "inference_model.served_model names the model, and inference_model.api_key_variable the "
    "environment variable that holds the key"
)
# Digits, blanks, accents and signs, which tokenizers cut in different ways.
_SAMPLE = "Question 12: what is 345 + 67?\n  naïve = [x**2 for x in (1, 2)]"
# vLLM takes missing fields from the model's generation config; other servers lack these fields.
_OF_VLLM = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "skip_special_tokens": False,
}


def server_policy(config: EvaluateConfig) -> LLMWrapperBase | ChatServerPolicy:
    """The policy for the server of ``inference_model.url``, and a line about its protocol.

    Args:
        config: configuration of the recipe.

    Raises:
        ConfigError: the model does not exist, access is denied, the key is not set, or the server
            does not support the protocol.
        WorkerError: the server does not answer.
    """
    wanted = config.inference_model
    key = None
    if (variable := wanted.api_key_variable) is not None:
        key = os.environ.get(variable)
        ensure(
            bool(key), f"inference_model.api_key_variable: {variable} is not set in the environment"
        )
    with naming("inference_model.url"):
        http = HTTPClient(server_root(wanted.url), api_key=key)
    try:
        card = model_card(http, wanted.served_model, _START_S)
    except ConfigError as error:
        raise ConfigError(f"inference_model.url: {error} ({_KEYS})") from error
    why = "inference_model.protocol=chat"
    if wanted.protocol != "chat":
        why = _why_not_tokens(config, http, card)
    if why is None:
        name = config.model.name or _root(card)
        say(f"{http.url}: {card['id']} is asked by token ids, with the tokenizer of {name}")
        return _token_policy(config, card, key)
    ensure(wanted.protocol != "tokens", f"inference_model.protocol=tokens cannot be: {why}")
    check_chat(config, why)
    room = card.get("max_model_len")
    ensure(
        room is None or wanted.max_tokens < room,
        f"inference_model.max_tokens={wanted.max_tokens} leaves no room for a prompt: the context "
        f"of the server's model holds {room} tokens",
    )
    say(
        f"{http.url}: {card['id']} is asked by chat completions ({why}): its own template, no "
        "token ids or log-probs"
    )
    return ChatServerPolicy(
        http,
        _request(wanted, card),
        timeout_s=wanted.request_timeout_s,
        concurrency=config.eval.batch_size,
        on_overlong=config.eval.on_overlong,
    )


def _request(wanted: SamplerConfig, card: dict[str, Any]) -> dict[str, Any]:
    """The fields of each chat request."""
    asked = wanted.arguments
    fields = {"model": card["id"], "max_tokens": asked.pop("max_new_tokens")}
    fields |= _OF_VLLM if card.get("owned_by") == "vllm" else {}
    # Settings that are off are not sent, because a server may not know them.
    off = {"top_k": 0, "min_p": 0.0}
    fields |= {name: value for name, value in asked.items() if value != off.get(name)}
    fields |= {"stop": wanted.stop} if wanted.stop else {}
    fields |= wanted.request
    return {name: value for name, value in fields.items() if value is not None}


def _root(card: dict[str, Any]) -> str:
    """Source of the server's model, as reported by vLLM; else its name there."""
    return card.get("root") or card["id"]


def _why_not_tokens(config: EvaluateConfig, http: HTTPClient, card: dict[str, Any]) -> str | None:
    """Why a server does not support token ids; ``None`` if it does."""
    body = {
        "model": card["id"],
        "prompt": _SAMPLE,
        "max_tokens": 1,
        "temperature": 0,
        "add_special_tokens": False,
        "return_token_ids": True,
    }
    reply = http.call(
        "POST", "/v1/completions", body, timeout_s=config.inference_model.request_timeout_s
    )
    try:
        theirs = list(reply.data["choices"][0]["prompt_token_ids"])
    except (TypeError, KeyError, IndexError):
        return "the server returns no token ids"
    name = config.model.name or _root(card)
    try:
        tokenizer = make_tokenizer(name, config.inference_model.max_tokens)
    except ConfigError as error:
        if config.model.name is not None:
            raise
        return f"the server knows token ids, but its tokenizer is not here ({error})"
    ours = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    if ours != theirs:
        return (
            f"the tokenizer of {name} is not the server's: it encodes {_SAMPLE[:30]!r}... as "
            f"{len(ours)} ids {ours[:4]}... and the server as {len(theirs)} ids {theirs[:4]}..."
        )
    return None


def _token_policy(config: EvaluateConfig, card: dict[str, Any], key: str | None) -> LLMWrapperBase:
    wanted = config.inference_model
    name = config.model.name or _root(card)
    tokenizer = make_tokenizer(name, wanted.max_tokens)
    backend = OpenAIBackend(
        wanted.url,
        card["id"],
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(name, tokenizer),
        api_key=key,
        timeout_s=wanted.request_timeout_s,
        concurrency=config.eval.batch_size,
    )
    return vLLMWrapper(
        backend,
        tokenizer=tokenizer,
        **config.model.template,
        on_overlong=config.eval.on_overlong,
        generate_kwargs=wanted.arguments | {"stop_sequences": wanted.stop},
    )
