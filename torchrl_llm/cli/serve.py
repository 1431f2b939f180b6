"""Serves a model: ``torchrl-llm serve FOLDER``, for any program that speaks OpenAI's protocol."""

from __future__ import annotations

import ipaddress
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

from torchrl_llm._settings import Group
from torchrl_llm.cli._options import Word, parse
from torchrl_llm.cli.chat import load, model_and_config
from torchrl_llm.errors import ConfigError

# Number of stored answers, so that continued conversations keep their sampled ids.
_REMEMBERED = 1000


class Options(Group):
    """Serve a model over HTTP, in the protocols of OpenAI and Anthropic.

    It answers at http://HOST:PORT/v1: chat completions, completions, responses, messages, models.

    Attributes:
        model: folder of a run (its newest checkpoint), of a checkpoint or a model, or a hub name;
            default: the model that ships with the package.
        host: address to listen on; by default only this machine can reach it.
        port: port to listen on; 0 takes a free one.
        key: API key that requests must contain; needed on a host that others can reach.
        name: name of the model; default: the name of its folder.
        temperature: sampling temperature of requests that set none.
        max_tokens: tokens of an answer if a request sets none; default: the run's, or 256.
        seed: random seed of sampling.
    """

    model: Annotated[str | None, Word("FOLDER")] = None
    host: Annotated[str, "HOST"] = "127.0.0.1"
    port: Annotated[int, "PORT"] = 8000
    key: Annotated[str | None, "KEY"] = None
    name: Annotated[str | None, "NAME"] = None
    temperature: Annotated[float, "T"] = 1.0
    max_tokens: Annotated[int | None, "N"] = None
    seed: Annotated[int, "N"] = 0


def main(arguments: Sequence[str]) -> int:
    """Serve a model until Ctrl-C.

    Args:
        arguments: the model, and options.

    Returns:
        The exit status.
    """
    given = parse(Options, "serve", arguments)
    if given.key is None and not _is_own(given.host):
        raise ConfigError(f"--host {given.host} can be reached by others: give --key KEY")

    import torch

    from torchrl_llm.gateway.app import make_app
    from torchrl_llm.gateway.server import GatewayServer

    engine, session = _session(given)
    torch.manual_seed(given.seed)

    def find(key: str) -> Any:
        return session if given.key in (None, key) else None

    with engine, GatewayServer(make_app(find), host=given.host, port=given.port) as server:
        sys.stdout.write(f"{session.model} at {server.url}/v1\n")
        sys.stdout.flush()
        threading.Event().wait()
    return 0


def _is_own(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _session(given: Options) -> tuple[Any, Any]:
    """The engine, and the single session of all requests."""
    from torchrl_llm.gateway import Formatters, GatewaySession, PolicyEngine
    from torchrl_llm.recipes.chat_settings import chat_settings, make_chat_policy

    name, config = model_and_config(given.model)
    # The client runs the tools of its requests, so the tools of the run are not needed.
    config = {key: config[key] for key in ("model", "inference_model") if key in config}
    settings = chat_settings(config)
    policy = make_chat_policy(
        *load(name), settings, max_tokens=given.max_tokens, temperature=given.temperature
    )
    engine = PolicyEngine(policy)
    engine.limits = engine.limits._replace(max_new_tokens=policy.backend.max_length or sys.maxsize)
    formatters = Formatters(
        policy.tokenizer,
        show_tools=settings.shows_tools,
        chat_template_name=settings.chat_template_name,
        template_kwargs=settings.template_kwargs,
    )
    session = GatewaySession(engine, formatters, max_answers=_REMEMBERED)
    session.model = given.name or (getattr(name, "name", name) or "torchrl-llm")
    return engine, session
