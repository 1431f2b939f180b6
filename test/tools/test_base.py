"""ToolTransform: which calls are answered, what the rows then hold, when tools begin and end."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.wire import PackedRows, encode, pack_rows
from torchrl_llm.envs import ChatEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.tools import (
    HermesParser,
    SyntaxParser,
    Tool,
    ToolCall,
    ToolTransform,
    XMLBlockParser,
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b


class Move(Tool):
    name = "move"
    kind = "action"
    parameters = {"type": "object"}  # noqa: RUF012

    def run(self, call):
        return "moved"


class Notes(Tool):
    """Keeps what each conversation has told it."""

    name = "note"
    stateful = True
    parameters = {"type": "object"}  # noqa: RUF012

    def __init__(self):
        self.notes, self.ended, self.starts, self.closes = {}, [], 0, 0

    def run(self, call):
        self.notes.setdefault(call.session, []).append(call.args["text"])
        return " ".join(self.notes[call.session])

    def end_session(self, session):
        self.ended.append(session)
        self.notes.pop(session, None)

    def start(self):
        self.starts += 1

    def close(self):
        self.closes += 1


def hermes(name, **args):
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': args})}</tool_call>"


def make(transform, size, **options):
    env = ChatEnv(batch_size=(size,), **options)
    return env.append_transform(transform)


def contents(td):
    return [[m["content"] for m in chat][2:] for chat in td["history"].prompt.chats]


@pytest.fixture
def played(queries, answer):
    """One step of an environment with these answers, and the next rows."""

    def play(transform, *answers):
        env = make(transform, len(answers))
        td = env.step(answer(env.reset(queries(*"abcdefgh"[: len(answers)])), *answers))["next"]
        env.close()
        return td

    return play


def test_the_result_of_a_call_is_the_next_message(played):
    td = played(ToolTransform([add], HermesParser()), hermes("add", a=1, b=2), "no call")
    assert td["history"].prompt.role == [["user", "assistant", "tool"], ["user", "assistant"]]
    assert contents(td) == [["3"], []]
    assert td["history"].prompt.chats[0][-1] == {"role": "tool", "content": "3", "name": "add"}
    tools = td["tools"]
    assert tools["num_calls"].tolist() == [1, 0]
    assert tools["num_failed"].tolist() == [0, 0]
    assert tools["auxiliary"].tolist() == [[True], [False]]
    [[record], nothing] = tools.get("calls").tolist()
    assert nothing == ()
    assert record.pop("seconds") >= 0
    assert record == {
        "tool": "add",
        "id": None,
        "tag": None,
        "error": "",
        "exit_code": None,
        "truncated": False,
        "num_characters": 1,
    }


def test_the_messages_own_calls_are_read_by_default(queries):
    env = make(ToolTransform([add]), 1)
    td = env.reset(queries("x"))
    calls = [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
        },
        {"id": "c2", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}},
        {"name": "add", "arguments": "{broken"},
        {"function": {"name": "add", "arguments": [1]}},
        "what",
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls, "tool_call_errors": ["bad"]}
    td["history"].full = History.of([td["history"].prompt.chats[0] + [turn]])
    td = env.step(td)["next"]
    chat = td["history"].prompt.chats[0]
    assert [m["content"] for m in chat][2:4] == ["3", "7"]
    assert [m.get("tool_call_id") for m in chat][2:4] == ["c1", "c2"]
    assert td["tools", "num_calls"].item() == 6
    assert td["tools", "num_failed"].item() == 4
    assert {r["error"] for r in td["tools"].get("calls").tolist()[0]} == {"", "MalformedCall"}


def test_every_kind_of_bad_call_is_answered_and_recorded(played):
    td = played(
        ToolTransform([add], HermesParser()),
        hermes("ad", a=1, b=2),
        hermes("add", a="one", b=2),
        '<tool_call>{"name": "add", "arguments": </tool_call>',
        '<tool_call>{"name": "add"',
        "<tool_call>" + "[" * 50_000,
    )
    errors = [[r["error"] for r in row] for row in td["tools"].get("calls").tolist()]
    assert errors == [["UnknownTool"], ["InvalidArguments"], *[["MalformedCall"]] * 3]
    assert td["tools", "num_failed"].tolist() == [1] * 5
    told = [row[0] for row in contents(td)]
    assert told[0] == "There is no tool 'ad'. Did you mean 'add'?"
    assert 'Expected {"a": integer, "b": integer}.' in told[1]
    assert all("Expected <tool_call>" in text and len(text) < 500 for text in told[2:])


def test_a_parser_that_fails_is_a_malformed_call(played):
    td = played(ToolTransform([add], lambda text: {}[text]), "hello")
    assert [r["error"] for r in td["tools"].get("calls").tolist()[0]] == ["MalformedCall"]
    assert "KeyError" in contents(td)[0][0]


def test_a_function_of_a_text_is_a_parser(played):
    parse = lambda text: {"calls": [ToolCall("add", {"a": len(text), "b": 1}, tag="T")]}  # noqa: E731
    td = played(ToolTransform([add], parse, tool_name="ipython"), "four")
    assert td["history"].prompt.chats[0][-1] == {
        "role": "ipython",
        "content": "[T] 5",
        "name": "add",
    }


def test_calls_inside_the_reasoning_are_not_made(played):
    td = played(
        ToolTransform([add], HermesParser()),
        f"<think>maybe {hermes('add', a=1, b=1)}</think>{hermes('add', a=2, b=2)}",
        f"<think>still thinking {hermes('add', a=3, b=3)}",
    )
    assert contents(td) == [["4"], ["6"]]


def test_calls_beyond_the_limit_are_answered_all_together(played):
    many = "".join(hermes("add", a=n, b=0) for n in range(1000))
    td = played(ToolTransform([add], HermesParser(), max_calls=3), many, hermes("add", a=1, b=0))
    assert contents(td)[0] == [
        "0",
        "1",
        "2",
        "997 further calls were not run: at most 3 a turn.",
    ]
    assert td["tools", "num_calls"].tolist() == [4, 1]
    assert td["tools"].get("calls").tolist()[0][-1]["error"] == "TooManyCalls"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_calls_in_a_response_that_was_cut_are_not_made(reason, queries, answer):
    notes = Notes()
    env = make(ToolTransform([notes], HermesParser()), 2)
    td = answer(env.reset(queries("a", "b")), *[hermes("note", text="hello") + " and"] * 2)
    td["tokens", "finish_reason"] = torch.tensor([reason, FinishReason.STOP])
    td = env.step(td)["next"]
    assert contents(td) == [["No tool was called: your answer was cut before its end."], ["hello"]]
    assert [len(row) for row in notes.notes.values()] == [1]
    assert td["tools"].get("calls").tolist()[0][0]["error"] == "CutResponse"
    assert td["tools", "num_failed"].tolist() == [1, 0]
    env.close()


def test_two_transforms_with_a_tool_of_one_name_are_refused():
    env = make(ToolTransform([add]), 1).append_transform(ToolTransform([Notes()]))
    with pytest.raises(ConfigError, match="both have a tool named 'add'"):
        env.append_transform(ToolTransform([Move(), add]))


def test_a_turn_is_auxiliary_unless_it_acts(played):
    td = played(
        ToolTransform([add, Move()], HermesParser()),
        hermes("add", a=1, b=2),
        hermes("move"),
        hermes("add", a=1, b=2) + hermes("move"),
        hermes("unknown"),
        "plain",
    )
    assert td["tools", "auxiliary"].flatten().tolist() == [True, False, False, True, False]
    assert td["tools", "auxiliary_turns"].tolist() == [1, 0, 0, 1, 0]


def test_where_all_tools_are_actions_a_call_that_cannot_be_read_was_one(played):
    td = played(ToolTransform([Move()], HermesParser()), hermes("mov"), "<tool_call>{}")
    assert td["tools", "auxiliary"].flatten().tolist() == [False, False]


def test_thinking_ends_after_so_many_turns_and_begins_anew_behind_a_step(queries, answer):
    env = make(ToolTransform([add], HermesParser(), max_auxiliary_turns=2), 2)
    td = env.reset(queries("a", "b"))
    seen = []
    for turn in range(6):
        td = answer(
            td, hermes("add", a=turn, b=0), "plain" if turn == 1 else hermes("add", a=1, b=1)
        )
        td = env.step_and_maybe_reset(td)[1]
        seen.append(td["tools", "auxiliary"].flatten().tolist())
    assert seen == [
        [True, True],
        [True, False],
        [False, True],
        [True, True],
        [True, False],
        [False, True],
    ]
    told = contents(td)[0]
    assert told[4] == (
        "No tool was called: 2 turns with calls are the limit. Answer without tools now."
    )
    env.close()


def test_rows_that_are_not_stepped_and_rows_that_are_done_are_left_alone(queries, answer):
    notes = Notes()
    env = make(ToolTransform([notes], HermesParser()), 3)
    td = answer(env.reset(queries("a", "b", "c")), *[hermes("note", text=t) for t in "xyz"])
    td["done"] = torch.tensor([[False], [False], [True]])
    td["_step"] = torch.tensor([True, False, False])
    td["tools", "auxiliary_turns"] = torch.tensor([0, 5, 7])
    td = env.step(td)["next"]
    assert [len(chat) for chat in td["history"].prompt.chats] == [3, 1, 1]
    assert td["tools", "num_calls"].tolist() == [1, 0, 0]
    assert td["tools", "auxiliary_turns"].tolist() == [1, 5, 7]
    assert list(notes.notes.values()) == [["x"]]
    env.close()


def test_a_session_is_a_conversation_and_ends_with_it(queries, answer):
    notes = Notes()
    env = make(ToolTransform([notes], HermesParser()), 2)
    td = env.reset(queries("a", "b"))
    first, second = td["traj_id"].tolist()
    for text in ("x", "y"):
        td = env.step_and_maybe_reset(answer(td, *[hermes("note", text=text)] * 2))[1]
    assert notes.notes == {first: ["x", "y"], second: ["x", "y"]}
    assert [row[-1] for row in contents(td)] == ["x y", "x y"]
    td["_reset"] = torch.tensor([False, True])
    td = env.reset(td)
    assert notes.ended == [second]
    assert td["tools", "num_calls"].tolist() == [1, 0]
    assert td["tools", "auxiliary_turns"].tolist() == [2, 0]
    env.reset(queries("c", "d"))
    assert sorted(notes.ended) == [first, second]
    env.close()
    assert (notes.starts, notes.closes) == (1, 1)


def test_tools_close_with_the_environment_and_start_again_with_it(queries, answer):
    notes = Notes()
    transform = ToolTransform([notes], HermesParser())
    env = make(transform, 1)
    td = answer(env.reset(queries("a")), hermes("note", text="x"))
    env.step(td)
    env.close()
    assert (notes.starts, notes.closes) == (1, 1)
    transform.start()
    assert notes.starts == 2
    transform.close()


def test_two_transforms_answer_the_calls_of_their_own_tools(queries, answer):
    def double(a: int) -> int:
        """Twice.

        Args:
            a: a number.
        """
        return 2 * a

    env = make(ToolTransform([add], HermesParser()), 2)
    env.append_transform(ToolTransform([double], HermesParser()))
    env.append_transform(ToolTransform([Move()], XMLBlockParser()))
    td = env.reset(queries("a", "b"))
    calls = hermes("double", a=4) + hermes("add", a=1, b=1) + hermes("none") + "<tool_call>{"
    td = env.step(answer(td, calls, '<tool name="move">{}</tool>' + hermes("double", a=1)))["next"]
    first, second = contents(td)
    assert first[0] == "2"
    assert first[1].startswith("There is no tool 'none'")
    assert first[2].startswith("This tool call cannot be read")
    assert first[3] == "8"
    assert second == ["2", "moved"]
    assert td["tools", "num_calls"].tolist() == [4, 2]
    assert td["tools", "num_failed"].tolist() == [2, 0]
    assert td["tools", "auxiliary"].tolist() == [[True], [False]]
    env.close()


def test_transforms_that_read_other_forms_leave_no_call_unanswered(queries, answer):
    shout = SyntaxParser('[CALL]{"name": "NAME", "arguments": {"key": "VALUE"}}[/CALL]')
    env = make(ToolTransform([add], HermesParser()), 1)
    env.append_transform(ToolTransform([Move()], shout))
    td = env.reset(queries("a"))
    text = '[CALL]{"name": "none", "arguments": {}}[/CALL] [CALL]{"name": 3}[/CALL]'
    [found] = contents(env.step(answer(td, text))["next"])
    assert found[0].startswith("There is no tool 'none'")
    assert found[1].startswith("This tool call cannot be read")
    env.close()


def test_two_ways_to_read_one_form_answer_each_call_once(queries):
    env = make(ToolTransform([add]), 1)
    env.append_transform(ToolTransform([Move()], HermesParser()))
    td = env.reset(queries("a"))
    calls = [("add", {"a": 1, "b": 2}), ("move", {}), ("none", {})]
    functions = [{"function": {"name": name, "arguments": args}} for name, args in calls]
    raw = "".join(hermes(name, **args) for name, args in calls)
    turn = {"role": "assistant", "content": "", "tool_calls": functions, "raw": raw}
    td["history"].full = History.of([td["history"].prompt.chats[0] + [turn]])
    [found] = contents(env.step(td)["next"])
    assert found == ["3", "There is no tool 'none'. There are ['add'].", "moved"]
    env.close()


def test_odd_names_and_arguments_of_calls_are_safe_to_store_and_to_send(queries, answer):
    env = make(ToolTransform([Notes()], HermesParser()), 2)
    td = env.reset(queries("a", "b"))
    half = '<tool_call>{"name": "\\ud83d", "arguments": {"a": "\\ud83d"}}</tool_call>'
    half += '<tool_call>{"name": "note", "arguments": {"text": "\\ud83d"}}</tool_call>'
    deep = "[" * 600 + "]" * 600
    long = hermes("n" * 5000) + hermes("note", text="x")
    long += f'<tool_call>{{"name": "note", "arguments": {{"text": {deep}}}}}</tool_call>'
    td = env.step(answer(td, half, long))["next"]
    first, second = contents(td)
    assert first == ["There is no tool '?'. There are ['note'].", "?"]
    assert second[1] == "x"
    assert len(td["history"].prompt.chats[1][-3]["name"]) == 200
    PackedRows.open(encode(pack_rows(td)))
    env.close()


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_specs_hold_in_every_mode(mode, tokenizer):
    options = {} if mode == "history" else {"tokenizer": tokenizer}
    env = make(ToolTransform([add], HermesParser()), 2, input_mode=mode, **options)
    from torchrl_llm.envs import DatasetChatEnv

    del env
    env = DatasetChatEnv(
        dataset=[{"query": "What?"}] * 4, num_envs=2, input_mode=mode, tokenizer=tokenizer
    )
    env = env.append_transform(ToolTransform([add], HermesParser()))
    check_env_specs(env)
    policy = FakeWrapper(
        lambda prompt: "done" if "tool" in prompt else hermes("add", a=1, b=2),
        tokenizer=tokenizer,
        input_mode=mode,
    )
    rollout = env.rollout(3, policy, break_when_any_done=False)
    assert rollout["next", "tools", "num_calls"].tolist() == [[1, 0, 0]] * 2
    env.close()


def test_rows_travel_by_pickle_and_as_safe_bytes(played):
    td = played(ToolTransform([add], HermesParser()), hermes("add", a=1, b=2), "no")
    td = td.select("tools")
    again = PackedRows.open(encode(pack_rows(td)))
    for rows in (pickle.loads(pickle.dumps(td)), again.unpack()):
        calls = [row.get(("tools", "calls")) for row in rows.unbind(0)]
        calls = [getattr(c, "data", c) for c in calls]
        assert [len(c) for c in calls] == [1, 0]
        assert calls[0][0]["tool"] == "add"
        assert [int(n) for n in read_rows(rows, ("tools", "num_calls"))] == [1, 0]


def test_the_transform_can_be_pickled_and_cloned(played):
    transform = ToolTransform([add], HermesParser(), tool_name="ipython", timeout=3)
    for again in (pickle.loads(pickle.dumps(transform)), transform.clone()):
        td = played(again, hermes("add", a=1, b=2))
        assert td["history"].prompt.role == [["user", "assistant", "ipython"]]
        assert contents(td) == [["3"]]
        assert again.executor.timeout == 3


def test_schemas_are_what_templates_take():
    [schema] = ToolTransform([add]).schemas
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [add, add]}, "two tools are named 'add'"),
        ({"tools": [7]}, "a tool must be a Tool or a function, got int"),
        ({"tools": [lambda a: a]}, "cannot be described"),
        ({"parser": 3}, "parser must be a ToolParser"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ToolTransform(**arguments)


def test_outside_of_an_environment_it_says_so():
    with pytest.raises(ConfigError, match="works in an environment only"):
        ToolTransform([add])._step(TensorDict(batch_size=[1]), TensorDict(batch_size=[1]))
