"""Python for models: :class:`PythonTool`, and :class:`PythonInterpreter` for code blocks.

The code always runs in a sandbox (:mod:`torchrl_llm.sandbox`), never in the trainer's process.
:class:`PythonExecutorService` runs the code in sandboxes. It runs in this process, or in a Ray
actor as one service for many environments (:class:`RayPythonExecutor`).
"""

from __future__ import annotations

import functools
import threading
import uuid
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from torchrl._utils import logger

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._ray import ActorOptions, RemoteObject
from torchrl_llm._registry import register
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, TemplateError
from torchrl_llm.sandbox import Limits, Sandbox, SandboxResult, SandboxSession, make_sandbox
from torchrl_llm.tools.code_blocks import CodeBlockParser
from torchrl_llm.tools.tool import Restarted, Tool, ToolKind
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput, ToolResult
from torchrl_llm.tools.tool_transform import ToolTransform

# Time limit of a persistent interpreter, which never ends by itself; each piece of code has its own
# limit.
_SESSION_CPU_S = 3600.0
# Additional time of a call: waiting for a slot in the pool, and ending its processes.
_GRACE_S = 5.0
# For each status of a run: the name of the error, and the text for the model.
_ENDS = {
    "ok": ("", ""),
    "error": ("CodeError", ""),
    "timeout": ("TimeoutError", "The code did not end within {timeout:g} s and was stopped."),
    "cpu": ("CPULimit", "The code used up its CPU time and was stopped."),
    "memory": ("MemoryLimit", "The code used up its memory."),
    "output": ("OutputLimit", "The code wrote too much and was stopped."),
    "killed": ("Killed", "The code was ended by a signal."),
    "sandbox_error": ("SandboxError", "The code could not be run; this is no fault of the code."),
}
_RESTARTED = "The interpreter was started anew: names of earlier code are gone."


class PythonExecutorService(Restarted):
    r"""Runs pieces of Python code in sandboxes, at most ``pool_size`` at a time.

    Args:
        pool_size: number of parallel runs; further runs wait.
        timeout: time limit of a run in seconds.
        sandbox: a sandbox or its kind; by default the strongest sandbox of the machine.
        limits: limits of each run; ``wall_s`` is set to ``timeout``.
        max_sessions: largest number of persistent interpreters. If there are more, the least
            recently used interpreter is ended.

    Raises:
        ConfigError: for an invalid number, or ``limits`` together with a sandbox object.

    Example:
        >>> service = PythonExecutorService(pool_size=2)
        >>> service.execute("print(6 * 7)")["stdout"]
        '42\n'
        >>> service.close()
    """

    _own = ("_free", "_lock", "_sandbox", "_kept", "_crowded_out")

    @checked
    def __init__(
        self,
        pool_size: Annotated[int, Ge(1)] = 32,
        timeout: Annotated[float, Gt(0)] = 10.0,
        *,
        sandbox: Sandbox | str | None = None,
        limits: Limits | None = None,
        max_sessions: Annotated[int, Ge(1)] = 256,
    ) -> None:
        if isinstance(sandbox, Sandbox) and limits is not None:
            raise ConfigError("limits would have no effect: the sandbox has its own")
        self.pool_size, self.timeout, self.max_sessions = pool_size, timeout, max_sessions
        self._given = sandbox if isinstance(sandbox, Sandbox) else None
        self._kind = "auto" if sandbox is None or self._given is not None else sandbox
        limits = self._given.limits if self._given is not None else limits or Limits()
        self.limits = replace(limits, wall_s=timeout)
        self._begin()

    def _begin(self) -> None:
        self._free = threading.BoundedSemaphore(self.pool_size)
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = self._given
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._crowded_out: set[Hashable] = set()

    @property
    def sandbox(self) -> Sandbox:
        """Where code runs."""
        with self._lock:
            if self._sandbox is None:
                self._sandbox = make_sandbox(self._kind, self.limits)
            return self._sandbox

    @property
    def num_sessions(self) -> int:
        """Number of persistent interpreters."""
        return len(self._kept)

    def execute(self, code: str, *, session: Hashable = None) -> dict[str, Any]:
        """Run a piece of code; thread-safe.

        Args:
            code: Python source.
            session: id of the caller's persistent interpreter; ``None`` for a fresh interpreter.

        Returns:
            ``success`` (bool), ``stdout``, ``stderr``, ``returncode`` (``None`` where unknown),
            ``status`` (see :class:`~torchrl_llm.sandbox.SandboxResult`), ``seconds``,
            ``truncated`` (bool), ``restarted`` (bool: the caller's interpreter had ended, and a new
            interpreter was started).
        """
        sandbox = self.sandbox
        with self._free:
            if session is None:
                return _as_dict(sandbox.run_python(code, limits=self.limits))
            kept = self._keep(session)
            with kept.lock:
                restarted = kept.open(sandbox, self.limits) or session in self._crowded_out
                self._crowded_out.discard(session)
                return _as_dict(kept.session.run(code, wall_s=self.timeout), restarted)

    def _keep(self, session: Hashable) -> _Kept:
        with self._lock:
            kept = self._kept.setdefault(session, _Kept())
            self._kept.move_to_end(session)
            crowd = list(self._kept)[: max(0, len(self._kept) - self.max_sessions)]
        for other in crowd:
            self.end_session(other)
            self._crowded_out.add(other)  # the next call reports this to the caller
        return kept

    def end_session(self, session: Hashable) -> None:
        """End the interpreter of a caller.

        Args:
            session: the id that was passed to :meth:`execute`.
        """
        with self._lock:
            kept = self._kept.pop(session, None)
            self._crowded_out.discard(session)
        if kept is not None:
            kept.close()

    def close(self) -> None:
        """End all interpreters; may be called twice, and the object can be used again."""
        for session in [*self._kept, *self._crowded_out]:
            self.end_session(session)
        with self._lock:
            sandbox, self._sandbox = self._sandbox, self._given
        if sandbox is not None and sandbox is not self._given:
            sandbox.close()

    def cleanup(self) -> None:
        """End all interpreters; the same as :meth:`close`."""
        self.close()


class PersistentPythonProcess:
    r"""One interpreter in a sandbox that keeps names between pieces of code.

    Args:
        timeout: time limit of a piece of code in seconds.

    Raises:
        ConfigError: when ``timeout`` is not above 0.

    Example:
        >>> process = PersistentPythonProcess()
        >>> process.execute("x = 2")["success"], process.execute("print(x)")["stdout"]
        (True, '2\n')
        >>> process.cleanup()
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self._service = PythonExecutorService(1, timeout)

    def execute(self, prompt: str) -> dict[str, Any]:
        """Run a piece of code, see :meth:`PythonExecutorService.execute`.

        Args:
            prompt: Python source.
        """
        return self._service.execute(prompt, session="")

    def cleanup(self) -> None:
        """End the interpreter; a later piece of code starts a new one."""
        self._service.close()


class _Kept:
    """The interpreter of one caller, opened at first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: SandboxSession | None = None

    def open(self, sandbox: Sandbox, limits: Limits) -> bool:
        """Open the interpreter, or reopen it if it ended; return whether it had ended."""
        if self.session is not None and self.session.alive:
            return False
        ended, self.session = self.session, None
        if ended is not None:
            ended.close()
        cpu_s = _SESSION_CPU_S if limits.cpu_s is None else limits.cpu_s
        self.session = sandbox.open_session(replace(limits, cpu_s=cpu_s))
        return ended is not None

    def close(self) -> None:
        """End the interpreter, even while code runs."""
        if self.session is not None:
            self.session.close()


def _as_dict(result: SandboxResult, restarted: bool = False) -> dict[str, Any]:
    return {
        "success": result.ok,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "returncode": result.exit_code,
        "status": result.status,
        "seconds": result.seconds,
        "truncated": result.stdout_truncated or result.stderr_truncated,
        "restarted": restarted,
    }


class RayPythonExecutor:
    """The service in a Ray actor, which all environments of a cluster share.

    The first object with a name starts the actor; later objects with this name use the same actor.
    The actor ends with Ray, or when no reference is left.

    Args:
        name: name of the actor.
        namespace: Ray namespace; by default the namespace of this job.
        pool_size: see :class:`PythonExecutorService`; an existing actor keeps its own value.
        timeout: see :class:`PythonExecutorService`; an existing actor keeps its own value.
        num_cpus: CPUs that the actor reserves.

    Raises:
        MissingExtraError: when Ray is not installed.
        ResourceError: when Ray is not running, or lacks the resources.
    """

    def __init__(
        self,
        name: str = "python_executor",
        *,
        namespace: str | None = None,
        pool_size: int = 32,
        timeout: float = 10.0,
        num_cpus: float = 1.0,
    ) -> None:
        self.timeout = timeout
        self._remote = RemoteObject(
            functools.partial(PythonExecutorService, pool_size, timeout),
            ActorOptions(
                name=name, namespace=namespace, max_concurrency=4 * pool_size, num_cpus=num_cpus
            ),
            what=f"the Python executor {name!r}",
        )

    def execute(self, code: str, *, session: Hashable = None) -> dict[str, Any]:
        """See :meth:`PythonExecutorService.execute`.

        Args:
            code: Python source.
            session: the caller whose interpreter is kept.

        Raises:
            WorkerError: when the actor died or did not answer.
        """
        return self._remote.call("execute", code, session=session)

    def end_session(self, session: Hashable) -> None:
        """See :meth:`PythonExecutorService.end_session`; does not wait until it has ended.

        Args:
            session: the id that was passed to :meth:`execute`.
        """
        self._remote.submit("end_session", session)

    def close(self) -> None:
        """Do nothing: other processes may use the actor."""


@register("tools", "python")
class PythonTool(Restarted, Tool):
    r"""Runs Python code in a sandbox and returns its output.

    Args:
        persistent: keep one interpreter per conversation, so that names persist between calls;
            otherwise each call gets a fresh interpreter.
        timeout: time limit of the code in seconds.
        executor: runs the code; by default a new :class:`PythonExecutorService`.
        sandbox: see :class:`PythonExecutorService`.
        limits: limits of each run, see :class:`PythonExecutorService`.
        kind: see :class:`~torchrl_llm.tools.tool.Tool`.
        name: name of the tool for the model.

    Raises:
        ConfigError: when ``executor`` is given together with ``sandbox`` or ``limits``.

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

    _own = ("_owner", "_sessions")

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
        # Code waits until the service has a free slot.
        shared = isinstance(executor, RayPythonExecutor)
        self.timeout = executor.timeout * (3 if shared else 1) + _GRACE_S
        self.kind, self.name = kind, name
        if persistent:
            kept = "Names are kept from one call to the next."
            self.description = f"{self.description} {kept}"
        self._begin()

    def _begin(self) -> None:
        # Needed because other processes may use the same conversation numbers with the same
        # service.
        self._owner = uuid.uuid4().hex
        self._sessions: set[int | None] = set()

    def run(self, call: ToolCall) -> ToolOutput:
        """Run the code; every outcome is returned as a result."""
        session = None
        if self.stateful:
            session = (self._owner, call.session)
            self._sessions.add(call.session)
        result = self.executor.execute(call.args["code"], session=session)
        return ToolOutput(
            self._text(result),
            _ENDS[result["status"]][0],
            exit_code=result["returncode"],
            truncated=result["truncated"],
        )

    def _text(self, result: Mapping[str, Any]) -> str:
        status, errors = result["status"], result["stderr"]
        if status == "sandbox_error":
            # The message is about the machine, so it is not useful to the model.
            logger.warning("the sandbox failed: %s", errors)
            errors = ""
        parts = [result["stdout"], errors]
        if result["truncated"]:
            parts.append("[the output was cut]")
        parts.append(_ENDS[status][1].format(timeout=self.code_timeout))
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
        """End all interpreters of this tool, but no others of a shared service."""
        for session in list(self._sessions):
            self.end_session(session)
        self.executor.close()


class PythonInterpreter(ToolTransform):
    r"""Runs the Python code blocks of the model's turn, and answers each block with a message.

    Blocks are fenced and labelled ``python``, ``py`` or similar (see ``python_blocks``); a turn
    without blocks is left unchanged. The answer to a block contains its number, its status and its
    output.

    Args:
        tokenizer: if given, the constructor checks that its chat template can express messages of
            role ``tool_name``.
        tool_name: role of the appended messages.
        persistent: keep one interpreter per conversation, so that names persist between blocks and
            turns; it ends with the conversation. Otherwise each block gets a fresh interpreter, and
            the blocks of a turn run in parallel.
        timeout: time limit of a block in seconds.
        services: ``"ray"`` runs the code in one service for the whole cluster; ``None`` runs it in
            this process's service.
        service_name: name of the Ray service.
        namespace: Ray namespace of the service.
        sandbox: a sandbox or its kind; by default the strongest sandbox of the machine. Cannot be
            combined with ``services``.
        limits: limits of each run, see :class:`~torchrl_llm.sandbox.Limits`.
        kind: ``"action"`` if running code is the model's action in a step.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.

    Raises:
        ConfigError: for an unknown service, or settings that would have no effect.
        TemplateError: when the tokenizer's template drops or rejects the output of code.

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

    @checked
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
        self.tokenizer, self.persistent, self.services = tokenizer, persistent, services
        self.service_name, self.namespace = service_name, namespace

    @property
    def timeout(self) -> float:
        """Time limit of a block in seconds."""
        return next(iter(self.tools.values())).code_timeout

    def result_messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """Return the answers to the code blocks, one per block.

        Args:
            results: results in the order of the blocks.
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
