"""GSM8K: grade-school word problems with a number for an answer (arXiv:2110.14168)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import DataError
from torchrl_llm.rewards.gsm8k import GSM8KRewardParser


@register("tasks", "gsm8k")
class GSM8KEnv(TaskEnv):
    r"""Grade-school mathematics, scored by the number in the answer block.

    Rows have ``query`` (the problem), ``answer`` (the number, as a string) and ``solution`` (the
    worked text before it).

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads JSON-lines files with
            the columns ``question`` and ``answer``; without it the hub's ``openai/gsm8k`` is
            loaded, split ``train`` or ``test``.

    Example:
        >>> rows = [{"question": "What is 3 + 4?", "answer": "Add them.\n#### 7"}]
        >>> env = GSM8KEnv(dataset=rows, num_envs=2, repeats=2)
        >>> td = env.reset()
        >>> list(td["query"]), list(td["answer"])
        (['What is 3 + 4?', 'What is 3 + 4?'], ['7', '7'])
    """

    DATASET = "openai/gsm8k"
    NAME = "main"
    COLUMNS = ("question", "answer")
    SYSTEM_PROMPT = (
        "Solve the problem. Think step by step between <think> and </think>, then give the final "
        "number, and nothing else, between <answer> and </answer>."
    )

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """``question`` and ``answer`` of the data set as ``query``, ``answer`` and ``solution``."""
        question, text = row["question"], row["answer"]
        if not isinstance(question, str) or not isinstance(text, str):
            raise DataError(f"question and answer must be strings, got {question!r} and {text!r}")
        solution, _, answer = text.rpartition("####")
        return {"query": question, "answer": answer.strip(), "solution": solution.strip()}

    def make_reward(self) -> GSM8KRewardParser:
        """See :class:`~torchrl_llm.rewards.GSM8KRewardParser`."""
        return GSM8KRewardParser()
