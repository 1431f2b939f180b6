"""Rewards per token of the response, for what is trained from a replay buffer."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.replay_buffers.trajectory_queues import as_path
from torchrl_llm.data.row_transform import Path, RowTransform, RowView
from torchrl_llm.errors import ConfigError


class TokenRewards(RowTransform):
    """Puts the reward of each token in the place of the row's reward, in a replay buffer.

    An environment's rewards have one shape for all rows, so
    :class:`~torchrl_llm.rewards.CompositeReward` writes ``[1, 1]`` there and the tokens' beside
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
        """A mark beside the tokens' rewards; those of joined turns are no longer all there."""
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
