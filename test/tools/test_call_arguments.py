"""Arguments against schemas: what is forgiven, what is refused, and schemas that are none."""

import pytest
from cases import cases

from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.call_arguments import (
    ArgumentError,
    argument_checker,
    describe_parameters,
)
from torchrl_llm.tools.tool import FunctionTool
from torchrl_llm.tools.tool_registry import ServiceTool

CASES = cases(__file__)


def check(kind, value):
    schema = kind if isinstance(kind, dict) else {"type": kind}
    return argument_checker({"type": "object", "properties": {"x": schema}})({"x": value})["x"]


TAKEN = CASES["taken"]


def test_what_can_be_meant_in_one_way_only_is_taken_that_way():
    for kind, value, taken in TAKEN:
        kind = {"type": kind} if isinstance(kind, list) else kind
        found = check(kind, value)
        assert found == taken, (kind, value)
        assert type(found) is type(taken), (kind, value)


REFUSED = [
    ("integer", "three"),
    ("integer", 2.5),
    ("integer", True),
    ("integer", "true"),
    ("integer", float("inf")),
    ("integer", float("nan")),
    ("integer", None),
    ("integer", "[" * 100_000),
    ("boolean", 1),
    ("boolean", "yes"),
    ("array", "abc"),
    ("array", {"a": 1}),
    ("string", [1]),
    ("string", None),
    ("object", "[1]"),
    ({"type": "integer", "maximum": 3}, "4"),
]


def test_everything_else_is_refused_in_few_words():
    for kind, value in REFUSED:
        with pytest.raises(ArgumentError) as caught:
            check(kind, value)
        assert len(str(caught.value)) < 400


def test_the_arguments_of_a_call_are_not_changed():
    given = {"x": ["1"]}
    schema = {"type": "array", "items": {"type": "integer"}}
    argument_checker({"type": "object", "properties": {"x": schema}})(given)
    assert given == {"x": ["1"]}


def test_a_schema_that_is_none_is_not_checked_against():
    for schema in ({"type": "thing"}, {"properties": 7}, {"required": "x"}):
        assert argument_checker(schema)({"x": 1}) == {"x": 1}


def test_references_stay_inside_the_schema(monkeypatch):
    import urllib.request

    def refuse(*args, **kwargs):
        raise AssertionError("a schema made us fetch something")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    inside = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    assert argument_checker(inside)({"x": 1}) == {"x": 1}
    with pytest.raises(ArgumentError, match="is not of type"):
        argument_checker(inside)({"x": "one"})
    outside = {"type": "object", "properties": {"x": {"$ref": "http://127.0.0.1:9/s.json"}}}
    with pytest.raises(ArgumentError, match="cannot be checked"):
        argument_checker(outside)({"x": 1})


def test_a_schema_that_refers_to_itself_ends():
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"$ref": "#/$defs/a"}},
    }
    with pytest.raises(ArgumentError, match="cannot be checked"):
        argument_checker(schema)({"x": 1})


def test_parameters_in_one_line():
    assert describe_parameters({}) == "{}"
    wide = {"properties": {f"p{n}": {"type": "string"} for n in range(500)}}
    assert len(describe_parameters(wide)) <= 600
    odd = {"properties": {"a": {"type": ["integer", "null"]}, "b": {"enum": [1, "x"]}, "c": True}}
    assert describe_parameters(odd) == (
        '{"a": integer or null (optional), "b": 1 or "x" (optional), "c": any (optional)}'
    )


def test_a_function_refuses_arguments_that_it_does_not_take():
    def some(a: int, **rest: int) -> int:
        """Some.

        Args:
            a: a number.
            rest: others.
        """
        return a

    schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    assert FunctionTool(some, schema=schema).argument_schema == schema["parameters"]
    closed = FunctionTool(lambda a: a, schema=schema).argument_schema
    assert closed["additionalProperties"] is False
    assert ServiceTool(lambda a: a, name="f").argument_schema["additionalProperties"] is False


def test_a_function_that_cannot_be_described_is_refused():
    def undocumented(a):
        return a

    for function in (undocumented, lambda a: a):
        with pytest.raises(ConfigError, match="cannot be described to a model"):
            FunctionTool(function)


def test_references_and_branches_are_followed():
    tree = {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"$ref": "#/$defs/T"}}}
    other = {**tree, "required": ["other"]}
    schema = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/T"}},
        "$defs": {"T": {"anyOf": [tree, other]}},
    }
    check_tree = argument_checker(schema)
    assert check_tree({"t": '{"n": "1", "t": {"n": "2"}}'}) == {"t": {"n": 1, "t": {"n": 2}}}
    with pytest.raises(ArgumentError):
        check_tree({"t": {"t": {"t": {"n": "no"}}}})


def test_branches_and_null_are_named_in_the_line_of_parameters():
    properties = {
        "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "b": {"type": "integer", "nullable": True},
    }
    line = describe_parameters({"properties": properties})
    assert line == '{"a": integer or null (optional), "b": integer or null (optional)}'
