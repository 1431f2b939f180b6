"""The evaluation script with a server's address: the same answers as in this process, and faults."""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from modules.backends.openai_server import FakeServer, hang_up, refuse
from recipes.script import run_alone
from recipes.test_evaluate import SCRIPT, answers
from tensordict import TensorDict

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data.column import Chat
from torchrl_llm.data.containers import ChatHistory
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.errors import ConfigError, OverlongError, TorchRLLLMError, WorkerError
from torchrl_llm.modules import TransformersBackend, TransformersWrapper, load_model, load_tokenizer

SMALL = ["eval.num_prompts=20", "inference_model.max_tokens=40"]
NAMED = f"model.name={embedded_model_path()}"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(importlib.import_module("server_policy"), "_START_S", 0.3)

    def main(folder, *overrides):
        run_alone(monkeypatch, SCRIPT, folder, *overrides)
        return json.loads((folder / "metrics.json").read_text())

    return main


class EmbeddedServer(FakeServer):
    """A server of the embedded model, which also chats by the model's own template."""

    def __init__(self, tokenizer, **options):
        super().__init__(vocab_size=len(tokenizer), max_length=2048, tokenizer=tokenizer, **options)
        self.backend = TransformersBackend(load_model(), tokenizer=tokenizer)
        self.options.setdefault("chat", self.chat)

    def chat(self, body):
        arguments = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
        policy = TransformersWrapper(
            self.backend, tokenizer=self.backend.tokenizer, generate_kwargs=arguments
        )
        if "tools" in body:
            policy = policy.get_new_version(tools=body["tools"])
        messages = [dict(message) for message in body["messages"]]
        prompt = History.of([Chat(messages)])
        with self.lock:
            td = policy(TensorDict(history=ChatHistory(prompt=prompt, batch_size=[1]), batch_size=[1]))
        message = td["history"].full.chats[0][-1]
        message = {k: message.get(k) for k in ("role", "content", "tool_calls")}
        for number, call in enumerate(message["tool_calls"] or ()):
            call["id"] = f"call_{number}"
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        length = td["tokens"].get("response", as_list=True)[0].shape[0]
        reason = FinishReason(td["tokens", "finish_reason"].item()).name.lower()
        choice = {"message": message, "finish_reason": reason}
        return 200, {"choices": [choice], "usage": {"completion_tokens": length}}


@pytest.fixture
def serve():
    with ExitStack() as running:

        def start(tokenizer=None, **options):
            fake = EmbeddedServer(tokenizer or load_tokenizer(), **options)
            return fake, f"inference_model.url={running.enter_context(fake.running())}/v1"

        yield start


def asked(fake):
    return {path for path, _ in fake.requests}


# The same answers


def test_by_token_ids_a_server_gives_the_answers_of_this_process(tmp_path, run, serve, capfd):
    fake, url = serve()
    tasks = "tasks=[arithmetic,calculator]"
    here = run(tmp_path / "here", tasks, *SMALL)
    there = run(tmp_path / "there", tasks, *SMALL, url, NAMED, "model.show_tools=false")
    assert there == here
    for task in here:
        assert answers(tmp_path / "there", task) == answers(tmp_path / "here", task)
    assert "/v1/chat/completions" not in asked(fake)
    assert f"is asked by token ids, with the tokenizer of {embedded_model_path()}" in (
        capfd.readouterr().err
    )


def test_by_chat_completions_too_and_no_ids_are_sent(tmp_path, run, serve, capfd):
    fake, url = serve(returns_ids=False)
    here = run(tmp_path / "here", "tasks=[arithmetic]", *SMALL)
    there = run(tmp_path / "there", "tasks=[arithmetic]", *SMALL, url)
    assert there == here
    assert answers(tmp_path / "there", "arithmetic") == answers(tmp_path / "here", "arithmetic")
    bodies = [body for path, body in fake.requests if path == "/v1/chat/completions"]
    assert len(bodies) == 20
    assert [set(m) for m in bodies[0]["messages"]] == [{"role", "content"}] * 2
    assert "by chat completions (the server returns no token ids)" in capfd.readouterr().err


def test_a_tool_is_called_through_chat_completions(tmp_path, run, serve):
    fake, url = serve(returns_ids=False)
    told = ["tasks=[calculator]", *SMALL, "model.show_tools=true"]
    here, there = run(tmp_path / "here", *told), run(tmp_path / "there", *told, url)
    assert there == here
    ours, theirs = (answers(tmp_path / each, "calculator") for each in ("here", "there"))
    assert [len(record["messages"]) for record in theirs] == [len(r["messages"]) for r in ours]
    bodies = [body for path, body in fake.requests if path == "/v1/chat/completions"]
    assert all(body["tools"][0]["function"]["name"] == "calculator" for body in bodies)
    called = next(body for body in bodies if body["messages"][-1]["role"] == "tool")["messages"]
    assert called[-1] == {"role": "tool", "content": called[-1]["content"], "tool_call_id": "call_0"}
    assert isinstance(called[-2]["tool_calls"][0]["function"]["arguments"], str)
