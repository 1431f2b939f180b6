"""A reward for the form of a response: the blocks that it was asked to consist of."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.reward_components import Sample, Scorer


@register("rewards", "format")
class FormatReward(Scorer):
    """1.0 for a response that consists of the given blocks, in this order, each once.

    There may be white space between them and nothing else, and none of them may be empty. For
    anything else ``partial`` is given for the part of the blocks that is there exactly once.

    Args:
        blocks: names of the tags.
        partial: at most this much for a response in another form, 0 to 1.
        opened_by_prompt: whether the prompt ends with the first opening tag, so that the response
            begins inside the block.

    Raises:
        ConfigError: no blocks, or ``partial`` outside of 0 to 1.

    Example:
        >>> reward = FormatReward(partial=0.5)
        >>> reward.score(Sample("<think>2+2</think> <answer>4</answer>"))
        1.0
        >>> reward.score(Sample("It is <answer>4</answer>."))
        0.25
    """

    def __init__(
        self,
        blocks: Sequence[str] = ("think", "answer"),
        *,
        partial: float = 0.0,
        opened_by_prompt: bool = False,
    ) -> None:
        if isinstance(blocks, str) or not blocks or not all(blocks):
            raise ConfigError(f"blocks must be names of tags, got {blocks!r}")
        if not 0 <= partial <= 1:
            raise ConfigError(f"partial must be between 0 and 1, got {partial}")
        self.blocks, self.partial = tuple(blocks), partial
        self.opened_by_prompt = opened_by_prompt

    def score(self, sample: Sample) -> float:
        """See :class:`FormatReward`; time is linear in the length of the response."""
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
