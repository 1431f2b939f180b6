"""A reward for the length of a response.

The punishment of DAPO for what comes near its limit is
:class:`torchrl_llm.envs.transforms.OverlongPenalty`.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.reward_components import Sample, Scorer

Unit = Literal["tokens", "words", "characters"]
_WORD = re.compile(r"\S+")


@register("rewards", "length")
class LengthReward(Scorer):
    r"""1.0 for a length between two limits, falling in a straight line to 0.0 beside them.

    With ``shortest`` :math:`a`, ``longest`` :math:`b` and ``cushion`` :math:`c`, a response of
    length :math:`n` gets :math:`\max(0, 1 - \max(a - n, n - b, 0) / c)`; with a cushion of 0 it is
    one or nothing.

    Args:
        longest: the upper limit.
        shortest: the lower limit.
        cushion: how far beside the limits the reward is gone.
        unit: ``"tokens"`` of the response, the one that ended it included; ``"words"``, what is
            between white space; or ``"characters"``.

    Raises:
        ConfigError: for limits that leave no length.

    Example:
        >>> reward = LengthReward(longest=100, cushion=50)
        >>> [reward.score(Sample("...", num_tokens=n)) for n in (1, 100, 125, 150, 999)]
        [1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self, longest: int, *, shortest: int = 0, cushion: int = 0, unit: Unit = "tokens"
    ) -> None:
        if not 0 <= shortest <= longest or cushion < 0:
            raise ConfigError(
                "a length needs 0 <= shortest <= longest and a cushion that is not negative, got "
                f"shortest={shortest}, longest={longest}, cushion={cushion}"
            )
        if unit not in get_args(Unit):
            raise ConfigError(f"unit must be one of {get_args(Unit)}, got {unit!r}")
        self.longest, self.shortest, self.cushion, self.unit = longest, shortest, cushion, unit

    def length(self, sample: Sample) -> int:
        """The length of a response in the unit.

        Raises:
            RewardError: tokens are to be counted and the rows have none.
        """
        if self.unit == "words":
            return sum(1 for _ in _WORD.finditer(sample.response))
        if self.unit == "characters":
            return len(sample.response)
        if sample.num_tokens is None:
            raise RewardError("the rows have no ('tokens', 'response') to count; set unit='words'")
        return sample.num_tokens

    def score(self, sample: Sample) -> float:
        """See :class:`LengthReward`."""
        length = self.length(sample)
        beside = max(self.shortest - length, length - self.longest, 0)
        if not self.cushion:
            return float(not beside)
        return max(0.0, 1 - beside / self.cushion)
