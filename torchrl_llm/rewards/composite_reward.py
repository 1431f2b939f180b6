"""Rewards of several parts: each with a value, a validity, an error and its seconds.

:class:`WrittenReward` is the part that an environment has written already; :class:`TokenRewards`
lets a replay buffer train on the rewards of tokens.

Next: :mod:`torchrl_llm.rewards.reward_components` says what a part is.

Shape legend: ``B`` rows, ``N`` of them scored, ``K`` components, ``R_b`` tokens of a response.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import tell_failures
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec
from torchrl_llm.errors import ConfigError, DataError, RewardError
from torchrl_llm.rewards.reward_components import (
    Component,
    Sample,
    Scorer,
    WeightedTotal,
    weighted_total,
)
from torchrl_llm.rewards.reward_parser import (
    RewardParser,
    RewardScore,
    error_spec,
    refused_rows,
    set_errors,
    written_failures,
)
from torchrl_llm.rewards.reward_runner import Outcome

_TOKEN_NODE = "token_reward"
_NEUTRAL = Outcome(RewardScore(0.0))


class CompositeReward(RewardParser):
    """The weighted sum of several components, written together with each of them.

    The components of a step run at the same time, each where it says. Written, next to the keys of
    :class:`~torchrl_llm.rewards.RewardParser`, which tell of the sum, for each component

    - ``("rewards", name, "value")``: float32 ``[B, 1, 1]``, NaN where it failed;
    - ``("rewards", name, "valid")``: bool ``[B]``;
    - ``("rewards", name, "seconds")``: float32 ``[B]``, wall-clock time;
    - ``("rewards", name, "error")``: what went wrong, empty where nothing did;
    - ``("rewards", name, "failure")``: the same in the keys of ``"error"``, for a component that is
      optional or of no weight, whose failures leave no error in their row.

    A component that fails makes the row's reward invalid, unless it is optional; then the weights
    of the others grow in proportion
    (:func:`~torchrl_llm.rewards.reward_components.weighted_total`). It never counts as zero.

    The first component is the task: ``success``, ``reward_answer``, ``reward_think``,
    ``reward_right`` and the end of the episode follow its score.

    Where a component scores tokens, the reward of the row is the sum over them, and
    ``("token_reward", "total")``, float32 ``[R_b]`` a row, aligned with the tokens of the response,
    has the reward of each; components that score the whole response count at its last token. A
    replay buffer trains on them with :class:`~torchrl_llm.rewards.TokenRewards`.

    An environment that has a reward already keeps it as a component, a
    :class:`~torchrl_llm.rewards.WrittenReward`.

    Args:
        components: name to a :class:`~torchrl_llm.rewards.Component`, or to what such a one is
            made of, with weight 1.
        tokenizer: see :class:`~torchrl_llm.rewards.RewardParser`.
        in_keys: see there.
        out_keys: see there.
        eos_token: see there.
        set_done_if_answer: see there.
        input_mode: see there.

    Raises:
        ConfigError: no component, a first one that is optional, or weights that are not positive
            where a component is optional.

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
        self._pools = {name: part.make_pool() for name, part in self.components.items()}
        self._written = {
            name: part.scorer
            for name, part in self.components.items()
            if isinstance(part.scorer, WrittenReward)
        }
        self.per_token = any(part.per_token for part in parts)

    def score(self, response: str, answer: Any) -> RewardScore:
        """Score one response outside of rows.

        Raises:
            RewardError: a component that is not optional failed.
        """
        results = self._run([Sample(response, answer)], self.components)
        (outcome,) = self._totals(results, self._weighted(results, 1))
        if outcome.error:
            raise RewardError(f"{outcome.error}: {outcome.message}")
        return outcome.value

    def close(self) -> None:
        """End the processes of the components; the next score starts new ones."""
        for pool in self._pools.values():
            if pool is not None:
                pool.close()

    # -- scoring ----------------------------------------------------------------------------------

    @property
    def _adds(self) -> bool:
        # A written reward is one of the parts already.
        return not self._written

    def _outcomes(
        self,
        td: TensorDictBase,
        next_td: TensorDictBase,
        rows: Sequence[int],
        responses: Sequence[str | Exception],
    ) -> list[Outcome]:
        lengths = response_lengths(td)
        if self.per_token and lengths is None:
            raise DataError("a reward per token needs ('tokens', 'response'), which the rows lack")
        asked = {name for part in self.components.values() for name in part.scorer.columns}
        samples = read_samples(self, td, rows, responses, lengths, sorted(asked))
        # Before anything is written: the composite's own reward takes the same place.
        everywhere = {
            name: part.outcomes(next_td, range(len(responses)))
            for name, part in self._written.items()
        }
        written = {name: [column[row] for row in rows] for name, column in everywhere.items()}
        there = [at for at, sample in enumerate(samples) if isinstance(sample, Sample)]
        results = {
            name: [_named(name, o) for o in column]
            for name, column in self._results(samples, there).items()
        } | written
        for column in results.values():
            # Here, for those that are optional or of no weight leave no error in their row.
            tell_failures(
                [outcome.failure for outcome in column], lambda at: td[rows[at]], len(responses)
            )
        total = self._weighted(results, len(rows))
        self._write_components(results, rows, next_td, everywhere)
        if self.per_token:
            self._write_tokens(results, total, rows, lengths, next_td)
        return self._totals(results, total)

    def _resting(self, next_td: TensorDictBase, size: int) -> list[Outcome]:
        """What was written of rows that are not scored: by a gate, or by a world of others."""
        outcomes = super()._resting(next_td, size)
        failures = written_failures(next_td) if self._written else []
        for name, part in self._written.items():
            weight = self.components[name].weight
            for row, outcome in enumerate(part.outcomes(next_td, range(size))):
                if outcome.value is None:
                    outcomes[row] = outcome
                    continue
                score = outcome.value._replace(reward=weight * outcome.value.reward)
                kind, message, *rest = failures[row]
                outcomes[row] = Outcome(score, kind, message, outcome.seconds, *rest)
        return outcomes

    def _results(
        self, samples: Sequence[Sample | Exception], there: Sequence[int]
    ) -> dict[str, list[Any]]:
        """Outcomes by component; a row without a response keeps its exception."""
        columns = {name: list(samples) for name in self.components if name not in self._written}
        scored = {name: self.components[name] for name in columns}
        for name, outcomes in self._run([samples[at] for at in there], scored).items():
            for at, outcome in zip(there, outcomes, strict=True):
                columns[name][at] = outcome
        return columns

    def _run(
        self, samples: Sequence[Sample], parts: Mapping[str, Component]
    ) -> dict[str, list[Outcome]]:
        """Components over all rows, at the same time."""
        results: dict[str, list[Outcome]] = {}

        def run(name: str) -> None:
            results[name] = parts[name].outcomes(samples, self._pools[name])

        threaded = [name for name, part in parts.items() if part.run != "inline"]
        threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in threaded]
        for thread in threads:
            thread.start()
        for name in parts:
            if name not in threaded:
                run(name)
        for thread in threads:
            thread.join()
        return results

    def _weighted(self, results: Mapping[str, Sequence[Outcome]], size: int) -> WeightedTotal:
        values = [[_value(outcome) for outcome in results[name]] for name in self.components]
        table = torch.tensor(values, dtype=torch.float64).view(len(values), size)
        return weighted_total(table, self._weights, self._optional)

    def _totals(
        self, results: Mapping[str, Sequence[Outcome]], total: WeightedTotal
    ) -> list[Outcome]:
        outcomes = []
        first = next(iter(self.components))
        for at, (value, valid) in enumerate(zip(total.values.tolist(), total.valid, strict=True)):
            column = {name: results[name][at] for name in self.components}
            seconds = sum(outcome.seconds for outcome in column.values())
            if not valid:
                outcomes.append(self._invalid(column)._replace(seconds=seconds))
                continue
            score = column[first].value
            if score is None:  # of no weight, and failed
                score = RewardScore(value)
            elif isinstance(score, Tensor):
                score = RewardScore(value, success=value > 0, has_answer=True)
            outcomes.append(Outcome(score._replace(reward=value), seconds=seconds))
        return outcomes

    def _invalid(self, column: Mapping[str, Outcome]) -> Outcome:
        """Why a row has no reward: the failure that harmed it."""
        parts = self.components
        failed = [name for name, o in column.items() if o.error and parts[name].weight]
        # Where all of them are optional, none is left.
        failed.sort(key=lambda name: parts[name].optional)
        if not failed:
            return Outcome.failed(RewardError("the weighted sum is too large for float32"))
        outcome = column[failed[0]]
        return outcome._replace(value=None, message=_part(failed[0], outcome))

    # -- writing ----------------------------------------------------------------------------------

    def _write_components(
        self,
        results: Mapping[str, Sequence[Outcome]],
        rows: Sequence[int],
        next_td: TensorDictBase,
        everywhere: Mapping[str, Sequence[Outcome]],
    ) -> None:
        size, device = next_td.batch_size.numel(), next_td.device
        node = TensorDict(batch_size=next_td.batch_size, device=device)
        for name, scored in results.items():
            outcomes = list(everywhere.get(name, [_NEUTRAL] * size))
            for row, outcome in zip(rows, scored, strict=True):
                outcomes[row] = outcome
            table = torch.tensor([(_value(o), o.seconds) for o in outcomes], dtype=torch.float32)
            values, seconds = table.to(device).view(size, 2).unbind(-1)
            part = TensorDict(batch_size=next_td.batch_size, device=device)
            part.set("value", values.reshape(size, 1, 1))
            part.set("valid", torch.tensor([not o.error for o in outcomes], device=device))
            part.set("seconds", seconds.contiguous())
            part.set("error", Column.of(_said(outcome) for outcome in outcomes))
            if self._is_harmless(name):
                set_errors(part, [outcome.failure for outcome in outcomes], "failure")
            node.set(name, part)
        next_td.set("rewards", node)

    def _is_harmless(self, name: str) -> bool:
        """Whether a failure of the component leaves the row its reward."""
        return self.components[name].optional or not self.components[name].weight

    def _write_tokens(
        self,
        results: Mapping[str, Sequence[Outcome]],
        total: WeightedTotal,
        rows: Sequence[int],
        lengths: Sequence[int],
        next_td: TensorDictBase,
    ) -> None:
        rewards = [torch.zeros(length) for length in lengths]
        for at, row in enumerate(rows):
            if not total.valid[at]:
                rewards[row].fill_(float("nan"))
                continue
            for weight, name in zip(total.weights[:, at].tolist(), self.components, strict=True):
                value = results[name][at].value
                if isinstance(value, Tensor):
                    rewards[row] += weight * value
                elif value is not None:
                    rewards[row][-1:] += weight * value.reward
        resting = self._resting(next_td, len(rewards))
        for row in refused_rows(next_td):
            rewards[row][-1:] += resting[row].value.reward
        next_td.set(_TOKEN_NODE, ragged_rows({"total": rewards}))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the components."""
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


def _named(name: str, outcome: Outcome | Exception) -> Outcome:
    """An outcome that says which component it is of."""
    outcome = outcome if isinstance(outcome, Outcome) else Outcome.failed(outcome)
    return outcome._replace(source=f"component {name!r}")


def _part(name: str, outcome: Outcome) -> str:
    return f"component {name!r}: {outcome.message}"


def _said(outcome: Outcome) -> str:
    return f"{outcome.error}: {outcome.message}" if outcome.error else ""


def response_lengths(td: TensorDictBase) -> list[int] | None:
    """Tokens of each response, without the padding of dense rows; ``None`` without tokens.

    Args:
        td: rows as the policy left them.
    """
    rows = read_rows(td, ("tokens", "response"), None)
    if rows is None:
        return None
    masks = read_rows(td, ("masks", "all_attention_mask"), None)
    full = read_rows(td, ("tokens", "full"), None)
    if masks is None or full is None:
        return [len(row) for row in rows]
    return [
        int(mask[len(mask) - len(row) :].sum()) if len(mask) == len(whole) else len(row)
        for row, mask, whole in zip(rows, masks, full, strict=True)
    ]


def read_samples(
    parser: RewardParser,
    td: TensorDictBase,
    rows: Sequence[int],
    responses: Sequence[str | Exception],
    lengths: Sequence[int] | None,
    columns: Iterable[str],
) -> list[Sample | Exception]:
    """What a scorer sees of some rows; a row without a response keeps its exception.

    Args:
        parser: that scores them.
        td: all rows, as the policy left them.
        rows: indices of those that are scored.
        responses: of all rows.
        lengths: of :func:`response_lengths`.
        columns: names of those that the scorer reads.
    """
    size = len(responses)
    answers = parser._column(td, parser._answer_key, size) or [None] * size
    asked = {name: parser._needed(td, name, size) for name in columns}
    reasons = td.get(("tokens", "finish_reason"), None)
    reasons = None if reasons is None else reasons.flatten().tolist()
    return [
        responses[row]
        if isinstance(responses[row], Exception)
        else Sample(
            responses[row],
            answers[row],
            None if lengths is None else lengths[row],
            None if reasons is None else FinishReason(reasons[row]),
            {name: column[row] for name, column in asked.items()},
        )
        for row in rows
    ]


class WrittenReward(Scorer):
    """Takes the reward that a task, a game or a server wrote for the step, as it is.

    For a :class:`~torchrl_llm.rewards.CompositeReward` that is appended to an environment with
    a reward of its own, and adds to it: success, validity and error of that reward become those of
    the component. The environment has ended its episodes itself, so pass
    ``set_done_if_answer=False``.

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
        """Not possible: a response alone does not say what was written for it.

        Raises:
            RewardError: always.
        """
        raise RewardError("a WrittenReward is read from the rows of an environment's step")

    def outcomes(self, next_td: TensorDictBase, rows: Sequence[int]) -> list[Outcome]:
        """What was written for a step.

        Args:
            next_td: rows ``[B]`` with ``reward``, ``reward_valid`` and what goes with them.
            rows: ``N`` indices of those that are asked for.

        Returns:
            ``N`` outcomes, whose values are scores.

        Raises:
            DataError: nothing has been written before.
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
        seconds = _flat(next_td.get("reward_seconds", None), size).tolist()
        failures = written_failures(next_td)
        valid = _flat(valid, size).bool().tolist()
        outcomes = []
        for row in rows:
            if valid[row]:
                score = RewardScore(reward[row], *(flag[row] for flag in flags))
                outcomes.append(Outcome(score, seconds=seconds[row]))
                continue
            kind, message, *rest = failures[row]
            kind = kind or RewardError.__name__
            outcomes.append(Outcome(None, kind, message, seconds[row], *rest))
        return outcomes


def _flat(values: Tensor | None, size: int) -> Tensor:
    """One number per row, 0 where there is none or where it is NaN."""
    return torch.zeros(size) if values is None else values.reshape(size, -1)[:, 0].nan_to_num()


class TokenRewards(RowTransform):
    """Puts the reward of each token in the place of the row's reward, in a replay buffer.

    An environment's rewards have one shape for all rows, so
    :class:`~torchrl_llm.rewards.CompositeReward` writes ``[1, 1]`` there and the tokens' next to
    it. Append this last, which in a buffer means that it runs first: the turns of a conversation
    are then joined, and advantages assigned, with rewards ``[R, 1]``.

    Args:
        reward_key: the reward, ``[1, 1]`` a row; it becomes ``[R, 1]``, aligned with the ``R``
            tokens of the response.
        token_key: the reward of each token, ``[R]`` a row.

    Raises:
        DataError: rows without rewards per token.

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
        """A mark next to the tokens' rewards; those of joined turns are no longer all there."""
        return (*self.token_key[:-1], "in_place")

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """The reward of each token."""
        advice = "a CompositeReward with a component per token writes it"
        rewards = [row.unsqueeze(-1) for row in rows.read(self.token_key, advice)]
        return {self.reward_key: rewards, self.written: [torch.ones(1)] * len(rewards)}

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise ConfigError(
            "an environment's rewards have one shape for all rows; append TokenRewards to the "
            "replay buffer"
        )
