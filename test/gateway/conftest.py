"""One gateway for all tests of a file; each test has a session with a key of its own."""

import secrets
from types import SimpleNamespace

import pytest
from gateway.scripted_port import ScriptedPort


@pytest.fixture(scope="session")
def served():
    """A gateway, its ports by key, and clients without a key."""
    import anthropic
    import httpx2
    import openai

    from torchrl_llm.gateway.app import make_app
    from torchrl_llm.gateway.server import GatewayServer

    ports = {}
    with GatewayServer(make_app(ports.get, max_body_bytes=2**20, max_calls=24)) as server:
        options = {"api_key": "nobody", "max_retries": 0}
        yield SimpleNamespace(
            server=server,
            ports=ports,
            openai=openai.OpenAI(base_url=f"{server.url}/v1", **options),
            anthropic=anthropic.Anthropic(base_url=server.url, **options),
            http=httpx2.Client(base_url=server.url),
        )


@pytest.fixture
def session(served):
    """A session: its port, its key and clients that have the key."""
    key, port = secrets.token_hex(8), ScriptedPort()
    served.ports[key] = port
    yield SimpleNamespace(
        key=key,
        port=port,
        url=served.server.url,
        openai=served.openai.with_options(api_key=key),
        anthropic=served.anthropic.with_options(api_key=key),
    )
    del served.ports[key]
