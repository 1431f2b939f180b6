"""A growing punishment for responses that come near their length limit."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import overlong_penalty


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
