"""The reward of IFEval: the share of instructions that the answer follows, strictly and loosely.

:class:`IFEvalExample` is a prompt with instructions, :class:`IFEvalScoreData` the scores,
:class:`IFEvalData` a table of prompts.

Next: :mod:`torchrl_llm.rewards.ifeval.instructions` checks instructions;
:class:`torchrl_llm.envs.datasets.hub_tasks.IFEvalEnv` has the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl import logger
from torchrl.data import Composite, Unbounded

from torchrl_llm._checked import checked
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec
from torchrl_llm.data.table_cells import plain_cell
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.answer_block import ResponseParts, split_response
from torchrl_llm.rewards.ifeval.instructions import Verdict, verify
from torchrl_llm.rewards.reward_parser import (
    RewardParser,
    finish_reasons,
    needed_column,
    read_column,
)
from torchrl_llm.rewards.reward_runner import Outcome
from torchrl_llm.rewards.reward_scorer import RewardScore

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
        arguments: arguments of each instruction.
        prompt: what the user asked.
        key: number of the prompt.
        complete: whether the response ended by itself; ``None`` if unknown.
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
    """Which instructions a response follows, for a single response or a batch of ``B``.

    Attributes:
        prompt_level_strict_acc: bool ``[B, 1]``, whether the unchanged response follows all
            instructions.
        inst_level_strict_acc: bool ``[B, N]``, whether it follows each of its ``N`` instructions;
            ``N`` differs from row to row.
        prompt_level_loose_acc: bool ``[B, 1]``, the same for the best of its loose forms.
        inst_level_loose_acc: bool ``[B, N]``, the same for the best of its loose forms.

    A single response has no dimension ``B``. A batch is a view of ragged rows in a tensordict: read
    them with :func:`torchrl_llm.data.ragged.read_rows`, or call :meth:`accuracies`.

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
        """Return the scores of one response."""
        return cls(**dict(zip(_SCORES, _flags(verdict), strict=True)), batch_size=[])

    @classmethod
    def rows(cls, verdicts: Iterable[Verdict]) -> LazyStackedTensorDict:
        """Return the scores of a batch of at least one response as ragged rows."""
        columns = zip(*(_flags(verdict) for verdict in verdicts), strict=True)
        return ragged_rows(dict(zip(_SCORES, columns, strict=True)))

    @classmethod
    def default_spec(cls, shape: Any = (1,), device: torch.device | None = None) -> Composite:
        """Return the spec of a batch.

        Args:
            shape: ``(B,)``.
            device: device of the tensors.
        """
        return RaggedSpec(dict.fromkeys(_SCORES, torch.bool), shape=shape, device=device)

    def accuracies(self, valid: Tensor | None = None) -> dict[str, float]:
        """Compute the four accuracies of the paper over a batch, and the number of prompts.

        Instruction-level accuracies are over all instructions of all prompts, so a prompt with
        three instructions counts three times.

        Args:
            valid: bool ``[B]``, the rows that count (``reward_valid``); all by default.

        Returns:
            A dict with the accuracies by field name (NaN if no row counts), and ``num_prompts``.
        """
        keep = [True] * self.batch_size[0] if valid is None else valid.flatten().tolist()
        result: dict[str, float] = {}
        for name in _SCORES:
            rows = [row for row, kept in zip(read_rows(self, name), keep, strict=True) if kept]
            flags = torch.cat(rows) if rows else torch.zeros(0)
            result[name] = flags.double().mean().item()
        return result | {"num_prompts": sum(keep)}


class IFEvalData(TensorClass["nocast"]):
    """Prompts of IFEval and their responses, outside an environment.

    Attributes:
        key: int64 ``[B]``, number of the prompt.
        query: ``B`` strings, what the user asked.
        instruction_id_list: ``B`` tuples of names.
        kwargs: ``B`` tuples with the arguments of each instruction.
        response: ``B`` strings, if there are responses.
        tokens: int64 ``[B, T]``, ids of prompts and responses, if known.
        tokens_response: int64 ``[B, R]``, ids of the responses.
        logits: float32 ``[B, R, V]``, if they were kept.
        reward: float32 ``[B, 1, 1]``, if they were scored.

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
    tokens: Tensor | None = None
    tokens_response: Tensor | None = None
    logits: Tensor | None = None
    reward: Tensor | None = None

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], responses: Iterable[str] | None = None
    ) -> IFEvalData:
        """Convert rows of the dataset to a batch.

        Args:
            rows: see ``read_row``.
            responses: one per row.

        Raises:
            DataError: for a malformed row, or without rows.
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
        """Return the spec of the columns that the dataset has.

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
    """Convert a row of the dataset for environments and scorers.

    Args:
        row: ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``. Arguments that are
            ``None`` are left out; the hub's table has a column for every argument.

    Returns:
        ``key``, ``query``, ``instruction_id_list`` and ``kwargs``.

    Raises:
        DataError: for a column of a wrong type, or lists of different lengths.
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


_ANSWER_BONUS = 0.1
_THINK_BONUS = 0.05


class _VerdictScore(RewardScore):
    """A score that also holds its verdict, for the additional keys."""

    verdict: Verdict

    def _replace(self, **changes: Any) -> _VerdictScore:
        replaced = super()._replace(**changes)
        replaced.verdict = self.verdict
        return replaced


class IfEvalScorer(RewardParser):
    r"""Scores which instructions the answer follows, strictly and loosely, and computes a reward.

    The reward is ``0.4 p_s + 0.3 i_s + 0.2 p_l + 0.1 i_l``. Here p is 1 if all instructions are
    followed, i is the share of instructions that are followed, s means strictly and l means
    loosely; ``format_weights`` sets the weights. Exactly one answer block adds 0.1, exactly one
    block of reasoning adds 0.05. A row with an unknown instruction or wrong arguments gets an
    invalid reward and an error.

    In addition to the keys of :class:`~torchrl_llm.rewards.RewardParser`, the scorer writes the
    rows of an :class:`IFEvalScoreData` to ``("next", score_key)``. ``success`` is true if all
    instructions are followed strictly.

    Args:
        instruction_ids_key: column with the names of the instructions, a list per row.
        prompt_key: column with the prompts, for the log; optional.
        keyword_args_key: column with the arguments, a list of dicts per row.
        id_key: column with the numbers of the prompts, for the log; optional.
        response_column: column with the responses, for tables with responses; by default the
            response of the policy, in any input mode.
        score_key: key of the scores.
        aggregate_reward: ``True`` for the reward above; ``False`` for scores without a reward; or a
            function of an :class:`IFEvalScoreData` without batch and of the keywords
            ``think_blocks``, ``answer_blocks`` (lists of strings) and ``complete`` (``None`` if the
            end of the response is unknown) that returns one number.
        format_weights: weights of prompt-level strict, instruction-level strict, prompt-level
            loose, instruction-level loose.
        verbose: log each verdict.
        scored_part: ``"answer"`` scores the last answer block, or an empty text if there is none.
            ``"response"`` scores everything after the reasoning, as the paper does, without a bonus
            for blocks.
        kwargs: arguments of :class:`~torchrl_llm.rewards.RewardParser`, except its keys.

    Raises:
        ConfigError: for weights that are not four numbers, or an unknown ``scored_part``.

    Example:
        >>> example = IFEvalExample(["punctuation:no_comma"], [{}])
        >>> scorer = IfEvalScorer()
        >>> scorer.score("<think>Easy, that.</think><answer>No comma</answer>", example).reward
        1.15
        >>> scorer.score("<answer>Well, one</answer>", example).reward
        0.1
    """

    __signature__ = FullSignature()

    @checked
    def __init__(
        self,
        *,
        instruction_ids_key: NestedKey = "instruction_id_list",
        prompt_key: NestedKey = "query",
        keyword_args_key: NestedKey = "kwargs",
        id_key: NestedKey = "key",
        response_column: NestedKey | None = None,
        score_key: NestedKey = "ifeval_score",
        aggregate_reward: bool | Callable[..., Any] = True,
        format_weights: Sequence[float] | None = None,
        verbose: bool = False,
        scored_part: Literal["answer", "response"] = "answer",
        **kwargs: Any,
    ) -> None:
        if "in_keys" in kwargs:
            raise ConfigError("in_keys has no effect here: name the columns by their own arguments")
        super().__init__(**kwargs)
        weights = [0.4, 0.3, 0.2, 0.1] if format_weights is None else list(format_weights)
        if len(weights) != 4 or not all(math.isfinite(weight) for weight in weights):
            raise ConfigError(f"format_weights must be four finite numbers, got {weights}")
        if format_weights is not None and aggregate_reward is not True:
            raise ConfigError("format_weights has no effect unless aggregate_reward is True")
        self.instruction_ids_key = instruction_ids_key
        self.prompt_key = prompt_key
        self.keyword_args_key = keyword_args_key
        self.id_key = id_key
        self.response_column = self.response_key = response_column
        self.score_key = score_key
        if aggregate_reward is False:
            self.out_keys, self._names = [], {}
        self.out_keys = [score_key, *self.out_keys]
        self.aggregate_reward = aggregate_reward
        self.format_weights = weights
        self.verbose = verbose
        self.scored_part = scored_part

    # Reading

    def _responses(self, td: TensorDictBase) -> list[str | Exception]:
        if self.response_column is None:
            return super()._responses(td)
        return [
            text if isinstance(text, str) else DataError(f"a response must be text, got {text!r}")
            for text in needed_column(td, self.response_column)
        ]

    def _answers(self, td: TensorDictBase) -> list[IFEvalExample]:
        missing = [None] * td.batch_size.numel()
        columns = (
            needed_column(td, self.instruction_ids_key),
            needed_column(td, self.keyword_args_key),
            read_column(td, self.prompt_key) or missing,
            map(plain_cell, read_column(td, self.id_key) or missing),
            [
                None if reason is None else reason == FinishReason.STOP
                for reason in finish_reasons(td)
            ],
        )
        return [IFEvalExample(*row) for row in zip(*columns, strict=True)]

    # Scoring

    def score(self, response: str, answer: IFEvalExample) -> RewardScore:
        """See :class:`IfEvalScorer`.

        Args:
            response: what the model wrote.
            answer: instructions of the prompt.

        Raises:
            RewardError: for an unknown instruction or wrong arguments.
        """
        parts = split_response(response)
        if self.scored_part == "answer":
            text = (parts.answer or [""])[-1]
        else:
            # Not stripped, because the loose form without the last line must drop only the empty
            # end.
            _, closed, text = response.rpartition("</think>")
            text = text.lstrip() if closed else text
        verdict = verify(text, answer.instruction_ids, answer.arguments)
        if self.verbose:
            pairs = zip(answer.instruction_ids, verdict.strict, verdict.loose, strict=True)
            logger.info(f"prompt {answer.key} {answer.prompt!r}: {text!r} -> {list(pairs)}")
        has_answer = bool(parts.answer if self.scored_part == "answer" else parts.behind)
        score = _VerdictScore(
            self._reward(verdict, parts, answer.complete),
            all(verdict.strict),
            has_answer,
            bool(parts.think),
        )
        score.verdict = verdict
        return score

    def _reward(self, verdict: Verdict, parts: ResponseParts, complete: bool | None) -> Any:
        if self.aggregate_reward is False:
            return 0.0
        data = IFEvalScoreData.row(verdict)
        if self.aggregate_reward is not True:
            return self.aggregate_reward(
                data, think_blocks=parts.think, answer_blocks=parts.answer, complete=complete
            )
        blocks = {"think_blocks": parts.think, "answer_blocks": parts.answer}
        if self.scored_part == "response":
            blocks = {}
        return self.default_reward_aggregator(data, **blocks, dtype=torch.float64).item()

    def default_reward_aggregator(
        self,
        score: IFEvalScoreData,
        think_blocks: Sequence[str] | None = None,
        answer_blocks: Sequence[str] | None = None,
        complete: bool | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute the reward of :class:`IfEvalScorer`.

        Args:
            score: scores of one response, or of a batch ``[*B]``.
            think_blocks: blocks of reasoning of the response.
            answer_blocks: answer blocks of the response.
            complete: whether the response ended by itself; ignored by this function.
            dtype: dtype of the reward; torch's default dtype by default.

        Returns:
            ``[*B, 1, 1]``.
        """
        none = torch.zeros(*score.batch_size, 1, dtype=torch.float64, device=score.device)
        shares = [getattr(score, name) for name in _SCORES]
        found = [none if s is None else s.to(none.dtype).mean(-1, keepdim=True) for s in shares]
        reward = torch.stack(found, -1) @ none.new_tensor(self.format_weights).unsqueeze(-1)
        bonus = _ANSWER_BONUS * (len(answer_blocks or ()) == 1)
        return (reward + (bonus + _THINK_BONUS * (len(think_blocks or ()) == 1))).to(
            dtype or torch.get_default_dtype()
        )

    # Writing

    def _write_outcomes(self, outcomes: Sequence[Outcome], next_td: TensorDictBase) -> None:
        super()._write_outcomes(outcomes, next_td)
        # Rows without a score follow no instruction; reward_valid distinguishes them.
        nothing = Verdict((False,), (False,))
        data = IFEvalScoreData.rows(getattr(o.value, "verdict", nothing) for o in outcomes)
        next_td.set(self.score_key, data.to(next_td.device) if next_td.device else data)

    # Specs

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the specs of the reward and of the scores."""
        reward_spec = super().transform_reward_spec(reward_spec)
        reward_spec[self.score_key] = IFEvalScoreData.default_spec(
            reward_spec.shape, device=reward_spec.device
        )
        return reward_spec
