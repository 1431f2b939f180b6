"""Protocols of the gateway, spoken by the clients of OpenAI and Anthropic over HTTP."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from gateway.scripted_port import PROMPT_IDS, answer_of, text_answer

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.gateway.calls import RefusedCallError

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

USER = {"role": "user", "content": "What is 2 + 2?"}
LONG = "Two and two are four. " * 20
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def called(arguments, call_id="call_1"):
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def said(content="", reasoning=None, calls=()):
    given = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return canonical_message({**given, "tool_calls": list(calls)})


MESSAGES = {
    "text": said("4"),
    "long text": said(LONG),
    "no text": said(""),
    "other scripts": said("四 — vier 🙂\u2028 \\u0041 \"'"),
    "spaces": said("  4\n\n"),
    "reasoning": said("4", LONG),
    "reasoning without text": said("", "two and two"),
    "empty reasoning": said("4", ""),
    "a call": said("", None, [called({"a": 1})]),
    "a call without arguments": said("", None, [called({})]),
    "two calls": said("", None, [called({"a": 1}), called({"a": 2}, "call_2")]),
    "everything": said(LONG, "hm", [called({"a": [LONG, {"b": None}], "c": 1.5, "d": "é🙂"})]),
    "broken arguments": said("", None, [called('{"a": 1')]),
    "arguments that are a text": said("", None, [called('"a"')]),
    "half a character": said("", None, [called({"a": "\\ud83d"})]),
}
CALLS = {name for name, message in MESSAGES.items() if "tool_calls" in message}


def post(served, session, path, **request):
    return served.http.post(path, headers={"x-api-key": session.key}, **request)


def results(message):
    return [
        {"role": "tool", "content": f"{i}", "tool_call_id": call["id"]}
        for i, call in enumerate(message.get("tool_calls", ()))
    ]


@pytest.fixture(params=MESSAGES)
def message(request, session):
    message = MESSAGES[request.param]
    session.port.answer_or_error = answer_of(message)
    return message


# -- what a client sends back is the message that was sampled -------------------------------------


def chat_message(client, streams, **fields):
    if not streams:
        return client.chat.completions.create(**fields).choices[0].message
    with client.chat.completions.stream(**fields) as stream:
        return stream.get_final_completion().choices[0].message


@pytest.mark.parametrize("streams", [False, True])
def test_a_message_of_a_chat_comes_back_as_it_was_sampled(session, message, streams):
    fields = {"model": "any", "messages": [USER]}
    got = chat_message(session.openai, streams, **fields)
    history = [USER, got.model_dump(exclude_none=True), *results(message), USER]
    session.openai.chat.completions.create(model="any", messages=history)
    assert session.port.messages == [USER, message, *results(message), USER]


@pytest.mark.parametrize("streams", [False, True])
def test_items_of_a_response_come_back_as_they_were_sampled(session, message, streams):
    fields = {"model": "any", "input": "What is 2 + 2?"}
    if streams:
        with session.openai.responses.stream(**fields) as stream:
            output = stream.get_final_response().output
    else:
        output = session.openai.responses.create(**fields).output
    outputs = [
        {"type": "function_call_output", "call_id": each["tool_call_id"], "output": each["content"]}
        for each in results(message)
    ]
    session.openai.responses.create(model="any", input=[USER, *output, *outputs, USER])
    assert session.port.messages == [USER, message, *results(message), USER]


@pytest.mark.parametrize("streams", [False, True])
def test_blocks_of_an_anthropic_message_come_back_as_they_were_sampled(session, message, streams):
    fields = {"model": "any", "max_tokens": 9}
    if streams:
        with session.anthropic.messages.stream(messages=[USER], **fields) as stream:
            content = stream.get_final_message().content
    else:
        content = session.anthropic.messages.create(messages=[USER], **fields).content
    outputs = [
        {"type": "tool_result", "tool_use_id": each["tool_call_id"], "content": each["content"]}
        for each in results(message)
    ]
    next_user = {"role": "user", "content": [*outputs, {"type": "text", "text": USER["content"]}]}
    history = [USER, {"role": "assistant", "content": content}, next_user]
    session.anthropic.messages.create(messages=history, **fields)
    assert session.port.messages == [USER, message, *results(message), USER]


def test_calls_that_a_client_has_parsed_come_back_as_they_were_sampled(session):
    class Add(pydantic.BaseModel):
        a: int

    session.port.answer_or_error = answer_of(MESSAGES["a call"])
    tools = [openai.pydantic_function_tool(Add, name="add")]
    parsed = session.openai.chat.completions.parse(model="any", messages=[USER], tools=tools)
    [got] = [choice.message for choice in parsed.choices]
    assert got.tool_calls[0].function.parsed_arguments == Add(a=1)
    history = [USER, got.model_dump(exclude_none=True)]
    session.openai.chat.completions.create(model="any", messages=history)
    assert session.port.messages == [USER, MESSAGES["a call"]]
    tools = [{"type": "function", "strict": True, **tools[0]["function"]}]
    output = session.openai.responses.parse(model="any", input=[USER], tools=tools).output
    session.openai.responses.create(model="any", input=[USER, *output])
    assert session.port.messages == [USER, MESSAGES["a call"]]
    assert "strict" not in session.port.calls[0].tools[0]["function"]


# -- chat completions ------------------------------------------------------------------------------


def test_a_chat_completion_says_what_was_sampled_and_how_much(session):
    session.port.answer_or_error = text_answer("42", FinishReason.LENGTH)
    found = session.openai.chat.completions.create(
        model="mine", messages=[USER], n=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert found.model == "mine"
    assert [choice.index for choice in found.choices] == [0, 1]
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    entries = found.choices[1].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [
        ("4", 0.0, [52]),
        ("2", -0.25, [50]),
    ]
    assert found.prompt_token_ids == PROMPT_IDS.tolist()
    assert found.choices[1].token_ids == [52, 50]
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)


def test_a_stream_of_chat_chunks_has_a_role_pieces_an_end_and_the_usage(session):
    session.port.answer_or_error = text_answer(LONG)
    chunks = list(
        session.openai.chat.completions.create(
            model="mine",
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert len(deltas) == 6
    assert "".join(delta.content or "" for delta in deltas) == LONG
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * 5 + ["stop"]
    assert chunks[0].prompt_token_ids == PROMPT_IDS.tolist()
    assert chunks[-2].choices[0].token_ids == list(map(ord, LONG))
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(LONG))
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_a_call_says_that_it_ends_with_one(session):
    session.port.answer_or_error = answer_of(MESSAGES["two calls"])
    chunks = list(
        session.openai.chat.completions.create(model="a", messages=[USER], stream=True, n=2)
    )
    ends = [c.choices[0] for c in chunks if c.choices[0].finish_reason]
    assert [(end.index, end.finish_reason) for end in ends] == [
        (0, "tool_calls"),
        (1, "tool_calls"),
    ]
    calls = [d for c in chunks for d in c.choices[0].delta.tool_calls or () if d.function.name]
    assert [(call.index, call.id) for call in calls] == [(0, "call_1"), (1, "call_2")] * 2


def test_async_clients_read_answers_and_streams(session):
    async def all_of_them():
        client = openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key=session.key)
        chat = client.chat.completions
        whole = await chat.create(model="a", messages=[USER])
        stream = await chat.create(model="a", messages=[USER], stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        response = await client.responses.create(model="a", input="?")
        other = anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key)
        fields = {"model": "a", "max_tokens": 9, "messages": [USER]}
        message = await other.messages.create(**fields)
        async with other.messages.stream(**fields) as blocks:
            text = await blocks.get_final_text()
        return (
            whole.choices[0].message.content,
            "".join(pieces),
            response.output_text,
            message.content[0].text,
            text,
        )

    assert asyncio.run(all_of_them()) == ("4",) * 5


def test_sampling_fields_of_a_chat_reach_the_call_under_our_names(session):
    session.openai.chat.completions.create(
        model="any",
        messages=[USER],
        n=3,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        stop=["\n", "END"],
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=True,
        frequency_penalty=0,
        response_format={"type": "text"},
        logit_bias={},
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [5, 6],
            "ignore_eos": True,
            "max_tokens": 7,
            "min_tokens": 0,
            "skip_special_tokens": True,
        },
    )
    [call] = session.port.calls
    assert (call.num_samples, call.tools) == (3, (TOOL,))
    assert call.sampling == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": -3,
        "stop": ("\n", "END"),
        "stop_token_ids": (5, 6),
        "ignore_eos": True,
    }


def test_what_a_chat_leaves_out_is_left_to_the_port(session):
    session.openai.chat.completions.create(
        model="any", messages=[USER], tools=[TOOL], tool_choice="none", stop="x", temperature=None
    )
    [call] = session.port.calls
    assert (call.sampling, call.tools, call.num_samples) == ({"stop": ("x",)}, (), 1)


def test_messages_of_a_chat_keep_their_order_and_their_parts_are_joined(session):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    tools = [{"role": "tool", "content": f"{i}", "tool_call_id": f"call_{i}"} for i in range(3)]
    calls = [called('{"a": 1}', f"call_{i}") for i in range(3)]
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        *reversed(tools),
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
        {"role": "user", "content": ""},
    ]
    session.openai.chat.completions.create(model="any", messages=history)
    assert session.port.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?", "name": "Ada"},
        said("", None, [called({"a": 1}, f"call_{i}") for i in range(3)]),
        *reversed(tools),
        said("4"),
        {"role": "user", "content": ""},
    ]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
REFUSED_CHATS = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 0},
    "seed": {"seed": 2**63},
    "n": {"n": 0},
    "max_tokens": {"max_tokens": 0},
    "max_completion_tokens": {"max_completion_tokens": 8, "max_tokens": 9},
    "stop": {"stop": ""},
    "stop.1": {"stop": ["a", 5]},
    "top_k": {"extra_body": {"top_k": 1.5}},
    "min_p": {"extra_body": {"min_p": 1}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "presence_penalty": {"presence_penalty": -0.1},
    "logit_bias": {"logit_bias": {"5": 1}},
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "reasoning_effort": {"reasoning_effort": "high"},
    "service_tier": {"service_tier": "flex"},
    "store": {"store": True},
    "stream_options.include_usage": {"stream_options": {"include_usage": 5}},
    "temprature": {"extra_body": {"temprature": 1}},
    "messages": {"messages": []},
    "messages.1.role": {"messages": [USER, {"role": "function", "content": ""}]},
    "messages.0.content": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "messages.0.tool_call_id": {"messages": [{"role": "tool", "content": "4"}]},
    "messages.0.weight": {"messages": [{**USER, "weight": 1}]},
    "messages.0.tool_calls.0.function.name": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}]
    },
    "tools.0.type": {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
    "tools.0.function.parameters": {
        "tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]
    },
}


@pytest.mark.parametrize("field", REFUSED_CHATS)
def test_a_field_of_a_chat_that_cannot_be_honoured_is_refused_by_its_name(session, field):
    fields = {"model": "any", "messages": [USER], **REFUSED_CHATS[field]}
    with pytest.raises(openai.BadRequestError) as error:
        session.openai.chat.completions.create(**fields)
    assert (error.value.param, error.value.type) == (field, "invalid_request_error")
    assert field in error.value.body["message"]
    assert not session.port.calls


def test_the_error_of_a_number_says_its_bounds_and_that_of_a_name_the_nearest(session):
    create = session.openai.chat.completions.create
    with pytest.raises(openai.BadRequestError, match=r"top_p must be in \(0, 1\], got 2"):
        create(model="any", messages=[USER], top_p=2)
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        create(model="any", messages=[USER], extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match=r"n must be in \[1, 128\], got True"):
        create(model="any", messages=[USER], n=True)


# -- completions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("2 + 2 =", "2 + 2 ="), (["2 +"], "2 +"), ([5, 6], (5, 6)), ([[5, 6]], (5, 6))],
)
def test_a_completion_continues_a_text_or_token_ids(session, given, prompt):
    session.openai.completions.create(model="any", prompt=given, max_tokens=3, echo=False)
    [call] = session.port.calls
    assert (call.prompt, call.messages, call.sampling) == (prompt, (), {"max_new_tokens": 3})


def test_a_completion_says_what_was_sampled(session):
    session.port.answer_or_error = text_answer("42", sampled="42.")
    found = session.openai.completions.create(
        model="any", prompt="?", n=2, logprobs=1, extra_body={"return_token_ids": True}
    )
    choice = found.choices[1]
    assert (choice.text, choice.finish_reason, choice.index) == ("42", "stop", 1)
    assert choice.logprobs.tokens == ["4", "2", "."]
    assert choice.logprobs.token_logprobs == [0.0, -0.25, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert (choice.prompt_token_ids, choice.token_ids) == (PROMPT_IDS.tolist(), [52, 50, 46])
    assert found.usage.completion_tokens == 6


def test_a_completion_streams(session):
    session.port.answer_or_error = text_answer(LONG, FinishReason.LENGTH)
    chunks = list(session.openai.completions.create(model="any", prompt="?", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == LONG
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("best_of", 2), ("logprobs", 2), ("prompt", ["a", "b"]), ("prompt", [])]
    + [("prompt", [5, -1]), ("prompt", [True]), ("suffix", "end")],
)
def test_a_field_of_a_completion_that_cannot_be_honoured_is_refused(session, field, value):
    fields = {"model": "any", "prompt": "?", field: value}
    with pytest.raises(openai.BadRequestError) as error:
        session.openai.completions.create(**fields)
    assert error.value.param == field


# -- responses -------------------------------------------------------------------------------------


def test_a_response_has_items_and_repeats_what_was_asked(session):
    session.port.answer_or_error = answer_of(MESSAGES["everything"])
    tool = {"type": "function", **FUNCTION, "strict": True}
    found = session.openai.responses.create(
        model="mine",
        input=[{"role": "developer", "content": [{"type": "input_text", "text": "Add."}]}, USER],
        instructions="Be brief.",
        tools=[tool],
        max_output_tokens=9,
        temperature=0.5,
        store=True,
        include=["message.output_text.logprobs"],
    )
    [call] = session.port.calls
    system = [{"role": "system", "content": text} for text in ("Be brief.", "Add.")]
    assert call.messages == (*system, USER)
    assert call.sampling == {"max_new_tokens": 9, "temperature": 0.5}
    assert call.tools == (TOOL,)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert (found.status, found.temperature, found.instructions) == ("completed", 0.5, "Be brief.")
    assert found.output_text == LONG
    assert found.output[1].content[0].logprobs[1].token == LONG[1]
    assert (found.usage.input_tokens, found.usage.output_tokens) == (3, len(LONG))


def test_a_response_that_was_cut_is_incomplete(session):
    session.port.answer_or_error = text_answer("4", FinishReason.LENGTH)
    found = session.openai.responses.create(model="any", input="?")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_events_of_a_response_come_in_the_order_of_openai(session):
    session.port.answer_or_error = answer_of(said("4", "hm", [called({"a": 1})]))
    events = list(session.openai.responses.create(model="any", input="?", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_items_of_one_turn_become_one_message_and_those_of_two_become_two(session):
    def call(call_id):
        return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": "{}"}

    def result(call_id):
        return {"type": "function_call_output", "call_id": call_id, "output": "4"}

    items = [USER, call("1"), call("2"), result("1"), result("2"), call("3"), result("3")]
    items += [{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "Four."}]
    session.openai.responses.create(model="any", input=items)
    assert session.port.messages == [
        USER,
        said("", None, [called({}, "1"), called({}, "2")]),
        *({"role": "tool", "content": "4", "tool_call_id": each} for each in "12"),
        said("", None, [called({}, "3")]),
        {"role": "tool", "content": "4", "tool_call_id": "3"},
        said("4"),
        said("Four."),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("truncation", "auto"),
        ("background", True),
        ("tools.0.type", [{"type": "web_search"}]),
        ("reasoning.effort", {"effort": "high"}),
        ("text.format", {"format": {"type": "json_object"}}),
        ("input.0", [{"type": "item_reference", "id": "msg_1"}]),
        ("input.0.content", [{"role": "user", "content": [{"type": "input_image"}]}]),
    ],
)
def test_a_field_of_a_response_that_cannot_be_honoured_is_refused(session, field, value):
    fields = {"model": "any", "input": "?", field.partition(".")[0]: value}
    with pytest.raises(openai.BadRequestError) as error:
        session.openai.responses.create(**fields)
    assert error.value.param == field


# -- Anthropic -------------------------------------------------------------------------------------


def test_an_anthropic_request_reaches_the_call_in_our_form(session):
    session.anthropic.messages.create(
        model="any",
        max_tokens=9,
        system=[{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}]
        + [{"type": "text", "text": "brief."}],
        messages=[USER],
        stop_sequences=["END"],
        tools=[{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
        tool_choice={"type": "auto"},
        metadata={"user_id": "somebody"},
        thinking={"type": "disabled"},
        extra_body={"temperature": 0.5, "top_p": 0.5, "top_k": 5},
    )
    [call] = session.port.calls
    assert call.messages == ({"role": "system", "content": "Be brief."}, USER)
    assert call.tools == (TOOL,)
    assert call.sampling == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "stop": ("END",),
    }


def test_results_and_texts_of_an_anthropic_message_keep_their_order(session):
    def result(call_id, **more):
        return {"type": "tool_result", "tool_use_id": call_id, **more}

    blocks = [
        result("1", content=[{"type": "text", "text": "4"}]),
        result("2", content="no", is_error=True),
        {"type": "text", "text": "And "},
        {"type": "text", "text": "now?"},
        result("3"),
    ]
    session.anthropic.messages.create(
        model="any", max_tokens=9, messages=[{"role": "user", "content": blocks}]
    )
    assert session.port.messages == [
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "tool", "content": "no", "tool_call_id": "2"},
        {"role": "user", "content": "And now?"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
    ]


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (text_answer("4"), "end_turn", None),
        (text_answer("4", FinishReason.LENGTH), "max_tokens", None),
        (text_answer("4", sampled="4END"), "stop_sequence", "END"),
        (answer_of(MESSAGES["a call"]), "tool_use", None),
    ],
)
def test_an_anthropic_message_says_why_it_ended(session, answer, reason, sequence):
    session.port.answer_or_error = answer
    fields = {"model": "any", "max_tokens": 9, "messages": [USER], "stop_sequences": ["N", "END"]}
    fields["stop_sequences"] = ["x", "END"]
    whole = session.anthropic.messages.create(**fields)
    with session.anthropic.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for found in (whole, streamed):
        assert (found.stop_reason, found.stop_sequence) == (reason, sequence)
        assert found.usage.input_tokens == 3
        assert found.usage.output_tokens == len(answer.token_ids)


def test_events_of_an_anthropic_message_come_in_its_order(session):
    session.port.answer_or_error = answer_of(said("4", "hm", [called({"a": 1})]))
    events = session.anthropic.messages.create(
        model="any", max_tokens=9, messages=[USER], stream=True
    )
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    found = [event.type for event in events]
    assert found == ["message_start", *block, *block, *block, "message_delta", "message_stop"]


def test_tokens_of_an_anthropic_prompt_are_counted_without_a_limit(session):
    found = session.anthropic.messages.count_tokens(model="any", messages=[USER], system="Brief.")
    assert found.input_tokens == 3
    assert session.port.messages == [{"role": "system", "content": "Brief."}, USER]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
        ("tool_choice.type", {"tool_choice": {"type": "any"}}),
        ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("messages.0.content.0", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("messages.0.role", {"messages": [{"role": "tool", "content": "4"}]}),
        ("container", {"container": "container_1"}),
    ],
)
def test_a_field_of_anthropic_that_cannot_be_honoured_is_refused(session, field, fields):
    fields = {"model": "any", "max_tokens": 9, "messages": [USER], **fields}
    with pytest.raises(anthropic.BadRequestError, match=field) as error:
        session.anthropic.messages.create(**fields)
    assert error.value.type == "invalid_request_error"


def test_anthropic_needs_max_tokens(served, session):
    body = {"model": "any", "messages": [USER]}
    reply = post(served, session, "/v1/messages", json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "max_tokens is missing")


# -- errors of the port ----------------------------------------------------------------------------


ERRORS = {
    "context": (400, "BadRequestError", "context_length_exceeded", "invalid_request_error"),
    "key": (401, "AuthenticationError", "invalid_api_key", "authentication_error"),
    "missing": (404, "NotFoundError", "not_found", "not_found_error"),
    "busy": (429, "RateLimitError", "rate_limit_exceeded", "rate_limit_error"),
    "server": (500, "InternalServerError", None, "api_error"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_port_has_the_form_that_clients_know(session, kind):
    status, name, code, anthropic_type = ERRORS[kind]
    words = "9 tokens > 8 maximum"
    session.port.answer_or_error = RefusedCallError(words, kind=kind, field="messages")
    create = session.openai
    asks = [
        lambda: create.chat.completions.create(model="any", messages=[USER]),
        lambda: create.chat.completions.create(model="any", messages=[USER], stream=True),
        lambda: create.completions.create(model="any", prompt="?"),
        lambda: create.responses.create(model="any", input="?", stream=True),
    ]
    for ask in asks:
        with pytest.raises(getattr(openai, name)) as error:
            ask()
        found = error.value
        assert (found.status_code, found.code, found.param) == (status, code, "messages")
        assert found.body["message"] == words
    for streams in (False, True):
        with pytest.raises(getattr(anthropic, name)) as error:
            session.anthropic.messages.create(
                model="any", max_tokens=9, messages=[USER], stream=streams
            )
        assert (error.value.status_code, error.value.type) == (status, anthropic_type)
        told = error.value.body["error"]["message"]
        assert told == ("prompt is too long: " if kind == "context" else "") + words


# -- requests that are none ------------------------------------------------------------------------


HISTORY = [
    {"role": "system", "content": "Add."},
    USER,
    {"role": "assistant", "content": "hm", "tool_calls": [called('{"a": 1}')]},
    {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "call_1"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "add", "input": {"a": [1]}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4"}]},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
    {"type": "reasoning", "id": "1", "summary": [], "content": []},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "4"},
]
SAMPLING = {"model": "any", "temperature": 1.0, "top_p": 1.0, "seed": 1, "stream": False}
BODIES = {
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": HISTORY,
        "tools": [TOOL],
        "tool_choice": "auto",
        "stop": ["a"],
        "n": 1,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {**SAMPLING, "prompt": [5, 6], "logprobs": 1, "stop_token_ids": [5]},
    "/v1/responses": {**SAMPLING, "input": ITEMS, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        **SAMPLING,
        "messages": BLOCKS,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Add."}],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
    },
}
JUNK = [None, True, False, 0, -1, 1.5, 1e308, 10**400, "", "x", "\\ud83d", "auto", [], {}, [[]]]
JUNK += [[None], [{}], {"type": "text"}, {"type": None}, {"": {}}, "[" * 99999, [1] * 999]


def mutated(body, generator):
    """A body of which one value is another, is missing or is new, or one byte of which is."""
    body = json.loads(json.dumps(body))
    places = []

    def walk(node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    walk(body)
    node, key = generator.choice(places)
    kind = generator.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[generator.choice(["x", "cache_control", "name", "index", ""])] = generator.choice(JUNK)
    else:
        node[key] = generator.choice(JUNK)
    text = bytearray(json.dumps(body).replace("\\\\ud", "\\ud").encode())
    if kind == 5:
        at = generator.randrange(len(text))
        text[at : at + generator.randrange(2)] = generator.choice(
            [b"\xff", b"", b"{", b"]", b"NaN", b"-Infinity", b"9" * 5000]
            + [b"[" * 50000, b'{"a":' * 500]
        )
    return bytes(text)


def test_no_malformed_request_is_an_error_of_the_server(served, session):
    generator = random.Random(0)
    counts = {}
    for i in range(1000):
        path = generator.choice(list(BODIES))
        text = mutated(BODIES[path], generator)
        reply = post(served, session, path, content=text, timeout=10)
        assert reply.status_code in (200, 400), (i, path, text[:2000], reply.text)
        counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
        if reply.status_code == 400:
            error = reply.json()["error"]
            assert error["message"]
            assert error["type"] == "invalid_request_error"
    assert counts[400] > 600
    assert served.http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_that_are_malformed_above_are_fine_themselves(served, session, path):
    assert post(served, session, path, json=BODIES[path]).status_code == 200
