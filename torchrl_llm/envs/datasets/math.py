"""MATH: competition problems with an answer in LaTeX (arXiv:2103.03874)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import DataError
from torchrl_llm.rewards.math import MATHRewardParser, last_boxed


@register("tasks", "math")
class MATHEnv(TaskEnv):
    r"""Competition mathematics, scored by whether the answer block is the same mathematics.

    Rows have ``query`` (the problem), ``answer`` (in LaTeX), ``solution`` (the worked text, empty
    where the data has none), ``level`` and ``subject``, all strings.

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads JSON-lines files with
            the column ``problem`` and either ``answer`` or ``solution``, whose last ``\boxed{}`` is
            then the answer (MATH, MATH-500 and what is written like them); without it the hub's
            ``DigitalLearningGmbH/MATH-lighteval`` is loaded, split ``train`` or ``test``.

    Raises:
        MissingExtraError: ``math-verify`` is not installed, and rewards are computed.

    Example:
        >>> rows = [{"problem": "Half of $1$?", "solution": r"It is $\boxed{\frac{1}{2}}$."}]
        >>> td = MATHEnv(dataset=rows).reset()
        >>> print(td["query"][0], td["answer"][0])
        Half of $1$? \frac{1}{2}
    """

    DATASET = "DigitalLearningGmbH/MATH-lighteval"
    NAME = "default"
    COLUMNS = ("problem",)
    SYSTEM_PROMPT = (
        "Solve the problem. Think step by step between <think> and </think>, then give the final "
        "answer in LaTeX, and nothing else, between <answer> and </answer>."
    )

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data set's columns as ``query``, ``answer``, ``solution``, ``level``, ``subject``."""
        problem, solution = row["problem"], row.get("solution") or ""
        answer = row.get("answer")
        if not isinstance(problem, str) or not isinstance(solution, str):
            raise DataError(f"problem and solution must be strings, got {problem!r}, {solution!r}")
        if answer is None:
            answer = last_boxed(solution)
        if not isinstance(answer, (str, int, float)) or not str(answer).strip():
            raise DataError(
                "a row needs an answer, or a solution with a \\boxed{} answer, got "
                f"answer={answer!r}, solution={solution[-200:]!r}"
            )
        return {
            "query": problem,
            "answer": str(answer).strip(),
            "solution": solution,
            "level": str(row.get("level", "")),
            "subject": str(row.get("subject") or row.get("type") or ""),
        }

    def make_reward(self) -> MATHRewardParser:
        """See :class:`~torchrl_llm.rewards.MATHRewardParser`."""
        return MATHRewardParser()
