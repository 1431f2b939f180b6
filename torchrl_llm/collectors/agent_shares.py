"""Distributes the rows of a collector by player to learners that each train one policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.errors import ConfigError, DataError

# After this many batches without a turn of a player, an error is raised.
_MOST_BATCHES = 16


class AgentShares(SavedState):
    """Distributes the rows of a collector: each learner gets the rows of its players.

    If a learner asks for rows and none wait for it, a batch is collected. The rows of the other
    learners in this batch wait until the weights change. Rows of earlier weights, and of players
    without a learner, are dropped.

    Args:
        collector: collector of batches of rows with ``"agent"``.
        players: names of the players of each learner.

    Attributes:
        untrained_tokens: sampled tokens of dropped rows since the last :meth:`take_untrained`.

    Raises:
        ConfigError: a player belongs to two learners, or a learner has none.

    Example:
        >>> from tensordict import NonTensorData
        >>> rows = [TensorDict(agent=NonTensorData(name)) for name in ("X", "O", "X")]
        >>> shares = AgentShares([lazy_rows(rows)], {"first": ["X"], "second": ["O"]})
        >>> len(next(iter(shares["first"]))), len(next(iter(shares["second"])))
        (2, 1)
    """

    saved = ("untrained_tokens", "_version")
    saved_rows = ("_waiting",)

    def __init__(self, collector: Iterable[Any], players: Mapping[str, Collection[str]]) -> None:
        self.collector = collector
        self.assign(players)
        self._waiting: dict[str, deque[list[TensorDict]]] = {each: deque() for each in players}
        self._batches: Iterator[Any] | None = None
        self._version = getattr(collector, "policy_version", None)
        self.untrained_tokens = 0

    def assign(self, players: Mapping[str, Collection[str]]) -> None:
        """Assign different players to the learners, from the next batch on.

        Args:
            players: see the constructor.

        Raises:
            ConfigError: see the constructor.
        """
        self._learner_of: dict[str, str] = {}
        for learner, names in players.items():
            if isinstance(names, str) or not names:
                raise ConfigError(f"the learner {learner!r} needs a list of players, got {names!r}")
            for name in names:
                if self._learner_of.setdefault(name, learner) != learner:
                    raise ConfigError(f"the player {name!r} belongs to two learners")

    def __getitem__(self, learner: str) -> Share:
        """Return the iterator for a learner, which the learner uses as its collector."""
        return Share(self, learner)

    def next_of(self, learner: str) -> LazyStackedTensorDict:
        """Return a learner's rows in the oldest batch that it has not received yet.

        Args:
            learner: name of the learner.

        Raises:
            StopIteration: the collector has ended.
            DataError: many batches have no row for the learner, or rows lack ``"agent"``.
        """
        self._forget_earlier()
        for _ in range(_MOST_BATCHES):
            if not self._waiting[learner]:
                if self._batches is None:
                    self._batches = iter(self.collector)
                self._share(next(self._batches))
            if rows := self._waiting[learner].popleft():
                return lazy_rows(rows)
        raise DataError(
            f"no player of {learner!r} has acted in {_MOST_BATCHES} batches: the episodes end "
            "before its turn"
        )

    def _forget_earlier(self) -> None:
        version = getattr(self.collector, "policy_version", None)
        if version is None or version == self._version:
            return
        self._version = version
        for batches in self._waiting.values():
            self.untrained_tokens += sum(sampled_tokens(row) for each in batches for row in each)
            batches.clear()

    def _share(self, batch: Any) -> None:
        shares: dict[str, list[TensorDict]] = {each: [] for each in self._waiting}
        for row in row_list(batch):
            if row.get("agent", None) is None:
                raise DataError(
                    "several learners wait for the rows of their players, and a row has no "
                    "'agent'; an environment of several players writes it"
                )
            learner = self._learner_of.get(str(row["agent"]))
            if learner is None:
                self.untrained_tokens += sampled_tokens(row)
            else:
                shares[learner].append(row)
        for learner, rows in shares.items():
            self._waiting[learner].append(rows)

    def take_untrained(self) -> int:
        """Return the number of sampled tokens of dropped rows since the last call."""
        number, self.untrained_tokens = self.untrained_tokens, 0
        return number


class Share:
    """The batches of one learner; see :class:`AgentShares`.

    Args:
        shares: the shares of all learners.
        learner: name of this learner.
    """

    def __init__(self, shares: AgentShares, learner: str) -> None:
        self._shares, self._learner = shares, learner

    @property
    def policy_version(self) -> Any:
        """The policy version of the collector."""
        return getattr(self._shares.collector, "policy_version", None)

    def __iter__(self) -> Iterator[LazyStackedTensorDict]:
        while True:
            try:
                yield self._shares.next_of(self._learner)
            except StopIteration:
                return
