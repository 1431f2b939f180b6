"""Limits of turns and tokens: the end of an episode, and a growing punishment near the limit."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter as _StepCounter

from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import overlong_penalty


class StepCounter(_StepCounter):
    """TorchRL's :class:`~torchrl.envs.StepCounter`, for environments of conversations.

    Rows cut at ``max_steps`` get ``truncation_reason`` ``MAX_STEPS``; a row that terminated in the
    same step is not truncated too. Rows that are not stepped do not count, nor do turns that only
    called tools to think (``("tools", "auxiliary")``): they are no step of the environment. The
    arguments are TorchRL's.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.envs import ChatEnv
        >>> env = ChatEnv(batch_size=(1,)).append_transform(StepCounter(max_steps=1))
        >>> td = env.reset(TensorDict({"query": ["Hi"]}, batch_size=(1,)))
        >>> td["history"].full = td["history"].prompt
        >>> td = env.step(td)["next"]
        >>> td["truncated"].item(), TruncationReason(td["truncation_reason"].item()).name
        (True, 'MAX_STEPS')
    """

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        before = {
            key: next_tensordict.get(key, None) for key in (*self.truncated_keys, *self.done_keys)
        }
        next_tensordict = super()._step(tensordict, next_tensordict)
        stepped = _counted(tensordict, next_tensordict)
        for count_key, truncated_key, terminated_key, done_key in zip(
            self.step_count_keys,
            self.truncated_keys,
            self.terminated_keys,
            self.done_keys,
            strict=True,
        ):
            count = next_tensordict.get(count_key)
            if stepped is not None:
                stepped = stepped.reshape(count.shape)
                count = torch.where(stepped, count, tensordict.get(count_key))
                next_tensordict.set(count_key, count)
            if self.max_steps is None:
                continue
            cut = count >= self.max_steps
            terminated = next_tensordict.get(terminated_key, None)
            if terminated is not None:
                cut = cut & ~terminated
            if stepped is not None:
                cut = cut & stepped
            truncated = _either(before[truncated_key], cut)
            next_tensordict.set(truncated_key, truncated)
            if self.update_done:
                next_tensordict.set(done_key, _either(before[done_key], truncated))
            self._write_reason(next_tensordict, cut)
        return next_tensordict

    @staticmethod
    def _write_reason(next_td: TensorDictBase, cut: torch.Tensor) -> None:
        reason = next_td.get("truncation_reason", None)
        if reason is None:
            reason = torch.full_like(cut, int(TruncationReason.NONE), dtype=torch.int8)
        fresh = cut & (reason == TruncationReason.NONE)
        reason = reason.masked_fill(fresh, int(TruncationReason.MAX_STEPS))
        next_td.set("truncation_reason", reason)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        if self.max_steps is not None and tensordict_reset.get("truncation_reason", None) is None:
            for key in self.truncated_keys:
                self._write_reason(tensordict_reset, tensordict_reset.get(key) & False)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the step count, and ``truncation_reason`` where the environment has none."""
        observation_spec = super().transform_observation_spec(observation_spec)
        if self.max_steps is not None and "truncation_reason" not in observation_spec.keys():
            shape = self.parent.output_spec["full_done_spec"]["done"].shape
            observation_spec["truncation_reason"] = Unbounded(
                shape=shape, dtype=torch.int8, device=observation_spec.device
            )
        return observation_spec


def _counted(td: TensorDictBase, next_td: TensorDictBase) -> torch.Tensor | None:
    """Rows whose turn is a step of the environment; ``None`` for all."""
    stepped = td.get("_step", None)
    thinking = next_td.get(("tools", "auxiliary"), None)
    if thinking is None:
        return stepped
    return ~thinking if stepped is None else stepped.reshape(thinking.shape) & ~thinking


def _either(before: torch.Tensor | None, flag: torch.Tensor) -> torch.Tensor:
    return flag if before is None else before | flag


class OverlongPenalty(RowTransform):
    r"""Adds DAPO's soft overlong punishment to the reward.

    arXiv:2503.14476 equation 13: nothing up to ``max_length - cache`` tokens, falling in a straight
    line to -1 at ``max_length``, and -1 beyond. What is counted are the tokens that the policy
    sampled in the turn a row stands for, the token that ended it included; with several turns, each
    has its own.

    Append it after the transform that writes the reward: to the environment, or to a replay buffer
    behind its credit assigner, which is then written with the punished reward::

        buffer.append_transform(JoinTurns())
        buffer.append_transform(MCAdvantage(grpo_size=8))
        buffer.append_transform(OverlongPenalty(max_length=512, cache=128))

    The paper takes a cache of 4096 of 20480 tokens, so that 16384 are free of it.

    Args:
        max_length: tokens from which on the whole punishment applies; usually what sampling is
            limited to.
        cache: tokens before it over which the punishment rises.
        coeff: factor on the punishment, 1 in the paper.
        reward_key: the reward, ``[1, 1]`` a row, or ``[R, 1]`` a token of the response, of which
            the last gets the punishment.
        penalty_key: where what was added is written, float32 ``[1, 1]``.

    Raises:
        ConfigError: for a cache that is not between 0 and ``max_length``, or a negative factor.
        DataError: for rows without tokens or reward.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> def row(length):
        ...     tokens = {"full": torch.arange(length + 1), "response": torch.arange(length)}
        ...     return TensorDict(tokens=tokens, next={"reward": torch.ones(1, 1)})
        >>> rows = OverlongPenalty(max_length=10, cache=4)(lazy_rows([row(6), row(9), row(10)]))
        >>> [row["next", "reward"].item() for row in rows.unbind(0)]
        [1.0, 0.25, 0.0]
    """

    def __init__(
        self,
        max_length: int,
        cache: int,
        *,
        coeff: float = 1.0,
        reward_key: NestedKey = ("next", "reward"),
        penalty_key: NestedKey = ("next", "overlong_penalty"),
    ) -> None:
        super().__init__()
        if not 0 < cache <= max_length:
            raise ConfigError(
                f"cache must be above 0 and at most max_length={max_length} tokens, got {cache}"
            )
        if coeff < 0:
            raise ConfigError(f"coeff must not be negative, got {coeff}")
        self.max_length, self.cache, self.coeff = max_length, cache, coeff
        self.reward_key, self.penalty_key = as_path(reward_key), as_path(penalty_key)

    @property
    def written(self) -> Path:
        """Where the punishment is."""
        return self.penalty_key

    def columns(self, rows: RowView) -> dict[Path, list[Tensor]]:
        """Reward and punishment."""
        rewards = rows.read(self.reward_key, "append this after the transform that writes it")
        lengths = torch.stack([mask.sum() for mask in rows.sampled()])
        penalties = self.coeff * overlong_penalty(lengths, self.max_length, self.cache)
        penalties = list(penalties.to(rewards[0].device).view(-1, 1, 1).unbind(0))
        changed = []
        for reward, penalty in zip(rewards, penalties, strict=True):
            reward = reward.clone()
            reward[-1:] += penalty.to(reward.dtype)
            changed.append(reward)
        return {self.reward_key: changed, self.penalty_key: penalties}

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        zero = torch.zeros(*tensordict_reset.batch_size, 1, 1, device=tensordict_reset.device)
        tensordict_reset.set(self.penalty_key[1:], zero)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the punishment."""
        observation_spec[self.penalty_key[1:]] = Unbounded(
            shape=(*observation_spec.shape, 1, 1), device=observation_spec.device
        )
        return observation_spec
