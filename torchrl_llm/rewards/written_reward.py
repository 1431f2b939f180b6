"""The reward that an environment has written already, as a part of a larger one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.data.failures import ERROR_KEYS
from torchrl_llm.errors import DataError, RewardError
from torchrl_llm.rewards.reward_components import Sample, Scorer
from torchrl_llm.rewards.reward_parser import RewardScore
from torchrl_llm.rewards.reward_runner import Outcome


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
        kinds, messages, places = (next_td.get(("error", n)).tolist() for n in ERROR_KEYS)
        valid = _flat(valid, size).bool().tolist()
        return [
            Outcome(
                RewardScore(reward[row], *(flag[row] for flag in flags)) if valid[row] else None,
                "" if valid[row] else kinds[row] or RewardError.__name__,
                "" if valid[row] else messages[row],
                seconds[row],
                places[row],
            )
            for row in rows
        ]


def _flat(values: Tensor | None, size: int) -> Tensor:
    """A number a row, 0 where there is none or where it is NaN."""
    return torch.zeros(size) if values is None else values.reshape(size, -1)[:, 0].nan_to_num()
