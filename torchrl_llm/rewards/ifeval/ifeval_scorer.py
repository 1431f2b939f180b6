"""The reward of IFEval: how many instructions does the answer follow, as it is and loosely?

:class:`IFEvalExample` is what is scored, :class:`IFEvalScoreData` the scores, :class:`IFEvalData`
a table of prompts.

Next: :mod:`torchrl_llm.rewards.ifeval.instructions` decides;
:class:`torchrl_llm.envs.datasets.hub_tasks.IFEvalEnv` has the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl import logger
from torchrl.data import Composite, Unbounded

from torchrl_llm._registry import FullSignature
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.answer_block import ResponseParts, split_response
from torchrl_llm.rewards.ifeval.instructions import Verdict, verify
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.reward_runner import Outcome

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
        complete: whether the response ended by itself, ``None`` where it is not known.
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
        tokens: int64 ``[B, T]``, their ids with those of the prompts, where they are known.
        tokens_response: int64 ``[B, R]``, theirs alone.
        logits: float32 ``[B, R, V]``, where they were kept.
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
    tokens: Tensor | None = None
    tokens_response: Tensor | None = None
    logits: Tensor | None = None
    reward: Tensor | None = None

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], responses: Iterable[str] | None = None
    ) -> IFEvalData:
        """Rows of the dataset as a batch.

        Args:
            rows: see ``read_row``.
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
        """Spec of the columns that the dataset has.

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
    """A row of the dataset as environments and scorers have it.

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


_ANSWER_BONUS = 0.1
_THINK_BONUS = 0.05
# What is written where scores are wanted and no reward.
_NO_REWARD_KEYS = ("reward_valid", "reward_seconds", "error")


class _VerdictScore(RewardScore):
    """A score that keeps its verdict, for the keys that are written next to the reward."""

    verdict: Verdict

    def _replace(self, **changes: Any) -> _VerdictScore:
        replaced = super()._replace(**changes)
        replaced.verdict = self.verdict
        return replaced


class _ColumnReader:
    """Reader of responses that stand in a column, without a conversation."""

    def __init__(self, column: NestedKey) -> None:
        self.column = column

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        return [
            text if isinstance(text, str) else DataError(f"a response must be text, got {text!r}")
            for text in _read_column(td, self.column)
        ]


def _read_column(td: TensorDictBase, key: NestedKey) -> list[Any]:
    values = td.get(key, None)
    if values is None:
        raise DataError(
            f"the rows lack {key!r}, which the reward needs; they have "
            f"{sorted(str(key) for key in td.keys())}"
        )
    size = td.batch_size.numel()
    if isinstance(values, Tensor):
        return values.reshape(size).tolist()
    if is_non_tensor(values) and not values.batch_dims:
        return [values.data] * size
    return values.tolist()


class IfEvalScorer(RewardParser):
    r"""The instructions that the answer follows, strictly and loosely, and a reward for them.

    The reward is ``0.4 p_s + 0.3 i_s + 0.2 p_l + 0.1 i_l``: whether all instructions are followed
    (p) and the share of them (i), strictly (s) and loosely (l); ``format_weights`` has the weights.
    Exactly one answer block adds 0.1, exactly one block of reasoning 0.05. A row with an unknown
    instruction or wrong arguments has no reward: it is invalid, with the error.

    Next to the keys of :class:`~torchrl_llm.rewards.RewardParser`, ``("next", score_key)`` has the
    rows of an :class:`IFEvalScoreData`; ``success`` says that all instructions are followed
    strictly.

    Args:
        instruction_ids_key: column with the names of the instructions, a list a row.
        prompt_key: column of the prompts, for the log; it may be missing.
        keyword_args_key: column with the arguments, a list of dicts a row.
        id_key: column with the numbers of the prompts, for the log; it may be missing.
        response_column: column with the responses, for tables of them; what the policy wrote, in
            any input mode, if not given.
        score_key: where the scores are written.
        aggregate_reward: ``True`` for the reward above; ``False`` for scores without a reward; or a
            function of an :class:`IFEvalScoreData` without batch and of the keywords
            ``think_blocks``, ``answer_blocks`` (lists of strings) and ``complete`` (``None`` where
            it is not known how the response ended), which returns one number.
        format_weights: weights of prompt-level strict, instruction-level strict, prompt-level
            loose, instruction-level loose.
        verbose: log each verdict.
        scored_part: ``"answer"`` looks at the last answer block, and at nothing where there is
            none; ``"response"`` at all behind the reasoning, as the paper does, with no bonus for
            blocks.
        kwargs: arguments of :class:`~torchrl_llm.rewards.RewardParser`, but for its keys.

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
        if scored_part not in ("answer", "response"):
            raise ConfigError(f"scored_part must be 'answer' or 'response', got {scored_part!r}")
        if format_weights is not None and aggregate_reward is not True:
            raise ConfigError("format_weights has no effect unless aggregate_reward is True")
        self.instruction_ids_key = instruction_ids_key
        self.prompt_key = prompt_key
        self.keyword_args_key = keyword_args_key
        self.id_key = id_key
        self.response_column = self.response_key = response_column
        self.score_key = score_key
        if aggregate_reward is False:
            self.out_keys = []
        self.out_keys = [score_key, *self.out_keys]
        self.aggregate_reward = aggregate_reward
        self.format_weights = weights
        self.verbose = verbose
        self.scored_part = scored_part

    # Reading

    def _mode(self) -> Any:
        if self.response_column is not None:
            return _ColumnReader(self.response_column)
        return super()._mode()

    def _answers(self, td: TensorDictBase, size: int) -> list[IFEvalExample]:
        missing = [None] * size
        prompts = (
            missing if td.get(self.prompt_key, None) is None else _read_column(td, self.prompt_key)
        )
        keys = missing if td.get(self.id_key, None) is None else _read_column(td, self.id_key)
        reasons = (
            read_rows(td, ("tokens", "finish_reason"), None) if "tokens" in td.keys() else None
        )
        complete = missing
        if reasons is not None:
            complete = [bool(reason == FinishReason.STOP) for reason in reasons]
        columns = (
            _read_column(td, self.instruction_ids_key),
            _read_column(td, self.keyword_args_key),
            prompts,
            keys,
            complete,
        )
        return [IFEvalExample(*row) for row in zip(*columns, strict=True)]

    # Scoring

    def score(self, response: str, answer: IFEvalExample) -> RewardScore:
        """See :class:`IfEvalScorer`.

        Args:
            response: what the model wrote.
            answer: the prompt's instructions.

        Raises:
            RewardError: for an unknown instruction or wrong arguments.
        """
        parts = split_response(response)
        if self.scored_part == "answer":
            text = (parts.answer or [""])[-1]
        else:
            # As it was written: without its last line, a response that ends a line is whole.
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
        """The reward of :class:`IfEvalScorer`.

        Args:
            score: of one response, or of a batch ``[*B]``.
            think_blocks: its blocks of reasoning.
            answer_blocks: its answer blocks.
            complete: whether it ended by itself; the default reward does not ask.
            dtype: of the reward; torch's default dtype by default.

        Returns:
            ``[*B, 1, 1]``.
        """
        none = torch.zeros(*score.batch_size, 1, dtype=torch.float64, device=score.device)
        shares = (
            score.prompt_level_strict_acc,
            score.inst_level_strict_acc,
            score.prompt_level_loose_acc,
            score.inst_level_loose_acc,
        )
        found = [none if s is None else s.to(none.dtype).mean(-1, keepdim=True) for s in shares]
        reward = torch.stack(found, -1) @ none.new_tensor(self.format_weights).unsqueeze(-1)
        bonus = _ANSWER_BONUS * (len(answer_blocks or ()) == 1)
        return (reward + (bonus + _THINK_BONUS * (len(think_blocks or ()) == 1))).to(
            dtype or torch.get_default_dtype()
        )

    # Writing

    def _write_outcomes(self, outcomes: Sequence[Outcome], next_td: TensorDictBase) -> None:
        written = next_td
        if self.aggregate_reward is False:
            written = next_td.select(*_NO_REWARD_KEYS, strict=False)
        super()._write_outcomes(outcomes, written)
        if self.aggregate_reward is False:
            for name in _NO_REWARD_KEYS:
                next_td.set(name, written.get(name))
        # Rows that were not scored, or could not be, follow nothing; reward_valid tells them apart.
        nothing = Verdict((False,), (False,))
        data = IFEvalScoreData.rows(getattr(o.value, "verdict", nothing) for o in outcomes)
        next_td.set(self.score_key, data.to(next_td.device) if next_td.device else data)

    # Specs

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the reward's keys and the scores."""
        before = set(reward_spec.keys())
        reward_spec = super().transform_reward_spec(reward_spec)
        if self.aggregate_reward is False:
            for name in set(reward_spec.keys()) - before - set(_NO_REWARD_KEYS):
                del reward_spec[name]
        reward_spec[self.score_key] = IFEvalScoreData.default_spec(
            reward_spec.shape, device=reward_spec.device
        )
        return reward_spec
