"""Rewards for the form of a response: its blocks and its length.

DAPO's penalty for responses close to the length limit is
:class:`torchrl_llm.envs.transforms.OverlongPenalty`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from torchrl_llm._checked import Ge, In, checked
from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.reward_scorer import Sample, Scorer


@register("rewards", "format")
class FormatReward(Scorer):
    """Reward 1.0 for a response that consists of the given blocks, each once and in this order.

    Only white space is allowed between the blocks, and no block may be empty. Any other response
    gets ``partial`` times the share of the blocks that occur exactly once.

    Args:
        blocks: names of the tags.
        partial: largest reward of a response with a different form, 0 to 1.
        opened_by_prompt: whether the prompt ends with the first opening tag, so that the response
            begins inside the block.

    Raises:
        ConfigError: when there are no blocks, or ``partial`` is outside of 0 to 1.

    Example:
        >>> reward = FormatReward(partial=0.5)
        >>> reward.score(Sample("<think>2+2</think> <answer>4</answer>"))
        1.0
        >>> reward.score(Sample("It is <answer>4</answer>."))
        0.25
    """

    @checked
    def __init__(
        self,
        blocks: Sequence[str] = ("think", "answer"),
        *,
        partial: Annotated[float, In("[0, 1]")] = 0.0,
        opened_by_prompt: bool = False,
    ) -> None:
        if isinstance(blocks, str) or not blocks or not all(blocks):
            raise ConfigError(f"blocks must be names of tags, got {blocks!r}")
        self.blocks, self.partial = tuple(blocks), partial
        self.opened_by_prompt = opened_by_prompt

    def score(self, sample: Sample) -> float:
        """See :class:`FormatReward`; the run time is linear in the length of the response."""
        text = sample.response
        if self.opened_by_prompt:
            text = f"<{self.blocks[0]}>{text}"
        once = [_is_once(text, block) for block in self.blocks]
        if all(once) and self._is_all(text):
            return 1.0
        return self.partial * sum(once) / len(once)

    def _is_all(self, text: str) -> bool:
        for block in self.blocks:
            text = text.lstrip()
            if not text.startswith(f"<{block}>"):
                return False
            inside, _, text = text[len(block) + 2 :].partition(f"</{block}>")
            if not inside.strip():
                return False
        return not text.strip()


def _is_once(text: str, block: str) -> bool:
    opening, closing = f"<{block}>", f"</{block}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return False
    return text.index(opening) < text.index(closing)


Unit = Literal["tokens", "words", "characters"]
_WORD = re.compile(r"\S+")


@register("rewards", "length")
class LengthReward(Scorer):
    r"""Reward 1.0 for a length between two limits; outside the limits it falls linearly to 0.0.

    With ``shortest`` :math:`a`, ``longest`` :math:`b` and ``cushion`` :math:`c`, a response of
    length :math:`n` gets :math:`\max(0, 1 - \max(a - n, n - b, 0) / c)`; with a cushion of 0 the
    reward is 1 or 0.

    Args:
        longest: the upper limit.
        shortest: the lower limit.
        cushion: distance outside the limits at which the reward reaches 0.0.
        unit: ``"tokens"`` of the response, including the token that ended it; ``"words"``,
            separated by white space; or ``"characters"``.

    Raises:
        ConfigError: for limits that no length satisfies.

    Example:
        >>> reward = LengthReward(longest=100, cushion=50)
        >>> [reward.score(Sample("...", num_tokens=n)) for n in (1, 100, 125, 150, 999)]
        [1.0, 1.0, 0.5, 0.0, 0.0]
    """

    @checked
    def __init__(
        self,
        longest: int,
        *,
        shortest: Annotated[int, Ge(0)] = 0,
        cushion: Annotated[int, Ge(0)] = 0,
        unit: Unit = "tokens",
    ) -> None:
        if shortest > longest:
            raise ConfigError(
                f"a length needs shortest <= longest, got shortest={shortest} and longest={longest}"
            )
        self.longest, self.shortest, self.cushion, self.unit = longest, shortest, cushion, unit

    def length(self, sample: Sample) -> int:
        """Return the length of a response in the unit.

        Raises:
            RewardError: when the unit is ``"tokens"`` and the rows have no tokens.
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
        outside = max(self.shortest - length, length - self.longest, 0)
        if not self.cushion:
            return float(not outside)
        return max(0.0, 1 - outside / self.cushion)
