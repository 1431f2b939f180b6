"""Tasks whose rows come from a file or from the hub: GSM8K, MATH, HumanEval, IFEval.

GSM8K is grade-school mathematics (arXiv:2110.14168), MATH has competition problems with an answer
in LaTeX (arXiv:2103.03874), HumanEval has functions to write from their docstring
(arXiv:2107.03374), and IFEval has prompts whose instructions a program can check
(arXiv:2311.07911).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from torchrl_llm._checked import checked
from torchrl_llm._imports import require
from torchrl_llm._registry import register
from torchrl_llm.envs.datasets.task_env import PROMPTS, TaskEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.answer_formats import AnswerFormat, last_boxed
from torchrl_llm.rewards.code import CodeProblem, CodeRunner, HumanEvalRewardParser
from torchrl_llm.rewards.ifeval.ifeval_scorer import IfEvalScorer, read_row
from torchrl_llm.rewards.math_reward import MATHRewardParser
from torchrl_llm.rewards.number_rewards import GSM8KRewardParser
from torchrl_llm.rewards.reward_parser import RewardParser
from torchrl_llm.sandbox.interface import MEMORY_BYTES


@register("tasks", "gsm8k")
class GSM8KEnv(TaskEnv):
    r"""Grade-school mathematics, scored by the number in the answer.

    Rows have ``query`` (the problem), ``answer`` (the number, as a string) and ``solution`` (the
    worked text before it).

    Args:
        answer_format: where the answer is in a response, see
            :class:`~torchrl_llm.rewards.GSM8KRewardParser`. With ``"tags"`` and ``"strict-match"``
            the system prompt asks for this form; with the other formats there is no system prompt.
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
    NEEDS_LARGER_MODEL = True
    NAME = "main"
    COLUMNS = ("question", "answer")
    SYSTEM_PROMPT = PROMPTS["gsm8k"]
    STRICT_PROMPT = PROMPTS["gsm8k_strict"]

    @checked
    def __init__(self, *, answer_format: AnswerFormat = "tags", **kwargs: Any) -> None:
        self.answer_format = answer_format
        if answer_format != "tags":
            self.SYSTEM_PROMPT = self.STRICT_PROMPT if answer_format == "strict-match" else None
        super().__init__(**kwargs)

    def make_reward(self) -> GSM8KRewardParser:
        """See :class:`~torchrl_llm.rewards.GSM8KRewardParser`."""
        return GSM8KRewardParser(answer_format=self.answer_format)

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """``question`` and ``answer`` of the dataset as ``query``, ``answer`` and ``solution``."""
        question, text = row["question"], row["answer"]
        if not isinstance(question, str) or not isinstance(text, str):
            raise DataError(f"question and answer must be strings, got {question!r} and {text!r}")
        solution, _, answer = text.rpartition("####")
        return {"query": question, "answer": answer.strip(), "solution": solution.strip()}


@register("tasks", "math")
class MATHEnv(TaskEnv):
    r"""Competition mathematics; the answer block must be mathematically equal to the answer.

    Rows have ``query`` (the problem), ``answer`` (in LaTeX), ``solution`` (the worked text, empty
    if the data has none), ``level`` and ``subject``, all strings.

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads JSON-lines files with
            the column ``problem`` and either ``answer`` or ``solution``, whose last ``\boxed{}`` is
            then the answer (MATH, MATH-500 and files of the same form); without it the hub's
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
    NEEDS_LARGER_MODEL = True
    NAME = "default"
    COLUMNS = ("problem",)
    REWARD = MATHRewardParser
    SYSTEM_PROMPT = PROMPTS["math"]

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The dataset's columns as ``query``, ``answer``, ``solution``, ``level``, ``subject``."""
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


@register("tasks", "humaneval")
class HumanEvalEnv(TaskEnv):
    r"""Python functions, judged by running them against tests in a sandbox.

    Rows have ``query`` (signature and docstring), ``answer`` (a dict of ``entry_point``, ``test``
    and ``prompt``, which the reward reads), ``task_id`` and ``solution`` (the canonical one).

    Args:
        memory_bytes: address space of each process of a run.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads JSON-lines files,
            gzipped or not, with the columns ``prompt``, ``entry_point`` and ``test``; without it
            the hub's ``openai/openai_humaneval`` is loaded, which has only the split ``test``.

    Raises:
        ConfigError: the hub's training split is requested.
        DataError: a problem without a test, or with a column of another type.

    Example:
        >>> rows = [{"prompt": "def one():\n    '''1'''\n", "entry_point": "one",
        ...          "test": "def check(candidate):\n    assert candidate() == 1"}]
        >>> env = HumanEvalEnv(dataset=rows)
        >>> env.reset()["history"].prompt[0].role
        ['system', 'user']
    """

    DATASET = "openai/openai_humaneval"
    NEEDS_LARGER_MODEL = True
    COLUMNS = ("prompt", "entry_point", "test")
    REWARD = HumanEvalRewardParser
    SYSTEM_PROMPT = PROMPTS["humaneval"]

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, **kwargs: Any) -> None:
        self.memory_bytes = memory_bytes
        super().__init__(**kwargs)

    def make_reward(self) -> RewardParser:
        """The problems' tests, run within the memory limit; or a subclass's own ``REWARD``."""
        if self.REWARD is not HumanEvalRewardParser:
            return super().make_reward()
        return HumanEvalRewardParser(runner=CodeRunner(memory_bytes=self.memory_bytes))

    @classmethod
    def default_dataset(cls, split: str | None) -> str:
        """The hub's problems; all of them are held out."""
        if split not in (None, "test"):
            raise ConfigError(
                f"HumanEval has no split {split!r}, only 'test'; to train on some of it, pass its "
                "file as data_files (of a recipe: env.data_files, which keeps the last "
                "eval.num_prompts problems for evaluation)"
            )
        return cls.DATASET

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A problem of the dataset as the environment returns it."""
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


@register("tasks", "ifeval")
class IFEvalEnv(TaskEnv):
    """Prompts such as *Write a poem without any commas*, scored by checks of a program.

    Rows have ``query`` (the prompt), ``key`` (its number, int64), ``instruction_id_list`` (names)
    and ``kwargs`` (arguments of each instruction).

    Args:
        scored_part: ``"answer"``: the model is asked for an answer block, and its content is
            scored. ``"response"``: there is no system prompt, and the whole response after its
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
    NEEDS_LARGER_MODEL = True
    COLUMNS = ("key", "prompt", "instruction_id_list", "kwargs")
    SYSTEM_PROMPT = PROMPTS["ifeval"]

    def __init__(
        self, *, scored_part: Literal["answer", "response"] = "answer", **kwargs: Any
    ) -> None:
        self.scored_part = scored_part
        if scored_part == "response":
            self.SYSTEM_PROMPT = None
        super().__init__(**kwargs)

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of the dataset, see ``read_row``."""
        read = read_row(row)
        return read | {"key": torch.tensor(read["key"])}

    def make_reward(self) -> IfEvalScorer:
        """See :class:`~torchrl_llm.rewards.ifeval.IfEvalScorer`.

        Raises:
            MissingExtraError: a package that checks some instructions is missing.
        """
        for package in ("langdetect", "nltk", "punkt"):
            require(package, extra="ifeval", feature="IFEvalEnv")
        return IfEvalScorer(scored_part=self.scored_part)
