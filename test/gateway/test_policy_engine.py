"""Clients that leave while a real model samples for them: how many steps it still makes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import pytest

from torchrl_llm.gateway.app import make_app
from torchrl_llm.gateway.calls import Call
from torchrl_llm.gateway.policy_engine import PolicyEngine
from torchrl_llm.gateway.server import GatewayServer
from torchrl_llm.gateway.session import Formatters, GatewaySession
from torchrl_llm.modules import TransformersWrapper, load_model

MESSAGES = ({"role": "user", "content": "What is 2 + 2?"},)


class Hold:
    """A step at which a model waits to be told to go on."""

    def __init__(self):
        self.is_reached, self.go_on = threading.Event(), threading.Event()


class Steps:
    """Counts the steps of a model, and holds it at some of them."""

    def __init__(self, model):
        self.count, self._holds = 0, {}
        model.register_forward_hook(self._step)

    def _step(self, *_):
        self.count += 1
        if hold := self._holds.get(self.count):
            hold.is_reached.set()
            assert hold.go_on.wait(60)

    def hold(self, at):
        return self._holds.setdefault(at, Hold())


@pytest.fixture
def gateway(tokenizer):
    """A session of a real model, its engine and its steps."""
    arguments = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    policy = TransformersWrapper(load_model(), tokenizer=tokenizer, generate_kwargs=arguments)
    with PolicyEngine(policy) as engine:
        yield GatewaySession(engine, Formatters(tokenizer)), engine, Steps(policy.backend.model)


def call(max_new_tokens):
    return Call(messages=MESSAGES, sampling={"max_new_tokens": max_new_tokens})


def test_a_client_that_leaves_frees_the_model_before_its_next_step(gateway, monkeypatch):
    session, engine, steps = gateway
    fifth, withdraw = steps.hold(5), engine.withdraw
    monkeypatch.setattr(engine, "withdraw", lambda it: (withdraw(it), fifth.go_on.set()))
    body = json.dumps({"model": "any", "messages": MESSAGES}).encode()
    with GatewayServer(make_app(lambda key: session)) as server:
        with socket.create_connection((server.host, server.port)) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert fifth.is_reached.wait(60)
        [after] = asyncio.run(session.answer(call(3)))  # waits for the model to be free
    assert len(after.token_ids) == 3
    assert steps.count == 5 + 3


def test_who_is_sampled_next_to_a_client_that_leaves_gets_a_whole_answer(gateway):
    session, engine, steps = gateway

    async def talk():
        [alone] = await session.answer(call(40))
        before, amid = steps.hold(41), steps.hold(50)
        first = asyncio.create_task(session.answer(call(1)))
        await asyncio.to_thread(before.is_reached.wait, 60)
        leaves, stays = (asyncio.create_task(session.answer(call(40))) for _ in range(2))
        while len(engine._waiting) < 2:
            await asyncio.sleep(0)
        before.go_on.set()
        await asyncio.to_thread(amid.is_reached.wait, 60)
        leaves.cancel()
        await asyncio.wait([first, leaves])
        amid.go_on.set()
        [answer] = await stays
        return alone, answer

    alone, answer = asyncio.run(talk())
    assert answer.token_ids.tolist() == alone.token_ids.tolist()
    assert answer.finish_reason == alone.finish_reason
    assert steps.count == 40 + 1 + 40
