"""What became of the tokens that the workers of a channel have sampled, as the learner sees it.

A worker says how many tokens it has sampled since it started, and with each delivery how many of
them it has sent. Each token is therefore received, or lost (its worker died, its delivery did on
the way, or was refused), or still with a worker that lives; :class:`TokenAccounts` keeps that sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl_llm.collectors.transport.channel import Delivery, WorkerCounts


@dataclass
class TokenAccounts:
    """Tokens received and lost.

    A learner that goes on from a checkpoint counts as lost what was delivered to the one before it
    since then: nothing that it trains with has seen those tokens.

    Attributes:
        received: tokens of all deliveries that came and were not refused.
        lost: tokens that will never come, or were refused.
        settled: worker to its tokens that were received or lost.
        gone: workers that were forgotten, and whose loss was counted.
        taken: losses that :meth:`take_lost` has handed out.

    Example:
        >>> from torchrl_llm.data.wire import pack_rows
        >>> accounts = TokenAccounts()
        >>> accounts.receive(Delivery(pack_rows([]), "a", 0, sent=4), 4)
        >>> accounts.receive(Delivery(pack_rows([]), "a", 2, sent=12), 4)  # number 1 never came
        >>> accounts.forget({"a": WorkerCounts(generated=15, sent=12)})  # and then it died
        >>> accounts.received, accounts.lost
        (8, 7)
    """

    received: int = 0
    lost: int = 0
    settled: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    taken: int = 0

    def receive(self, delivery: Delivery, num_tokens: int) -> None:
        """Count a delivery, and what was sent before it and never came.

        Args:
            delivery: as it came. Where ``sent`` is ``None`` no gap is seen.
            num_tokens: sampled tokens of its rows.
        """
        settled = self.settled.get(delivery.worker, 0)
        sent = settled + num_tokens if delivery.sent is None else delivery.sent
        self.lost += max(sent - num_tokens - settled, 0)
        self.settled[delivery.worker] = max(sent, settled)
        self.received += num_tokens

    def refuse(self, num_tokens: int) -> None:
        """Count tokens as lost that :meth:`receive` has counted as received."""
        self.received -= num_tokens
        self.lost += num_tokens

    def forget(self, forgotten: Mapping[str, WorkerCounts]) -> None:
        """Count what dead workers had sampled and not put, once for each.

        Args:
            forgotten: of :meth:`~torchrl_llm.collectors.transport.RowChannel.forgotten`.
        """
        for name, counts in forgotten.items():
            if name not in self.gone:
                self.gone.append(name)
                self.lost += counts.in_flight

    def take_lost(self) -> int:
        """Tokens lost since the last call, for the ledger of a step."""
        new, self.taken = self.lost - self.taken, self.lost
        return new

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after :meth:`state_dict`."""
        self.received, self.lost, self.taken = state["received"], state["lost"], state["taken"]
        self.settled, self.gone = dict(state["settled"]), list(state["gone"])
