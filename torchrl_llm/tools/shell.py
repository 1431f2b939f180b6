"""A shell for models: :class:`ShellTool`, and :class:`ShellTransform` for rows with files.

Each conversation has its own sandbox with a persistent bash (:mod:`torchrl_llm.sandbox.shell`):
files, working directory and variables persist between calls and end with the conversation.

Next: :mod:`torchrl_llm.envs.datasets.repairs` is a task with this shell.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from tensordict import TensorDictBase
from torchrl._utils import logger

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._registry import register
from torchrl_llm.data.column import Column
from torchrl_llm.sandbox import Limits, Sandbox, run_supervisor
from torchrl_llm.sandbox import shell as shell_program
from torchrl_llm.tools.python_interpreter import PythonExecutorService
from torchrl_llm.tools.tool import Restarted, Tool
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput
from torchrl_llm.tools.tool_transform import ToolTransform

FILES = "files"
"""Column with the files of a row's working directory: maps a path to a text."""
# Largest number of bytes of an answer of the sandbox (output and files); each byte may be written
# as "\u0000".
_ANSWER_BYTES = 1 << 20
# Time limit for ending all processes of a command.
_STOP_S = 6.0
# For each ending of a command: the name of the error, and the text for the model.
_ENDS = {
    "timeout": ("TimeoutError", "[The command did not end within {timeout:g} s and was stopped.]"),
    "output": ("OutputLimit", "[The command wrote too much and was stopped.]"),
    "exit": ("ShellExited", "[The shell exited with code {code}.]"),
    "signal": ("Killed", "[The shell was killed by signal {signal}.]"),
}
_FRESH = "[The next command gets a fresh shell, in the same files.]"
_NOT_RUN = "[The command could not be run; this is no fault of the command.]\n"
# The programs of a session, by name.
_SOURCES = {
    name: Path(module.__file__).read_text(encoding="utf-8")
    for name, module in {"guard": run_supervisor, "program": shell_program}.items()
}
_PIECE = """
if "shell" not in globals():
    import types
    guard, shell = types.ModuleType("guard"), types.ModuleType("shell")
    exec({guard!r}, vars(guard))
    exec({program!r}, vars(shell))
    shell.guard = guard
    shell = shell.Shell({files!r})
shell.run(**{arguments!r})
"""


@register("tools", "shell")
class ShellTool(Restarted, Tool):
    r"""Runs commands in a sandboxed bash that persists for the whole conversation.

    Standard output and errors are combined, as in a terminal; standard input is empty. If a command
    times out or ends its shell, the result says so; the next command gets a fresh shell with the
    same files, and background processes are ended. If a command ends the whole session (for example
    because of the memory limit), only the files of the row are kept, as they were after the last
    command.

    Args:
        timeout: time limit of a command in seconds.
        sandbox: a sandbox or its kind; by default the strongest sandbox of the machine. It needs
            bash; a container image may lack it.
        limits: limits of each session; ``output_bytes`` limits the output of a command that the
            model reads; the middle of a longer output is left out.
        max_sessions: largest number of persistent shells. If there are more, the least recently
            used shell is ended.

    Raises:
        ConfigError: an invalid number, or ``limits`` with a sandbox that has its own.

    Example:
        >>> tool = ShellTool()
        >>> tool.run(ToolCall("shell", {"command": "cd /usr && export X=3"}, session=0)).content
        ''
        >>> tool.run(ToolCall("shell", {"command": "pwd; echo $X"}, session=0)).content
        '/usr\n3\n'
        >>> tool.close()
    """

    name = "shell"
    description = (
        "Runs a command in bash and returns what it prints. Files, the working directory and "
        "variables are kept from one call to the next."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "for bash"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    stateful = True

    _own = ("_owner", "_files")

    @checked
    def __init__(
        self,
        *,
        timeout: Annotated[float, Gt(0)] = 10.0,
        sandbox: Sandbox | str | None = None,
        limits: Limits | None = None,
        max_sessions: Annotated[int, Ge(1)] = 1024,
    ) -> None:
        if limits is None and not isinstance(sandbox, Sandbox):
            limits = Limits(output_bytes=8 << 10)
        executor = PythonExecutorService(
            64, timeout + _STOP_S, sandbox=sandbox, limits=limits, max_sessions=max_sessions
        )
        self.output_bytes = executor.limits.output_bytes
        answer_bytes = _ANSWER_BYTES + 6 * self.output_bytes
        executor.limits = replace(executor.limits, output_bytes=answer_bytes)
        self.executor, self.command_timeout = executor, timeout
        self.timeout = executor.timeout + _STOP_S
        self._begin()

    def _begin(self) -> None:
        # Other processes may use the same conversation numbers with the same service.
        self._owner = uuid.uuid4().hex
        self._files: dict[int | None, dict[str, str | None]] = {}

    def run(self, call: ToolCall) -> ToolOutput:
        """Run the command; every outcome is returned as a result."""
        command, session = call.args["command"], call.session
        if "\0" in command:
            return ToolOutput("A command cannot hold the character NUL.", "ValueError")
        files = self._files.setdefault(session, _files_of(call.state))
        there = {path: text for path, text in files.items() if text is not None}
        limits = {"timeout_s": self.command_timeout, "keep": self.output_bytes}
        arguments = {"command": command, "names": list(files), **limits}
        piece = _PIECE.format(**_SOURCES, files=there, arguments=arguments)
        result = self.executor.execute(piece, session=(self._owner, session))
        answer = _read(result)
        if answer is None:
            return self._over(result, session)
        self._files[session] = {path: answer["files"].get(path) for path in files}
        output, new = self._output(answer), result["restarted"]
        return output._replace(content="[This is a new session.]\n" * new + output.content)

    def _output(self, answer: Mapping[str, Any]) -> ToolOutput:
        head, left_out, tail = answer["output"]
        ended, code = answer["ended"], answer["exit_code"]
        if ended == "ready":
            error, said = ("CommandFailed", f"[exit code {code}]") if code else ("", "")
        else:
            signalled = ended == "exit" and code is not None and code < 0
            error, said = _ENDS["signal" if signalled else ended]
            said = said.format(timeout=self.command_timeout, code=code, signal=-(code or 0))
            said = f"{said}\n{_FRESH}"
        text = f"{head}\n[... {left_out} bytes left out ...]\n{tail}" if left_out else head
        text += "\n" * bool(said and text and not text.endswith("\n"))
        return ToolOutput(text + said, error, exit_code=code, truncated=bool(left_out))

    def _over(self, result: Mapping[str, Any], session: int | None) -> ToolOutput:
        """End the session, and return a text for the model, if the sandbox did not answer."""
        self.executor.end_session((self._owner, session))
        if result["status"] in ("sandbox_error", "error"):
            # The message is about the machine (no bash, for example), so it is not useful to the
            # model.
            logger.warning(f"the sandbox of a shell failed: {result['stderr']}")
            return ToolOutput(_NOT_RUN, "SandboxError")
        left = ", ".join(self._files.get(session, ()))
        left = f"with {left} as after the last command" if left else "without files"
        said = (
            f"[The session ended ({result['status']}). The next command gets a new one {left}.]\n"
        )
        return ToolOutput(said, "SessionEnded", exit_code=result["returncode"])

    def files(self, session: int | None) -> Mapping[str, str | None] | None:
        """Return the files of a conversation's row, as they are after its last command.

        Args:
            session: its ``traj_id``.

        Returns:
            Maps a path to a text. The value is ``None`` for a file that was deleted or is not a
            text of at most 64 KiB. ``None`` instead of the mapping if the conversation has made no
            call.
        """
        return self._files.get(session)

    def end_session(self, session: int | None) -> None:
        """End the shell of a conversation and delete its files."""
        self._files.pop(session, None)
        self.executor.end_session((self._owner, session))

    def close(self) -> None:
        """End all shells."""
        self._files.clear()
        self.executor.close()


class ShellTransform(ToolTransform):
    """A shell with the files of the row: the column ``files`` fills the working directory.

    After each step, the column holds the current files, so a reward can read them and a resumed run
    continues with them. A cell is a mapping of paths to texts.

    Args:
        shell: the tool; by default a tool with default limits.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.

    Example:
        >>> from torchrl_llm.envs import DatasetChatEnv
        >>> rows = [{"query": "What is in a.txt?", "files": {"a.txt": "hello"}}]
        >>> env = DatasetChatEnv(dataset=rows).append_transform(ShellTransform())
        >>> td = env.reset()
        >>> call = {"function": {"name": "shell", "arguments": {"command": "cat a.txt; rm *"}}}
        >>> turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> prompt = td["history"].prompt
        >>> td["history"].full = type(prompt).of([prompt.chats[0] + [turn]])
        >>> td = env.step(td)["next"]
        >>> td["history"].prompt[0, -1].content, td["files"][0]
        ('hello', {'a.txt': None})
        >>> env.close()
    """

    hands_over_state = True

    def __init__(self, shell: ShellTool | None = None, **kwargs: Any) -> None:
        shell = ShellTool() if shell is None else shell
        super().__init__([shell], **kwargs)
        self.shell = shell

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict = super()._step(tensordict, next_tensordict)
        if (before := tensordict.get(FILES, None)) is not None:
            found = map(self.shell.files, tensordict.get("traj_id").flatten().tolist())
            rows = zip(before.tolist(), found, strict=True)
            next_tensordict.set(FILES, Column.of(old if new is None else new for old, new in rows))
        return next_tensordict


def _files_of(row: TensorDictBase | None) -> dict[str, str | None]:
    """Return the files of a row."""
    found = None if row is None else row.get(FILES, None)
    return {} if found is None else dict(found.data)


def _read(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the answer of the program in the sandbox, or ``None``."""
    if result["status"] != "ok":
        return None
    try:
        answer = json.loads(result["stdout"])
        head, left_out, tail = answer["output"]
        whole = isinstance(answer["files"], dict) and isinstance(answer["exit_code"], int | None)
        whole = whole and answer["ended"] in ("ready", *_ENDS) and left_out >= 0
        return answer if whole and isinstance(head + tail, str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
