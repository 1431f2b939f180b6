"""Python for a model: :class:`PythonTool`, and :class:`PythonInterpreter` for code blocks.

The code runs in a sandbox, never in the trainer's process:
:mod:`torchrl_llm.tools.python_service` brings it there.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torchrl._utils import logger

from torchrl_llm._registry import register
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, TemplateError
from torchrl_llm.sandbox import Limits, Sandbox
from torchrl_llm.tools.code_blocks import CodeBlockParser
from torchrl_llm.tools.python_service import (
    PythonExecutorService,
    RayPythonExecutor,
)
from torchrl_llm.tools.tool import Tool, ToolKind
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput, ToolResult
from torchrl_llm.tools.tool_transform import ToolTransform

# What a call may take beyond the limit of the code: a place in the pool, the end of its processes.
_GRACE_S = 5.0
_ERRORS = {
    "ok": "",
    "error": "CodeError",
    "timeout": "TimeoutError",
    "cpu": "CPULimit",
    "memory": "MemoryLimit",
    "output": "OutputLimit",
    "killed": "Killed",
    "sandbox_error": "SandboxError",
}
_ENDED = {
    "timeout": "The code did not end within {timeout:g} s and was stopped.",
    "cpu": "The code used up its CPU time and was stopped.",
    "memory": "The code used up its memory.",
    "output": "The code wrote too much and was stopped.",
    "killed": "The code was ended by a signal.",
    "sandbox_error": "The code could not be run; this is no fault of the code.",
}
_RESTARTED = "The interpreter was started anew: names of earlier code are gone."


@register("tools", "python")
class PythonTool(Tool):
    r"""Runs Python code in a sandbox and says what it printed.

    Args:
        persistent: keep one interpreter a conversation, so that names live from call to call; else
            each call gets a fresh one.
        timeout: seconds that the code may take.
        executor: who runs it; a :class:`PythonExecutorService` of its own by default.
        sandbox: where the code runs, see :class:`PythonExecutorService`.
        limits: of each run, see :class:`PythonExecutorService`.
        kind: see :class:`~torchrl_llm.tools.tool.Tool`.
        name: what the model calls it.

    Raises:
        ConfigError: ``executor`` together with ``sandbox`` or ``limits``.

    Example:
        >>> tool = PythonTool()
        >>> tool.run(ToolCall("python", {"code": "print(1 + 1)"})).content
        '2\n'
        >>> tool.close()
    """

    description = "Runs Python code and returns what it prints."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source"}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        *,
        persistent: bool = False,
        timeout: float = 10.0,
        executor: PythonExecutorService | RayPythonExecutor | None = None,
        sandbox: Sandbox | str | None = None,
        limits: Limits | None = None,
        kind: ToolKind = "auxiliary",
        name: str = "python",
    ) -> None:
        if executor is not None and (sandbox is not None or limits is not None):
            raise ConfigError(
                "sandbox and limits have no effect on a given executor; set them there"
            )
        if executor is None:
            executor = PythonExecutorService(64, timeout, sandbox=sandbox, limits=limits)
        self.executor, self.code_timeout = executor, executor.timeout
        self.stateful = persistent
        # Code for which a service has no place yet waits.
        shared = isinstance(executor, RayPythonExecutor)
        self.timeout = executor.timeout * (3 if shared else 1) + _GRACE_S
        self.kind, self.name = kind, name
        if persistent:
            kept = "Names are kept from one call to the next."
            self.description = f"{self.description} {kept}"
        # Others may have conversations of the same number with the same service.
        self._owner = uuid.uuid4().hex
        self._sessions: set[int | None] = set()

    def run(self, call: ToolCall) -> ToolOutput:
        """Run the code; whatever comes of it is a result."""
        session = None
        if self.stateful:
            session = (self._owner, call.session)
            self._sessions.add(call.session)
        result = self.executor.execute(call.args["code"], session=session)
        return ToolOutput(
            self._text(result),
            _ERRORS[result["status"]],
            exit_code=result["returncode"],
            truncated=result["truncated"],
        )

    def _text(self, result: Mapping[str, Any]) -> str:
        status, errors = result["status"], result["stderr"]
        if status == "sandbox_error":
            # It is about the machine, and none of the model's business.
            logger.warning("the sandbox failed: %s", errors)
            errors = ""
        parts = [result["stdout"], errors]
        if result["truncated"]:
            parts.append("[the output was cut]")
        if status in _ENDED:
            parts.append(_ENDED[status].format(timeout=self.code_timeout))
        if result["restarted"]:
            parts.append(_RESTARTED)
        lines = [part if part.endswith("\n") else f"{part}\n" for part in parts if part]
        return "".join(lines)

    def end_session(self, session: int) -> None:
        """End the interpreter of a conversation."""
        if self.stateful:
            self._sessions.discard(session)
            self.executor.end_session((self._owner, session))

    def close(self) -> None:
        """End all interpreters; those of others in a shared service stay."""
        for session in list(self._sessions):
            self.end_session(session)
        self.executor.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner, self._sessions = uuid.uuid4().hex, set()


class PythonInterpreter(ToolTransform):
    r"""Runs the Python code blocks of the model's turn; each is answered by a message.

    The blocks are those in fences that are labelled ``python``, ``py`` and the like (see
    :func:`~torchrl_llm.tools.call_parsers.python_blocks`); a turn without any is
    left as it is. The answer to a block is its number, whether it ran, and what it printed.

    Args:
        tokenizer: with one, it is checked at once that its chat template writes messages of role
            ``tool_name``.
        tool_name: role of the appended messages.
        persistent: keep one interpreter a conversation, so that names live from block to block and
            from turn to turn; it ends when the conversation does. Else each block gets a fresh one,
            and those of one turn run at the same time.
        timeout: seconds that a block may take.
        services: ``"ray"`` runs the code in one service for the whole cluster; ``None`` here.
        service_name: name of that service.
        namespace: Ray namespace of that service.
        sandbox: where the code runs, or the name of a kind of sandbox; the strongest that the
            machine has by default. Not with ``services``.
        limits: of each run, see :class:`~torchrl_llm.sandbox.Limits`.
        kind: ``"action"`` where running code is what the model does in a step.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.

    Raises:
        ConfigError: an unknown service, or settings that would have no effect.
        TemplateError: the tokenizer's template drops or refuses what the code printed.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.history import History
        >>> from torchrl_llm.envs import ChatEnv
        >>> env = ChatEnv(batch_size=(1,)).append_transform(PythonInterpreter())
        >>> td = env.reset(TensorDict({"query": ["What is 6 times 7?"]}, batch_size=(1,)))
        >>> turn = {"role": "assistant", "content": "```python\nprint(6 * 7)\n```"}
        >>> td["history"].full = History.of([td["history"].prompt.chats[0] + [turn]])
        >>> print(env.step(td)["next", "history"].prompt[0, -1].content)
        Code block 1 executed successfully:
        42
        <BLANKLINE>
        >>> env.close()
    """

    def __init__(
        self,
        tokenizer: Any = None,
        tool_name: str = "tool",
        persistent: bool = False,
        timeout: float = 10.0,
        services: Literal["ray"] | None = None,
        service_name: str = "python_executor",
        namespace: str | None = None,
        *,
        sandbox: Sandbox | str | None = None,
        limits: Limits | None = None,
        kind: ToolKind = "auxiliary",
        **kwargs: Any,
    ) -> None:
        if services not in (None, "ray"):
            raise ConfigError(f'services must be None or "ray", got {services!r}')
        if services is None and (service_name, namespace) != ("python_executor", None):
            raise ConfigError('service_name and namespace have no effect without services="ray"')
        if tokenizer is not None:
            _check_role(tokenizer, tool_name)
        executor = None
        if services is not None:
            executor = RayPythonExecutor(service_name, namespace=namespace, timeout=timeout)
        tool = PythonTool(
            persistent=persistent,
            timeout=timeout,
            executor=executor,
            sandbox=sandbox,
            limits=limits,
            kind=kind,
        )
        parser = CodeBlockParser(tool.name)
        super().__init__([tool], parser, tool_name=tool_name, timeout=tool.timeout, **kwargs)

    def result_messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """The answers to the code blocks, one for each.

        Args:
            results: in the order of the blocks.
        """
        return [
            {"role": self.tool_name, "content": _answer(result), "name": result.call.tool}
            for result in results
        ]


def _answer(result: ToolResult) -> str:
    if result.error in ("TooManyCalls", "CutResponse"):  # nothing was run
        return result.content
    how = "executed successfully" if result.ok else "failed"
    return f"Code block {result.call.tag} {how}:\n{result.content}"


def _check_role(tokenizer: Any, role: str) -> None:
    chat = [
        {"role": "user", "content": "A question?"},
        {"role": "assistant", "content": "A block of code."},
        {"role": role, "content": "what-it-printed"},
    ]
    try:
        written = "what-it-printed" in ChatFormatter(tokenizer).render(chat)
        problem = "drops it"
    except TemplateError as error:
        written, problem = False, str(error)
    if not written:
        raise TemplateError(
            f"what code prints comes as a message of role {role!r}, and the chat template cannot "
            f"write it: {problem}; choose another tool_name ('user' is written by all) or template"
        )
