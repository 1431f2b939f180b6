"""PythonInterpreter: code blocks run in a sandbox and the model goes on from what they print."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs, step_mdp

from torchrl_llm.data.enums import Source
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs import ChatEnv
from torchrl_llm.errors import ConfigError, TemplateError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.sandbox import Limits
from torchrl_llm.tools.python_interpreter import (
    PythonExecutorService,
    PythonInterpreter,
    PythonTool,
)
from torchrl_llm.tools.tool_call import ToolCall

SQUARE = """Here is a block of code to be executed in python:
```python
def square(x):
    return x * x
print('testing the square function with input 2:', square(2))
```"""
RENDERED = """<|im_start|>system
You are an assistant that can execute Python code. Decorate your code with ```python``` tags.<|im_end|>
<|im_start|>user
Let's write a Python function that returns the square of a number.<|im_end|>
<|im_start|>assistant
Here is a block of code to be executed in python:
```python
def square(x):
    return x * x
print('testing the square function with input 2:', square(2))
```<|im_end|>
<|im_start|>user
<tool_response>
Code block 1 executed successfully:
testing the square function with input 2: 4

</tool_response><|im_end|>
<|im_start|>assistant
"""  # noqa: E501


def block(code):
    return f"```python\n{code}\n```"


@pytest.fixture
def make_env():
    """Environments that are closed when the test ends."""
    made = []

    def make(size=1, *, mode=None, tokenizer=None, **kwargs):
        env = ChatEnv(batch_size=(size,), input_mode=mode or "history", tokenizer=tokenizer)
        made.append(env.append_transform(PythonInterpreter(**kwargs)))
        return made[-1]

    yield make
    for env in made:
        env.close(raise_if_closed=False)


@pytest.fixture
def ask(make_env, queries, answer):
    """Contents of the messages that answer the texts, a list for each row."""

    def run(*texts, **kwargs):
        env = make_env(len(texts), **kwargs)
        td = env.step(answer(env.reset(queries(*["Q"] * len(texts))), *texts))["next"]
        return [[m["content"] for m in chat.messages[2:]] for chat in td["history"].prompt.chats]

    return run


def test_the_example_of_the_manual_gives_the_same_conversation(answer):
    env = ChatEnv(
        system_prompt="You are an assistant that can execute Python code. Decorate your code with "
        "```python``` tags.",
        user_role="user",
        system_role="system",
        batch_size=(1,),
    ).append_transform(PythonInterpreter())
    env.set_seed(0)
    query = "Let's write a Python function that returns the square of a number."
    td = env.reset(TensorDict({"query": [query]}, batch_size=(1,)))
    assert td["history", "prompt"].role == [["system", "user"]]
    td, after = env.step_and_maybe_reset(answer(td, SQUARE))
    history = after["history", "prompt"]
    assert history.role == [["system", "user", "assistant", "tool"]]
    assert history.apply_chat_template(chat_template_name="qwen") == [RENDERED]
    assert td["history", "full"].role == [["system", "user", "assistant"]]
    env.close()


def test_a_model_asked_twice_goes_on_from_what_the_code_printed(make_env, queries):
    def reply(chat):
        last = chat[-1]
        if last["role"] == "tool":
            return "It is " + last["content"].rpartition(":\n")[2].strip()
        return block("print(6 * 7)")

    env = make_env(2)
    policy = AnsweringPolicy(answer=reply)
    td = step_mdp(env.step(policy(env.reset(queries("a", "b")))))
    assert td["tools", "num_calls"].tolist() == [1, 1]
    assert td["tools", "auxiliary"].tolist() == [[True], [True]]
    td = env.step(policy(td))["next"]
    assert [chat[-1]["content"] for chat in td["history"].prompt.chats] == ["It is 42"] * 2
    assert td["tools", "num_calls"].tolist() == [0, 0]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_the_ids_of_a_turn_begin_the_next_prompt_and_what_was_printed_is_no_sample(
    mode, make_env, tokenizer
):
    env = make_env(2, mode=mode, tokenizer=tokenizer)

    def reply(prompt):
        return "done" if "successfully" in prompt else block("print(6 * 7)")

    policy = FakeWrapper(reply, tokenizer=tokenizer, input_mode=mode)
    td = env.reset(TensorDict({"query": ["a", "b"]}, batch_size=(2,)))
    first = policy(td)
    second = policy(step_mdp(env.step(first)))
    before, prompt = read_rows(first, ("tokens", "full")), read_rows(second, ("tokens", "prompt"))
    sources = read_rows(second, ("trace", "source"))
    for old, new, source in zip(before, prompt, sources, strict=True):
        assert torch.equal(new[: len(old)], old)
        printed = tokenizer.decode(new[len(old) :])
        assert "Code block 1 executed successfully:\n42\n" in printed
        assert Source.TOOL in source[len(old) : len(new)].tolist()
        assert Source.SAMPLED not in source[len(old) : len(new)].tolist()


def test_ids_beside_conversations_hold_what_was_printed(tokenizer, answer):
    env = ChatEnv(batch_size=(1,), with_tokenizer=True, tokenizer=tokenizer)
    env = env.append_transform(PythonInterpreter(tokenizer))
    td = env.reset(TensorDict({"query": ["Q"]}, batch_size=(1,)))
    td = env.step(answer(td, block("print(41 + 1)")))["next"]
    (ids,) = read_rows(td, ("tokens", "prompt"))
    assert "executed successfully:\n42\n" in tokenizer.decode(ids)
    env.close()


def test_each_block_is_answered_by_a_message_of_its_own(ask):
    one, two, three = ask(f"{block('print(1)')}\nand\n{block('1/0')}\n```py\nprint(3)")[0]
    assert one == "Code block 1 executed successfully:\n1\n"
    assert two.startswith("Code block 2 failed:\nTraceback")
    assert two.endswith("ZeroDivisionError: division by zero\n")
    assert three == "Code block 3 executed successfully:\n3\n"


def test_a_turn_without_code_is_left_as_it_is(ask):
    assert ask("no code", block("x = 1")) == [[], ["Code block 1 executed successfully:\n"]]


def test_what_goes_to_standard_error_is_shown_and_no_failure(ask):
    code = "import sys\nprint('out')\nprint('warned', file=sys.stderr)"
    assert ask(block(code))[0] == ["Code block 1 executed successfully:\nout\nwarned\n"]


BROKE_OTHERS = [
    ("for i in range(500): print(i)", "".join(f"{i}\n" for i in range(500))),
    ("x = '''\n---END---\n'''\nprint(x)", "\n---END---\n\n"),
    ("print('no newline', end='')", "no newline\n"),
    ("print('\\x1b[31mred\\x1b[0m')", "\x1b[31mred\x1b[0m\n"),
    ("if True:\n    print('é 中 🙂')", "é 中 🙂\n"),
    ("import sys; sys.exit(0)", ""),
]


@pytest.mark.parametrize("persistent", [False, True])
def test_code_that_broke_others_runs(persistent, ask):
    answers = ask(*(block(code) for code, _ in BROKE_OTHERS), persistent=persistent)
    expected = [[f"Code block 1 executed successfully:\n{printed}"] for _, printed in BROKE_OTHERS]
    assert answers == expected


FAILS = [
    ("while True: pass", "TimeoutError", "did not end within 5 s"),
    ("import os; os._exit(3)", "CodeError", ""),
    ("x = bytearray(10**10)", "CodeError MemoryLimit", "Memory"),
    ("def f(): f()\nf()", "CodeError", "RecursionError"),
    ("1 +", "CodeError", "SyntaxError"),
    ("print(\ud800)", "CodeError", ""),
    ("import sys; sys.exit('no')", "CodeError", "no"),
    ("while True: print('x' * 10**6)", "OutputLimit TimeoutError", "stopped"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "Killed CodeError", ""),
]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("three", [FAILS[:3], FAILS[3:6], FAILS[6:]], ids=["first", "next", "last"])
def test_code_that_fails_is_a_result_and_its_neighbours_run(
    three, persistent, make_env, queries, answer
):
    env = make_env(4, persistent=persistent, timeout=5.0)
    codes = [*(block(code) for code, _, _ in three), block("print(1)")]
    td = env.step(answer(env.reset(queries(*"abcd")), *codes))["next"]
    *bad, good = (chat[-1]["content"] for chat in td["history"].prompt.chats)
    records = td["tools", "calls"]
    for row, (content, (code, error, said)) in enumerate(zip(bad, three, strict=True)):
        assert content.startswith("Code block 1 failed:\n"), code
        assert said in content, code
        assert records[row][0]["error"] in error.split(), code
    assert good == "Code block 1 executed successfully:\n1\n"
    assert records[3][0]["error"] == ""
    assert td["tools", "num_failed"].tolist() == [1, 1, 1, 0]
    assert not td["done"].any()


def test_long_output_is_cut_and_says_so(make_env, queries, answer):
    env = make_env(1, max_result_chars=1000)
    td = env.step(answer(env.reset(queries("a")), block("print('x' * 10**6)")))["next"]
    content = td["history"].prompt.chats[0][-1]["content"]
    assert len(content) < 1200
    assert "characters left out" in content
    assert td["tools", "calls"][0][0]["truncated"]


@pytest.mark.parametrize("persistent", [False, True])
def test_names_live_on_only_in_a_persistent_interpreter(persistent, ask):
    first, second = ask(f"{block('x = 41')}\n{block('print(x + 1)')}", persistent=persistent)[0]
    assert first == "Code block 1 executed successfully:\n"
    assert ("42" in second) is persistent
    assert ("NameError" in second) is not persistent


def test_names_live_from_turn_to_turn_of_one_conversation_only(make_env, queries, answer):
    env = make_env(2, persistent=True)
    td = step_mdp(env.step(answer(env.reset(queries("a", "b")), block("x = 1"), block("x = 2"))))
    td = env.step(answer(td, *[block("print(x)")] * 2))["next"]
    printed = [chat[-1]["content"][-2:] for chat in td["history"].prompt.chats]
    assert printed == ["1\n", "2\n"]


def test_a_reset_ends_the_interpreter_of_the_rows_that_it_resets(make_env, queries, answer):
    env = make_env(2, persistent=True)
    td = answer(env.reset(queries("a", "b")), block("x = 1"), block("x = 2"))
    td = env.step_and_maybe_reset(td)[1]
    service = env.transform.tools["python"].executor
    assert service.num_sessions == 2
    td["_reset"] = torch.tensor([[True], [False]])
    td = env.reset(td)
    assert service.num_sessions == 1
    td = env.step(answer(td, *[block("print(x)")] * 2))["next"]
    first, second = (chat[-1]["content"] for chat in td["history"].prompt.chats)
    assert "NameError" in first
    assert second == "Code block 1 executed successfully:\n2\n"
    env.close()
    assert service.num_sessions == 0


def test_an_interpreter_that_was_stopped_starts_anew_and_says_so(ask):
    code = (
        f"{block('x = 1')}\n{block('while True: pass')}\n{block('print(2)')}\n{block('print(3)')}"
    )
    _, stopped, anew, then = ask(code, persistent=True, timeout=4.0)[0]
    assert "did not end within 4 s" in stopped
    assert anew == (
        "Code block 3 executed successfully:\n2\n"
        "The interpreter was started anew: names of earlier code are gone.\n"
    )
    assert then == "Code block 4 executed successfully:\n3\n"


def test_rows_that_are_not_stepped_run_nothing(make_env, queries, answer):
    env = make_env(2)
    td = answer(env.reset(queries("a", "b")), block("print(1)"), block("print(2)"))
    td["_step"] = torch.tensor([[True], [False]])
    td = env.step(td)["next"]
    assert [len(chat) for chat in td["history"].prompt.chats] == [3, 1]
    assert td["tools", "num_calls"].tolist() == [1, 0]


def test_more_blocks_than_allowed_are_answered_all_together(ask):
    answers = ask("\n".join(block(f"print({i})") for i in range(5)), max_calls=2)[0]
    assert answers[:2] == [f"Code block {i + 1} executed successfully:\n{i}\n" for i in range(2)]
    assert len(answers) == 3
    assert answers[2].startswith("3 further calls were not run")


def test_code_knows_nothing_of_the_trainer(ask, monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "kept")
    code = f"import os\nprint(os.environ.get('TRAINER_SECRET'), os.getpid() == {os.getpid()})"
    assert ask(block(code))[0] == ["Code block 1 executed successfully:\nNone False\n"]


@pytest.mark.sandbox
def test_in_bubblewrap_code_reads_no_file_of_the_trainer_and_opens_no_connection(ask, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("kept")
    reading = f"print(open({str(secret)!r}).read())"
    calling = "import socket; socket.create_connection(('1.1.1.1', 80), 1)"
    read, called = ask(f"{block(reading)}\n{block(calling)}", sandbox="bubblewrap")[0]
    assert "failed" in read
    assert "kept" not in read
    assert "failed" in called


def test_the_role_of_the_answers_can_be_chosen(make_env, queries, answer):
    env = make_env(tool_name="ipython")
    td = env.step(answer(env.reset(queries("a")), block("print(1)")))["next"]
    assert td["history"].prompt[0, -1].role == "ipython"


def test_a_template_that_drops_what_was_printed_is_refused(make_tokenizer):
    drops = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + "
        "m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(TemplateError, match=r"role 'tool'.*drops it"):
        PythonInterpreter(make_tokenizer(chat_template=drops))
    PythonInterpreter(make_tokenizer(chat_template=drops), tool_name="user")


@pytest.mark.parametrize(
    ("kwargs", "what"),
    [
        ({"service_name": "mine"}, "service_name"),
        ({"namespace": "here"}, "namespace"),
    ],
)
def test_impossible_settings_are_refused(kwargs, what):
    with pytest.raises(ConfigError, match=what):
        PythonInterpreter(**kwargs)


def test_specs_hold(make_env, queries):
    env = make_env(2)
    check_env_specs(env, tensordict=env.reset(queries("a", "b")))


def test_a_copy_runs_interpreters_of_its_own():
    again = pickle.loads(pickle.dumps(PythonInterpreter(persistent=True, timeout=3.0)))
    tool = again.tools["python"]
    assert (tool.stateful, tool.code_timeout) == (True, 3.0)
    assert tool._owner != copy.deepcopy(tool)._owner  # no shared interpreters
    assert tool.run(ToolCall("python", {"code": "print(1)"}, session=0)).content == "1\n"
    tool.close()


def test_the_tool_can_be_called_by_name_too(queries):
    from torchrl_llm.tools import ToolTransform

    env = ChatEnv(batch_size=(1,)).append_transform(ToolTransform([PythonTool(kind="action")]))
    td = env.reset(queries("Q"))
    call = {"function": {"name": "python", "arguments": {"code": "print(1)"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    td["history"].full = History.of([td["history"].prompt.chats[0] + [turn]])
    td = env.step(td)["next"]
    assert td["history"].prompt[0, -1].content == "1\n"
    assert not td["tools", "auxiliary"].any()
    env.close()


def test_a_tool_takes_an_executor_or_a_sandbox_but_not_both():
    with pytest.raises(ConfigError, match="executor"):
        PythonTool(executor=PythonExecutorService(1), limits=Limits())
