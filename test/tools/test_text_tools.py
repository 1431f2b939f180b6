"""Tool transforms as TorchRL's users write and read them."""

from __future__ import annotations

import pytest
from torchrl.envs import StepCounter

from torchrl_llm.envs import ChatEnv, DatasetChatEnv
from torchrl_llm.envs.transforms import PolicyVersion
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools import (
    BrowserTransform,
    ExecuteToolsInOrder,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    ToolTransformBase,
    XMLBlockParser,
)


class Sums(ToolTransformBase):
    tool_role = "calculator"

    def _process_batch_item(self, content, index):
        if "raise" in content:
            raise ZeroDivisionError("of the program")
        return [f"{index}: {part}=4" for part in content.split() if part == "2+2"] or None

    def _format_result(self, result):
        return f"<{result}>"


@pytest.mark.parametrize("mode", ["history", "text"])
def test_a_tool_of_one_method_answers_its_rows(mode, queries, answer, tokenizer):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer)
    env = env.append_transform(Sums()).append_transform(StepCounter())
    td = env.reset(queries("a", "b"))
    if mode == "text":
        said = ["no sum", "2+2 and 2+2"]
        td["text", "full"] = [f"{p}{s}" for p, s in zip(td["text", "prompt"], said, strict=True)]
        td["text", "response"] = said
        td = env.step(td)["next"]
        assert td["text", "prompt"][1].count("<1: 2+2=4>") == 2
        return
    td = env.step(answer(td, "no sum", "2+2 and 2+2"))["next"]
    first, second = td["history"].prompt.chats
    assert [m["role"] for m in first] == ["user", "assistant"]
    assert [(m["role"], m["content"]) for m in second][2:] == [("calculator", "<1: 2+2=4>")] * 2
    assert td["tools", "num_calls"].tolist() == [0, 2]
    with pytest.raises(ZeroDivisionError, match="of the program"):
        env.step(answer(env.reset(queries("a", "b")), "raise", ""))


def test_a_tool_that_is_no_part_of_the_step_is_refused():
    class Late(Sums):
        use_step = False

    with pytest.raises(ConfigError, match="remove use_step = False"):
        Late()
    with pytest.raises(NotImplementedError, match="ToolTransformBase"):
        ToolTransformBase()._process_batch_item("", 0)


def test_a_service_that_is_registered_later_is_called(queries, answer):
    class Echo:
        name, schema_in, schema_out = "echo", {"text": str}, {}

        def __call__(self, text, **kwargs):
            return {"said": text}

    registry = ToolRegistry()
    env = ChatEnv(batch_size=(1,)).append_transform(ExecuteToolsInOrder(registry, XMLBlockParser()))
    td = env.reset(queries("a"))
    registry.register(Echo())
    td = env.step(answer(td, '<tool name="echo">{"text": "hi"}</tool>'))["next"]
    assert '{"said": "hi"}' in td["history"].prompt.chats[0][-1]["content"]
    env.close()


def test_what_users_read_of_a_transform_is_there():
    pattern = r"CALL\[(.*?)\]\(([^()]*+)\)"
    simple = SimpleToolTransform(
        {"add": lambda a, b: a + b}, tool_call_pattern=pattern, tool_name="sums", timeout=3.0
    )
    assert simple.tools["add"](a=1, b=2) == 3
    assert (simple.tool_call_pattern, simple.tool_schemas) == (pattern, {})
    assert (simple.tool_role, simple.timeout) == ("sums", 3.0)
    parser = XMLBlockParser()
    ordered = ExecuteToolsInOrder(ToolRegistry(), parser, stop_on_error=True)
    assert ordered.parser is parser
    assert (ordered.stop_on_error, ordered.pass_state_to_tools) == (True, True)
    python = PythonInterpreter(persistent=True, timeout=4.0)
    assert (python.persistent, python.timeout, python.services) == (True, 4.0, None)
    assert (python.service_name, python.namespace, python.tokenizer) == (
        "python_executor",
        None,
        None,
    )
    browser = BrowserTransform(["example.org"])
    assert (browser.allowed_domains, browser.headless, browser.timeout) == (
        ["example.org"],
        True,
        30.0,
    )
    version = PolicyVersion()
    version.increment_version()
    version.version = 7
    changes = [(change.old_version, change.new_version) for change in version.version_history]
    assert changes == [(None, 0), (0, 1), (1, 7)]


def test_apply_template_is_accepted_and_says_that_it_has_no_effect():
    rows = [{"query": "a", "answer": "b"}]
    with pytest.warns(UserWarning, match='input_mode="text" gives prompts'):
        env = DatasetChatEnv(dataset=rows, apply_template=True)
    assert env.reset()["history"].prompt.chats[0][0]["content"] == "a"
