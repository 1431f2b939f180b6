"""The port of models that write text: what an answer cost, and that failures stay in their rows."""

from __future__ import annotations

import json
import pickle
import threading

import pytest
from chat_server import ChatHandler, chat_server

from torchrl_llm.errors import BackendError, ConfigError, RewardError, WorkerError
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.rewards import (
    EndpointTextModel,
    ScriptedTextModel,
    TextModel,
    WrapperTextModel,
)


def asked(*texts):
    return [({"role": "user", "content": text},) for text in texts]


class Server(ChatHandler):
    """Answers as the question says."""

    def reply(self, body):
        text, asked = body["messages"][-1]["content"], [each for *_, each in self.server.requests]
        message, status = {"role": "assistant", "content": text.upper()}, 200
        data = {"choices": [{"message": message, "finish_reason": "stop"}]}
        data["usage"] = {"prompt_tokens": 7, "completion_tokens": 3}
        if text == "null":
            message["content"] = None
        if text == "empty":
            message["content"] = ""
        if text == "long":
            data["choices"][0]["finish_reason"] = "length"
        if text == "no usage":
            del data["usage"]
        if text == "odd usage":
            data["usage"] = {"prompt_tokens": "many", "completion_tokens": -1}
        if text == "broken":
            status = 500
        if text.startswith("busy") and asked.count(body) == 1:
            status = 429
        if text == "garbage":
            data = b"<html>"
        if text == "half":
            data = json.dumps(data).encode()
            data = data[: len(data) // 2]
        return status, data, {"Retry-After": "0"} if text == "busy, come back" else {}


@pytest.fixture
def server():
    with chat_server(Server) as server:
        yield server


@pytest.fixture
def model(server, monkeypatch):
    monkeypatch.setattr("torchrl_llm._http._FIRST_PAUSE_S", 0.02)
    model = EndpointTextModel(f"http://127.0.0.1:{server.server_address[1]}", "m", timeout=20)
    yield model
    model.close()


def test_a_server_tells_what_its_answer_cost(model):
    [answer] = model.answer(asked("hello"))
    assert (answer.text, answer.finish_reason) == ("HELLO", "stop")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.model) == (7, 3, "m")
    assert (usage.num_retries, usage.estimated) == (0, False)
    assert 0 < usage.seconds < 20


def test_numbers_that_a_server_does_not_give_are_estimates_and_marked(model):
    for text in ("no usage", "odd usage"):
        [answer] = model.answer(asked(text))
        # Eight or nine characters are three tokens at most, at four characters each.
        assert answer.usage[:2] == (-(-len(text) // 4),) * 2
        assert answer.usage.estimated


def test_no_text_is_an_empty_text_and_no_crash(model):
    assert [answer.text for answer in model.answer(asked("null", "empty"))] == ["", ""]


def test_requests_that_were_sent_again_are_counted(model, server):
    found = model.answer(asked("busy", "busy, come back"))
    assert [answer.usage.num_retries for answer in found] == [1, 1]
    assert len(server.requests) == 4


def test_each_failure_is_that_of_its_row(model):
    texts = ("broken", "garbage", "half", "fine")
    *failed, fine = model.answer(asked(*texts))
    assert [type(error) for error in failed] == [WorkerError, BackendError, BackendError]
    assert fine.text == "FINE"


def test_a_cut_answer_is_an_answer_and_no_judgement(model):
    [answer] = model.answer(asked("long"))
    assert (answer.text, answer.finish_reason) == ("LONG", "length")
    [error] = model.ask(asked("long"))
    assert isinstance(error, RewardError)


def test_each_answer_is_told_of_when_it_comes(model):
    told = {0: [], 1: [], 2: []}
    found = model.answer(asked("a", "broken", "c"), on_call=lambda k, said: told[k].append(said))
    assert told == {place: [None, answer] for place, answer in enumerate(found)}


def test_a_limit_of_tokens_goes_with_the_request(server):
    url = f"http://127.0.0.1:{server.server_address[1]}/api"
    model = EndpointTextModel(
        url, "m", options={"top_p": 0.5}, path="/chat", max_tokens_field="max_completion_tokens"
    )
    model.answer(asked("x"), max_tokens=5)
    ((path, _, body),) = server.requests
    assert path == "/api/chat"
    assert (body["max_completion_tokens"], body["top_p"]) == (5, 0.5)
    assert "max_tokens" not in body


def test_a_function_is_a_model_and_what_it_raises_is_data():
    def answer(messages):
        if messages[-1]["content"] == "bad":
            raise KeyError("no")
        return 7 if messages[-1]["content"] == "number" else "ok"

    fine, bad, number = ScriptedTextModel(answer).answer(asked("x", "bad", "number"))
    assert fine.text == "ok"
    assert isinstance(bad, KeyError)
    assert "without a text: 7" in str(number)


def test_a_function_is_called_by_so_many_threads_as_it_may():
    barrier = threading.Barrier(3, timeout=10)
    model = ScriptedTextModel(lambda messages: str(barrier.wait()), concurrency=3)
    assert sorted(model.ask(asked(*"abc"))) == ["0", "1", "2"]


def test_a_model_in_this_process_counts_its_tokens_and_repeats_under_a_seed(tokenizer, tiny_model):
    wrapper = TransformersWrapper(
        tiny_model,
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        generate_kwargs={"max_new_tokens": 9, "temperature": 1.0},
    )
    model = WrapperTextModel(wrapper, name="tiny")
    questions = asked("a", "a longer question")
    one, two = (model.answer(questions, max_tokens=4, seed=3) for _ in range(2))
    assert [answer.text for answer in one] == [answer.text for answer in two]
    assert all(1 <= answer.usage.output_tokens <= 4 for answer in one)
    prompt = tokenizer.apply_chat_template(
        list(asked("a")[0]), add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert one[0].usage.input_tokens == len(ids)
    assert not one[0].usage.estimated
    assert pickle.loads(pickle.dumps(model)).name == "tiny"


def test_a_conversation_that_does_not_fit_fails_alone_or_with_its_batch(tokenizer, tiny_model):
    def model(**options):
        wrapper = TransformersWrapper(
            tiny_model,
            tokenizer=tokenizer,
            input_mode="history",
            generate=True,
            generate_kwargs={"max_new_tokens": 2},
            **options,
        )
        return WrapperTextModel(wrapper)

    long = "word " * 100_000
    error, fine = model(on_overlong="drop").answer(asked(long, "short"))
    assert "does not fit" in str(error)
    assert fine.usage.output_tokens > 0
    assert all(isinstance(each, Exception) for each in model().answer(asked(long, "short")))


def test_a_model_that_writes_ask_alone_answers_with_estimates():
    class Old(TextModel):
        def ask(self, conversations):
            return ["Score: 8"] * len(conversations)

    [answer] = Old().answer(asked("12345678"))
    assert (answer.text, answer.usage[:2], answer.usage.estimated) == ("Score: 8", (2, 2), True)
    with pytest.raises(ConfigError, match="max_tokens"):
        Old().answer(asked("x"), max_tokens=3)


def test_a_model_that_answers_nothing_is_refused_where_it_is_defined():
    with pytest.raises(TypeError, match="must define ask"):

        class Mute(TextModel):
            pass
