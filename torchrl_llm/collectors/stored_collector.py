"""Collector of stored rollouts, to compute losses and advantages without a sampler.

:class:`torchrl_llm.data.rollout_store.RolloutStore` is the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm.data.nodes import leaf, new_node, plain_node, set_copied, typed_node
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollout_store import CHANGED, RolloutStore
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.errors import DataError

_OF_THE_STORE = ("fate", "carried", "step", "collected")


class StoredCollector(SavedState):
    """Returns stored batches of finished trajectories; each has one step's collected rows.

    All values that training wrote (advantages, scores, mask reasons, invalid marks) are removed, so
    that different rules can write them. A row that waited for its group is in the batch of the step
    that completed the group. It has the state in which it waited: without tokens cut by
    ``train.max_seq_len``, and with tokens masked by filters and staleness.

    Args:
        store: store that is opened for reading. With ``logging.rollouts=sample`` a batch has few
            rows; groups of at most 16 are complete.
        steps: steps to read, in this order; all by default.
        epochs: number of passes.

    Attributes:
        policy_version: version of the newest weights that sampled tokens of the last batch.

    Raises:
        DataError: a step is not in the store.

    Example:
        >>> import tempfile, torch
        >>> from torchrl_llm.data.rollout_store import RolloutWriter
        >>> folder = tempfile.mkdtemp()
        >>> RolloutWriter(folder).append(1, [TensorDict(x=torch.ones(n)) for n in (1, 2)])
        >>> [len(batch) for batch in StoredCollector(RolloutStore(folder), epochs=2)]
        [2, 2]
    """

    saved = ("_done",)

    def __init__(
        self, store: RolloutStore, *, steps: Iterable[int] | None = None, epochs: int = 1
    ) -> None:
        known = store.steps()
        self.steps = known if steps is None else list(steps)
        if lacking := sorted(set(self.steps) - set(known)):
            raise DataError(f"{store.folder} has no rows of the steps {lacking}")
        self.store, self.epochs = store, epochs
        self.policy_version = 0
        self._done = 0

    def __iter__(self) -> Iterator[LazyStackedTensorDict]:
        while self._done < self.epochs * len(self.steps):
            step = self.steps[self._done % len(self.steps)]
            self._done += 1
            rows = self.store.iterate(step, where=_is_decided)
            added = self.store.about(step).get("added", ())
            found = [as_collected(row, added) for row in rows]
            versions = [leaf(row, ("trace", "policy_version")) for row in found]
            known = [int(v.max()) for v in versions if v is not None and v.numel()]
            self.policy_version = max(known, default=self.policy_version)
            if found:
                yield lazy_rows(found)

    def update_policy_weights_(self, *weights: Any, **options: Any) -> None:
        """Do nothing: there is no sampler."""

    def take_lost(self) -> int:
        """Return zero: no tokens are lost."""
        return 0


def as_collected(row: TensorDict, added: Iterable[Iterable[str]] = ()) -> TensorDict:
    """Return a stored row as collected, without the columns of training.

    Args:
        row: row of a :class:`~torchrl_llm.data.rollout_store.RolloutStore`; it is not changed.
        added: keys that training wrote: ``store.about(step)["added"]``.

    Example:
        >>> row = TensorDict(fate="trained", advantage=1.0, reward=2.0)
        >>> sorted(as_collected(row, [["advantage"]]).keys())
        ['reward']
    """
    made = new_node(dict(row._tensordict))
    for path in CHANGED:
        before = leaf(row, ("collected", path[-1]))
        if before is not None:
            set_copied(made, path, before)
    for path in (*((name,) for name in _OF_THE_STORE), *added):
        _take_off(made, tuple(path))
    return made


def _take_off(node: TensorDict, path: tuple[str, ...]) -> None:
    """Delete a key and empty nodes above it, without changing nodes shared with other rows."""
    name, *rest = path
    if not rest:
        node._tensordict.pop(name, None)
        return
    child = node._tensordict.get(name)
    if child is None:
        return
    inner = new_node(dict(plain_node(child)._tensordict))
    _take_off(inner, tuple(rest))
    if not inner._tensordict:
        del node._tensordict[name]
    else:
        typed = plain_node(child) is not child
        node._tensordict[name] = typed_node(type(child), inner) if typed else inner


def _is_decided(row: TensorDict) -> bool:
    fate = row._tensordict.get("fate")
    return fate is None or fate.data != "pending"
