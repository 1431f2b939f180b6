"""Task from an environment for verifiers; a Python with that package lists and plays its tasks.

This module does not import verifiers: :mod:`torchrl_llm.envs.libs.adapters.verifiers_program` lists
and plays the tasks in a separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows, Row, read_jsonl
from torchrl_llm.envs.datasets.task_env import TaskEnv, check_split
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.function_reward import as_reward
from torchrl_llm.rewards.reward_parser import RewardParser

_PLAYER = Path(__file__).parents[1] / "libs" / "adapters" / "verifiers_program.py"
_LIST_LIMIT_S = 600


@register("tasks", "verifiers")
class VerifiersEnv(TaskEnv):
    """The tasks of an environment for verifiers, scored by its own rewards.

    A program plays them (``agent=program agent.program=verifiers``), with all features of the
    environment: tools, turns of a user, metrics. Rows have ``query`` (the prompt) and ``task``
    (JSON with everything that the program needs).

    Args:
        id: id of the environment in verifiers: the name of an installed package.
        args: its configuration, with the keys below ``env`` in verifiers' files: ``taskset``, or
            ``agent`` with ``max_turns``.
        eval_args: configuration of the held-out tasks; if not given, the last tenth of the tasks is
            held out.
        num_rows: number of tasks to use, from the first on; all if not given. It is required if the
            environment has endless tasks.
        python: the Python that has verifiers and the environment; this one if not given.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Raises:
        ConfigError: no environment is named, or it cannot be loaded or has too few tasks.

    Example:
        >>> VerifiersEnv(id="no-such-environment")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: the tasks of 'no-such-environment' cannot be listed ...
    """

    COLUMNS = ("query", "task")
    PROGRAM = f"{_PLAYER}:run"

    def __init__(
        self,
        *,
        id: str = "",
        args: Mapping[str, Any] | None = None,
        eval_args: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
        python: str | None = None,
        **kwargs: Any,
    ) -> None:
        settings = {"id": id, "args": args, "eval_args": eval_args}
        self.settings = {**settings, "num_rows": num_rows, "python": python}
        super().__init__(**kwargs)

    @classmethod
    def generate(
        cls,
        split: str,
        id: str = "",
        args: Mapping[str, Any] | None = None,
        eval_args: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
        python: str | None = None,
    ) -> GeneratedRows:
        """The tasks of a split."""
        check_split(split)
        if not id:
            raise ConfigError("env=verifiers needs the name of an environment: env.options.id=NAME")
        held_out = split == "test"
        chosen = eval_args if held_out and eval_args is not None else args
        request = {"name": id, "arguments": dict(chosen or {}), "num_rows": num_rows}
        rows = _listed(json.dumps(request), id, python or sys.executable)
        if eval_args is not None:
            return GeneratedRows(lambda index: rows[index], len(rows))
        num_held_out = max(1, len(rows) // 10)
        if len(rows) < 2:
            raise ConfigError(f"{id!r} has {len(rows)} tasks, so that none can be held out")
        start = len(rows) - num_held_out
        count = num_held_out if held_out else start
        return GeneratedRows(lambda index: rows[index], count, offset=start if held_out else 0)

    def make_reward(self) -> RewardParser:
        """A reward that raises: without a program there are no rewards."""
        return as_reward(_refuse)


def _refuse(response: str) -> float:
    raise ConfigError(
        "an environment for verifiers scores its own rollouts: set agent=program "
        "agent.program=verifiers agent.python=... (a Python with verifiers)"
    )


@cache
def _listed(request: str, name: str, python: str) -> list[Row]:
    """The tasks of an environment as rows."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "rows.jsonl")
        words = [python, str(_PLAYER), request, str(target)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_LIST_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"the tasks of {name!r} cannot be listed: {error}") from error
        if done.returncode:
            raise ConfigError(
                f"the tasks of {name!r} cannot be listed by {python} (env.options.python must name "
                f"a Python with verifiers and the environment): {done.stderr.strip()[-800:]}"
            )
        return read_jsonl(target)
