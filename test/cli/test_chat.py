"""``torchrl-llm chat``: a real model, real tools, and lines as somebody types or pipes them."""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from cli.run_folders import run_command, write_run

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.evaluation import Conversation
from torchrl_llm.recipes.chat_settings import chat_settings

CALCULATOR = {"env": {"dataset": "calculator"}, "model": {"name": None}}


@pytest.fixture
def chat(monkeypatch, capfd):
    """Pipes lines into the command; its status, standard output and standard error."""

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run_command(capfd, "chat", *arguments)

    return run


@pytest.fixture
def run(tmp_path):
    """A run of the task with a calculator, whose newest checkpoint is the model that ships."""
    folder = write_run(tmp_path / "run", CALCULATOR, {"train/reward": [0.5]})
    for step in (1, 2):
        shutil.copytree(embedded_model_path(), folder / "checkpoints" / f"step_{step:06d}")
    (folder / "checkpoints" / "step_000001" / "model.safetensors").write_text("broken")
    return folder


def test_each_line_is_a_turn_and_answers_alone_are_printed(chat):
    lines = ["What is 66+85?", "", "/reset", "/nothing", "What is 66+85?", "/quit", "What is 1+1?"]
    status, out, err = chat(lines)
    assert status == 0
    first, second = out.splitlines()
    assert first == second != ""
    assert err.startswith("there is no command /nothing: /reset begins anew")
    assert err.count("\n") == 1


def test_the_second_turn_sees_the_first_and_a_reset_forgets_it(chat):
    texts = ["What is 37+85?", "What is 37+85?", "/reset", "What is 37+85?"]
    first, second, third = chat(texts)[1].split("\n")[:3]
    assert first == third
    assert first != second


def test_a_run_brings_its_checkpoint_system_prompt_and_tools(chat, run):
    status, out, err = chat(["What is 123*45?"], run)
    assert status == 0
    # The model that ships adds what it is to multiply, and reads the result from the tool.
    assert out == "168\n"
    assert err == '[calculator {"expression": "123+45"}]\n[calculator -> 168]\n'
    # Without the system prompt of its task it does not know what to do.
    lines = ["/system Use the calculator.", "What is 123*45?"]
    checkpoint = run / "checkpoints" / "step_000002"
    assert chat(lines, checkpoint, "--system", "") == (0, out, err)
    assert "calculator" not in chat(["What is 123*45?"], checkpoint, "--system", "")[2]


def test_tools_are_added_by_name(chat):
    arguments = ("--tool", "calculator", "--system", "Use the calculator.")
    assert chat(["What is 123*45?"], *arguments)[1] == "168\n"
    assert "did you mean 'calculator'?" in chat([], "--tool", "calculater")[2]


def test_temperature_and_seed_decide_the_answers(chat):
    def answers(seed):
        lines = ["What is 37+85?", "/reset"] * 8
        return chat(lines, "--temperature", "1", "--seed", str(seed))[1]

    assert answers(1) == answers(1) != answers(2)


def test_an_answer_that_is_cut_is_told_next_to_it(chat):
    status, out, err = chat(["What is 66+85?"], "--max-tokens", "1")
    assert (status, len(out)) == (0, 2)
    assert err == "(cut: --max-tokens, or the end of the context)\n"


def test_a_full_context_ends_with_a_sentence(chat, tmp_path):
    folder = shutil.copytree(embedded_model_path(), tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    status, out, err = chat(["What is 37+85?"] * 9, folder)
    assert status == 1
    assert 1 <= out.count("\n") < 9
    assert err.splitlines()[-1].startswith("The conversation is full: the prompt of row 0 has")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{empty}"], "ConfigError: {empty} holds no model (config.json), no checkpoint"),
        (["no/such-model"], "ConfigError: there is no "),
        (["--temperature", "-1"], "ConfigError: "),
        (["--max-tokens", "0"], "ConfigError: "),
    ],
)
def test_what_cannot_be_is_a_paragraph(chat, tmp_path, arguments, said):
    arguments = [each.format(empty=tmp_path) for each in arguments]
    status, out, err = chat(["Hi"], *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(said.format(empty=tmp_path))
    assert "Traceback" not in err


def wait_until_asleep(pid):
    """Python misses a signal between the prompt that it prints and its wait for a line."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)


@pytest.mark.full
def test_in_a_terminal_ctrl_c_ends_without_a_traceback():
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "torchrl_llm", "chat"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    # Whoever runs tests in the background has Ctrl-C ignored, which children inherit.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **streams, preexec_fn=heard) as child:
        os.close(theirs)
        said, prompts = b"", 0
        while True:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if said.count(b"> ") > prompts:
                prompts += 1
                if prompts == 1:
                    os.write(terminal, b"What is 66+85?\n")
                else:
                    wait_until_asleep(child.pid)
                    child.send_signal(signal.SIGINT)
    assert child.returncode == 130
    assert b"the model that ships with the package; /reset begins anew" in said
    assert b"150" in said
    assert b"Traceback" not in said


def test_settings_are_those_of_training():
    told = chat_settings({**CALCULATOR, "model": {"name": "a/b", "chat_template_name": "qwen"}})
    assert told.system_prompt == "Use the calculator."
    assert [schema["function"]["name"] for schema in told.schemas] == ["calculator"]
    assert (told.chat_template_name, told.max_tokens) == ("qwen", None)
    assert chat_settings(CALCULATOR).schemas is None
    own = {"dataset": "gsm8k", "system_prompt": "Think.", "options": {"answer_format": "auto"}}
    said = chat_settings({"env": own, "inference_model": {"max_tokens": 9}})
    assert (said.system_prompt, said.tools, said.max_tokens) == ("Think.", (), 9)
    # Which prompt a task has may depend on its settings.
    del own["system_prompt"]
    assert chat_settings({"env": own}).system_prompt is None
    fine_tuned = {"data": {"system_prompt": "Be brief."}}
    assert chat_settings(fine_tuned).system_prompt == "Be brief."
    assert "Think step by step" in chat_settings({"env": {"dataset": "gsm8k"}}).system_prompt
    assert chat_settings({}) == (None, (), None, None, None, None, False)


def test_a_task_that_is_gone_is_warned_of_and_its_model_still_talks(monkeypatch):
    from torchrl._utils import logger

    warned = []
    monkeypatch.setattr(logger, "warning", warned.append)
    assert chat_settings({"env": {"dataset": "gone:Task"}}).tools == ()
    assert "'gone:Task' cannot be loaded here" in warned[0]


def test_neither_answers_nor_calls_nor_results_reach_the_terminal_raw(chat, monkeypatch):
    hostile = "\x1b]0;owned\x07\x1b[2J\u202eevil\ud83d"

    def say(self, text):
        call = {"function": {"name": hostile, "arguments": {"a": hostile}}}
        said = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": hostile, "content": hostile},
            {"role": "assistant", "content": hostile},
        ]
        monkeypatch.setattr(Conversation, "messages", property(lambda self: said))
        return hostile

    monkeypatch.setattr(Conversation, "messages", property(lambda self: []))
    monkeypatch.setattr(Conversation, "say", say)
    status, out, err = chat(["hello"])
    assert (status, out) == (0, "evil?\n")
    assert err.count("evil") == 4
    assert all(char == "\n" or char.isprintable() for char in err.replace("\\ud83d", ""))
