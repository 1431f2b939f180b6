"""The evaluation script with a server's address: the answers of this process, and faults."""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from typing import ClassVar

import pytest
import torch
from modules.backends.openai_server import FakeServer, hang_up, refuse
from recipes.script import run_alone
from recipes.test_evaluate import SCRIPT, answers
from tensordict import TensorDict

from torchrl_llm._http import Reply
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.views import ChatHistory
from torchrl_llm.errors import ConfigError, OverlongError, TorchRLLLMError, WorkerError
from torchrl_llm.modules import (
    ChatServerPolicy,
    TransformersBackend,
    TransformersWrapper,
    load_model,
    load_tokenizer,
)

SMALL = ["eval.num_prompts=10", "inference_model.max_tokens=40"]
NAMED = f"model.name={embedded_model_path()}"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))

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
        messages = [dict(message) for message in body["messages"]]
        prompt = History.of([Chat(messages)])
        with self.lock:
            td = policy(
                TensorDict(history=ChatHistory(prompt=prompt, batch_size=[1]), batch_size=[1])
            )
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
    assert len(bodies) == 10
    assert [set(m) for m in bodies[0]["messages"]] == [{"role", "content"}]
    assert "by chat completions (the server returns no token ids)" in capfd.readouterr().err


def test_a_tool_is_called_through_chat_completions(tmp_path, run, serve):
    fake, url = serve(returns_ids=False)
    # The embedded model knows its tool without being told, and the server does as it does.
    settings = ["tasks=[calculator]", *SMALL]
    here, there = run(tmp_path / "here", *settings), run(tmp_path / "there", *settings, url)
    assert there == here
    ours, theirs = (answers(tmp_path / each, "calculator") for each in ("here", "there"))
    assert [len(record["messages"]) for record in theirs] == [len(r["messages"]) for r in ours]
    bodies = [body for path, body in fake.requests if path == "/v1/chat/completions"]
    assert all(body["tools"][0]["function"]["name"] == "calculator" for body in bodies)
    called = next(body for body in bodies if body["messages"][-1]["role"] == "tool")["messages"]
    assert called[-1] == {
        "role": "tool",
        "content": called[-1]["content"],
        "tool_call_id": "call_0",
    }
    assert isinstance(called[-2]["tool_calls"][0]["function"]["arguments"], str)


# How a server is asked


def test_the_tokenizer_of_a_server_that_says_where_its_model_is_need_not_be_named(
    tmp_path, run, serve, capfd
):
    fake, url = serve(card={"root": str(embedded_model_path()), "max_model_len": 2048})
    run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=2", url)
    assert "/v1/chat/completions" not in asked(fake)
    assert "is asked by token ids" in capfd.readouterr().err


def test_a_server_whose_tokenizer_is_not_here_is_asked_by_chat(tmp_path, run, serve, capfd):
    fake, url = serve()
    run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=2", url)
    assert "/v1/chat/completions" in asked(fake)
    assert "knows token ids, but its tokenizer is not here" in capfd.readouterr().err


def test_chat_can_be_wanted_of_a_server_that_knows_ids(tmp_path, run, serve):
    fake, url = serve()
    run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=2", url, "inference_model.protocol=chat")
    assert asked(fake) == {"/v1/models", "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({}, [], "the tokenizer of .* is not the server's: it encodes 'Question 12.*Leave it out"),
        ({"returns_ids": False}, [], "model.name=.*.the server returns no token ids.. Leave it"),
        ({}, ["inference_model.protocol=tokens"], "protocol=tokens cannot be: the tokenizer of"),
    ],
)
def test_a_named_tokenizer_that_cannot_be_used_is_an_error(
    tmp_path, run, serve, tokenizer, options, overrides, message
):
    _, url = serve(tokenizer, **options)  # a tokenizer that is not the embedded model's
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "tasks=[arithmetic]", url, NAMED, *overrides)


def test_what_is_off_is_told_to_vllm_alone_for_it_has_other_defaults(tmp_path, run, serve):
    bodies = []
    for owner in ("vllm", "somebody"):
        fake, url = serve(returns_ids=False, card={"owned_by": owner})
        more = ["inference_model.request={reasoning_effort: low, top_p: null}"]
        more += ["inference_model.stop=['Question:']"]
        run(tmp_path / owner, "tasks=[arithmetic]", "eval.num_prompts=1", url, *more)
        bodies.append(fake.requests[-1][1])
    told, plain = bodies
    plain.pop("messages")
    assert plain == {
        "model": "tiny",
        "max_tokens": 512,
        "temperature": 0.0,
        "stop": ["Question:"],
        "reasoning_effort": "low",
    }
    assert told["top_k"] == 0
    assert told["repetition_penalty"] == 1.0
    assert "top_p" not in told


def test_samples_of_a_prompt_have_seeds_of_their_own_which_repeat(tmp_path, run, serve):
    seeds = []
    for number in range(2):
        fake, url = serve(returns_ids=False)
        sampled = ["inference_model.temperature=1", "eval.repeats=3", "eval.num_prompts=1"]
        run(tmp_path / str(number), "tasks=[arithmetic]", url, *sampled)
        seeds.append({body["seed"] for path, body in fake.requests if "seed" in (body or {})})
    assert len(seeds[0]) == 3
    assert seeds[0] == seeds[1]


def test_the_key_is_read_from_the_environment_and_sent(tmp_path, run, serve, monkeypatch):
    key = "inference_model.api_key_variable=MY_KEY"
    fake, url = serve()
    with pytest.raises(ConfigError, match="api_key_variable: MY_KEY is not set in the environment"):
        run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=1", url, key)
    monkeypatch.setenv("MY_KEY", "secret")
    run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=1", url, key, NAMED)
    assert fake.keys == {"Bearer secret"}
    assert "secret" not in "".join(file.read_text() for file in tmp_path.rglob("*.y*ml"))


# Faults


def chat_answer(**message):
    message = {"role": "assistant", "content": "<answer>1</answer>", **message}
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


def test_lengths_that_a_server_does_not_count_are_not_known(tmp_path, run, serve):
    _, url = serve(returns_ids=False, chat=lambda body: chat_answer(reasoning="because"))
    result = run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=2", url)["arithmetic"]
    assert result["response_length"] != result["response_length"]
    record = answers(tmp_path, "arithmetic")[0]
    assert record["length"] is None
    assert record["messages"][-1]["reasoning_content"] == "because"


def overlong(body):
    if "47" in body["messages"][-1]["content"]:
        return 400, {"error": {"message": "This model's maximum context length is 9 tokens."}}
    return chat_answer()


def test_a_conversation_longer_than_the_servers_context_is_an_error_unless_it_is_dropped(
    tmp_path, run, serve
):
    path = tmp_path / "rows.jsonl"
    rows = [{"query": f"{n}?", "answer": "1"} for n in (12, 47)]
    path.write_text("\n".join(map(json.dumps, rows)))
    _, url = serve(returns_ids=False, chat=overlong)
    settings = ["tasks=[arithmetic]", f"data_files.arithmetic={path}", url]
    with pytest.raises(
        OverlongError, match=r"maximum context length is 9.*on_overlong=drop leaves"
    ):
        run(tmp_path / "a", *settings)
    result = run(tmp_path / "b", *settings, "eval.on_overlong=drop")["arithmetic"]
    assert (result["accuracy"], result["num_prompts"]) == (0.5, 2)
    assert answers(tmp_path / "b", "arithmetic")[1]["length"] == 0
    with pytest.raises(ConfigError, match="on_overlong=truncate cannot be with chat completions"):
        run(tmp_path / "c", *settings, "eval.on_overlong=truncate")


def test_requests_that_are_turned_away_or_cut_off_are_sent_again(tmp_path, run, serve):
    fake, url = serve(returns_ids=False)
    fake.faults.extend([lambda handler: False] * 2 + [refuse(429), refuse(503), hang_up])
    result = run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=2", url)
    assert result["arithmetic"]["num_prompts"] == 2
    assert sum(path == "/v1/chat/completions" for path, _ in fake.requests) == 5


def test_a_server_that_fails_in_the_middle_leaves_the_answers_so_far(tmp_path, run, serve):
    fake, url = serve(returns_ids=False)
    fake.faults.extend([lambda handler: False] * 4 + [refuse(500, data="out of memory")])
    match = r"failed with 500: out of memory; .*answers_arithmetic.jsonl has the 2 answers so far"
    with pytest.raises(WorkerError, match=match):
        run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=4", "eval.batch_size=2", url)
    assert len(answers(tmp_path, "arithmetic")) == 2


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (lambda body: (200, {"choices": []}), "answered without a text"),
        (lambda body: (200, "hello"), "answered without a text: hello"),
        (lambda body: chat_answer(content=["parts"]), "answered without a text"),
        (lambda body: chat_answer(tool_calls=["add"]), "message cannot be read: .*tool call"),
        (
            lambda body: (400, {"error": {"message": "no such field"}}),
            "refused .400.: no such field",
        ),
        (lambda body: (404, "not found"), "chat/completions refused .404.: not found"),
    ],
)
def test_nonsense_of_a_server_is_told_in_one_line(tmp_path, run, serve, chat, message):
    _, url = serve(returns_ids=False, chat=chat)
    with pytest.raises(TorchRLLLMError, match=message):
        run(tmp_path, "tasks=[arithmetic]", "eval.num_prompts=2", url)


def test_a_server_that_is_not_there_or_has_no_such_model_or_lets_nobody_in(
    tmp_path, run, serve, monkeypatch
):
    nobody = "inference_model.url=http://127.0.0.1:9"
    answer = r"http://127.0.0.1:9/v1/models gave no answer in .* attem"
    with monkeypatch.context() as shortly:
        shortly.setattr(importlib.import_module("server_policy"), "_START_S", 0.3)
        with pytest.raises(WorkerError, match=answer):
            run(tmp_path, "tasks=[arithmetic]", nobody)
    fake, url = serve(models=["a", "b"])
    with pytest.raises(
        ConfigError, match=r"serves the models \['a', 'b'\]; model= must name .*served_model"
    ):
        run(tmp_path, "tasks=[arithmetic]", url)
    with pytest.raises(ConfigError, match=r"url: .*serves the models .*; 'c' is not one of them"):
        run(tmp_path, "tasks=[arithmetic]", url, "inference_model.served_model=c")
    fake.faults.append(refuse(401, data={"error": {"message": "who are you?"}}))
    with pytest.raises(
        ConfigError, match=r"refuses access .401: who are.*is api_key right.*api_key_variable"
    ):
        run(tmp_path, "tasks=[arithmetic]", url)
    with pytest.raises(
        ConfigError, match=r"inference_model.url: the address of a server looks like"
    ):
        run(tmp_path, "tasks=[arithmetic]", "inference_model.url=localhost:8000")


# The policy alone


def test_rows_that_are_not_stepped_are_not_asked_about_and_every_end_is_told():
    ends = iter(["stop", "length", "tool_calls", "content_filter"])

    class Server:
        bodies: ClassVar[list] = []

        def call(self, method, path, body, **_):
            self.bodies.append(body)
            choice = {"message": {"content": None, "refusal": "No."}, "finish_reason": next(ends)}
            return Reply(200, {"choices": [choice], "usage": {"completion_tokens": 3}})

        def check(self, reply, path):
            pass

    policy = ChatServerPolicy(Server(), {"model": "m", "temperature": 0}, concurrency=1)
    chats = [Chat([{"role": "user", "content": str(n)}]) for n in range(5)]
    history = ChatHistory(prompt=History.of(chats), batch_size=[5])
    steps = torch.tensor([1, 1, 0, 1, 1]).bool().unsqueeze(-1)
    td = policy(TensorDict(history=history, _step=steps, batch_size=[5]))
    asked = [body["messages"][0]["content"] for body in Server.bodies]
    assert asked == ["0", "1", "3", "4"]
    assert [len(chat) for chat in td["history"].full.chats] == [2, 2, 1, 2, 2]
    assert td["history"].full.chats[0][-1] == {"role": "assistant", "content": "No."}
    reasons = [FinishReason(code).name for code in td["tokens", "finish_reason"].tolist()]
    assert reasons == ["STOP", "LENGTH", "ABORT", "TOOL_CALLS", "ABORT"]
    assert td["tokens", "response_length"].tolist() == [3, 3, 0, 3, 3]
    with pytest.raises(ConfigError, match=r"\['stream'\] cannot be"):
        ChatServerPolicy(Server(), {"stream": True})
