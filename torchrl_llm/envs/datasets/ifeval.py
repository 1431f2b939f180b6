"""IFEval: prompts whose instructions a program can check (arXiv:2311.07911)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from torchrl_llm._registry import register
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.rewards.ifeval.data import read_row
from torchrl_llm.rewards.ifeval.ifeval_scorer import IfEvalScorer


@register("tasks", "ifeval")
class IFEvalEnv(TaskEnv):
    """Prompts such as *Write a poem. Do not use any commas*, scored by what a program can check.

    Rows have ``query`` (the prompt), ``key`` (its number, int64), ``instruction_id_list`` (names)
    and ``kwargs`` (arguments of each instruction).

    Args:
        scored_part: ``"answer"``: the model is asked for an answer block, and what stands in it is
            scored. ``"response"``: there is no system prompt, and the whole response behind its
            reasoning is scored, as in the paper; use it to compare with published accuracies.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads JSON-lines files with
            the columns ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``; without it the
            hub's ``google/IFEval`` is loaded.

    Example:
        >>> row = {"key": 1, "prompt": "Say hi, without commas.", "kwargs": [{}],
        ...        "instruction_id_list": ["punctuation:no_comma"]}
        >>> td = IFEvalEnv(dataset=[row]).reset()
        >>> td["query"][0], td["key"].tolist(), td["instruction_id_list"][0]
        ('Say hi, without commas.', [1], ('punctuation:no_comma',))
    """

    DATASET = "google/IFEval"
    COLUMNS = ("key", "prompt", "instruction_id_list", "kwargs")
    SYSTEM_PROMPT = (
        "Follow every instruction of the user exactly. Think first, between <think> and </think>. "
        "Then write your answer between <answer> and </answer>. Only what stands there is read, so "
        "it must follow all instructions by itself."
    )

    def __init__(
        self, *, scored_part: Literal["answer", "response"] = "answer", **kwargs: Any
    ) -> None:
        self.scored_part = scored_part
        if scored_part == "response":
            self.SYSTEM_PROMPT = None
        super().__init__(**kwargs)

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of the data set, see :func:`~torchrl_llm.rewards.ifeval.data.read_row`."""
        read = read_row(row)
        return read | {"key": torch.tensor(read["key"])}

    def make_reward(self) -> IfEvalScorer:
        """See :class:`~torchrl_llm.rewards.ifeval.IfEvalScorer`."""
        return IfEvalScorer(scored_part=self.scored_part)
