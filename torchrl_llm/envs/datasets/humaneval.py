"""HumanEval: functions to write from their docstring, judged by tests (arXiv:2107.03374)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.code import CodeProblem, HumanEvalRewardParser


@register("tasks", "humaneval")
class HumanEvalEnv(TaskEnv):
    r"""Python functions, judged by running them against tests in a sandbox.

    Rows have ``query`` (signature and docstring), ``answer`` (a dict of ``entry_point``, ``test``
    and ``prompt``, which the reward reads), ``task_id`` and ``solution`` (the canonical one).

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads JSON-lines files, packed
            by gzip or not, with the columns ``prompt``, ``entry_point`` and ``test``; without it
            the hub's ``openai/openai_humaneval`` is loaded, which has the split ``test`` alone.

    Raises:
        ConfigError: the hub's training split is asked for.
        DataError: a problem without a test, or with a column of another type.

    Example:
        >>> rows = [{"prompt": "def one():\n    '''1'''\n", "entry_point": "one",
        ...          "test": "def check(candidate):\n    assert candidate() == 1"}]
        >>> env = HumanEvalEnv(dataset=rows)
        >>> env.reset()["history"].prompt[0].role
        ['system', 'user']
    """

    DATASET = "openai/openai_humaneval"
    COLUMNS = ("prompt", "entry_point", "test")
    SYSTEM_PROMPT = (
        "Complete the Python function of the user. Answer with the whole function, its imports "
        "included, in one block that begins with ```python and ends with ```."
    )

    @classmethod
    def default_dataset(cls, split: str | None) -> str:
        """The hub's problems, all of which are held out."""
        if split not in (None, "test"):
            raise ConfigError(
                f"HumanEval has no split {split!r}, only 'test'; to train on some of it, pass its "
                "file as data_files (of a recipe: env.data_files, which keeps the last "
                "eval.num_prompts problems for evaluation)"
            )
        return cls.DATASET

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A problem of the data set as the environment hands it out."""
        task_id = str(row.get("task_id", row["entry_point"]))
        answer = {name: row[name] for name in ("entry_point", "test", "prompt")}
        try:
            CodeProblem.of(answer)
        except DataError as error:
            raise DataError(f"{task_id}: {error}") from None
        return {
            "query": row["prompt"],
            "answer": answer,
            "task_id": task_id,
            "solution": row.get("canonical_solution", ""),
        }

    def make_reward(self) -> HumanEvalRewardParser:
        """See :class:`~torchrl_llm.rewards.code.HumanEvalRewardParser`."""
        return HumanEvalRewardParser()
