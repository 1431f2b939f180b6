"""Tasks of the ``language`` environment: their files, their prompts and their scores.

A file has one JSON task per line:

- ``qa``: ``question``, ``answer`` and optionally ``context``;
- ``math``: ``problem`` and ``answer``;
- ``writing``: ``prompt`` and optionally ``criteria``;
- ``coding``: ``prompt``, ``entry_point`` and ``tests`` (or ``test``), as in HumanEval.

Answers are compared with the reference answer (``qa`` as text, ``math`` as a number), judged by a
model (``use_verified_reward``; ``writing`` always), or run in a sandbox (``coding`` always).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_llm.data.table_files import FileRow, read_jsonl
from torchrl_llm.errors import DataError, RewardError
from torchrl_llm.langmarl.calls import CallLog
from torchrl_llm.langmarl.config import LanguageTaskConfig
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.rewards.code import CodeProblem, CodeRunner, HumanEvalRewardParser
from torchrl_llm.rewards.judge import JudgeReward, read_verdict
from torchrl_llm.rewards.number_rewards import last_number, parse_number
from torchrl_llm.rewards.reward_runner import run_rows
from torchrl_llm.rewards.reward_scorer import Sample
from torchrl_llm.rewards.text_models import Messages

Scorer = Callable[[Sequence[tuple[Mapping[str, Any], str]]], Sequence[float | Exception]]
"""Function from tasks and last answers to scores in ``[0, 1]``, or exceptions."""

_COLUMNS = {
    "qa": ("question", "answer"),
    "math": ("problem", "answer"),
    "writing": ("prompt",),
    "coding": ("prompt", "entry_point"),
}
_FINAL = re.compile(r"final answer\s*\W{0,3}\s*[:=]\s*(.+)", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b|[^\w\s.,%-]|[.,](?=\s|$)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")

_PROMPTS = Path(__file__).with_name("judge_prompts")


def load_tasks(config: LanguageTaskConfig) -> list[dict[str, Any]]:
    """Load the tasks of a configuration, each with its ``task_type``.

    Args:
        config: ``benchmark_path`` is a file, or a folder with a file ``<task_type>.jsonl``.

    Raises:
        DataError: the file does not exist or has no task, or a line is malformed.
    """
    path = Path(config.benchmark_path)
    path = path / f"{config.task_type}.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"benchmark_path={config.benchmark_path!r} has no tasks: there is no file {path}"
        )
    rows = read_jsonl(path, columns=_COLUMNS[config.task_type])
    limit = config.data_limit
    rows = rows if limit is None or limit <= 0 else rows[:limit]
    return [_task(row, config.task_type) for row in rows]


def _task(row: FileRow, task_type: str) -> dict[str, Any]:
    for name in _COLUMNS[task_type]:
        if not isinstance(row[name], (str, int, float)) or row[name] == "":
            raise DataError(f"{row.place}: a task of {task_type!r} needs {name!r}")
    if task_type == "coding":
        try:
            compile(CodeProblem.of(row).prelude, "<prompt>", "exec")
        except SyntaxError as error:
            told = "the prompt is no Python by itself (a docstring is a body)"
            raise DataError(f"{row.place}: {told}: {error.msg}") from error
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    return {**row, "task_type": task_type}


def task_text(task: Mapping[str, Any]) -> str:
    """Text of a task for the agents.

    Args:
        task: the task with its ``task_type``.

    Example:
        >>> task_text({"task_type": "math", "problem": "2 + 2"})
        'Problem: 2 + 2'
    """
    match task.get("task_type"):
        case "qa":
            context = f"{task['context']}\n\n" if task.get("context") else ""
            return f"{context}{task['question']}"
        case "math":
            return f"Problem: {task['problem']}"
        case "coding":
            return f"Complete the following Python function.\n\n{task['prompt']}"
        case _:
            return str(task["prompt"])


def final_request(task: Mapping[str, Any]) -> str:
    """Final instruction for the last agent.

    Args:
        task: the task with its ``task_type``.
    """
    match task.get("task_type"):
        case "qa" | "math":
            return "You answer last. End with one line of the form FINAL ANSWER: ..."
        case "coding":
            return "You answer last. Write the whole FINAL function in one fenced block of Python."
        case _:
            return "You answer last. Write the FINAL text and nothing else."


def final_answer(response: str) -> str:
    r"""Final answer of a response.

    Args:
        response: text of the last agent.

    Returns:
        The text after the last ``FINAL ANSWER:``, else the last non-empty line.

    Example:
        >>> final_answer("It is 4.\nFINAL ANSWER: 4"), final_answer("So:\n4\n")
        ('4', '4')
    """
    if found := _FINAL.findall(response):
        return found[-1].strip()
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def same_text(response: str, answer: Any) -> bool:
    """Whether two short texts are equal up to case, articles and punctuation.

    Example:
        >>> same_text("The Blue Whale.", "blue whale"), same_text("1.5", "15")
        (True, False)
        >>> same_text("A", "A"), same_text("A", "B")
        (True, False)
        >>> same_text("5,100", "5100"), same_text("5, 100", "5100")
        (True, False)
    """
    one, other = (
        " ".join(_ARTICLES.sub(" ", _THOUSANDS.sub("", str(text).casefold())).split())
        for text in (response, answer)
    )
    same = str(response).casefold().strip(" .") == str(answer).casefold().strip(" .")
    return (one == other and bool(one)) or (same and bool(str(answer).strip(" .")))


def _compare(task: Mapping[str, Any], response: str) -> float:
    answer = final_answer(response)
    if task["task_type"] == "qa":
        return float(same_text(answer, task["answer"]))
    wanted = parse_number(str(task["answer"]))
    found = parse_number(answer)
    return float(wanted is not None and (last_number(answer) if found is None else found) == wanted)


class _Judge:
    """Asks a model for verdicts, through the journal."""

    def __init__(self, config: LanguageTaskConfig, prompt: str) -> None:
        self._asked = LLMClient(config.get_judge_llm()).asked
        self._prompt = (_PROMPTS / f"{prompt}.txt").read_text(encoding="utf-8").rstrip("\n")

    def __call__(
        self, rows: Sequence[tuple[Mapping[str, Any], str]], log: CallLog, prefix: str
    ) -> Sequence[float | Exception]:
        def ask(conversations: Sequence[Messages]) -> list[str | Exception]:
            keys = [f"{prefix}/judge/{_name_of(messages)}" for messages in conversations]
            answers = log.ask(self._asked, "judge", keys, conversations)
            return [each if isinstance(each, Exception) else each.text for each in answers]

        # An unreadable verdict is not requested again: the journal would return the same answer.
        judge = JudgeReward(ask, self._prompt, read=read_verdict, retries=0, cache_size=0)
        samples = [
            Sample(
                final_answer(response) if task["task_type"] in ("qa", "math") else response,
                answer=task.get("answer", task.get("criteria", "It does what the task asks for.")),
                columns={"query": task_text(task)},
            )
            for task, response in rows
        ]
        return judge.score_batch(samples)


def _name_of(messages: Messages) -> str:
    text = json.dumps([message["content"] for message in messages])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _run(
    parser: HumanEvalRewardParser,
    rows: Sequence[tuple[Mapping[str, Any], str]],
    log: CallLog,
    prefix: str,
) -> list[float | Exception]:
    jobs = [(response, task) for task, response in rows]
    found = run_rows(lambda text, task: parser.score(text, task).reward, jobs, num_threads=4)
    return [
        RewardError(f"{each.error}: {each.message}") if each.error else max(each.value, 0.0)
        for each in found
    ]


def make_scorer(config: LanguageTaskConfig) -> Callable[..., Sequence[float | Exception]]:
    """Make the scorer of last answers: a function of rows, a journal and a key prefix.

    Args:
        config: its ``task_type`` and ``use_verified_reward``.

    Raises:
        ConfigError: a judge is needed, but no model is configured for it.
    """
    if config.task_type == "coding":
        runner = CodeRunner(timeout_s=config.code_timeout)
        return partial(_run, HumanEvalRewardParser(runner=runner))
    if config.task_type == "writing":
        return _Judge(config, "criteria")
    if config.use_verified_reward:
        return _Judge(config, "verify")
    return lambda rows, log, prefix: [_compare(task, response) for task, response in rows]
