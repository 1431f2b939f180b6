"""MCPToolTransform: real servers over pipes and HTTP, several at once, alive and dying."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.history import History
from torchrl_llm.envs import ChatEnv
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.tools.call_parsers import ToolTagParser
from torchrl_llm.tools.mcp import MCPServers, MCPToolTransform, _text_of
from torchrl_llm.tools.mcp_client import MCPServerConfig
from torchrl_llm.tools.tool_call import ToolCall
from torchrl_llm.weights.transfer import free_port

if find_spec("mcp") is None:  # importing it takes a second
    pytest.skip("needs mcp: pip install torchrl_llm[mcp]", allow_module_level=True)

PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
OURS = {"command": sys.executable, "args": [PROGRAM]}
START_S = 120.0  # on a machine that does other things too


@pytest.fixture
def make_tools():
    made = []

    def make(servers=None, **kwargs):
        servers = {"ours": OURS} if servers is None else servers
        made.append(MCPToolTransform(servers, **{"start_timeout": START_S, **kwargs}))
        return made[-1]

    yield make
    for transform in made:
        transform.close()


@pytest.fixture(scope="module")
def tools():
    """One for all tests that leave it as it was."""
    transform = MCPToolTransform({"ours": OURS}, start_timeout=START_S)
    yield transform
    transform.close()


def run(transform, tool, session=0, **args):
    return transform.executor.run([[ToolCall(tool, args, session=session)]])[0][0]


def say(env, td, *calls):
    """One turn of the model with these calls in every row."""
    functions = [{"function": {"name": name, "arguments": args}} for name, args in calls]
    turn = {"role": "assistant", "content": "", "tool_calls": functions}
    td["history"].full = History.of([chat + [turn] for chat in td["history"].prompt.chats])
    return env.step_and_maybe_reset(td)[1]


@contextmanager
def http_server(port):
    process = subprocess.Popen(
        [sys.executable, PROGRAM, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    """Address of a server that all tests share."""
    with http_server(free_port()) as url:
        yield url


@pytest.fixture
def children(tools):
    """Tells the processes of servers that run, but for the one that all tests share."""
    others = set(_children())
    return lambda: [pid for pid in _children() if pid not in others]


def _children():
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if PROGRAM.encode() in words and parent == os.getpid():
            found.append(int(entry.name))
    return found


def test_a_conversation_calls_a_server_over_pipes(make_tools, queries, children):
    tools = make_tools()
    env = ChatEnv(batch_size=(2,)).append_transform(tools)
    check_env_specs(env, tensordict=env.reset(queries("a", "b")))
    td = say(env, env.reset(queries("a", "b")), ("add", {"a": 1, "b": 2}), ("echo", {"text": "hi"}))
    assert td["history"].prompt.role == [["user", "assistant", "tool", "tool"]] * 2
    assert td["history"].prompt[0, -2].content == "3"
    assert td["history"].prompt[1, -1].content == "hi"
    assert td["tools", "num_calls"].tolist() == [2, 2]
    assert td["tools", "auxiliary"].all()
    assert children()
    env.close()
    assert not children()


def write(env, td, text):
    """One turn of the model with this text in every row; the messages that answer it."""
    turn = {"role": "assistant", "content": text}
    td["history"].full = History.of([chat + [turn] for chat in td["history"].prompt.chats])
    td = env.step(td)["next"]
    return [m["content"] for m in td["history"].prompt.chats[0].messages[2:]]


def test_calls_in_torchrls_form_are_answered(make_tools, queries):
    env = ChatEnv(batch_size=(1,)).append_transform(make_tools())
    written = 'So:\n<tool>ours.add\n{"a": 1, "b": 2}</tool><tool>ours.echo {"text": "hi"}</tool>'
    assert write(env, env.reset(queries("a")), written) == ["3", "hi"]
    assert write(env, env.reset(queries("a")), '<tool>add\n{"a": 2, "b": 2}</tool>') == ["4"]
    bad, unknown = write(
        env, env.reset(queries("a")), "<tool>ours.add\n{'a'</tool><tool>theirs.add\n{}</tool>"
    )
    assert "cannot be read" in bad
    assert "no tool 'theirs.add'" in unknown
    env.close()
    named = make_tools({"one": OURS, "two": OURS}, tool_call_pattern=r"CALL\[(.*?)\]\((.*?)\)")
    env = ChatEnv(batch_size=(1,)).append_transform(named)
    assert write(env, env.reset(queries("a")), 'CALL[two.add]({"a": 3, "b": 2})') == ["5"]
    # A name that two servers have means the first, as in TorchRL.
    td = env.reset(queries("a"))
    assert write(env, td, 'CALL[echo]({"text": "x"})') == ["x"]
    env.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tool_call_pattern": "(a)(b)", "parser": ToolTagParser()}, "not both"),
        ({"tool_call_pattern": ToolTagParser()}, "parser=... by its name"),
    ],
)
def test_one_way_to_write_calls_is_given(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        MCPToolTransform({"ours": OURS}, **arguments)


def test_a_server_over_http_is_called_and_outlives_the_environment(make_tools, queries, url):
    for server in (url, {"url": url, "headers": {"X-Token": "secret"}}):
        env = ChatEnv(batch_size=(1,)).append_transform(make_tools({"http": server}))
        td = say(env, env.reset(queries("a")), ("add", {"a": 20, "b": 22}))
        assert td["history"].prompt[0, -1].content == "42"
        env.close()


def test_the_schemas_say_what_the_server_says(tools):
    schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    assert schemas["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    json.dumps(list(schemas.values()))


def test_arguments_of_wrong_types_and_unknown_tools_are_answered_before_the_server(tools):
    assert run(tools, "add", a="many", b=2).error == "InvalidArguments"
    assert run(tools, "add", a=1).error == "InvalidArguments"
    unknown = run(tools, "ad", a=1, b=2)
    assert unknown.error == "UnknownTool"
    assert "'add'" in unknown.content


def test_what_a_tool_raises_is_a_result(tools):
    result = run(tools, "fail")
    assert result.error == "ToolError"
    assert "fail" in result.content


def test_a_server_that_dies_in_the_middle_is_started_again_by_the_next_call(
    make_tools, queries, children
):
    tools = make_tools()
    env = ChatEnv(batch_size=(1,)).append_transform(tools)
    td = say(env, env.reset(queries("a")), ("die", {}))
    assert td["tools", "num_failed"].tolist() == [1]
    assert td["tools", "calls"][0][0]["error"] == "WorkerError"
    assert "ended before it answered" in td["history"].prompt[0, -1].content
    td = say(env, td, ("add", {"a": 1, "b": 1}))
    assert td["history"].prompt[0, -1].content == "2"
    assert tools.servers.num_starts("ours") == 2
    assert len(children()) == 1


def test_a_server_that_died_between_two_calls_is_started_again_unnoticed(make_tools, children):
    tools = make_tools()
    assert run(tools, "add", a=1, b=1).content == "2"
    os.kill(children()[0], 9)
    deadline = time.monotonic() + START_S
    while children() and time.monotonic() < deadline:
        time.sleep(0.01)
    result = run(tools, "add", a=1, b=2)
    # It is noticed by the end of its output, which comes a moment after its end.
    assert (result.content, result.error) == ("3", "") or result.error == "WorkerError"
    assert run(tools, "add", a=1, b=3).content == "4"


def test_calls_of_others_fail_with_the_server_and_nothing_hangs(make_tools):
    tools = make_tools()
    calls = [[ToolCall("sleep", {"seconds": 60.0})], [ToolCall("die")]]
    slow, dead = (row[0] for row in tools.executor.run(calls))
    assert (slow.error, dead.error) == ("WorkerError", "WorkerError")


def test_a_call_that_takes_too_long_is_given_up_and_the_server_stays(make_tools):
    tools = make_tools(timeout=0.5)
    result = run(tools, "sleep", seconds=60.0)
    assert result.error == "TimeoutError"
    assert result.content == "sleep did not answer within 0.5 s."
    assert tools.executor.num_hanging == 0
    assert tools.servers.num_starts("ours") == 1


@pytest.mark.parametrize("http", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_result_of_ten_megabytes_is_cut(http, make_tools, request):
    server = request.getfixturevalue("url") if http else OURS
    tools = make_tools({"big": server}, timeout=60.0, max_result_chars=1000)
    result = run(tools, "big", characters=10_000_000)
    assert (result.error, result.truncated) == ("", True)
    assert 900 < len(result.content) <= 1000


def test_what_a_result_holds_beside_texts_is_written_as_it_is():
    from mcp import types

    resources = [
        types.TextResourceContents(uri="file:///a", text=""),
        types.BlobResourceContents(uri="file:///b", blob="AAAA", mime_type="a/b"),
    ]
    content = [types.EmbeddedResource(type="resource", resource=one) for one in resources]
    assert _text_of(types.CallToolResult(content=content)) == "\n[a/b file:///b]"
    facts = types.CallToolResult(content=[], structured_content={"gr\xfc\xdfe": [1, None]})
    assert _text_of(facts) == '{"gr\xfc\xdfe": [1, null]}'


def test_pictures_are_named_and_not_shown(tools):
    assert run(tools, "picture").content == "[image/png, 100 bytes]"


def test_servers_see_none_of_the_trainers_variables_but_their_own(make_tools, monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "kept")
    seen = run(make_tools({"s": {**OURS, "env": {"GIVEN": "1"}}}), "environment").content
    assert "GIVEN" in seen
    assert "PATH" in seen
    assert "TRAINER_SECRET" not in seen


def test_two_servers_work_at_once_and_names_that_collide_get_the_server_in_front(
    make_tools, children
):
    tools = make_tools({"one": OURS, "two": OURS}, tools=["one.add", "two.add", "one.echo"])
    assert sorted(tools.tools) == ["one.add", "one.echo", "two.add"]
    assert run(tools, "two.add", a=1, b=1).content == "2"
    assert len(children()) == 2


def test_tools_can_be_chosen_prefixed_and_made_actions(make_tools, queries):
    tools = make_tools(tools=["add", "ours.echo"], actions=["echo"], prefix=True)
    assert {name: tool.kind for name, tool in tools.tools.items()} == {
        "ours.add": "auxiliary",
        "ours.echo": "action",
    }
    env = ChatEnv(batch_size=(1,)).append_transform(tools)
    td = say(env, env.reset(queries("a")), ("ours.echo", {"text": "x"}))
    assert not td["tools", "auxiliary"].any()


@pytest.mark.parametrize("argument", ["tools", "actions"])
def test_a_tool_that_no_server_has_is_refused_and_the_servers_end(argument, url, children):
    servers = {"ours": OURS if argument == "tools" else url}
    with pytest.raises(ConfigError, match=r"no MCP server has a tool 'nothing'.*ours\.add"):
        MCPToolTransform(servers, start_timeout=START_S, **{argument: ["nothing"]})
    assert not children()


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": "/no/such/program"}, "No such file"),
        ({"command": sys.executable, "args": ["-c", "exit('I am broken')"]}, "I am broken"),
        ({"url": "http://127.0.0.1:1/mcp"}, "ConnectError"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_that_says_why(server, said):
    with pytest.raises(WorkerError, match=rf"'bad'.*did not start(.|\n)*{said}"):
        MCPToolTransform({"bad": server}, start_timeout=START_S)


@pytest.mark.full
def test_a_server_that_is_slow_to_start_is_given_up():
    with pytest.raises(WorkerError, match=r"'slow'.*no answer within 0.5 s"):
        MCPToolTransform({"slow": {"command": "sleep", "args": ["600"]}}, start_timeout=0.5)


@pytest.mark.parametrize(
    ("servers", "what"),
    [
        ({}, "servers must map"),
        ([OURS], "servers must map"),
        ({"s": {}}, "either"),
        ({"s": {**OURS, "url": "http://x"}}, "either"),
        ({"s": {**OURS, "comand": "x"}}, "unknown settings comand"),
        ({"s": {"command": "x", "args": "a b"}}, "list of strings"),
        ({"s": {"command": "x", "env": {"A": 1}}}, "strings to strings"),
        ({"s": {"url": "http://x", "args": ["a"]}}, "no effect"),
        ({"s": "ftp://x"}, "begins with http"),
    ],
)
def test_impossible_configurations_are_refused(servers, what):
    with pytest.raises(ConfigError, match=what):
        MCPServers(servers)


def test_a_configuration_object_is_taken_as_it_is():
    config = MCPServerConfig(command="x")
    assert MCPServers({"s": config}).configs["s"] is config


@pytest.mark.full
def test_a_copy_and_a_closed_transform_start_servers_of_their_own(make_tools, children):
    tools = make_tools()
    again = pickle.loads(pickle.dumps(tools))
    assert run(again, "add", a=1, b=2).content == "3"
    assert len(children()) == 2
    again.close()
    assert len(children()) == 1
    assert run(tools, "add", a=1, b=2).content == "3"
    tools.close()
    tools.close()
    assert not children()
    assert run(tools, "add", a=1, b=2).content == "3"


@pytest.mark.mcp
def test_a_server_from_the_package_registry_answers(make_tools, queries):
    program = os.environ.get("TORCHRL_LLM_MCP_SERVER")
    if not program:
        pytest.skip("set TORCHRL_LLM_MCP_SERVER to the program of mcp-server-time")
    tools = make_tools({"time": {"command": program}, "ours": OURS}, timeout=60.0)
    assert {"get_current_time", "convert_time", "add"} <= set(tools.tools)
    env = ChatEnv(batch_size=(1,)).append_transform(tools)
    asked = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    td = say(env, env.reset(queries("a")), ("convert_time", asked), ("add", {"a": 1, "b": 2}))
    answer, total = (message["content"] for message in td["history"].prompt.chats[0].messages[-2:])
    assert json.loads(answer)["target"]["datetime"].endswith("T21:00:00+09:00")
    assert total == "3"
    td = say(env, td, ("get_current_time", {"timezone": "Mars/Olympus"}))
    assert td["tools", "calls"][0][0]["error"] == "ToolError"
    env.close()


def test_no_error_or_repr_of_a_server_shows_its_password():
    where = "//me:secret@host"
    for wrong in ({"url": f"ftp:{where}"}, {"url": f"http:{where}", "command": "a"}):
        with pytest.raises(ConfigError, match=r"me:\*\*\*@host") as refused:
            MCPServerConfig(**wrong)
        assert "secret" not in str(refused.value)
    headers = {"Authorization": "secret"}
    assert "secret" not in repr(MCPServerConfig(url=f"http:{where}", headers=headers))
    assert "secret" not in repr(MCPServerConfig(command="a", env={"KEY": "secret"}))
