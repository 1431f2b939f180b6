"""ShellTool: a bash for each conversation, whatever the commands do to it."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch
from processes import survivors
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs, step_mdp

import torchrl_llm
from torchrl_llm.data.history import History
from torchrl_llm.envs import ChatEnv, DatasetChatEnv
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox import BubblewrapSandbox, Limits, make_sandbox
from torchrl_llm.sandbox.interface import Sandbox, SandboxResult, SandboxSession
from torchrl_llm.tools import ToolTransform
from torchrl_llm.tools.shell import ShellTool, ShellTransform
from torchrl_llm.tools.tool_call import ToolCall

FRESH = "[The next command gets a fresh shell, in the same files.]"
pytestmark = pytest.mark.filterwarnings("ignore:SubprocessSandbox:RuntimeWarning")


@pytest.fixture(params=[pytest.param("bubblewrap", marks=pytest.mark.sandbox), "subprocess"])
def make_shell(request):
    made = []

    def make(**kwargs):
        if request.param == "bubblewrap":
            try:
                BubblewrapSandbox()
            except ResourceError:
                pytest.skip("bubblewrap does not work here")
        made.append(ShellTool(sandbox=request.param, **kwargs))
        return made[-1]

    yield make
    for shell in made:
        shell.close()


def ask(shell, command, session=0, files=None):
    state = None if files is None else TensorDict({"files": files}).lock_()
    return shell.run(ToolCall("shell", {"command": command}, session=session, state=state))


def appeared(token, number):
    """Whether there are so many soon."""
    patience = time.monotonic() + 20
    while len(survivors(token)) != number and time.monotonic() < patience:
        time.sleep(0.02)
    return len(survivors(token)) == number


def gone(token):
    """Whether all end soon."""
    return appeared(token, 0)


def sleeper(token):
    """A command that leaves a process behind, in a session of its own."""
    return f"setsid bash -c 'exec -a {token} sleep 60' &"


# What is kept, and for whom


def test_files_folder_variables_and_functions_are_kept_from_call_to_call(make_shell):
    shell = make_shell()
    said = ask(shell, "mkdir a && cd a && echo hi > b; export X=1; y=2; f() { echo f$1; }")
    assert said == ("", "", 0, False, None)
    assert ask(shell, "cat b; basename $PWD; echo $X$y; f 3; env | grep ^X=").content == (
        "hi\na\n12\nf3\nX=1\n"
    )


def test_standard_input_is_empty_and_errors_come_with_the_output_in_their_order(make_shell):
    said = ask(make_shell(), "echo a; echo b >&2; cat; read x; echo $?")
    assert said.content == "a\nb\n1\n"


def test_quotes_documents_and_loose_words_of_loops_mean_what_they_mean_in_bash(make_shell):
    shell = make_shell()
    assert ask(shell, "cat <<'END'\n'a' \"b\" $c `d`\nEND").content == "'a' \"b\" $c `d`\n"
    assert "unexpected EOF" in ask(shell, "echo 'open").content
    assert ask(shell, "for i in 1 2; do echo $i; break; done").content == "1\n"
    ask(shell, "break; continue; return")
    assert ask(shell, "echo é 中 🙂").content == "é 中 🙂\n"


def test_an_exit_code_other_than_zero_is_told(make_shell):
    said = ask(make_shell(), "echo no; (exit 3)")
    assert said == ("no\n[exit code 3]", "CommandFailed", 3, False, None)


def test_one_conversation_sees_nothing_of_another(make_shell):
    shell = make_shell()
    token = uuid.uuid4().hex
    ask(shell, f"echo {token} > secret; export SECRET={token}; pwd; sleep 60 &", session=1)
    other = ask(shell, "pwd", session=1).content.strip()
    look = f"ls -a; env; cat {other}/secret; grep -rl {token} $HOME /tmp 2>/dev/null"
    said = ask(shell, look, session=2).content
    assert token not in said
    assert "secret" not in said.replace(f"{other}/secret: ", "")
    assert ask(shell, "cat secret", session=1).content == f"{token}\n"


def test_commands_know_nothing_of_the_trainer_and_have_no_network(make_shell, monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "kept")
    shell = make_shell()
    assert "kept" not in ask(shell, "env").content
    said = ask(shell, "exec 3<>/dev/tcp/1.1.1.1/80 && echo connected")
    assert "connected" not in said.content
    # Nor do they find the pipes of the program that gives them to bash.
    assert "denied" in ask(shell, "ls /proc/$PPID/fd").content


# What commands do to their shell


def test_a_command_without_an_end_is_stopped_and_the_next_has_the_files(make_shell):
    shell = make_shell(timeout=60.0)
    token = f"/{uuid.uuid4().hex}"
    assert not ask(shell, f"echo hi > a; cd /; export X=1; {sleeper(token)}").error
    assert appeared(token, 1)
    shell.command_timeout = 2.0
    said = ask(shell, "echo before; sleep 60")
    assert said.content == (
        f"before\n[The command did not end within 2 s and was stopped.]\n{FRESH}"
    )
    assert said.error == "TimeoutError"
    assert gone(token)  # what ran in the background ends with its shell
    shell.command_timeout = 60.0
    assert ask(shell, "cat a; echo .$X.").content == "hi\n..\n"


@pytest.mark.parametrize(
    ("command", "error", "code", "said"),
    [
        ("echo bye; exit 3", "ShellExited", 3, "bye\n[The shell exited with code 3.]"),
        ("set -e; false", "ShellExited", 1, "[The shell exited with code 1.]"),
        ("exec true", "ShellExited", 0, "[The shell exited with code 0.]"),
        ("kill -9 $$", "Killed", -9, "[The shell was killed by signal 9.]"),
        ("kill -9 0", "Killed", -9, "[The shell was killed by signal 9.]"),
    ],
)
def test_a_shell_that_ends_is_told_and_replaced_in_the_same_files(
    command, error, code, said, make_shell
):
    shell = make_shell()
    ask(shell, "echo hi > a; cd /")
    assert ask(shell, command) == (f"{said}\n{FRESH}", error, code, False, None)
    assert ask(shell, "cat a").content == "hi\n"


def test_a_session_that_is_brought_down_begins_again_with_the_files_of_the_row(make_shell):
    shell = make_shell()
    files = {"a.txt": "old\n", "sub/b.txt": "b\r\n"}
    assert ask(shell, "cat a.txt sub/b.txt", files=files).content == "old\nb\r\n"
    ask(shell, "echo new > a.txt; echo other > c.txt")
    said = ask(shell, "kill -9 $PPID; sleep 5")
    assert said.error == "SessionEnded"
    assert "a.txt, sub/b.txt as after the last command" in said.content
    assert ask(shell, "cat a.txt; ls; cd sub").content == "new\na.txt\nsub\n"
    assert files == {"a.txt": "old\n", "sub/b.txt": "b\r\n"}


def test_the_tool_says_what_has_become_of_the_files_of_the_row(make_shell):
    shell = make_shell()
    names = ["same", "new", "removed", "pipe", "large", "bytes"]
    assert shell.files(0) is None
    ask(shell, "true", files=dict.fromkeys(names, "x"))
    assert shell.files(0) == dict.fromkeys(names, "x")
    ask(
        shell,
        "echo hi > new; rm removed pipe; mkfifo pipe; head -c 99999 /dev/zero > large;"
        "printf '\\377' > bytes; echo more > more",
    )
    lost = dict.fromkeys(["removed", "pipe", "large"])
    assert shell.files(0) == {"same": "x", "new": "hi\n", "bytes": "\ufffd", **lost}
    shell.end_session(0)
    assert shell.files(0) is None


# Limits


def test_long_output_loses_its_middle_and_says_how_much(make_shell):
    said = ask(make_shell(limits=Limits(output_bytes=300)), "seq 1 1000")
    whole = "".join(f"{n}\n" for n in range(1, 1001))
    head, left_out, tail = re.split(r"\[\.\.\. (\d+) bytes left out \.\.\.]\n", said.content)
    head = head.removesuffix("\n")
    assert (len(head), len(tail), int(left_out)) == (200, 100, len(whole) - 300)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert said.truncated
    assert not said.error


def test_output_without_an_end_is_ended(make_shell):
    shell = make_shell(limits=Limits(output_bytes=300), timeout=60.0)
    said = ask(shell, "yes")
    assert (said.error, said.truncated) == ("OutputLimit", True)
    assert said.content.startswith("y\ny\n")
    ask(shell, "yes & sleep 0.1")
    assert ask(shell, "echo hi").error in ("", "OutputLimit")  # of what runs in the background
    assert ask(shell, "echo hi").content == "hi\n"


def test_bytes_that_are_no_text_are_replaced(make_shell):
    assert ask(make_shell(), "printf 'a\\377\\000b'").content == "a\ufffd\0b"
    assert ask(make_shell(), "echo a\0b").error == "ValueError"


def test_memory_of_a_process_and_size_of_files_are_limited_and_the_shell_lives_on(make_shell):
    shell = make_shell(limits=Limits(memory_bytes=256 << 20, file_bytes=1 << 20))
    ask(shell, "echo hi > a")
    said = ask(shell, "python3 -c 'bytearray(10**9)'")
    assert ("MemoryError" in said.content, said.exit_code) == (True, 1)
    assert ask(shell, "head -c 9999999 /dev/zero > big").exit_code
    assert int(ask(shell, "stat -c %s big; rm big").content) <= 1 << 20
    assert ask(shell, "cat a").content == "hi\n"


def test_a_bomb_of_processes_is_held_and_the_conversation_goes_on(make_shell):
    shell = make_shell(limits=Limits(num_processes=16), timeout=1.0)
    files, token = {"a": "hi\n"}, f"/{uuid.uuid4().hex}"
    said = ask(shell, f"for i in {{1..40}}; do {sleeper(token)} done; sleep 5", files=files)
    assert said.error in ("TimeoutError", "SessionEnded")  # ordinary users are held less exactly
    assert gone(token)
    said = ask(shell, f"bomb() {{ bomb | bomb & bomb; }}; bomb; {sleeper(token)} sleep 9")
    assert said.error
    ask(shell, "sleep 9")  # whatever still runs is ended here
    assert gone(token)
    assert ask(shell, "cat a").content == "hi\n"


def test_many_processes_that_take_too_much_together_end_the_session_and_no_other(make_shell):
    shell = make_shell(limits=Limits(memory_bytes=128 << 20, file_bytes=1 << 20), timeout=20.0)
    ask(shell, "echo hi > a", session=1)
    hog = "python3 -c 'import time; x = bytearray(90 << 20); time.sleep(9)' &"
    said = ask(shell, f"{hog * 5} wait")
    assert said.error == "SessionEnded"
    assert "(memory)" in said.content
    assert ask(shell, "cat a", session=1).content == "hi\n"
    assert ask(shell, "echo back").content == "back\n"


# What is left behind


def test_the_end_of_a_conversation_leaves_no_process_and_no_folder(make_shell):
    shell, token = make_shell(), f"/{uuid.uuid4().hex}"
    folders = set(Path(tempfile.gettempdir()).glob("sandbox-*"))
    for session in (1, 2):
        ask(shell, f"{sleeper(f'{token}{session}')} echo x > a", session=session)
    assert appeared(token, 2)
    shell.end_session(1)
    assert gone(f"{token}1")
    assert appeared(token, 1)
    assert ask(shell, "ls", session=1).content == ""
    shell.close()
    assert gone(token)
    assert set(Path(tempfile.gettempdir()).glob("sandbox-*")) <= folders
    assert shell.executor.num_sessions == 0


TRAINER = """
import sys, warnings
warnings.simplefilter("ignore")
from torchrl_llm.tools.shell import ShellTool
from torchrl_llm.tools.tool_call import ToolCall
shell = ShellTool(sandbox=sys.argv[1])
shell.run(ToolCall("shell", {"command": sys.argv[2]}, session=0))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "kind", [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "subprocess"]
)
def test_a_trainer_that_is_killed_takes_its_shells_with_it(kind):
    try:
        make_sandbox(kind)
    except ResourceError:
        pytest.skip(f"{kind} does not work here")
    token = f"/{uuid.uuid4().hex}"
    root = Path(torchrl_llm.__file__).parents[1]
    folder = Path(tempfile.mkdtemp())  # nobody is left to remove what a plain process has written
    folder.chmod(0o755)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, kind, sleeper(token) * 2],
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout.readline() == "ready\n"
    assert appeared(token, 3)  # itself, whose arguments hold the command
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    assert gone(token)
    shutil.rmtree(folder)


def test_a_copy_has_shells_of_its_own():
    shell = ShellTool(timeout=3.0)
    ask(shell, "export X=1")
    again = pickle.loads(pickle.dumps(shell))
    assert ask(again, "echo .$X").content == ".\n"
    assert copy.deepcopy(shell)._owner != shell._owner
    assert (again.command_timeout, again.output_bytes) == (3.0, 8 << 10)
    for each in (shell, again):
        each.close()


# A sandbox that fails


class Failing(Sandbox):
    python, missing = "python", ()

    def __init__(self, result):
        super().__init__()
        self.result = result

    def run(self, argv, **kwargs):
        raise AssertionError

    def open_session(self, limits=None):
        return Answering(self.result)


class Answering(SandboxSession):
    alive = True

    def __init__(self, result):
        self.result = result

    def run(self, code, *, wall_s=None):
        return self.result

    def close(self):
        pass


@pytest.mark.parametrize("status", ["error", "sandbox_error"])
def test_what_the_sandbox_says_of_the_machine_is_for_the_log_and_not_for_the_model(status, warned):
    shell = ShellTool(sandbox=Failing(SandboxResult(status=status, stderr="/secret is missing")))
    said = ask(shell, "ls")
    assert said.content == "[The command could not be run; this is no fault of the command.]\n"
    assert said.error == "SandboxError"
    assert len(warned) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        '{"ended": "ready", "exit_code": 0, "output": ["a", 0], "files": {}}',
        '{"ended": "ready", "exit_code": "0", "output": ["a", 0, ""], "files": {}}',
        '{"ended": "won", "exit_code": 0, "output": ["a", 0, ""], "files": {}}',
    ],
)
def test_an_answer_that_cannot_be_read_ends_the_session(answer):
    shell = ShellTool(sandbox=Failing(SandboxResult(status="ok", stdout=answer, exit_code=0)))
    assert ask(shell, "ls").error == "SessionEnded"
    assert shell.executor.num_sessions == 0


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="timeout"):
        ShellTool(timeout=0)
    with pytest.raises(ConfigError, match="limits would have no effect"):
        ShellTool(sandbox=Failing(None), limits=Limits())


# In an environment


def call(td, *commands):
    """Each row's turn: a command, or ``None`` for an answer."""
    chats = []
    for chat, command in zip(td["history"].prompt.chats, commands, strict=True):
        turn = {"role": "assistant", "content": "done" if command is None else ""}
        if command is not None:
            function = {"name": "shell", "arguments": {"command": command}}
            turn["tool_calls"] = [{"function": function}]
        chats.append(chat + [turn])
    td["history"].full = History.of(chats)
    return td


def last(td):
    return [chat[-1]["content"] for chat in td["history"].prompt.chats]


def test_a_reset_ends_the_shell_of_the_rows_that_it_resets(queries):
    env = ChatEnv(batch_size=(2,)).append_transform(ToolTransform(["shell"]))
    td = call(env.reset(queries("a", "b")), "echo 1 > x; export X=1", "echo 2 > x; export X=2")
    td = env.step_and_maybe_reset(td)[1]
    td["_reset"] = torch.tensor([[True], [False]])
    td = env.reset(td)
    td = env.step(call(td, *["cat x; echo $X"] * 2))["next"]
    first, second = last(td)
    assert "No such file" in first
    assert second == "2\n2\n"
    service = env.transform.tools["shell"].executor
    assert service.num_sessions == 2
    env.close()
    assert service.num_sessions == 0


ROWS = [{"query": f"q{n}", "files": {"a.txt": f"{n}\n"}} for n in range(2)]


def test_the_files_of_a_row_are_in_the_shell_and_then_in_the_row():
    env = DatasetChatEnv(dataset=ROWS, shuffle=False, num_envs=2, repeats=1)
    env = env.append_transform(ShellTransform())
    td = env.step(call(env.reset(), "cat a.txt; echo new > a.txt", None))["next"]
    assert last(td) == ["0\n", "done"]
    assert list(td["files"]) == [{"a.txt": "new\n"}, {"a.txt": "1\n"}]
    td = env.step(call(td.exclude("reward"), None, "rm a.txt"))["next"]
    assert list(td["files"]) == [{"a.txt": "new\n"}, {"a.txt": None}]
    assert ROWS[0]["files"] == {"a.txt": "0\n"}
    td = env.reset()
    assert list(td["files"]) == [ROWS[0]["files"], ROWS[1]["files"]]
    env.close()


def test_an_environment_that_goes_on_elsewhere_has_the_files_of_its_rows():
    def make():
        env = DatasetChatEnv(dataset=ROWS, shuffle=False, num_envs=1)
        return env.append_transform(ShellTransform())

    env = make()
    td = step_mdp(env.step(call(env.reset(), "echo new > a.txt; echo other > b.txt")))
    state = env.state_dict()
    env.close()
    again = make()
    again.load_state_dict(state)
    td = again.step(call(td, "ls; cat a.txt"))["next"]
    assert last(td) == ["a.txt\nnew\n"]
    again.close()


def test_the_specs_hold_with_files():
    env = DatasetChatEnv(dataset=ROWS, num_envs=2).append_transform(ShellTransform())
    check_env_specs(env)
    env.close()
