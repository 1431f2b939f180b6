"""Weighted sums of reward components; each component has a value, a validity and an error.

:class:`WrittenReward` is a component for a reward that the environment has already written;
:class:`TokenRewards` makes a replay buffer train on rewards per token.

Next: :mod:`torchrl_llm.rewards.reward_components` defines a component.

Shape legend: ``B`` or ``N`` rows, ``K`` components, ``R_b`` tokens of a response.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.column import Column
from torchrl_llm.data.failures import NO_FAILURE, tell_failures
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec
from torchrl_llm.errors import ConfigError, DataError, RewardError
from torchrl_llm.rewards.reward_components import Component
from torchrl_llm.rewards.reward_parser import (
    RewardParser,
    error_spec,
    response_lengths,
    set_errors,
    written_failures,
)
from torchrl_llm.rewards.reward_runner import Outcome
from torchrl_llm.rewards.reward_scorer import RewardScore, Sample, Scorer

_TOKEN_NODE = "token_reward"


class CompositeReward(RewardParser):
    """The weighted sum of several components; also writes the value of each.

    The components of a step run in parallel; each component's ``run`` says where. The keys of
    :class:`~torchrl_llm.rewards.RewardParser` hold the sum. In addition, each component writes:

    - ``("rewards", name, "value")``: float32 ``[B, 1, 1]``, NaN where the component failed;
    - ``("rewards", name, "valid")``: bool ``[B]``;
    - ``("rewards", name, "seconds")``: float32 ``[B]``, wall-clock time;
    - ``("rewards", name, "error")``: the error, empty if there was none;
    - ``("rewards", name, "failure")``: the failure with the keys of ``"error"``, for a component
      that is optional or has weight 0, because such failures leave no error in the row.

    If a component fails, the row's reward is invalid. If the failed component is optional, the
    weights of the other components grow in proportion instead (``weighted_total``). A failure never
    counts as zero.

    The first component is the task: its score determines ``success``, ``reward_answer``,
    ``reward_think``, ``reward_right`` and the end of the episode.

    If a component scores tokens, the reward of the row is the sum over the tokens.
    ``("token_reward", "total")``, float32 ``[R_b]`` per row, aligned with the tokens of the
    response, holds the reward of each token; components that score the whole response count at its
    last token. A replay buffer trains on them with :class:`~torchrl_llm.rewards.TokenRewards`.

    To keep the reward of an environment that already has one, add it as a component:
    :class:`~torchrl_llm.rewards.WrittenReward`.

    Args:
        components: maps a name to a :class:`~torchrl_llm.rewards.Component`, or to a scorer (with
            weight 1).
        tokenizer: see :class:`~torchrl_llm.rewards.RewardParser`.
        in_keys: see :class:`~torchrl_llm.rewards.RewardParser`.
        out_keys: see :class:`~torchrl_llm.rewards.RewardParser`.
        eos_token: see :class:`~torchrl_llm.rewards.RewardParser`.
        set_done_if_answer: see :class:`~torchrl_llm.rewards.RewardParser`.
        input_mode: see :class:`~torchrl_llm.rewards.RewardParser`.

    Raises:
        ConfigError: when there is no component, when the first component is optional, or when a
            component is optional and a weight is not positive.

    Example:
        >>> from torchrl_llm.envs import GSM8KEnv
        >>> from torchrl_llm.rewards import FormatReward, GSM8KRewardParser
        >>> reward = CompositeReward({
        ...     "right": Component(GSM8KRewardParser(), weight=0.75),
        ...     "format": Component(FormatReward(), weight=0.25),
        ... })
        >>> rows = [{"question": "What is 3 + 4?", "answer": "#### 7"}]
        >>> env = GSM8KEnv(dataset=rows, compute_reward=False).append_transform(reward)
        >>> td = env.reset()
        >>> message = {"role": "assistant", "content": "<answer>7</answer>"}
        >>> prompt = td["history"].prompt
        >>> td["history"].full = type(prompt).of([prompt.chats[0] + [message]])
        >>> td = env.step(td)["next"]
        >>> td["reward"].item(), td["rewards", "right", "value"].item(), td["success"].item()
        (0.75, 1.0, True)
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        tokenizer: Any = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        eos_token: str | None = None,
        set_done_if_answer: bool = True,
        input_mode: str | None = None,
    ) -> None:
        super().__init__(tokenizer, in_keys, out_keys, eos_token, set_done_if_answer, input_mode)
        self.components = {
            name: part if isinstance(part, Component) else Component(part)
            for name, part in components.items()
        }
        parts = list(self.components.values())
        self.needs_answer = any(part.scorer.needs_answer for part in parts)
        if not parts or not any(part.weight for part in parts):
            raise ConfigError("a reward needs a component with a weight")
        if parts[0].optional:
            raise ConfigError("the first component is the task itself and cannot be optional")
        if any(part.optional for part in parts) and any(part.weight < 0 for part in parts):
            raise ConfigError(
                "weights must not be negative where a component is optional, since what fails is "
                "shared out in proportion; let a scorer return negative values instead"
            )
        self._weights = torch.tensor([part.weight for part in parts], dtype=torch.float64)
        self._optional = torch.tensor([part.optional for part in parts])
        self._columns = sorted({name for part in parts for name in part.scorer.columns})
        self._pools = {name: part.make_pool() for name, part in self.components.items()}
        self._written = {
            name: part.scorer
            for name, part in self.components.items()
            if isinstance(part.scorer, WrittenReward)
        }
        self.per_token = any(part.scorer.per_token for part in parts)

    def score(self, response: str, answer: Any) -> RewardScore:
        """Score a single response without a row.

        Raises:
            RewardError: when a component that is not optional failed.
        """
        samples = [Sample(response, answer)]
        written = {name: self.components[name].outcomes(samples) for name in self._written}
        results = self._run(samples) | written
        (outcome,) = self._totals(results, self._weighted(results))
        if outcome.value is None:
            raise RewardError(f"{outcome.error}: {outcome.message}")
        return outcome.value

    def close(self) -> None:
        """End the processes of the components; the next score starts new ones."""
        for pool in self._pools.values():
            if pool is not None:
                pool.close()

    @property
    def _adds(self) -> bool:
        # A written reward is already one of the components.
        return not self._written

    def _outcomes(
        self,
        samples: Sequence[Sample | Exception | None],
        td: TensorDictBase,
        next_td: TensorDictBase,
    ) -> list[Outcome]:
        lengths = response_lengths(td) if self.per_token else None
        if self.per_token and lengths is None:
            raise DataError("a reward per token needs ('tokens', 'response'), which the rows lack")
        # Read before anything is written, because the composite writes its reward to the same key.
        written = {name: part.outcomes(next_td) for name, part in self._written.items()}
        results = self._run(samples) | written
        for column in results.values():
            # Logged here, because failures of optional components and of components with weight 0
            # leave no error in their row.
            tell_failures([outcome.failure for outcome in column], td.__getitem__, len(column))
        total = self._weighted(results)
        self._write_components(results, next_td)
        if lengths is not None:
            self._write_tokens(results, total, lengths, next_td)
        return self._totals(results, total)

    def _run(self, samples: Sequence[Sample | Exception | None]) -> dict[str, list[Outcome]]:
        """Run the components in parallel, and return their outcomes."""
        results: dict[str, list[Outcome]] = {}

        def run(name: str) -> None:
            outcomes = self.components[name].outcomes(samples, self._pools[name])
            results[name] = [outcome.of(f"component {name!r}") for outcome in outcomes]

        names = [name for name in self.components if name not in self._written]
        threaded = [name for name in names if self.components[name].run != "inline"]
        threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in threaded]
        for thread in threads:
            thread.start()
        for name in names:
            if name not in threaded:
                run(name)
        for thread in threads:
            thread.join()
        return results

    def _weighted(self, results: Mapping[str, Sequence[Outcome]]) -> WeightedTotal:
        values = [[_value(outcome) for outcome in results[name]] for name in self.components]
        table = torch.tensor(values, dtype=torch.float64)
        return weighted_total(table, self._weights, self._optional)

    def _totals(
        self, results: Mapping[str, Sequence[Outcome]], total: WeightedTotal
    ) -> list[Outcome]:
        outcomes = []
        columns = zip(*(results[name] for name in self.components), strict=True)
        for column, value, valid in zip(columns, total.values.tolist(), total.valid, strict=True):
            seconds = sum(outcome.seconds for outcome in column)
            if not valid:
                outcomes.append(self._invalid(column)._replace(seconds=seconds))
                continue
            score = column[0].value
            if score is None:  # a failed component with weight 0
                score = RewardScore(value)
            elif isinstance(score, Tensor):
                score = RewardScore(value, success=value > 0, has_answer=True)
            # A valid reward records why a gate rejected the turn.
            refused = (o.failure for o in column if o.error and o.value is not None)
            failure = next(refused, NO_FAILURE)
            outcomes.append(Outcome(score._replace(reward=value), seconds, failure))
        return outcomes

    def _invalid(self, column: Sequence[Outcome]) -> Outcome:
        """Return the failure that makes a row's reward invalid."""
        parts = zip(self.components.items(), column, strict=True)
        failed = [(name, part, o) for (name, part), o in parts if o.value is None and part.weight]
        if not failed:
            return Outcome.failed(RewardError("the weighted sum is too large for float32"))
        # If all components are optional and all failed, no component is left.
        name, _, outcome = min(failed, key=lambda each: each[1].optional)
        message = f"component {name!r}: {outcome.message}"
        return outcome._replace(failure=outcome.failure._replace(message=message))

    # -- writing ----------------------------------------------------------------------------------

    def _write_components(
        self, results: Mapping[str, Sequence[Outcome]], next_td: TensorDictBase
    ) -> None:
        size, device = next_td.batch_size.numel(), next_td.device
        node = TensorDict(batch_size=next_td.batch_size, device=device)
        for name, outcomes in results.items():
            table = torch.tensor([(_value(o), o.seconds) for o in outcomes], dtype=torch.float32)
            values, seconds = table.to(device).view(size, 2).unbind(-1)
            part = TensorDict(batch_size=next_td.batch_size, device=device)
            part.set("value", values.reshape(size, 1, 1))
            valid = [outcome.value is not None for outcome in outcomes]
            part.set("valid", torch.tensor(valid, device=device))
            part.set("seconds", seconds.contiguous())
            part.set("error", Column.of(map(_said, outcomes)))
            if self._is_harmless(name):
                set_errors(part, [outcome.failure for outcome in outcomes], "failure")
            node.set(name, part)
        next_td.set("rewards", node)

    def _is_harmless(self, name: str) -> bool:
        """Whether the row keeps its reward if the component fails."""
        return self.components[name].optional or not self.components[name].weight

    def _write_tokens(
        self,
        results: Mapping[str, Sequence[Outcome]],
        total: WeightedTotal,
        lengths: Sequence[int],
        next_td: TensorDictBase,
    ) -> None:
        rewards = [torch.zeros(length) for length in lengths]
        for row, (reward, weights) in enumerate(zip(rewards, total.weights.t(), strict=True)):
            for weight, name in zip(weights.tolist(), self.components, strict=True):
                value = results[name][row].value
                if isinstance(value, Tensor):
                    reward += weight * value
                elif value is not None:
                    reward[-1:] += weight * value.reward
            if not total.valid[row]:
                reward.fill_(float("nan"))
        next_td.set(_TOKEN_NODE, ragged_rows({"total": rewards}))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the specs of the components."""
        reward_spec = super().transform_reward_spec(reward_spec)
        size, device = reward_spec.shape, reward_spec.device
        parts = {
            name: Composite(
                value=Unbounded(shape=(*size, 1, 1), device=device),
                valid=Unbounded(shape=size, dtype=torch.bool, device=device),
                seconds=Unbounded(shape=size, device=device),
                error=ColumnSpec((*size, -1), example_data=""),
                **({"failure": error_spec(size, device)} if self._is_harmless(name) else {}),
                shape=size,
                device=device,
            )
            for name in self.components
        }
        reward_spec["rewards"] = Composite(parts, shape=size, device=device)
        if self.per_token:
            reward_spec[_TOKEN_NODE] = RaggedSpec({"total": torch.float32}, shape=size)
        return reward_spec


def _value(outcome: Outcome) -> float:
    if outcome.value is None:
        return float("nan")
    return float(outcome.value.sum() if isinstance(outcome.value, Tensor) else outcome.value.reward)


def _said(outcome: Outcome) -> str:
    return f"{outcome.error}: {outcome.message}" if outcome.value is None else ""


class WeightedTotal(NamedTuple):
    """A weighted sum of rewards.

    Attributes:
        values: float64 ``[N]``, NaN where invalid.
        valid: bool ``[N]``.
        weights: float64 ``[K, N]``, the weight of each value.
    """

    values: Tensor
    valid: Tensor
    weights: Tensor


def weighted_total(values: Tensor, weights: Tensor, optional: Tensor) -> WeightedTotal:
    r"""Compute the weighted sum of components, some of which may have failed.

    :math:`r_n = s_n \sum_{k \in V_n} w_k v_{kn}` over the valid components :math:`V_n` of a row,
    where :math:`s_n` is 1 if no component failed, otherwise :math:`\sum_k w_k / \sum_{k \in V_n}
    w_k`. A row is invalid if a component failed that has a weight and is not optional, if no
    component with a weight is left, or if the sum overflows float32.

    Args:
        values: float ``[K, N]``, NaN if a component failed.
        weights: float ``[K]``.
        optional: bool ``[K]``.

    Example:
        >>> values = torch.tensor([[1.0, 1.0], [0.0, float("nan")]])
        >>> total = weighted_total(values, torch.tensor([0.5, 1.5]), torch.tensor([False, True]))
        >>> total.values.tolist(), total.valid.tolist()
        ([0.5, 2.0], [True, True])
    """
    values_KN, weights_K1 = values.double(), weights.double().unsqueeze(-1)
    counts_K1 = weights_K1 != 0
    there_KN = ~values_KN.isnan() & counts_K1
    missing_KN = values_KN.isnan() & counts_K1
    valid_N = ~(missing_KN & ~optional.unsqueeze(-1)).any(0) & there_KN.any(0)
    scale_N = weights_K1.sum() / (weights_K1 * there_KN).sum(0)
    # A complete row is not divided, so it is not rounded.
    scale_N = scale_N.where(missing_KN.any(0), 1.0)
    weights_KN = (weights_K1 * scale_N).where(there_KN, 0.0)
    total_N = (weights_KN * values_KN.nan_to_num()).sum(0)
    valid_N = valid_N & (total_N.abs() <= torch.finfo(torch.float32).max)
    return WeightedTotal(total_N.where(valid_N, math.nan), valid_N, weights_KN)


class WrittenReward(Scorer):
    """A component that returns the reward that a task, a game or a server wrote for the step.

    Use it in a :class:`~torchrl_llm.rewards.CompositeReward` that is appended to an environment
    with its own reward. The component takes over success, validity and error of that reward. The
    environment ends its episodes itself, so pass ``set_done_if_answer=False``.

    Example:
        >>> from torchrl_llm.data.history import History
        >>> from torchrl_llm.envs import TicTacToeEnv
        >>> from torchrl_llm.rewards import Component, CompositeReward
        >>> short = Component(lambda sample: float(len(sample.response) < 20), weight=0.1)
        >>> parts = {"game": Component(WrittenReward()), "short": short}
        >>> env = TicTacToeEnv(num_envs=1, player="X", shuffle=False)
        >>> env = env.append_transform(CompositeReward(parts, set_done_if_answer=False))
        >>> td = env.reset()
        >>> answer = {"role": "assistant", "content": "<move>10</move>"}
        >>> td["history"].full = History.of([td["history"].prompt.chats[0] + [answer]])
        >>> td = env.step(td)["next"]
        >>> round(td["rewards", "game", "value"].item(), 3), round(td["reward"].item(), 3)
        (-0.3, -0.2)
    """

    def score(self, sample: Sample) -> float:
        """Raise an error, because a response alone does not contain the written reward.

        Raises:
            RewardError: always.
        """
        raise RewardError("a WrittenReward is read from the rows of an environment's step")

    def outcomes(self, next_td: TensorDictBase) -> list[Outcome]:
        """Return the rewards that were written for a step.

        Args:
            next_td: rows ``[B]`` with ``reward``, ``reward_valid`` and the related keys.

        Returns:
            ``B`` outcomes whose values are scores; a turn that a gate rejected also has a failure.

        Raises:
            DataError: when no reward has been written before.
        """
        size = next_td.batch_size.numel()
        valid = next_td.get("reward_valid", None)
        if valid is None:
            raise DataError(
                "there is no reward yet: append this after the transform that writes it, or let "
                "the environment have a reward (compute_reward=True)"
            )
        reward = next_td.get("reward").reshape(size, -1).sum(-1).double().tolist()
        flags = [
            _flat(next_td.get(name, None), size).bool().tolist()
            for name in ("success", "reward_answer", "reward_think")
        ]
        scores = map(RewardScore, reward, *flags)
        seconds = _flat(next_td.get("reward_seconds", None), size).tolist()
        rows = zip(
            scores, valid.flatten().tolist(), seconds, written_failures(next_td), strict=True
        )
        return [
            Outcome(score, taken, failure)
            if fine
            else Outcome(None, taken, failure._replace(kind=failure.kind or RewardError.__name__))
            for score, fine, taken, failure in rows
        ]


def _flat(values: Tensor | None, size: int) -> Tensor:
    """Return one number per row; 0 if it is missing or NaN."""
    return torch.zeros(size) if values is None else values.reshape(size, -1)[:, 0].nan_to_num()


class TokenRewards(RowTransform):
    """Replaces the row's reward by the rewards of its tokens, in a replay buffer.

    An environment's rewards have one shape for all rows, so
    :class:`~torchrl_llm.rewards.CompositeReward` writes rewards ``[1, 1]`` in the environment and
    stores the tokens' rewards separately. Append this transform last, so that it runs first in a
    buffer. Then the following transforms, which join turns and compute advantages, read rewards
    ``[R, 1]``.

    Args:
        reward_key: key of the reward, ``[1, 1]`` per row; it becomes ``[R, 1]``, aligned with the
            ``R`` tokens of the response.
        token_key: key of the reward of each token, ``[R]`` per row.

    Raises:
        DataError: when rows have no rewards per token.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> buffer = ReplayBuffer(transform=TokenRewards())
        >>> tokens = {"total": torch.tensor([0.0, 1.0])}
        >>> row = TensorDict(next={"reward": torch.ones(1, 1), "token_reward": tokens})
        >>> index = buffer.extend([row])
        >>> buffer[0]["next", "reward"].tolist()
        [[0.0], [1.0]]
    """

    def __init__(
        self,
        reward_key: NestedKey = ("next", "reward"),
        token_key: NestedKey = ("next", "token_reward", "total"),
    ) -> None:
        super().__init__()
        self.reward_key, self.token_key = as_path(reward_key), as_path(token_key)

    @property
    def written(self) -> Path:
        """A mark next to the tokens' rewards; joined turns do not have it for all turns."""
        return (*self.token_key[:-1], "in_place")

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """Return the reward of each token."""
        advice = "a CompositeReward with a component per token writes it"
        rewards = [row.unsqueeze(-1) for row in rows.read(self.token_key, advice)]
        return {self.reward_key: rewards, self.written: [torch.ones(1)] * len(rewards)}

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise ConfigError(
            "an environment's rewards have one shape for all rows; append TokenRewards to the "
            "replay buffer"
        )
