"""What the scorer reads and writes: an example, its scores, and whole tables of them.

Next: :mod:`torchrl_llm.rewards.ifeval.ifeval_scorer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict
from torch import Tensor
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec
from torchrl_llm.errors import DataError
from torchrl_llm.rewards.ifeval.verdict import Verdict

_SCORES = (
    "prompt_level_strict_acc",
    "inst_level_strict_acc",
    "prompt_level_loose_acc",
    "inst_level_loose_acc",
)


class IFEvalExample(NamedTuple):
    """A prompt with its instructions.

    Attributes:
        instruction_ids: names of the instructions.
        arguments: of each instruction.
        prompt: what the user asked.
        key: number of the prompt.
        complete: whether the response ended by itself, ``None`` where nobody knows.
    """

    instruction_ids: Sequence[str]
    arguments: Sequence[Mapping[str, Any] | None]
    prompt: str = ""
    key: int | None = None
    complete: bool | None = None


def _flags(verdict: Verdict) -> tuple[Tensor, ...]:
    strict, loose = (torch.tensor(flags, dtype=torch.bool) for flags in verdict)
    return strict.all(0, keepdim=True), strict, loose.all(0, keepdim=True), loose


class IFEvalScoreData(TensorClass["nocast"]):
    """Which instructions a response follows, for one response or a batch of ``B``.

    Attributes:
        prompt_level_strict_acc: bool ``[B, 1]``, whether it follows all, as it is.
        inst_level_strict_acc: bool ``[B, N]``, whether it follows each of its ``N`` instructions;
            ``N`` differs from row to row.
        prompt_level_loose_acc: as above, for the best of its loose forms.
        inst_level_loose_acc: as above, for the best of its loose forms.

    One response has no ``B``. A batch is a view of ragged rows, which are what a tensordict holds:
    read them by :func:`torchrl_llm.data.ragged.read_rows`, or ask the view for :meth:`accuracies`.

    Example:
        >>> rows = IFEvalScoreData.rows([Verdict((True, False), (True, True)), Verdict((1,), (1,))])
        >>> scores = IFEvalScoreData.from_tensordict(rows)
        >>> scores.accuracies()["inst_level_strict_acc"], scores.accuracies()["num_prompts"]
        (0.6666666666666666, 2)
    """

    prompt_level_strict_acc: Tensor | None = None
    inst_level_strict_acc: Tensor | None = None
    prompt_level_loose_acc: Tensor | None = None
    inst_level_loose_acc: Tensor | None = None

    @classmethod
    def row(cls, verdict: Verdict) -> IFEvalScoreData:
        """The scores of one response."""
        return cls(**dict(zip(_SCORES, _flags(verdict), strict=True)), batch_size=[])

    @classmethod
    def rows(cls, verdicts: Iterable[Verdict]) -> LazyStackedTensorDict:
        """The scores of a batch, at least one response, as ragged rows."""
        columns = zip(*(_flags(verdict) for verdict in verdicts), strict=True)
        return ragged_rows(dict(zip(_SCORES, columns, strict=True)))

    @classmethod
    def default_spec(cls, shape: Any = (1,), device: torch.device | None = None) -> Composite:
        """Spec of a batch.

        Args:
            shape: ``(B,)``.
            device: device of the tensors.
        """
        return RaggedSpec(dict.fromkeys(_SCORES, torch.bool), shape=shape, device=device)

    def accuracies(self, valid: Tensor | None = None) -> dict[str, float]:
        """The four accuracies of the paper over a batch, and how many prompts they are of.

        Instruction-level ones are over all instructions of all prompts, so a prompt with three
        counts three times.

        Args:
            valid: bool ``[B]``, the rows that count (``reward_valid``); all if not given.

        Returns:
            The fields' names to accuracies, NaN where no row counts, and ``num_prompts``.
        """
        keep = [True] * self.batch_size[0] if valid is None else valid.flatten().tolist()
        result: dict[str, float] = {}
        for name in _SCORES:
            rows = [row for row, kept in zip(read_rows(self, name), keep, strict=True) if kept]
            flags = torch.cat(rows) if rows else torch.zeros(0)
            result[name] = flags.double().mean().item()
        return result | {"num_prompts": sum(keep)}


class IFEvalData(TensorClass["nocast"]):
    """Prompts of IFEval, and what was answered to them, outside an environment.

    Attributes:
        key: int64 ``[B]``, number of the prompt.
        query: ``B`` strings, what the user asked.
        instruction_id_list: ``B`` tuples of names.
        kwargs: ``B`` tuples with the arguments of each instruction.
        response: ``B`` strings, where there are answers.
        reward: float32 ``[B, 1, 1]``, where they were scored.

    Example:
        >>> from torchrl_llm.rewards.ifeval.ifeval_scorer import IfEvalScorer
        >>> row = {"key": 1, "prompt": "Hi, without commas", "kwargs": [{}],
        ...        "instruction_id_list": ["punctuation:no_comma"]}
        >>> data = IFEvalData.from_rows([row, row], responses=["Hi!", "Well, hi!"])
        >>> scorer = IfEvalScorer(response_column="response", scored_part="response")
        >>> scorer(data.to_tensordict())["next", "success"].flatten().tolist()
        [True, False]
    """

    key: Tensor
    query: Any
    instruction_id_list: Any
    kwargs: Any
    response: Any = None
    reward: Tensor | None = None

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], responses: Iterable[str] | None = None
    ) -> IFEvalData:
        """Rows of the data set as a batch.

        Args:
            rows: see :func:`read_row`.
            responses: one a row.

        Raises:
            DataError: for a malformed row, or none at all.
        """
        read = [read_row(row) for row in rows]
        if not read:
            raise DataError("a batch needs at least one row")
        keys = torch.tensor([row.pop("key") for row in read], dtype=torch.int64)
        columns = {name: Column.of(row[name] for row in read) for name in read[0]}
        if responses is not None:
            columns["response"] = Column.of(responses)
        td = TensorDict({"key": keys}, batch_size=[len(read)])
        return cls._from_tensordict(td.update(columns))

    @classmethod
    def default_spec(cls, shape: Any = (1,), device: torch.device | None = None) -> Composite:
        """Spec of the columns that the data set has.

        Args:
            shape: ``(B,)``.
            device: device of the tensors.
        """
        examples = {
            "query": "Say hi. Do not use any commas.",
            "instruction_id_list": ("punctuation:no_comma",),
            "kwargs": ({},),
        }
        leaves = {name: ColumnSpec((*shape, -1), example_data=e) for name, e in examples.items()}
        key = Unbounded(shape=tuple(shape), dtype=torch.int64, device=device)
        return Composite(leaves, key=key, shape=tuple(shape), data_cls=cls)


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the data set as environments and scorers have it.

    Args:
        row: ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``. Arguments that are
            ``None``, as in the hub's table with a column for every argument, are left out.

    Returns:
        ``key``, ``query``, ``instruction_id_list`` and ``kwargs``.

    Raises:
        DataError: for a column of another type, or lists of different lengths.
    """
    prompt, ids, arguments = row["prompt"], row["instruction_id_list"], row["kwargs"]
    if not isinstance(prompt, str) or not isinstance(row["key"], int):
        raise DataError(f"prompt must be a string and key a whole number, got {row!r}")
    lists = isinstance(ids, (list, tuple)) and isinstance(arguments, (list, tuple))
    if not lists or len(ids) != len(arguments) or not ids:
        raise DataError(
            f"prompt {row['key']}: instruction_id_list and kwargs must be lists of one length, "
            f"got {ids!r} and {arguments!r}"
        )
    if not all(isinstance(item, Mapping) or item is None for item in arguments):
        raise DataError(f"prompt {row['key']}: kwargs must be a list of dicts, got {arguments!r}")
    kept = [{k: v for k, v in (item or {}).items() if v is not None} for item in arguments]
    return {
        "key": row["key"],
        "query": prompt,
        "instruction_id_list": tuple(ids),
        "kwargs": tuple(kept),
    }
