"""The reward of IFEval: how many instructions does the answer follow, as it is and loosely?

Next: :mod:`torchrl_llm.rewards.ifeval.verdict` decides, one function an instruction;
:class:`torchrl_llm.envs.datasets.ifeval.IFEvalEnv` has the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tensordict import TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl import logger
from torchrl.data import Composite

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.ifeval.data import IFEvalExample, IFEvalScoreData
from torchrl_llm.rewards.ifeval.verdict import Verdict, verify
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.reward_runner import Outcome
from torchrl_llm.rewards.text_blocks import ResponseParts, split_response

_ANSWER_BONUS = 0.1
_THINK_BONUS = 0.05
# What is written where scores are wanted and no reward.
_NO_REWARD_KEYS = ("reward_valid", "reward_seconds", "error")


class _VerdictScore(RewardScore):
    """A score that keeps its verdict, for the keys that are written beside the reward."""

    verdict: Verdict

    def _replace(self, **changes: Any) -> _VerdictScore:
        replaced = super()._replace(**changes)
        replaced.verdict = self.verdict
        return replaced


class _ColumnReader:
    """Responses that stand in a column of their own, beside no conversation."""

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

    Beside the keys of :class:`~torchrl_llm.rewards.RewardParser`, ``("next", score_key)`` holds
    the rows of an :class:`IFEvalScoreData`; ``success`` says that all instructions are followed
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
        set_done_if_answer: see :class:`~torchrl_llm.rewards.RewardParser`.
        scored_part: ``"answer"`` looks at the last answer block, and at nothing where there is
            none; ``"response"`` at all behind the reasoning, as the paper does, with no bonus for
            blocks.
        tokenizer: see :class:`~torchrl_llm.rewards.RewardParser`.
        eos_token: see there.
        input_mode: see there.
        num_threads: see there.
        timeout: see there.

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
        set_done_if_answer: bool = True,
        scored_part: Literal["answer", "response"] = "answer",
        tokenizer: Any = None,
        eos_token: str | None = None,
        input_mode: str | None = None,
        num_threads: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            eos_token=eos_token,
            set_done_if_answer=set_done_if_answer,
            input_mode=input_mode,
            num_threads=num_threads,
            timeout=timeout,
        )
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
        self.response_column = response_column
        self.score_key = score_key
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
        text = parts.behind if self.scored_part == "response" else (parts.answer or [""])[-1]
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
        return self.default_reward_aggregator(data, **blocks, complete=complete)

    def default_reward_aggregator(
        self,
        score: IFEvalScoreData,
        think_blocks: Sequence[str] | None = None,
        answer_blocks: Sequence[str] | None = None,
        complete: bool | None = None,
    ) -> float:
        """The reward of :class:`IfEvalScorer`.

        Args:
            score: of one response.
            think_blocks: its blocks of reasoning.
            answer_blocks: its answer blocks.
            complete: whether it ended by itself; the default reward does not ask.
        """
        shares = (
            score.prompt_level_strict_acc,
            score.inst_level_strict_acc,
            score.prompt_level_loose_acc,
            score.inst_level_loose_acc,
        )
        pairs = zip(self.format_weights, shares, strict=True)
        reward = sum(weight * share.double().mean().item() for weight, share in pairs)
        bonus = _ANSWER_BONUS * (len(answer_blocks or ()) == 1)
        return reward + bonus + _THINK_BONUS * (len(think_blocks or ()) == 1)

    # Writing

    def _write_outcomes(self, outcomes: Sequence[Outcome], next_td: TensorDictBase) -> None:
        written = next_td if self.aggregate_reward is not False else next_td.empty()
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
