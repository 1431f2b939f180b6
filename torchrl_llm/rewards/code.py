"""Rewards for code: run the model's program against tests in a sandbox.

The code never runs in this process. The tests run in a different process from the code
(``torchrl_llm.rewards.code_judge``), so the code cannot change this process or the tests. A
:class:`CodeResult` records every error that the code causes as a failure of the code. A failure of
the sandbox makes the reward invalid.

Next: :class:`torchrl_llm.envs.datasets.hub_tasks.HumanEvalEnv` is a task with this reward.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache, lru_cache
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Literal, NamedTuple

from tensordict import TensorDictBase

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm.errors import DataError, RewardError
from torchrl_llm.rewards import code_judge
from torchrl_llm.rewards.reward_parser import RewardParser, extract_block, needed_column
from torchrl_llm.rewards.reward_scorer import RewardScore
from torchrl_llm.sandbox.interface import MEMORY_BYTES, Limits, Sandbox, SandboxResult
from torchrl_llm.tools.code_blocks import python_blocks

CompileStatus = Literal["success", "syntax", "import", "timeout", "unknown", "not_run"]
RunStatus = Literal[
    "success", "wrong", "runtime", "timeout", "memory", "killed", "not_run", "sandbox_error"
]
_BARE_BLOCK = re.compile(r"^[ \t]*(```|~~~)[ \t]*\n(.*?)^[ \t]*\1[ \t]*$", re.M | re.S)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[ \t]*$", re.M)
# Results that may be different in a repeated run are not cached.
_LASTING = ("success", "wrong", "runtime", "not_run")


class CodeProblem(NamedTuple):
    """A function to write, with its tests.

    Attributes:
        entry_point: name of the function.
        tests: Python source that defines ``check(function)``, or that calls the function by its
            name. Each statement that contains an ``assert`` is a case.
        prelude: Python source that the code and the tests may use (imports, other functions).
    """

    entry_point: str
    tests: str
    prelude: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> CodeProblem:
        """Read the problem in a row with these names or HumanEval's (``test``, ``prompt``).

        Raises:
            DataError: when a name is missing or not a string, or when there is no test.

        Example:
            >>> row = {"entry_point": "f", "tests": "assert f(1) == 2"}
            >>> CodeProblem.of(row).num_cases
            1
        """
        prelude = row.get("prelude", row.get("prompt", ""))
        problem = cls(row.get("entry_point"), row.get("tests", row.get("test")), prelude)
        if not all(isinstance(text, str) for text in problem):
            raise DataError(
                "a problem of code needs the strings 'entry_point' and 'tests', and 'prelude' "
                f"if any; got {sorted(row)}"
            )
        if not problem.num_cases:
            raise DataError(f"the tests of {problem.entry_point!r} assert nothing")
        return problem

    @property
    def num_cases(self) -> int:
        """Number of cases in the tests."""
        return _cases(self.tests)[1]


class CodeResult(NamedTuple):
    """Result of running a program.

    Attributes:
        compile_status: result of compiling and loading the program: ``success``, ``syntax``,
            ``import`` (a missing module), ``timeout``, ``unknown`` (the program raised, exited, or
            lacks the function), ``not_run`` (there was no code).
        run_status: the first failure: ``wrong`` (an assertion), ``runtime`` (the program raised or
            exited), ``timeout``, ``memory``, ``killed``, ``not_run`` (nothing was run), or
            ``sandbox_error`` (not a failure of the program); otherwise ``success``.
        passed: number of cases that passed; cases that were not run count as failed.
        total: number of cases.
        message: message of the first failure.
        seconds: wall-clock time of the sandbox.
    """

    compile_status: CompileStatus
    run_status: RunStatus
    passed: int = 0
    total: int = 0
    message: str = ""
    seconds: float = 0.0

    @property
    def all_passed(self) -> bool:
        """Whether there are cases and all of them passed."""
        return 0 < self.total == self.passed and self.run_status == "success"


@lru_cache(maxsize=4096)
def _cases(tests: str) -> tuple[str, int]:
    """Change the tests so that they report each case; also return the number of cases."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"the tests are no Python: {error}") from error
    owner: ast.Module | ast.FunctionDef = tree
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            owner = node
    body: list[ast.stmt] = []
    count = 0
    for statement in owner.body:
        if not _asserts(statement):
            body.append(statement)
            continue
        # Names that no test uses, so that a case may define any other name.
        wrapped = ast.parse(
            "try:\n    pass\nexcept BaseException as __error__:\n"
            f"    __case__({count}, __error__)\nelse:\n    __case__({count}, None)"
        ).body[0]
        wrapped.body = [statement]
        body.append(wrapped)
        count += 1
    owner.body = body or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree)), count


def _asserts(statement: ast.stmt) -> bool:
    """Whether a statement asserts something that could fail."""
    return any(
        isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)
        for node in ast.walk(statement)
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    )


def extract_code(response: str, entry_point: str) -> str | None:
    r"""Extract the Python code of a response.

    Text before ``</think>`` is ignored. If there is an ``<answer>`` block, only its contents are
    searched. Among several Python blocks, the last block that defines the function is used; if none
    defines it, the last block is used. Without Python blocks, the same rule applies to blocks
    without a language. Without any block, the whole text is the code. If the text has a single
    unmatched fence, only the part before or after it is the code.

    Args:
        response: what the model wrote.
        entry_point: name of the requested function.

    Returns:
        The code; ``None`` if there is only white space.

    Example:
        >>> extract_code("Sure!\n```python\ndef f():\n    return 1\n```", "f")
        'def f():\n    return 1'
    """
    answer = response.rpartition("</think>")[2]
    answer = extract_block(answer, "answer") or answer
    blocks = python_blocks(answer) or [found[2] for found in _BARE_BLOCK.finditer(answer)]
    if not blocks and (fence := _FENCE.search(answer)):
        # The prompt may have opened the block, or the response was cut before its end.
        before, behind = answer[: fence.start()], answer[fence.end() :]
        begins = defines(before, entry_point) or before.lstrip("\n")[:1].isspace()
        blocks = [part for part in [before if begins else behind] if part.strip()]
    defining = [code for code in blocks if defines(code, entry_point)]
    code = (defining or blocks or [answer])[-1]
    return code if code.strip() else None


def defines(code: str, name: str) -> bool:
    """Whether Python source appears to define a name at its top level.

    Args:
        code: source; it is not parsed, because it may be hostile.
        name: name of a function or class.
    """
    name = re.escape(name)
    return bool(re.search(rf"^(?:(?:async )?def {name}\b|{name} *=|class {name}\b)", code, re.M))


@cache
def _judge_source() -> str:
    return Path(code_judge.__file__).read_text(encoding="utf-8")


class CodeRunner:
    r"""Runs programs against tests, several at once, and caches the results.

    The cache keys are the code and the tests. Results with an exceeded time or memory limit, a
    killed process or a failure of the sandbox are not cached. If several threads request the same
    result at the same time, the program runs once.

    Args:
        sandbox: where programs run; by default the strongest sandbox of the machine.
        timeout_s: time limit in seconds for loading a program and running all its cases.
        memory_bytes: address space of each process of a program.
        cache_size: number of cached results; 0 for no cache.

    Raises:
        ConfigError: for a limit that is not above zero.

    Example:
        >>> problem = CodeProblem("double", "assert double(2) == 4")
        >>> CodeRunner().run("def double(x):\n    return 2 * x", problem).all_passed
        True
    """

    @checked
    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        timeout_s: Annotated[float, Gt(0, finite=True)] = 10.0,
        memory_bytes: Annotated[int, Ge(1)] = MEMORY_BYTES,
        cache_size: Annotated[int, Ge(0)] = 4096,
    ) -> None:
        self.timeout_s = timeout_s
        # One second longer, so that the judge ends first and reports the progress of the program.
        self.limits = Limits(wall_s=timeout_s + 1.0, memory_bytes=memory_bytes)
        self.cache_size = cache_size
        self._sandbox = sandbox
        self._clear()

    def _clear(self) -> None:
        self._known: OrderedDict[bytes, Future[CodeResult]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Locks and results are not copied.
        return {k: v for k, v in self.__dict__.items() if k not in ("_known", "_lock")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeRunner:
        # Sandboxes keep no state of a program, so copies share one sandbox.
        other = copy.copy(self)
        memo[id(self)] = other
        return other

    @property
    def sandbox(self) -> Sandbox:
        """Where programs run; created at first use."""
        with self._lock:
            if self._sandbox is None:
                from torchrl_llm.sandbox import make_sandbox

                self._sandbox = make_sandbox()
            return self._sandbox

    def run(
        self, code: str | Sequence[str], problem: CodeProblem, *, stop_early: bool = True
    ) -> CodeResult:
        """Run a program against the tests of a problem.

        Thread-safe.

        Args:
            code: the program, or several candidates; the first candidate that compiles is used.
            problem: the function to write, with tests.
            stop_early: stop at the first case that fails.

        Returns:
            The result.

        Raises:
            RewardError: when the sandbox failed, or the problem has no case.
        """
        if not problem.num_cases:
            raise RewardError(f"the tests of {problem.entry_point!r} assert nothing")
        sources = [code] if isinstance(code, str) else list(code)
        job = {**problem._asdict(), "sources": sources, "stop_early": stop_early}
        job |= {"tests": _cases(problem.tests)[0], "timeout_s": self.timeout_s}
        key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).digest()
        with self._lock:
            known = self._known.get(key)
            mine: Future[CodeResult] = Future()
            if known is not None:
                self._known.move_to_end(key)
            elif self.cache_size:
                self._known[key] = mine
                while len(self._known) > self.cache_size:
                    self._known.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            result = self._run(job, problem.num_cases)
        except BaseException as error:
            self._forget(key, mine)
            mine.set_exception(error)
            raise
        if result.run_status not in _LASTING or result.compile_status == "timeout":
            self._forget(key, mine)
        mine.set_result(result)
        return result

    def _forget(self, key: bytes, mine: Future[CodeResult]) -> None:
        with self._lock:
            if self._known.get(key) is mine:
                del self._known[key]

    def _run(self, job: dict[str, Any], total: int) -> CodeResult:
        secret = secrets.token_hex(16)
        sandboxed = self.sandbox.run_python(
            _judge_source(), stdin=json.dumps({**job, "secret": secret}), limits=self.limits
        )
        said: dict[str, Any] = {}
        for line in sandboxed.stdout.split("\n"):
            if line.startswith(secret):
                said |= json.loads(line.removeprefix(secret))
        if sandboxed.status == "sandbox_error" or "ready" not in said:
            reason = sandboxed.stderr.strip()[-500:] or sandboxed.status
            raise RewardError(f"the sandbox failed ({sandboxed.status}): {reason}")
        passed = said.get("passed", 0)
        if "run" not in said:
            return _without_verdict(sandboxed, passed, total)
        return CodeResult(
            said["compile"], said["run"], passed, total, said["message"], sandboxed.seconds
        )


def _without_verdict(sandboxed: SandboxResult, passed: int, total: int) -> CodeResult:
    """Return a failure, for a program that ended its judge or kept it from ending."""
    ends: dict[str, RunStatus] = {"timeout": "timeout", "cpu": "timeout", "memory": "memory"}
    status = ends.get(sandboxed.status, "killed")
    message = f"the tests were ended before the last case ({sandboxed.status})"
    return CodeResult("unknown", status, passed, total, message, sandboxed.seconds)


class CodeRewardParser(RewardParser):
    """The reward of a function: whether all tests pass.

    A row's ``answer`` is a mapping that :meth:`CodeProblem.of` reads. Missing code and code that
    cannot be loaded get ``compile_failure_reward``. A program that fails a case gets 0, unless
    ``partial_credit`` rewards the other cases.

    Args:
        tokenizer: see :class:`~torchrl_llm.rewards.RewardParser`.
        runner: runs the programs; by default a runner with default limits in ``make_sandbox()``.
        partial_credit: the reward is the fraction of the cases that pass, and all cases are run.
            Without it, the run stops at the first failure.
        correct_reward: reward if all cases pass.
        compile_failure_reward: reward if there is no code or it cannot be loaded.
        timeout_reward: reward if the time limit was exceeded and no case earned partial credit.
        num_threads: number of programs that run at the same time.
        kwargs: further arguments of :class:`~torchrl_llm.rewards.RewardParser`.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        runner: CodeRunner | None = None,
        partial_credit: bool = False,
        correct_reward: float = 1.0,
        compile_failure_reward: float = -0.1,
        timeout_reward: float = 0.0,
        num_threads: int = 16,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_threads=num_threads, **kwargs)
        self.runner = CodeRunner() if runner is None else runner
        self.partial_credit = partial_credit
        self.correct_reward = correct_reward
        self.compile_failure_reward = compile_failure_reward
        self.timeout_reward = timeout_reward

    def sources(self, code: str, problem: CodeProblem) -> list[str]:
        """Return candidates for the code, best first; by default only the code itself."""
        return [code]

    def judge(self, response: str, answer: Any) -> CodeResult:
        """Run the code in a response.

        Args:
            response: what the model wrote.
            answer: the row's answer.

        Raises:
            RewardError: when the sandbox failed.
            DataError: when the answer is not a code problem.
        """
        if not isinstance(answer, Mapping):
            raise DataError(f"the answer of a row with code is a mapping, got {answer!r}")
        problem = CodeProblem.of(answer)
        code = extract_code(response, problem.entry_point)
        if code is None:
            return CodeResult("not_run", "not_run", 0, problem.num_cases, "no code")
        stop_early = not self.partial_credit
        return self.runner.run(self.sources(code, problem), problem, stop_early=stop_early)

    def score(self, response: str, answer: Any) -> RewardScore:
        """See :class:`CodeRewardParser`."""
        result = self.judge(response, answer)
        if result.all_passed:
            reward = self.correct_reward
        elif self.partial_credit and result.passed:
            reward = self.correct_reward * result.passed / result.total
        elif "timeout" in (result.compile_status, result.run_status):
            reward = self.timeout_reward
        elif result.compile_status in ("success", "unknown") and result.run_status != "not_run":
            reward = 0.0
        else:
            reward = self.compile_failure_reward
        has_code = result.compile_status != "not_run"
        return RewardScore(reward, result.all_passed, has_code, "</think>" in response)


_CODE_LINE = re.compile(r"^(?:import |from \w|def |async def |class |@)", re.MULTILINE)


class HumanEvalRewardParser(CodeRewardParser):
    """Runs a function, or the continuation of the prompt's function, against HumanEval's tests.

    A response may contain the whole function, in a fenced block or as plain text. It may also
    continue the prompt, as a model without a chat template does. If a continuation does not
    compile, the text after the body is removed. If a plain function does not compile, the words
    before and after it are removed.

    Args:
        kwargs: see :class:`~torchrl_llm.rewards.code.CodeRewardParser`.
    """

    def sources(self, code: str, problem: CodeProblem) -> list[str]:
        """The code itself if it defines the function, otherwise the prompt followed by the code."""
        if defines(code, problem.entry_point):
            return [code, *_without_words(code, problem.entry_point)]
        body = code.lstrip("\n")
        bodies = [body]
        if not body[:1].isspace():
            # Decoding removes the indentation of the first line; a fenced block removes the
            # indentation of all lines.
            bodies = ["    " + body, indent(body, "    ")]
        return [problem.prelude + each for each in (*bodies, _first_part(bodies[0]))]


def _without_words(code: str, name: str) -> list[str]:
    """Return the code from its first code-like line, and this code up to the end of a function."""
    begin = _CODE_LINE.search(code)
    if begin is None:
        return []
    code = code[begin.start() :]
    function = re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE)
    if function is None:
        return [code]
    return [code, code[: function.start()] + _first_part(code[function.start() :])]


def _first_part(body: str) -> str:
    """Return the text before the next line without indentation."""
    lines = body.split("\n")
    end = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
    return "\n".join(lines[:end])


_FROM_FILES = """
import pathlib, sys
for path, text in {files!r}.items():
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_bytes(text.encode())
sys.path.insert(0, str(pathlib.Path.cwd()))
from {module} import {entry_point}
"""


class FilesRewardParser(CodeRewardParser):
    """Tests a function in the row's files, as they are after the last shell command.

    The reward ignores the text of the model and reads the column ``files``
    (:class:`~torchrl_llm.tools.shell.ShellTransform`). A row's ``answer`` has the same keys as for
    a :class:`CodeRewardParser`, plus the ``module`` that contains the function.

    Args:
        compile_failure_reward: reward if the function cannot be loaded.
        kwargs: further arguments of :class:`CodeRewardParser`.

    Example:
        >>> answer = {"module": "a", "entry_point": "one", "tests": "assert one() == 1"}
        >>> files = {"a.py": "from b import one", "b.py": "def one(): return 1"}
        >>> FilesRewardParser().score(json.dumps(files), answer).reward
        1.0
    """

    def __init__(self, *, compile_failure_reward: float = 0.0, **kwargs: Any) -> None:
        super().__init__(compile_failure_reward=compile_failure_reward, **kwargs)

    def _responses(self, td: TensorDictBase) -> list[str | Exception]:
        return [json.dumps(dict(files)) for files in needed_column(td, "files")]

    def judge(self, response: str, answer: Any) -> CodeResult:
        """Run the function in the files.

        Args:
            response: a JSON object that maps each path to the file's text; ``null`` for a missing
                file.
            answer: the row's answer.

        Raises:
            RewardError: when the sandbox failed.
            DataError: when the answer is not a code problem.
        """
        problem = CodeProblem.of(answer)
        files = {path: text for path, text in json.loads(response).items() if text is not None}
        names = {"module": answer["module"], "entry_point": problem.entry_point}
        source = _FROM_FILES.format(files=files, **names)
        return self.runner.run(source, problem, stop_early=not self.partial_credit)
