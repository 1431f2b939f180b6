"""Tools: parsers of calls, registries, and the transforms that answer a model's calls."""

from __future__ import annotations

import json
from typing import ClassVar

from _shared import read, show, tokenizer
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import BrowserTransform, ChatEnv
from torchrl.envs.llm.transforms import (
    ExecuteToolsInOrder,
    JSONCallParser,
    PythonInterpreter,
    SimpleToolTransform,
    ToolCall,
    ToolRegistry,
    ToolService,
    XMLBlockParser,
)
from torchrl.envs.llm.transforms.tools import PersistentPythonProcess, ToolTransformBase


class Service:
    schema_in: ClassVar[dict] = {}
    schema_out: ClassVar[dict] = {}


class Adder(Service):
    name = "add"
    schema_in: ClassVar[dict] = {"a": int, "b": int}

    def __call__(self, a, b, **kwargs):
        return {"sum": a + b}


class Failing(Service):
    name = "fail"

    def __call__(self, **kwargs):
        raise ValueError("no luck")


class Asking(Service):
    """Looks at the state that it is handed."""

    name = "ask"

    def __call__(self, _state=None, **kwargs):
        return {"state": "some" if _state else "none", "is_dict": hasattr(_state, "get")}


def stepped(env, *replies):
    """The prompts after a step in which the model said ``replies``."""
    td = env.reset(TensorDict(query=["Go on."] * len(replies), batch_size=(len(replies),)))
    chats = [[{"role": "assistant", "content": reply}] for reply in replies]
    full = td["history"].prompt.extend(History.from_chats(chats), inplace=False, dim=-1)
    td["history"].full = full
    return [row.prompt for row in env.step(td)["next", "history"].unbind(0)]


def with_tool(transform, num=1):
    return ChatEnv(batch_size=(num,)).append_transform(transform)


def show_answers(prompts):
    for prompt in prompts:
        show(
            [pair for pair in zip(prompt.role, prompt.content, strict=True) if pair[0] != "<none>"][
                1:
            ]
        )


# -- calls ----------------------------------------------------------------------------------------


def a_call_in_a_block():
    found = XMLBlockParser()('Look: <tool name="add" tag="A">{"a": 1, "b": 2}</tool> there.')
    show(found["text"], found["meta"])
    for call in found["calls"]:
        show(call.tool, call.args, call.tag)


def several_calls_in_blocks():
    text = '<tool name="a">{}</tool> and <tool name="b"></tool>\nso'
    found = XMLBlockParser()(text)
    show(found["text"], [(call.tool, call.args, call.tag) for call in found["calls"]])


def a_call_with_broken_arguments():
    found = XMLBlockParser()('<tool name="add">{"a": 1,</tool>')
    show([(call.tool, call.args) for call in found["calls"]])


def a_text_without_calls():
    found = XMLBlockParser()("There is nothing to do.")
    show(found["text"], found["calls"], found["meta"])


def calls_in_json():
    reply = {"message": "One moment.", "tools": [{"tool": "add", "args": {"a": 1}, "tag": "x"}]}
    for response in (reply, json.dumps(reply)):
        found = JSONCallParser()(response)
        show(found["text"], found["meta"])
        show([(call.tool, call.args, call.tag) for call in found["calls"]])


def a_text_that_is_no_json():
    found = JSONCallParser()("plain words")
    show(found["text"], found["calls"])


def a_tool_call():
    call = ToolCall(tool="add", args={"a": 1})
    show(call.tool, call.args, call.tag, ToolCall("b", {}, "t").tag)


def a_registry():
    registry = ToolRegistry([Adder()])
    registry.register(Failing())
    show("add" in registry, "fail" in registry, "none" in registry)
    show(registry.get("add")(a=1, b=2))


def a_registry_without_the_tool():
    try:
        ToolRegistry().get("none")
    except KeyError:
        show("KeyError")


def the_later_service_of_one_name():
    registry = ToolRegistry([Adder()])
    registry.register(Adder())
    show("add" in registry)


# -- tools by a registry --------------------------------------------------------------------------


def ordered(*services, **kwargs):
    return ExecuteToolsInOrder(ToolRegistry(services), XMLBlockParser(), **kwargs)


def tools_in_order():
    reply = (
        '<tool name="add">{"a": 1, "b": 2}</tool><tool name="add" tag="B">{"a": 3, "b": 4}</tool>'
    )
    show_answers(stepped(with_tool(ordered(Adder())), reply))


def a_failing_tool_in_order():
    reply = '<tool name="fail">{}</tool><tool name="add">{"a": 3, "b": 4}</tool>'
    show_answers(stepped(with_tool(ordered(Adder(), Failing())), reply))


def an_error_that_stops_the_others():
    reply = '<tool name="fail">{}</tool><tool name="add">{"a": 3, "b": 4}</tool>'
    show_answers(stepped(with_tool(ordered(Adder(), Failing(), stop_on_error=True)), reply))


def a_turn_without_calls():
    prompts = stepped(with_tool(ordered(Adder())), "Nothing to do.")
    show(prompts[0].role, prompts[0].content)


def the_state_that_a_tool_sees():
    prompts = stepped(with_tool(ordered(Asking())), '<tool name="ask">{}</tool>')
    show("true" in prompts[0].content[-1], '"state": "some"' in prompts[0].content[-1])


def a_tool_without_state():
    env = with_tool(ordered(Adder(), pass_state_to_tools=False))
    show_answers(stepped(env, '<tool name="add">{"a": 1, "b": 2}</tool>'))


def attributes_of_tools_in_order():
    transform = ordered(Adder(), stop_on_error=True)
    show(transform.stop_on_error, transform.pass_state_to_tools, transform.tool_role)
    show("add" in transform.registry, callable(transform.parser))


# -- tools by name --------------------------------------------------------------------------------


def add(a: int, b: int):
    """Add."""
    return {"result": a + b}


CALL = '<tool>add\n{"a": 1, "b": 2}</tool>'


def a_simple_tool():
    prompts = stepped(with_tool(SimpleToolTransform({"add": add})), f"Look: {CALL}")
    show(prompts[0].role, "3" in prompts[0].content[-1])


def two_calls_of_a_simple_tool():
    prompts = stepped(with_tool(SimpleToolTransform({"add": add})), CALL + CALL)
    show(prompts[0].role, len(prompts[0].content))


def rows_with_and_without_a_call():
    env = with_tool(SimpleToolTransform({"add": add}), 2)
    for prompt in stepped(env, CALL, "Nothing."):
        show([role for role in prompt.role if role != "<none>"])


def a_simple_tool_by_another_parser():
    transform = SimpleToolTransform({"add": add}, parser=XMLBlockParser())
    prompts = stepped(with_tool(transform), '<tool name="add">{"a": 1, "b": 2}</tool>')
    show(prompts[0].role, "3" in prompts[0].content[-1])


def a_simple_tool_by_a_pattern():
    transform = SimpleToolTransform({"add": add}, tool_call_pattern=r"CALL\[(.*?)\]\((.*?)\)")
    prompts = stepped(with_tool(transform), 'CALL[add]({"a": 1, "b": 2})')
    show(prompts[0].role, "3" in prompts[0].content[-1])


def a_simple_tool_that_fails():
    def fail():
        raise ValueError("no luck")

    transform = SimpleToolTransform({"fail": fail})
    prompts = stepped(with_tool(transform), "<tool>fail\n{}</tool>")
    show(prompts[0].role, "no luck" in prompts[0].content[-1])


def attributes_of_simple_tools():
    transform = SimpleToolTransform({"add": add}, tool_schemas={"add": {"description": "x"}})
    show(sorted(transform.tools), transform.tool_schemas, transform.tool_role, transform.timeout)


def answered_with_a_schema(schema):
    transform = SimpleToolTransform({"add": add}, tool_schemas={"add": schema})
    (prompt,) = stepped(with_tool(transform), CALL)
    show(prompt.role, "3" in prompt.content[-1], transform.tool_schemas == {"add": schema})


ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


def a_simple_tool_with_openais_schema():
    function = {"name": "add", "description": "Adds.", "parameters": ARGUMENTS}
    answered_with_a_schema({"type": "function", "function": function})


def a_simple_tool_in_text_mode():
    env = ChatEnv(input_mode="text", tokenizer=tokenizer())
    env = env.append_transform(SimpleToolTransform({"add": add}))
    td = env.reset(TensorDict(query=["Go on."], batch_size=(1,)))
    td["text"].full = [td["text"].prompt[0] + CALL + "<|im_end|>"]
    show("3" in env.step(td)["next", "text"].prompt[0].split("</tool>")[1])


# -- tools of one's own ---------------------------------------------------------------------------


class Shout(ToolTransformBase):
    tool_role = "echo"

    def _process_batch_item(self, content, index):
        return [f"{index}: {content.upper()}"] if "!" in content else None


def a_tool_of_ones_own():
    env = TransformedEnv(ChatEnv(batch_size=(2,)), Shout())
    for prompt in stepped(env, "Hey!", "Hey."):
        pairs = zip(prompt.role, prompt.content, strict=True)
        show([pair for pair in pairs if pair[0] != "<none>"])


def a_tool_of_ones_own_that_formats():
    class Framed(Shout):
        def _format_result(self, result):
            return f"[{result}]"

    show_answers(stepped(TransformedEnv(ChatEnv(), Framed()), "Hey!"))


def a_tool_outside_an_environment():
    try:
        Shout()._step(TensorDict(), TensorDict())
    except (RuntimeError, ValueError) as error:
        show(type(error).__name__ != "")


# -- Python ---------------------------------------------------------------------------------------


def two_blocks_of_python_code():
    reply = "```python\nprint(1)\n```\nand\n```python\nprint(2)\n```"
    show_answers(stepped(with_tool(PythonInterpreter()), reply))


def python_code_that_fails():
    prompts = stepped(with_tool(PythonInterpreter()), "```python\n1 / 0\n```")
    last = prompts[0].content[-1]
    show(prompts[0].role, "ZeroDivisionError" in last, last.startswith("Code block 1 failed:"))


def python_code_that_takes_too_long():
    transform = PythonInterpreter(timeout=0.5)
    prompts = stepped(with_tool(transform), "```python\nwhile True: pass\n```")
    show_answers(prompts)


def python_code_that_goes_on():
    transform = PythonInterpreter(persistent=True)
    env = with_tool(transform)
    td = env.reset(TensorDict(query=["Go on."], batch_size=(1,)))
    for code in ("a = 20", "a += 1; print(2 * a)"):
        reply = History.from_chats([[{"role": "assistant", "content": f"```python\n{code}\n```"}]])
        td["history"].full = td["history"].prompt.extend(reply, inplace=False, dim=-1)
        _, td = env.step_and_maybe_reset(td)
    show(td["history"].prompt.content[0][2:])
    transform.close()


def attributes_of_an_interpreter():
    transform = PythonInterpreter(tool_name="python", timeout=3.0)
    show(transform.tool_role, transform.persistent, transform.timeout, transform.services)
    show(transform.tokenizer, transform.service_name, transform.namespace)
    show(transform.clone().tool_role)


def a_python_process():
    process = PersistentPythonProcess(timeout=5.0)
    for code in ("a = 3", "print(a)"):
        result = process.execute(code)
        show([result[key] for key in ("success", "stdout", "stderr", "returncode")])
    process.cleanup()


# -- browsers --------------------------------------------------------------------------------------


def a_browser_without_a_page():
    transform = BrowserTransform(allowed_domains=["example.com"])
    show(transform.allowed_domains, transform.headless, transform.timeout, transform.tool_role)


PROGRAMS = {
    "calls_of_a_dict": lambda: show(
        XMLBlockParser()({"text": '<tool name="a">{"n": 1}</tool>'})["calls"][0].args
    ),
    "an_unknown_tool_in_order": lambda: show_answers(
        stepped(with_tool(ordered(Adder())), '<tool name="sub">{"a": 3}</tool>')
    ),
    "a_service_is_a_protocol": lambda: show(
        isinstance(ToolService, type), sorted(ToolService.__annotations__)
    ),
    "the_answer_of_a_simple_tool": lambda: show_answers(
        stepped(with_tool(SimpleToolTransform({"add": add})), CALL)
    ),
    "a_simple_tool_with_the_schema_of_responses": lambda: answered_with_a_schema(
        {"type": "function", "name": "add", "description": "Adds.", "parameters": ARGUMENTS}
    ),
    "a_simple_tool_with_torchrls_schema": lambda: answered_with_a_schema(
        {"name": "add", "description": "Adds.", "parameters": ARGUMENTS}
    ),
    "a_simple_tool_with_anthropics_schema": lambda: answered_with_a_schema(
        {"name": "add", "description": "Adds.", "input_schema": ARGUMENTS}
    ),
    "a_simple_tool_with_the_schema_of_mcp": lambda: answered_with_a_schema(
        {"name": "add", "inputSchema": ARGUMENTS}
    ),
    "a_simple_tool_with_a_description_alone": lambda: answered_with_a_schema(
        {"description": "Adds."}
    ),
    "a_simple_tool_with_a_schema_of_arguments": lambda: answered_with_a_schema(ARGUMENTS),
    "python_code": lambda: show_answers(
        stepped(with_tool(PythonInterpreter()), "So:\n```python\nprint(1 + 1)\n```")
    ),
    "python_code_without_output": lambda: show_answers(
        stepped(with_tool(PythonInterpreter()), "```python\na = 1\n```")
    ),
    "an_unknown_service": lambda: PythonInterpreter(services="redis"),
    "a_simple_tool_with_a_role": lambda: show(
        stepped(with_tool(SimpleToolTransform({"add": add}, tool_name="result")), CALL)[0].role
    ),
    "a_simple_tool_that_is_unknown": lambda: show(
        stepped(with_tool(SimpleToolTransform({"add": add})), "<tool>sub\n{}</tool>")[0].role
    ),
    "the_pattern_of_simple_tools": lambda: read(
        SimpleToolTransform({"add": add}), "parser", "tool_call_pattern"
    ),
    "no_python_code": lambda: show(
        stepped(with_tool(PythonInterpreter()), "There is none: ```\nprint(1)\n```")[0].role
    ),
}
"""Programs of one expression."""
