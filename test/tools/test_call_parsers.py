"""Calls in texts: every format, what is broken in them, and texts made to break the reader."""

import json

import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.data.text.call_syntax import Call, CallSyntax, ParsedCalls
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools import (
    BrokenCall,
    HermesParser,
    JSONCallParser,
    LlamaParser,
    MessageCallParser,
    MessageOrTagParser,
    PatternParser,
    SyntaxParser,
    ToolCall,
    ToolTagParser,
    XMLBlockParser,
)

CASES = cases(__file__)

PATTERN = r"CALL\[(.*?)\]\((.*?)\)"
PARSERS = [
    HermesParser(),
    LlamaParser(),
    JSONCallParser(),
    XMLBlockParser(),
    ToolTagParser(),
    PatternParser(PATTERN),
]
SCHEMAS = {"f": {"type": "object", "properties": {"a": {}}}}


def parse(parser, text, schemas=SCHEMAS):
    return parser.parse({"role": "assistant", "content": text}, schemas)


def write(parser, *calls):
    """The calls as the parser's format has them."""
    listed = [json.dumps(args) for _, args in calls]
    if isinstance(parser, HermesParser):
        bodies = [json.dumps({"name": n, "arguments": a}) for n, a in calls]
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if isinstance(parser, LlamaParser):
        return json.dumps([{"name": n, "parameters": a} for n, a in calls])
    if isinstance(parser, JSONCallParser):
        return json.dumps({"message": "m", "tools": [{"tool": n, "args": a} for n, a in calls]})
    if isinstance(parser, XMLBlockParser):
        pairs = zip(calls, listed, strict=True)
        return " and ".join(f'<tool name="{n}">{body}</tool>' for (n, _), body in pairs)
    return " and ".join(
        f"<tool>{n}\n{body}</tool>" for (n, _), body in zip(calls, listed, strict=True)
    )


WRITTEN = [parser for parser in PARSERS if not isinstance(parser, PatternParser)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
TRICKY = st.sampled_from(["</tool>", "</tool_call>", "<tool>", "}", '"', "\\", "</think", "```"])


@pytest.mark.parametrize("parser", WRITTEN, ids=lambda p: type(p).__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_in_a_format_is_read_back(parser, data):
    arguments = st.dictionaries(st.text(max_size=5), VALUES | TRICKY, max_size=3)
    names = st.sampled_from(["f", "get_weather", "a.b", "x-1"])
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
    found = parse(parser, write(parser, *calls))
    assert [(call.tool, dict(call.args)) for call in found] == calls


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: type(p).__name__)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='<>/tolcaneg_{}[]":,\n\\ =fCAL()1', max_size=80))
def test_no_text_is_too_odd_to_be_read(parser, text):
    assert all(isinstance(call, (ToolCall, BrokenCall)) for call in parse(parser, text))


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: type(p).__name__)
def test_a_text_without_calls_has_none(parser):
    for text in ("", "I need no tool.", "{", "[1, 2]", "<b>bold</b>", '{"answer": 42}'):
        assert parse(parser, text) == []


BEGINNINGS = CASES["beginnings"]


@pytest.mark.parametrize("parser", WRITTEN, ids=lambda p: type(p).__name__)
def test_a_long_text_of_nothing_but_beginnings_is_read(parser):
    for piece in BEGINNINGS:
        found = parse(parser, piece * (100_000 // len(piece)))
        assert all(isinstance(call, BrokenCall) or not call.args for call in found)
        assert len(found) < 20_000


# -- Hermes, Llama, and other syntaxes by example -------------------------------------------------


def test_hermes_calls_stand_anywhere_in_the_text():
    text = 'Sure. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> Wait.'
    assert parse(HermesParser(), text) == [ToolCall("f", {"a": 1})]
    assert HermesParser()(text)["text"] == "Sure.  Wait."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}', "without '</tool_call>'"),
        ('<tool_call>{"arguments": {}}</tool_call>', "an object with a name"),
        ('<tool_call>{"name": 3}</tool_call>', "an object with a name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "not JSON"),
        ("<tool_call>[]</tool_call>", "an empty list"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ],
)
def test_a_broken_hermes_call_says_what_is_wrong_and_what_is_expected(text, problem):
    [broken] = parse(HermesParser(), text)
    assert isinstance(broken, BrokenCall)
    assert problem in broken.problem
    assert broken.expected.startswith("<tool_call>")


def test_a_broken_call_does_not_hide_the_next():
    text = "<tool_call>{oops</tool_call>" + write(HermesParser(), ("f", {"a": 1}))
    found = parse(HermesParser(), text)
    assert [type(call) for call in found] == [ToolCall, BrokenCall]


@pytest.mark.parametrize("text", ['{"name": ' + "[" * 100_000, '{"name": "f", "parameters": '])
def test_a_broken_llama_call_is_one(text):
    [broken] = parse(LlamaParser(), text)
    assert broken.expected == '{"name": "NAME", "parameters": {"key": "VALUE"}}'


def test_calls_in_the_syntax_of_an_example():
    tags = "<tool_call><function=NAME><parameter=key>VALUE</parameter></function></tool_call>"
    text = "<tool_call><function=f><parameter=a>7</parameter></function></tool_call>"
    schemas = {"f": {"properties": {"a": {"type": "integer"}}}}
    assert parse(SyntaxParser(tags), text, schemas) == [ToolCall("f", {"a": 7})]


@pytest.mark.parametrize("example", ["", "call it", "NAME", '{"key": "VALUE"}'])
def test_an_example_without_a_syntax_is_refused(example):
    with pytest.raises(ConfigError, match="no syntax of calls"):
        SyntaxParser(example)


def test_a_syntax_of_ones_own():
    class Shouted(CallSyntax):
        def parse(self, text, schemas):
            found = [Call(word[1:], {}) for word in text.split() if word.startswith("!")]
            return ParsedCalls(text, found or [BrokenCall("nothing is shouted")])

    assert parse(SyntaxParser(Shouted()), "now !f and !g") == [ToolCall("f"), ToolCall("g")]
    assert parse(SyntaxParser(Shouted()), "f") == [BrokenCall("nothing is shouted")]


# -- XML blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('<tool name="f">{"a": 1}</tool>', ToolCall("f", {"a": 1})),
        ('<tool name="f" tag="T">{"a": 1}</tool>', ToolCall("f", {"a": 1}, tag="T")),
        ("<tool tag='T' name='f'>\n{}\n</tool>", ToolCall("f", {}, tag="T")),
        ('<tool  name = "f" >{}</tool>', ToolCall("f", {})),
        ('<tool name="f"></tool>', ToolCall("f", {})),
        ('<tool name="f">   </tool>', ToolCall("f", {})),
        ('<tool name="f">{"a": "</tool>"}</tool>', ToolCall("f", {"a": "</tool>"})),
        # A stop string cuts the closing tag off.
        ('<tool name="f">{"a": 1}', ToolCall("f", {"a": 1})),
    ],
)
def test_xml_blocks(text, call):
    assert parse(XMLBlockParser(), text) == [call]


@pytest.mark.parametrize(
    "text",
    [
        '<tool name="f">{"a": 1</tool>',
        '<tool name="f">a=1</tool>',
        '<tool name="f">{"a": 1} and {"b": 2}</tool>',
        '<tool name="f">[1]</tool>',
        '<tool name="f">{"a"',
    ],
)
def test_a_broken_xml_block_says_what_is_expected(text):
    [broken] = parse(XMLBlockParser(), text)
    assert broken.expected == '<tool name="NAME">{"argument": value}</tool>'


def test_a_block_that_is_no_json_is_raw_where_somebody_takes_that():
    text = '<tool name="sh">ls -l</tool>'
    raw = {"sh": {"properties": {"raw": {"type": "string"}}}}
    assert parse(XMLBlockParser(), text, raw) == [ToolCall("sh", {"raw": "ls -l"})]
    assert XMLBlockParser()(text)["calls"] == [ToolCall("sh", {"raw": "ls -l"})]


def test_a_parser_outside_of_a_conversation_gives_text_calls_and_their_number():
    found = XMLBlockParser()('A <tool name="f">{"a": 1}</tool> B <tool name="g">[]</tool>')
    assert found["text"] == "A  B"
    assert found["calls"] == [ToolCall("f", {"a": 1})]
    assert found["meta"] == {"count": 1, "errors": ["the arguments of 'g' must be an object"]}
    assert XMLBlockParser()({"text": "none"}) == {"text": "none", "calls": [], "meta": {"count": 0}}


# -- the other formats ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ['<tool>f\n{"a": 1}</tool>', '<tool>\n f \n{"a": 1}\n</tool>', '<tool>f{"a": 1}</tool>'],
)
def test_tool_tags_with_the_name_in_front(text):
    assert parse(ToolTagParser(), text) == [ToolCall("f", {"a": 1})]


def test_tool_tags_that_are_broken():
    assert parse(ToolTagParser(), "<tool>f\n</tool>") == [ToolCall("f", {})]
    [broken] = parse(ToolTagParser(), "<tool>f\n{a}</tool>")
    assert broken.expected == '<tool>NAME\n{"argument": value}</tool>'


def test_a_pattern_of_ones_own():
    text = 'CALL[f]({"a": 1}) CALL[g]() CALL[h]({a}) CALL[i]([1])'
    found = parse(PatternParser(PATTERN), text)
    assert found[:2] == [ToolCall("f", {"a": 1}), ToolCall("g", {})]
    assert [type(call) for call in found[2:]] == [BrokenCall, BrokenCall]


@pytest.mark.parametrize("pattern", ["(", "one", "(a)", "(a)(b)(c)"])
def test_a_pattern_needs_two_groups(pattern):
    with pytest.raises(ConfigError):
        PatternParser(pattern)


@pytest.mark.parametrize(
    "text",
    [
        '{"message": "m", "tools": [{"tool": "f", "args": {"a": 1}, "tag": "T"}]}',
        ' ```json\n{"message": "m", "tools": [{"tool": "f", "args": {"a": 1}, "tag": "T"}]}\n```',
    ],
)
def test_a_turn_that_is_json(text):
    assert parse(JSONCallParser(), text) == [ToolCall("f", {"a": 1}, tag="T")]
    assert JSONCallParser()(text)["text"] == "m"


def test_an_object_that_has_been_read_already():
    found = JSONCallParser()({"message": "m", "tools": [{"tool": "f"}]})
    assert found == {"text": "m", "calls": [ToolCall("f", {})], "meta": {"count": 1}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"tools": [{"tool": "f"}', "the turn is not JSON"),
        ('{"tools": {"tool": "f"}}', '"tools" must be a list'),
        ('{"tools": ["f"]}', 'has no "tool"'),
        ('{"tools": [{"tool": ""}]}', 'has no "tool"'),
        ('{"tools": [{"tool": "f", "args": [1]}]}', "must be an object"),
    ],
)
def test_a_turn_that_is_almost_json(text, problem):
    [broken] = parse(JSONCallParser(), text)
    assert problem in broken.problem
    assert '"tools"' in broken.expected


@pytest.mark.parametrize(
    "calls", [None, [], [None], [{}], [{"function": "f"}], [{"function": {"name": ["f"]}}]]
)
def test_a_message_with_odd_calls_is_read(calls):
    found = MessageCallParser().parse({"role": "assistant", "tool_calls": calls}, {})
    assert all(isinstance(call, BrokenCall) for call in found)
    assert len(found) == len(calls or ())


def test_marks_of_thoughts_inside_an_argument_hide_nothing():
    call = ToolCall("f", {"a": "<think>x</think> </tool_call>"})
    text = write(HermesParser(), ("f", dict(call.args)))
    for thought in ("", "<think>no</think>\n", "no\n</think>\n"):
        assert parse(HermesParser(), thought + text) == [call]


def test_calls_stand_between_and_behind_thoughts():
    one, two = (write(HermesParser(), (name, {})) for name in "fg")
    text = f"<think>a</think>{one}<think>{two}</think> done"
    assert parse(HermesParser(), text) == [ToolCall("f", {})]
    split = {"content": "", "reasoning_content": two, "raw": f"<seed>{two}</seed>{one}"}
    split["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
    assert HermesParser().parse(split, SCHEMAS) == [ToolCall("f", {})]


def test_llama_calls_as_they_are_written():
    one, two = '{"name": "f", "parameters": {"a": 1}}', '{"name": "f", "parameters": {"a": 2}}'
    for text in (f"{one}; {two}", f"{one}\n{two}", f"<|python_tag|>{one};{two}", f"[{one}, {two}]"):
        assert parse(LlamaParser(), text) == [ToolCall("f", {"a": 1}), ToolCall("f", {"a": 2})]
    assert parse(LlamaParser(), '{"name": "Alice", "age": 30}') == []


def test_strings_with_line_ends_are_taken_as_they_are():
    body = '{"a": "1\n2"}'
    texts = {
        HermesParser(): f'<tool_call>{{"name": "f", "arguments": {body}}}</tool_call>',
        XMLBlockParser(): f'<tool name="f">{body}</tool>',
        ToolTagParser(): f"<tool>f\n{body}</tool>",
        JSONCallParser(): f'{{"tools": [{{"tool": "f", "args": {body}}}]}}',
        PatternParser(PATTERN): f"CALL[f]({body})",
    }
    for parser, text in texts.items():
        assert parse(parser, text) == [ToolCall("f", {"a": "1\n2"})]


def test_a_block_that_closes_itself_and_a_fence_of_any_kind():
    assert parse(XMLBlockParser(), 'So <tool name="f"/> and <tool name="f" tag="A" />') == [
        ToolCall("f", {}),
        ToolCall("f", {}, "A"),
    ]
    fenced = '```JSON\r\n{"message": null, "tools": [{"tool": "f"}]}\r\n```'
    assert JSONCallParser()(fenced)["calls"] == [ToolCall("f", {})]
    assert JSONCallParser()(fenced)["text"] == ""
    assert JSONCallParser()('{"message": "m", "tools": null}')["calls"] == []


def test_calls_of_the_message_and_of_its_text_are_read_once_each():
    own = {"function": {"name": "add", "arguments": {"a": 1}}}
    text = '<tool>add\n{"a": 1}</tool><tool>add\n{"a": 2}</tool><tool>add\n{a</tool>'
    parser = MessageOrTagParser()
    # A message whose calls were split off keeps what the model wrote as "raw".
    calls = parser.parse({"content": "", "tool_calls": [own], "raw": text}, {})
    assert [getattr(call, "args", None) for call in calls] == [{"a": 1}, {"a": 2}, None]
    unread = {"content": text, "tool_calls": [own], "tool_call_errors": ["no JSON"]}
    assert [getattr(call, "args", None) for call in parser.parse(unread, {})] == [
        {"a": 1},
        None,
        {"a": 2},
    ]
    assert parser.parse({"content": "no call"}, {}) == []
