"""Services as TorchRL writes them: registries, ordered execution with state, plain functions."""

import pickle

import pytest

from torchrl_llm.envs import ChatEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools import (
    ExecuteToolsInOrder,
    JSONCallParser,
    SimpleToolTransform,
    ToolCall,
    ToolRegistry,
    ToolService,
    XMLBlockParser,
)
from torchrl_llm.tools.tool_registry import ServiceTool, json_schema, signature_schema


class Service:
    schema_in = {"text": str}  # noqa: RUF012
    schema_out = {"said": str}  # noqa: RUF012

    def __init__(self, name, log=None):
        self.name, self.log = name, [] if log is None else log

    def __call__(self, text, _state=None, **kwargs):
        self.log.append((self.name, text))
        if text == "fail":
            raise ValueError("asked to fail")
        turn = None if _state is None else _state["turn"].item()
        return {"said": f"{self.name} {text}", "turn": turn}


class Plain:
    name, schema_in, schema_out = "plain", {"n": int}, {}

    def __call__(self, n):
        return {"n": n + 1}


def block(tool, text, tag=""):
    return f'<tool name="{tool}"{tag}>{{"text": "{text}"}}</tool>'


@pytest.fixture
def told(queries, answer):
    """The contents of the messages behind the answers."""

    def play(transform, *answers):
        env = ChatEnv(batch_size=(len(answers),)).append_transform(transform)
        td = env.step(answer(env.reset(queries(*"abc"[: len(answers)])), *answers))["next"]
        env.close()
        return td, [[m["content"] for m in c][2:] for c in td["history"].prompt.chats]

    return play


def test_calls_run_in_the_order_in_which_they_were_written_and_are_reported_together(told):
    log = []
    registry = ToolRegistry([Service("a", log), Service("b", log)])
    text = block("b", "1") + block("a", "2", ' tag="T"') + block("b", "3")
    td, [[report]] = told(ExecuteToolsInOrder(registry, XMLBlockParser()), text)
    assert log == [("b", "1"), ("a", "2"), ("b", "3")]
    assert report == (
        "<tool_results>\n"
        '1. b: {"said": "b 1", "turn": 0}\n'
        '2. a [T]: {"said": "a 2", "turn": 0}\n'
        '3. b: {"said": "b 3", "turn": 0}\n'
        "</tool_results>"
    )
    assert td["tools", "num_calls"].tolist() == [3]


def test_the_state_of_the_row_is_handed_over_and_cannot_be_changed(told):
    seen = []

    class Look:
        name, schema_in, schema_out = "look", {}, {}

        def __call__(self, _state):
            seen.append((_state["traj_id"].item(), _state["history"].full.content[-1]))
            _state["turn"] = 7

    td, [[first], [second]] = told(
        ExecuteToolsInOrder(ToolRegistry([Look()]), JSONCallParser()),
        '{"message": "x", "tools": [{"tool": "look"}]}',
        '{"message": "y", "tools": [{"tool": "look"}]}',
    )
    assert [traj for traj, _ in sorted(seen)] == sorted(td["traj_id"].tolist())
    assert {text[13] for _, text in seen} == {"x", "y"}
    assert "locked" in first
    assert "locked" in second


def test_the_state_is_read_as_a_dict_is(told):
    class Look:
        name, schema_in, schema_out = "look", {}, {}

        def __call__(self, _state=None):
            if not _state:
                return {"turn": None}
            assert "turn" in _state
            assert ("history", "full") in _state
            assert "nothing" not in _state
            assert _state.get("nothing", 5) == 5
            copy = {**_state}
            return {"turn": copy["turn"].item(), "said": _state["history", "full"].content[-1]}

    transform = ExecuteToolsInOrder(ToolRegistry([Look()]), XMLBlockParser())
    _, [[report]] = told(transform, '<tool name="look"></tool>')
    assert '"turn": 0' in report
    assert "name=" in report
    outside = ServiceTool(Look(), name="look", pass_state=True)
    assert outside.run(ToolCall("look")) == '{"turn": null}'


def test_no_state_is_handed_over_where_it_is_not_wanted(told):
    log = []
    transform = ExecuteToolsInOrder(
        ToolRegistry([Service("a", log), Plain()]), XMLBlockParser(), pass_state_to_tools=False
    )
    _, [[report]] = told(transform, block("a", "1") + '<tool name="plain">{"n": "4"}</tool>')
    assert '"turn": null' in report
    assert '2. plain: {"n": 5}' in report


@pytest.mark.parametrize("stop", [False, True])
def test_an_error_stops_what_follows_if_asked(told, stop):
    log = []
    transform = ExecuteToolsInOrder(
        ToolRegistry([Service("a", log)]), XMLBlockParser(), stop_on_error=stop
    )
    text = block("a", "1") + block("a", "fail") + block("a", "2")
    td, [[report], [other]] = told(transform, text, block("a", "3"))
    assert (("a", "2") in log) != stop
    assert ("a", "3") in log
    assert "2. a failed: ValueError: asked to fail" in report
    assert ("3. a failed: Not run" in report) == stop
    assert other.startswith("<tool_results>\n1. a: ")
    assert td["tools", "num_failed"].tolist() == [2 if stop else 1, 0]


def test_unknown_services_and_wrong_arguments_are_reported(told):
    transform = ExecuteToolsInOrder(ToolRegistry([Service("alpha")]), XMLBlockParser())
    text = block("alpa", "1") + '<tool name="alpha">{"n": 1}</tool><tool name="alpha">{</tool>'
    _, [[report]] = told(transform, text)
    assert "1. alpa failed: There is no tool 'alpa'. Did you mean 'alpha'?" in report
    assert "2. alpha failed: Invalid arguments for alpha" in report
    assert "3. a call failed: This tool call cannot be read" in report


def test_a_registry_knows_its_services():
    registry = ToolRegistry([Service("a")])
    registry.register(Service("b"))
    assert [s.name for s in registry] == ["a", "b"]
    assert len(registry) == 2
    assert "a" in registry
    assert "c" not in registry
    assert registry.get("b").name == "b"
    assert isinstance(registry.get("a"), ToolService)
    with pytest.raises(KeyError, match="no service 'bb'"):
        registry.get("bb")
    with pytest.raises(ConfigError, match="registered already"):
        registry.register(Service("a"))
    for odd in (Service(""), object(), lambda: 1):
        with pytest.raises(ConfigError, match="a service has a name"):
            registry.register(odd)


def test_schemas_of_services():
    assert json_schema({"n": int, "x": {"type": "string"}, "y": "array", "z": object}) == {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "x": {"type": "string"},
            "y": {"type": "array"},
            "z": {},
        },
        "required": ["n", "x", "y", "z"],
    }
    whole = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert json_schema(whole) == whole
    assert json_schema({}) == {"type": "object", "properties": {}, "required": []}

    def function(a: int, b: "str", c=1, *rest, _state=None, d: list = (), **more):
        """Do."""

    assert signature_schema(function) == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {},
            "d": {"type": "array"},
        },
        "required": ["a", "b"],
    }
    assert signature_schema(print)["type"] == "object"


def test_a_service_tool_gives_its_service_what_it_takes():
    tool = ServiceTool.of(Plain(), pass_state=True, stateful=True)
    assert tool.run(ToolCall("plain", {"n": 1}, state={"x": 1})) == '{"n": 2}'
    assert tool.stateful


# -- plain functions ------------------------------------------------------------------------------


def calculator(operation: str, a: float, b: float):
    """Compute."""
    if operation == "add":
        return {"result": a + b}
    raise ValueError(f"cannot {operation}")


def test_plain_functions_are_tools(told):
    transform = SimpleToolTransform({"calculator": calculator})
    assert transform.schemas[0]["function"]["description"] == "Compute."
    td, contents = told(
        transform,
        'So <tool>calculator\n{"operation": "add", "a": 1, "b": "2"}</tool>',
        '<tool>calculator\n{"operation": "sub", "a": 1, "b": 2}</tool><tool>calc\n{}</tool>',
        "nothing",
    )
    assert contents == [
        ['{"result": 3}'],
        ["ValueError: cannot sub", "There is no tool 'calc'. Did you mean 'calculator'?"],
        [],
    ]
    assert td["history"].prompt.role[1] == ["user", "assistant", "tool", "tool"]


def test_plain_functions_with_other_formats(told):
    by_parser = SimpleToolTransform(
        {"f": lambda a: a}, parser=XMLBlockParser(), tool_name="ipython"
    )
    td, contents = told(by_parser, '<tool name="f" tag="T">{"a": [1]}</tool>')
    assert contents == [["[T] [1]"]]
    assert td["history"].prompt.role[0][-1] == "ipython"
    by_pattern = SimpleToolTransform(
        {"f": lambda a: a}, tool_call_pattern=r"CALL\[(.*?)\]\((.*?)\)"
    )
    assert told(by_pattern, 'CALL[f]({"a": 1})')[1] == [["1"]]


def test_a_schema_says_more_than_the_signature(told):
    schemas = {"f": {"n": {"type": "integer", "minimum": 3}}}
    transform = SimpleToolTransform({"f": lambda n: n}, schemas)
    contents = told(transform, '<tool>f\n{"n": 1}</tool>', '<tool>f\n{"n": 4}</tool>')[1]
    assert "less than the minimum of 3" in contents[0][0]
    assert contents[1] == ["4"]


ARGUMENTS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": 0}},
        {"type": "function", "name": "f", "description": "F.", "parameters": 0, "strict": True},
        {"name": "f", "description": "F.", "parameters": 0},
        {"name": "f", "description": "F.", "input_schema": 0},
        {"name": "f", "description": "F.", "inputSchema": 0},
        {"parameters": 0},
        {"description": "F."},
        {"n": {"type": "integer"}},
        {"n": int},
        0,
    ],
    ids=[
        "chat",
        "responses",
        "torchrl",
        "anthropic",
        "mcp",
        "nameless",
        "text",
        "name",
        "int",
        "bare",
    ],
)
def test_a_schema_is_read_in_each_form_that_libraries_write(told, schema):
    """``0`` stands for the schema of the arguments."""

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return ARGUMENTS if value == 0 and value is not False else value

    def f(n: int):
        return n + 1

    schema = filled(schema)
    transform = SimpleToolTransform({"f": f}, {"f": schema})
    function = transform.schemas[0]["function"]
    assert function["parameters"] == ARGUMENTS
    assert function["description"] == ("F." if "F." in str(schema) else "")
    assert told(transform, '<tool>f\n{"n": 1}</tool>')[1] == [["2"]]
    service = type("F", (), {"name": "f", "schema_in": schema, "schema_out": {}})()
    tool = ServiceTool.of(service, pass_state=False, stateful=False)
    assert tool.parameters == (ARGUMENTS if schema != {"description": "F."} else {"type": "object"})


def test_arguments_that_are_called_as_parts_of_a_schema_are_arguments():
    schemas = {"f": {"name": "string", "description": "string", "parameters": {"type": "array"}}}
    transform = SimpleToolTransform({"f": lambda name, description, parameters: name}, schemas)
    properties = transform.schemas[0]["function"]["parameters"]["properties"]
    assert list(properties) == ["name", "description", "parameters"]


def test_a_schema_of_another_tool_is_refused_by_both_names():
    with pytest.raises(ConfigError, match="'f' is one of 'g'"):
        SimpleToolTransform({"f": lambda n: n}, {"f": {"name": "g", "parameters": ARGUMENTS}})


def test_a_registry_and_its_transform_can_be_pickled(told):
    transform = ExecuteToolsInOrder(ToolRegistry([Plain()]), XMLBlockParser(), stop_on_error=True)
    again = pickle.loads(pickle.dumps(transform))
    assert again.executor.stop_on_error
    assert '{"n": 2}' in told(again, '<tool name="plain">{"n": 1}</tool>')[1][0][0]


def test_contradicting_arguments_are_refused():
    with pytest.raises(ConfigError, match="not both"):
        SimpleToolTransform({}, parser=XMLBlockParser(), tool_call_pattern="(a)(b)")
    with pytest.raises(ConfigError, match="tool_schemas has"):
        SimpleToolTransform({"f": calculator}, {"g": {}})
