"""Makes pairs of a better and a worse answer, from a run's rollouts or an evaluation's answers.

The reward ranks the answers, and only answers to the same prompt are compared. ``torchrl-llm export
--pairs`` is the command. :mod:`torchrl_llm.data.chat_export` reads and writes.

Next: ``torchrl_llm.data.preferences`` reads the pairs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from math import isclose
from typing import Any, Literal

from torchrl_llm._checked import checked
from torchrl_llm.data.chat_export import SampledChat
from torchrl_llm.data.preferences import shared_messages

WhichPairs = Literal["best-worst", "all"]


@dataclass
class SampledPair:
    """Two answers to a prompt.

    Attributes:
        chosen: the conversation with the higher reward.
        rejected: the other conversation.
        shared: number of messages at the beginning that both conversations share.
    """

    chosen: SampledChat
    rejected: SampledChat
    shared: int

    def row(self) -> dict[str, Any]:
        """Return its columns: messages, the tools if any, and the difference of the rewards."""
        tools = {"tools": self.chosen.tools} if self.chosen.tools else {}
        return {
            "prompt": self.chosen.messages[: self.shared],
            "chosen": self.chosen.messages[self.shared :],
            "rejected": self.rejected.messages[self.shared :],
            "margin": self.chosen.reward - self.rejected.reward,
            **tools,
        }


@checked
@dataclass(kw_only=True)
class PairFilter:
    """Makes pairs of the conversations of each group.

    Attributes:
        which: ``"best-worst"``: one pair per group, the first conversation with the highest and the
            first with the lowest reward; ``"all"``: every pair of a group with different rewards.
        duplicates: keep repeated pairs, which are equal message for message.
        counts: after the selection: numbers of ``groups``, ``written`` pairs, and groups or pairs
            left out for each reason.

    Example:
        >>> said = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": t}]
        ...     for t in "abc"]
        >>> chats = [SampledChat(m, r, 0) for m, r in zip(said, (0.0, 1.0, 0.5), strict=True)]
        >>> [pair.row()["margin"] for pair in PairFilter(which="all")(chats)]
        [0.5, 1.0, 0.5]
    """

    which: WhichPairs = "best-worst"
    duplicates: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, chats: Iterable[SampledChat]) -> Iterator[SampledPair]:
        """Return the pairs, group by group.

        Args:
            chats: conversations with a reward; conversations of the same group must be adjacent.
        """
        seen: set[str] = set()
        for _, group in groupby(chats, key=lambda chat: chat.group):
            self.counts["groups"] += 1
            found = self._pairs(list(group))
            self.counts["groups without a difference"] += not found
            for chosen, rejected in found:
                shared = shared_messages([chosen.messages, rejected.messages])
                pair = SampledPair(chosen, rejected, shared)
                reason = self._reason(pair, seen)
                self.counts[reason or "written"] += 1
                if reason is None:
                    yield pair

    def _pairs(self, group: Sequence[SampledChat]) -> list[tuple[SampledChat, SampledChat]]:
        """Return the pairs to compare, each with the better answer first."""
        ranked = sorted(group, key=lambda chat: -chat.reward)
        pairs = list(combinations(ranked, 2))
        if self.which == "best-worst":
            pairs = [(ranked[0], min(group, key=lambda chat: chat.reward))]
        # Rewards are sums of float32 values, so equal rewards may differ slightly.
        return [(a, b) for a, b in pairs if not isclose(a.reward, b.reward, rel_tol=1e-6)]

    def _reason(self, pair: SampledPair, seen: set[str]) -> str | None:
        """Return why a pair is left out; ``None`` if it is kept."""
        row = pair.row()
        if row["chosen"] == row["rejected"]:
            return "pairs of equal answers"
        if not pair.shared or any(row[k][0]["role"] != "assistant" for k in ("chosen", "rejected")):
            return "pairs of different prompts"
        if not self.duplicates:
            text = json.dumps({**row, "margin": 0}, sort_keys=True, default=str)
            if text in seen:
                return "pairs twice"
            seen.add(text)
        return None
