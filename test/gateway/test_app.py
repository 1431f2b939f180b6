"""The gateway's application and server: keys, limits, clients that leave and ports that fail."""

from __future__ import annotations

import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway.scripted_port import ScriptedPort, text_answer
from waiting import wait_until

from torchrl_llm.errors import ConfigError
from torchrl_llm.gateway.app import make_app, read_json
from torchrl_llm.gateway.calls import RefusedCallError
from torchrl_llm.gateway.server import GatewayServer

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")

CHAT = "/v1/chat/completions"
BODY = {"model": "any", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
BYTES = json.dumps(BODY).encode()


@pytest.fixture
def other(served):
    served.ports["other-key"] = ScriptedPort(text_answer("other"))
    yield served.ports["other-key"]
    del served.ports["other-key"]


def ask(served, path=CHAT, **headers):
    reply = served.http.post(path, json=BODY, headers=headers)
    if reply.status_code != 200:
        return reply.status_code
    return reply.json()["choices"][0]["message"]["content"]


def connected(served, key, body=BYTES, length=None):
    """A socket on which a chat was asked for."""
    connection = socket.create_connection((served.server.host, served.server.port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_comes_in_a_header_or_in_the_path(served, session):
    assert ask(served, authorization=f"Bearer {session.key}") == "4"
    assert ask(served, authorization=f"bearer  {session.key}") == "4"
    assert ask(served, **{"x-api-key": session.key}) == "4"
    assert ask(served, f"/session/{session.key}{CHAT}") == "4"
    assert ask(served, f"/session/{session.key}{CHAT}", authorization="Bearer EMPTY") == "4"
    both = {"authorization": f"Bearer {session.key}", "x-api-key": session.key}
    assert ask(served, f"/session/{session.key}{CHAT}", **both) == "4"


def test_a_key_that_is_not_known_is_refused(served, session):
    for headers in ({}, {"authorization": f"Basic {session.key}"}, {"x-api-key": "guessed"}):
        assert ask(served, **headers) == 401
    assert ask(served, f"/session/guessed{CHAT}", **{"x-api-key": session.key}) == 401
    with pytest.raises(openai.AuthenticationError, match="not known"):
        served.openai.chat.completions.create(**BODY)
    with pytest.raises(anthropic.AuthenticationError, match="not known"):
        served.anthropic.messages.create(**BODY, max_tokens=9)
    with pytest.raises(openai.AuthenticationError):
        served.openai.models.list()
    assert not session.port.calls


def test_keys_of_two_sessions_are_refused(served, session, other):
    mixed = {"authorization": f"Bearer {session.key}", "x-api-key": "other-key"}
    assert ask(served, **mixed) == 401
    assert ask(served, f"/session/other-key{CHAT}", authorization=f"Bearer {session.key}") == 401
    assert not session.port.calls
    assert not other.calls
    assert ask(served, f"/session/other-key{CHAT}") == "other"


def test_both_clients_work_with_the_key_in_their_address(served, session):
    url = f"{session.url}/session/{session.key}"
    client = served.openai.with_options(base_url=f"{url}/v1", api_key="EMPTY")
    assert client.chat.completions.create(**BODY).choices[0].message.content == "4"
    client = served.anthropic.with_options(base_url=url, api_key="EMPTY")
    assert client.messages.create(**BODY, max_tokens=9).content[0].text == "4"
    assert client.messages.count_tokens(**BODY).input_tokens == 3


# -- other paths -----------------------------------------------------------------------------------


def test_both_clients_list_the_model_of_the_session(session):
    assert [model.id for model in session.openai.models.list()] == ["scripted"]
    assert [model.id for model in session.anthropic.models.list()] == ["scripted"]
    assert session.openai.models.retrieve("scripted").owned_by == "torchrl_llm"
    assert session.anthropic.models.retrieve("scripted").display_name == "scripted"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        session.openai.models.retrieve("gpt")
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'a/b'"):
        session.anthropic.models.retrieve("a/b")


def test_a_path_or_a_method_that_there_is_not_is_named(served, session):
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
        session.openai.embeddings.create(model="any", input="?")
    reply = served.http.get(CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "not_found")
    assert served.http.get(f"{CHAT}/").status_code == 404
    assert served.http.get("/health").json() == {"status": "ok"}


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": "\\uD83D \\uDE42"}',
        b'{"a": ' * 101 + b"1" + b"}" * 101,
        b"[" * 10**5,
    ],
)
def test_a_body_that_is_no_object_is_refused(served, session, text):
    with pytest.raises(RefusedCallError):
        read_json(text)
    reply = served.http.post(CHAT, content=text, headers={"x-api-key": session.key})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_may_have_a_hundred_levels_and_any_character():
    body = read_json(b'{"a": ' * 99 + b'"\\ud83d\\ude42 \xe2\x80\xa8 {[{["' + b"}" * 99)
    for _ in range(99):
        body = body["a"]
    assert body == "🙂 \u2028 {[{["


def test_a_body_beyond_the_limit_is_refused_by_both_protocols(served, session):
    long = [{"role": "user", "content": "a" * 2**20}]
    with pytest.raises(openai.APIStatusError, match="longer than 1048576 bytes") as error:
        session.openai.chat.completions.create(model="any", messages=long)
    assert (error.value.status_code, error.value.type) == (413, "invalid_request_error")
    with pytest.raises(anthropic.APIStatusError) as error:
        session.anthropic.messages.create(model="any", messages=long, max_tokens=9)
    assert error.value.status_code == 413
    assert error.value.body["error"]["type"] == "request_too_large"
    assert not session.port.calls


# -- ports that fail, wait or are busy -------------------------------------------------------------


def test_an_unexpected_error_of_a_port_is_logged_once_and_told_to_the_program(session, caplog):
    session.port.answer_or_error = ZeroDivisionError("by zero, api_key=sk-1234567890123456789")
    with caplog.at_level(logging.WARNING, "torchrl"):
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as error:
                session.openai.chat.completions.create(**BODY)
        with pytest.raises(anthropic.InternalServerError, match="ZeroDivisionError: by zero"):
            session.anthropic.messages.create(**BODY, max_tokens=9)
    assert "sk-123" not in error.value.message
    [text] = [record.message for record in caplog.records if record.name == "torchrl"]
    assert "Traceback" in text
    assert "scripted_port.py" in text
    assert "sk-123" not in text


def test_a_client_that_leaves_cancels_its_call(served, session):
    session.port.waits = True
    connection = connected(served, session.key)
    assert session.port.was_called.wait(10)
    assert not session.port.was_cancelled.is_set()
    connection.close()
    assert session.port.was_cancelled.wait(10)


def test_a_client_whose_time_is_over_cancels_its_call_in_both_protocols(session):
    session.port.waits = True
    with pytest.raises(openai.APITimeoutError):
        session.openai.with_options(timeout=0.2).chat.completions.create(**BODY, stream=True)
    assert session.port.was_cancelled.wait(10)
    session.port.was_cancelled.clear()
    with pytest.raises(anthropic.APITimeoutError):
        session.anthropic.with_options(timeout=0.2).messages.create(**BODY, max_tokens=9)
    assert session.port.was_cancelled.wait(10)


def test_a_client_that_leaves_amid_its_body_makes_no_call(served, session):
    connected(served, session.key, BYTES[:20], length=len(BYTES)).close()
    session.openai.chat.completions.create(**BODY)
    assert len(session.port.calls) == 1


def test_calls_beyond_the_limit_are_refused_until_others_end(served, session):
    session.port.waits = True
    waiting = [connected(served, session.key) for _ in range(24)]
    wait_until(lambda: len(session.port.calls) == 24)
    with pytest.raises(openai.RateLimitError, match="24 calls wait for answers"):
        session.openai.chat.completions.create(**BODY)
    with pytest.raises(anthropic.RateLimitError):
        session.anthropic.messages.create(**BODY, max_tokens=9)
    for connection in waiting:
        connection.close()
    session.port.waits = False
    wait_until(lambda: ask(served, **{"x-api-key": session.key}) == "4")


def test_a_call_that_its_session_cancels_is_an_error_of_the_server(served, session):
    class Cancelled(ScriptedPort):
        async def answer(self, call):
            import asyncio

            raise asyncio.CancelledError

    served.ports[session.key] = Cancelled()
    with pytest.raises(openai.InternalServerError, match="was cancelled by its session"):
        session.openai.chat.completions.create(**BODY)


# -- the server ------------------------------------------------------------------------------------


def test_slow_readers_and_slow_writers_keep_nobody_waiting(served, session):
    session.port.answer_or_error = text_answer("4" * 2**21, sampled="4")
    slow = [connected(served, session.key) for _ in range(20)]
    slow += [connected(served, session.key, BYTES[:20], length=len(BYTES)) for _ in range(20)]
    wait_until(lambda: len(session.port.calls) == 20)
    session.port.answer_or_error = text_answer("4")
    began = time.monotonic()
    assert ask(served, **{"x-api-key": session.key}) == "4"
    assert time.monotonic() - began < 2
    for connection in slow:
        connection.close()


def test_sessions_that_ask_at_once_get_their_own_answers(served):
    keys = [f"key-{i}" for i in range(32)]
    served.ports.update({key: ScriptedPort(text_answer(key)) for key in keys})

    def talk(key):
        return {ask(served, f"/session/{key}{CHAT}") for _ in range(5)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(talk, keys)) == [{key} for key in keys]
    for key in keys:
        del served.ports[key]


def test_an_answer_does_not_wait_for_the_kernel_to_fill_a_packet(served, session):
    headers = {"x-api-key": session.key}
    ask(served, **headers)
    began = time.monotonic()
    for _ in range(20):
        ask(served, **headers)
    assert (time.monotonic() - began) / 20 < 0.03  # Nagle's algorithm makes it 0.04 s


def test_a_server_runs_calls_on_its_loop_and_closes_with_calls_that_wait():
    port = ScriptedPort()
    port.waits = True
    with GatewayServer(make_app({"key": port}.get)) as server:
        seen = []
        server.loop.call_soon_threadsafe(seen.append, 1)
        wait_until(lambda: seen == [1])
        connection = socket.create_connection((server.host, server.port))
        head = f"POST /session/key{CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(BYTES)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + BYTES)
        assert port.was_called.wait(10)
    assert port.was_cancelled.wait(10)
    connection.close()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.url}/health")
    server.close()


def test_a_host_or_a_port_that_cannot_be_had_is_named(served):
    taken = GatewayServer(make_app({}.get), port=served.server.port)
    with pytest.raises(ConfigError, match=f"host='127.0.0.1', port={served.server.port}"):
        taken.start()
    with pytest.raises(ConfigError, match=r"host='no\.such\.host\.invalid', port=0"):
        GatewayServer(make_app({}.get), host="no.such.host.invalid").start()
    with pytest.raises(ConfigError, match="port must be in"):
        GatewayServer(make_app({}.get), port=65536)
