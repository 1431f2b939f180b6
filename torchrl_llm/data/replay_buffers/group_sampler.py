"""Sampling of whole groups: several answers to each of several prompts.

Sampled rows stay in the buffer, so answers of earlier steps can be trained again together with new
answers: RePO, "Replay-Enhanced Policy Optimization", arXiv:2506.09340.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl._utils import logger
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.replay_buffers.trajectory_queues import as_path, group_value
from torchrl_llm.errors import ConfigError, DataError

_STATE_FILE = "groups.pt"


class PromptGroupSampler(Sampler):
    """Draws batches of balanced groups: the same number of rows of each of several prompts.

    The rows of a batch are ordered by group. Rows of different agents (``"agent"``) are in
    different groups. If a group has too few rows, or the buffer too few groups, some are drawn
    again, with one warning.

    Args:
        num_groups: number of groups of a batch; the batch size then determines the number of rows
            per group.
        samples_per_group: number of rows per group; the batch size then determines the number of
            groups. Either this or ``num_groups`` must be given.
        group_key: key that identifies the group of a row, with integers or text. ``None`` means
            ``"group_id"``, or ``"query"`` if a row has no ``"group_id"``. ``"query"`` puts answers
            of several epochs into one group.
        strategy: which rows of a group are drawn. ``"random"``: random rows. ``"recency"``: the
            last written rows. ``"reward"``: the rows with the highest rewards. ``"variance"``: the
            rows whose rewards have the largest variance, and among several such choices the highest
            rewards (RePO).
        reward_key: key of the reward; per-token rewards of a row are added up. ``"reward"`` and
            ``"variance"`` never choose rows whose reward is NaN or infinite.
        cache_groups: read the keys of a row only once, after it was written. ``False`` reads all
            rows at every call, for buffers whose rows are changed in place.

    Raises:
        ConfigError: arguments are impossible, or the batch size is not a multiple of the given
            number.
        DataError: a row lacks a key.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> buffer = ReplayBuffer(sampler=PromptGroupSampler(num_groups=2), batch_size=4)
        >>> _ = buffer.extend([TensorDict(group_id=torch.tensor(i // 3)) for i in range(9)])
        >>> groups = [row["group_id"].item() for row in buffer.sample().unbind(0)]
        >>> groups[0] == groups[1] != groups[2] == groups[3]
        True
    """

    @checked
    def __init__(
        self,
        *,
        num_groups: Annotated[int, Ge(1)] | None = None,
        samples_per_group: Annotated[int, Ge(1)] | None = None,
        group_key: NestedKey | None = None,
        strategy: Literal["random", "recency", "reward", "variance"] = "random",
        reward_key: NestedKey = ("next", "reward"),
        cache_groups: bool = True,
    ) -> None:
        if (num_groups is None) == (samples_per_group is None):
            raise ConfigError("give one of num_groups and samples_per_group, not both or neither")
        self.num_groups, self.samples_per_group = num_groups, samples_per_group
        self.group_key, self.reward_key = group_key, reward_key
        self.strategy, self.cache_groups = strategy, cache_groups
        self._warned = False
        self._empty()

    # -- calls by the buffer --------------------------------------------------------------------

    def _empty(self) -> None:
        self._keys: list[Hashable] = []
        self._rewards: list[float] = []
        # The time when each row was written, counted in rows.
        self._written: list[int] = []
        self._clock = 0
        self._unread: set[int] = set()
        self._groups: dict[Hashable, Tensor] = {}

    def add(self, index: int) -> None:
        """Record that a row was written."""
        self.extend(torch.tensor([index]))

    def extend(self, index: Tensor) -> None:
        """Record that rows were written."""
        for position in torch.as_tensor(index).reshape(-1).tolist():
            self._grow(position + 1)
            self._written[position] = self._clock
            self._clock += 1
            self._unread.add(position)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Record that rows were changed in place, so that their keys are read again."""
        self._unread.update(torch.as_tensor(index).reshape(-1).tolist())

    def _grow(self, size: int) -> None:
        missing = size - len(self._keys)
        if missing > 0:
            self._unread.update(range(len(self._keys), size))
            self._keys += [None] * missing
            self._rewards += [float("nan")] * missing
            self._written += [-1] * missing

    # -- sampling ---------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict]:
        """Draw the indices of a batch.

        Args:
            storage: storage of the buffer.
            batch_size: a multiple of ``num_groups`` or ``samples_per_group`` (the one that was
                given).

        Returns:
            int64 ``[batch_size]``, group after group, and an empty dictionary.
        """
        if not len(storage):
            raise DataError("the buffer is empty; rows that wait in a transform are not in it yet")
        size = self.num_groups or self.samples_per_group
        if batch_size % size:
            name = "samples_per_group" if self.num_groups is None else "num_groups"
            raise ConfigError(f"batch_size={batch_size} is not a multiple of {name}={size}")
        rest = batch_size // size
        num_groups, rows = (rest, size) if self.num_groups is None else (size, rest)
        self._read(storage)
        names = list(self._groups)
        chosen = self._random(len(names), num_groups)
        return torch.cat([self._members(self._groups[names[i]], rows) for i in chosen]), {}

    def _read(self, storage: Storage) -> None:
        if len(storage) < len(self._keys):
            self._keys, self._rewards = self._keys[: len(storage)], self._rewards[: len(storage)]
            self._written = self._written[: len(storage)]
            self._unread.add(0)
        self._grow(len(storage))
        if not self.cache_groups:
            self._unread.update(range(len(storage)))
        if not self._unread:
            return
        for position in self._unread:
            if position < len(storage):
                row = storage.get(position)
                self._keys[position] = self._key(row)
                self._rewards[position] = self._reward(row)
        self._unread.clear()
        members: dict[Hashable, list[int]] = {}
        for position, key in enumerate(self._keys):
            members.setdefault(key, []).append(position)
        self._groups = {key: torch.tensor(positions) for key, positions in members.items()}

    def _key(self, row: Any) -> Hashable:
        keys = ("group_id", "query") if self.group_key is None else (self.group_key,)
        found = next((v for k in keys if (v := leaf(row, as_path(k))) is not None), None)
        if found is None:
            raise DataError(f"a row has no {' or '.join(map(repr, keys))}; name its group_key")
        agent = leaf(row, ("agent",))
        return group_value(found), None if agent is None else group_value(agent)

    def _reward(self, row: Any) -> float:
        if self.strategy not in ("reward", "variance"):
            return float("nan")
        reward = leaf(row, as_path(self.reward_key))
        if not isinstance(reward, Tensor):
            raise DataError(
                f"strategy={self.strategy!r} needs a reward at {self.reward_key!r}, and a row has "
                "none"
            )
        return reward.sum(dtype=torch.float64).item()

    def _members(self, positions: Tensor, count: int) -> Tensor:
        if self.strategy in ("reward", "variance"):
            rewards = [self._rewards[p] for p in positions.tolist()]
            rewards = torch.tensor(rewards, dtype=torch.float64)
            finite = rewards.isfinite()
            if finite.any():
                positions, rewards = positions[finite], rewards[finite]
        if len(positions) <= count or self.strategy == "random":
            return positions[self._random(len(positions), count)]
        if self.strategy == "recency":
            written = torch.tensor([self._written[p] for p in positions.tolist()])
            return positions[written.argsort(descending=True)[:count]]
        order = rewards.argsort(descending=True, stable=True)
        if self.strategy == "variance":
            order = order[_widest(rewards[order], count)]
        return positions[order[:count]]

    def _random(self, number: int, count: int) -> list[int]:
        """Draw ``count`` of ``number``, each at most once if possible."""
        chosen = torch.randperm(number, generator=self._rng)[:count]
        if number < count:
            if not self._warned:
                self._warned = True
                logger.warning(
                    f"{type(self).__name__}: {count} were requested and there are {number} rows of "
                    "a group, or groups; some are drawn again"
                )
            more = torch.randint(number, (count - number,), generator=self._rng)
            chosen = torch.cat([chosen, more])
        return chosen.tolist()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return when each row was written; all other data are read from the rows."""
        return {"written": list(self._written), "clock": self._clock}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self._empty()
        self._grow(len(state_dict["written"]))
        self._written, self._clock = list(state_dict["written"]), state_dict["clock"]

    def dumps(self, path: str | Path) -> None:
        """Save the state into a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Load the state that :meth:`dumps` saved."""
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True))


def _widest(falling: Tensor, count: int) -> Tensor:
    """Choose ``count`` of descending rewards with the largest variance: some from each end.

    A subset with the largest variance always consists of the highest and lowest rewards: moving a
    member away from the mean of the others never lowers the variance.
    """
    number = len(falling)
    ends = torch.stack(
        [
            torch.cat([torch.arange(high), torch.arange(number - count + high, number)])
            for high in range(count + 1)
        ]
    )
    variance = falling[ends].var(1, correction=0)
    # Among choices of equal variance, the last one takes the most from the top.
    widest = variance >= variance.amax() - 1e-12 * falling.square().amax()
    return ends[int(widest.nonzero()[-1])]
