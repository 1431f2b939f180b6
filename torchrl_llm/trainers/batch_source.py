"""Rows of one training step: collected, filtered and grouped; every token is counted.

:class:`BatchSource` connects a collector to the training loop. It marks responses that were cut,
writes the rows into the buffer (whose transforms group them and write advantages), collects further
prompts if filtered groups left room, and closes the token ledger:

``generated = trained + stale + filtered + truncated + invalid + surplus + lost``, where tokens that
still wait in a queue (in an incomplete group) count as ``pending`` in the next step. If tokens
vanished or were counted twice, the ledger does not close and raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl._utils import logger
from torchrl.data import ReplayBuffer

from torchrl_llm.collectors.staleness import StalenessRule, age_histogram, age_metrics
from torchrl_llm.data.enums import FinishReason, MaskReason, Source
from torchrl_llm.data.failures import tell_failures_of
from torchrl_llm.data.nodes import leaf, set_copied
from torchrl_llm.data.overlong import FittedRows, LengthRule
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.data.replay_buffers.trajectory_queues import task_path, trajectory_of, was_cut
from torchrl_llm.data.rollouts import (
    ends_trajectory,
    invalidate_reward,
    mask_trained,
    row_list,
    sampled_tokens,
    unpadded,
)
from torchrl_llm.data.row_transform import RowTransform
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.trainers.kept_rollouts import RowOutcomes
from torchrl_llm.trainers.ledger import TokenLedger
from torchrl_llm.trainers.ranks import ALONE, Ranks

_REWARD = ("next", "reward")
# Number of batches of stale rows in one step after which an error is raised.
_MAX_STALE_BATCHES = 100


class BatchSource(SavedState):
    """Fills a replay buffer with the rows of one step.

    A step takes one batch of the collector. With a ``staleness`` rule, collectors run during
    training, and a step takes batches until it has ``num_rows`` rows that are not dropped for their
    age. The age of a row is checked when it arrives, and again in every step while it waits for its
    group.

    Args:
        collector: iterated for batches of finished trajectories; iteration continues where it
            stopped.
        buffer: buffer that is emptied at each step; its last transform is ``credit``.
        credit: the buffer's credit assigner or selection; its counts report what was filtered.
        num_rows: trajectories that a step needs; each is one row of the buffer's storage.
        length: maximum length of a row, and the treatment of longer rows; ``None`` for any length.
        truncated: responses cut by their length limit, or by ``length``: ``keep`` trains them,
            ``mask`` keeps them in their group's baseline only, ``drop`` removes them from the
            baseline, too.
        max_resamples: maximum number of additional batches, collected while filtered groups leave
            fewer than ``num_rows`` rows in the buffer; 0 for none.
        staleness: largest age of the weights that sampled a row, and the treatment of older rows;
            the age is counted from the collector's ``policy_version``. ``None`` if all rows come
            from the present weights.
        lost: function for the ledger: returns the number of tokens that collectors sampled and lost
            since its last call.
        rows_per_trajectory: maximum number of rows of one trajectory; more than 1 if its history is
            rewritten between turns. The storage has room for this number.
        ranks: the processes that train together, each with its own source and buffer; all have to
            call :meth:`fill` at the same time.

    Attributes:
        policy_age: ``train/policy_age_mean`` and ``train/policy_age_max`` of the last step, in
            updates; empty without ``staleness``.
        overlong: ``train/overlong_rows`` and ``train/tokens_overlong`` of the last step; empty
            without ``length``.

    Raises:
        ConfigError: the storage cannot hold exactly the rows of a step, or the collector counts no
            versions and ``staleness`` is given.
    """

    saved = ("ledger", "_dropped")

    def __init__(
        self,
        collector: Iterable[Any],
        buffer: ReplayBuffer,
        *,
        credit: GroupTransform,
        num_rows: int,
        length: LengthRule | None = None,
        truncated: Literal["keep", "mask", "drop"] = "keep",
        max_resamples: int = 0,
        staleness: StalenessRule | None = None,
        lost: Callable[[], int] | None = None,
        rows_per_trajectory: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        capacity = num_rows * rows_per_trajectory
        if buffer.storage.max_size != capacity:
            raise ConfigError(
                f"the storage must hold the {capacity} rows of a step, so that surplus rows leave "
                f"it; its max_size is {buffer.storage.max_size}"
            )
        if staleness is not None and not isinstance(
            getattr(collector, "policy_version", None), int
        ):
            raise ConfigError(
                f"the age of rows is counted from the version of the weights, and "
                f"{type(collector).__name__}.policy_version is not an integer"
            )
        self.ledger = TokenLedger()
        self.policy_age: dict[str, float] = {}
        self.overlong: dict[str, int] = {}
        self._collector, self._buffer, self._credit = collector, buffer, credit
        self._num_rows, self._capacity, self._truncated = num_rows, capacity, truncated
        self._max_resamples, self._length = max_resamples, length
        self._staleness, self._lost = staleness, lost
        self._batches: Iterator[Any] | None = None
        # Tokens of rows that were made invalid here, until the credit assigner has counted them.
        self._dropped = {"stale": 0, "truncated": 0}
        self._warned = False
        self._outcomes = RowOutcomes([])

    def fill(self) -> LazyStackedTensorDict:
        """Collect the rows of a step into the buffer.

        Returns:
            All collected rows, including the filtered ones, for metrics; in rank 0 the rows of all
            ranks. In rows that are too long, the tokens that are not trained have the mask reason
            ``OVERLONG``. The rewards are the rewards that the credit assigner read, including the
            penalties of the buffer's transforms.

        Raises:
            OverlongError: a row is too long, and ``length`` makes this an error.
            DataError: the token ledger does not close, or all rows remain too old.
            ConfigError: the collector has no further batch.
        """
        self._buffer.empty()
        before = self._credit.get_stats()
        if self._length is not None:
            self.overlong = {"train/overlong_rows": 0, "train/tokens_overlong": 0}
        self._judge_waiting()
        carried = list(self._credit.held())
        collected: list[TensorDict] = []
        shown: list[TensorDict] = []
        judged: list[TensorDict] = []
        written = 0
        for _ in range(1 + self._max_resamples):
            fresh = 0
            while not fresh or (self._staleness is not None and fresh < self._num_rows):
                rows = self._next()
                fitted = self._fitted(rows)
                collected += rows
                marked, stale = self._judged(fitted)
                judged += marked
                fresh += sum(map(ends_trajectory, marked)) - stale
                rewarded = self._rewarded(marked)
                shown += map(_with_reward, fitted.marked, rewarded)
                written += len(self._buffer.extend(rewarded))
                if len(collected) > fresh + _MAX_STALE_BATCHES * self._num_rows:
                    raise DataError(
                        f"{len(collected)} rows in a row were older than max_policy_age="
                        f"{self._staleness.max_policy_age} at version "
                        f"{self._collector.policy_version}: do the workers get the weights?"
                    )
            if written >= self._num_rows:
                break
        self.overlong = self._ranks.sums(self.overlong)
        kept = self._account(collected, before, written)
        waiting = frozenset(map(trajectory_of, self._credit.held()))
        # Rows of earlier steps whose group is now full or was abandoned.
        decided = [row for row in carried if trajectory_of(row) not in waiting]
        self._outcomes = RowOutcomes(
            [*collected, *decided], [*judged, *decided], kept, waiting, len(decided)
        )
        return self._ranks.rows(lazy_rows(shown))

    def outcomes(self) -> RowOutcomes:
        """Outcomes of the rows of the last step; a run stores them with the rows."""
        return self._outcomes

    def _next(self) -> list[TensorDict]:
        if self._batches is None:
            self._batches = iter(self._collector)
        batch = next(self._batches, None)
        if batch is None:
            raise ConfigError("the collector has ended; give it total_dialog_turns=-1")
        rows = unpadded(row_list(batch))
        tell_failures_of(rows)
        return rows

    def _fitted(self, rows: list[TensorDict]) -> FittedRows:
        """The rows as collected, and the rows that fit into training."""
        if self._length is None:
            return FittedRows.of(rows)
        fitted = self._length.fit(rows)
        out = [row for row, gone in zip(fitted.kept, fitted.dropped, strict=True) if gone]
        dropped = sum(map(sampled_tokens, out))
        self._dropped["truncated"] += dropped
        # Cut-off tokens are counted here, because they do not exist afterwards; dropped rows are
        # counted with their group.
        self.ledger.count(truncated=fitted.cut_tokens)
        self.overlong["train/overlong_rows"] += fitted.overlong
        self.overlong["train/tokens_overlong"] += fitted.cut_tokens + dropped
        return fitted

    def _judged(self, fitted: FittedRows) -> tuple[list[TensorDict], int]:
        """Mark tokens not to train; return the rows, and the number of old last turns."""
        if self._staleness is None and self._truncated == "keep":
            return fitted.kept, 0
        judged: list[TensorDict] = []
        num_stale = 0
        for row, gone in zip(fitted.kept, fitted.dropped, strict=True):
            if gone:
                judged.append(row)
                continue
            aged = False
            if self._staleness is not None and self._too_old(row):
                row = row.copy()  # metrics report the rows as they were collected
                aged = self._aged(row)
                num_stale += aged and ends_trajectory(row)
            if not aged and self._truncated != "keep" and _was_cut(row):
                row, drop = row.copy(), self._truncated == "drop"
                mark_truncated(row, drop=drop)
                self._dropped["truncated"] += sampled_tokens(row) if drop else 0
            judged.append(row)
        return judged, num_stale

    def _rewarded(self, rows: list[TensorDict]) -> list[TensorDict]:
        """Rows after the buffer's first transforms, so that rewards include penalties."""
        for transform in reversed(list(self._buffer.transform.transforms)):
            if not isinstance(transform, RowTransform):
                break
            rows = row_list(transform._inv_call(lazy_rows([row.copy() for row in rows])))
        return rows

    def _too_old(self, row: TensorDict) -> bool:
        return self._staleness.verdict(row, self._collector.policy_version) != "keep"

    def _aged(self, row: TensorDict) -> bool:
        """Mark tokens that are too old; returns whether the row was dropped."""
        if self._staleness.mark(row, self._collector.policy_version) != "drop":
            return False
        self._dropped["stale"] += sampled_tokens(row)
        return True

    def _judge_waiting(self) -> None:
        """Check the age of the waiting rows of earlier steps again."""
        if self._staleness is None:
            return
        for trajectory in self._credit.waiting():
            if trajectory.valid:
                # A list, because every row has to be marked, not only the first.
                aged = [self._aged(row) for row in trajectory.rows]
                trajectory.valid = not any(aged)
        for row in self._credit.unfinished():
            valid = leaf(row, ("next", "reward_valid"))
            if valid is None or bool(valid.all()):
                self._aged(row)

    def _account(
        self, collected: list[TensorDict], before: dict[str, int], written: int
    ) -> list[TensorDict]:
        """Close the ledger; returns the rows of the buffer."""
        after = self._credit.get_stats()
        reasons: dict[int, int] = {}
        kept: list[TensorDict] = []
        if len(self._buffer):
            # Straight from the storage: indexing the buffer locks every node of every row first.
            rows = self._buffer.storage.get(torch.arange(len(self._buffer)))
            reasons, kept = tokens_by_reason(rows), row_list(rows)
        if self._staleness is not None:
            ages = age_histogram(kept, self._collector.policy_version)
            self.policy_age = age_metrics(ages)
        invalid = after["invalid_tokens"] - before["invalid_tokens"]
        # For the credit assigner, dropped responses are invalid; the ledger has the reason.
        dropped = {}
        for name, number in self._dropped.items():
            dropped[name] = min(invalid, number)
            self._dropped[name] -= dropped[name]
            invalid -= dropped[name]
        lost = 0 if self._lost is None else self._lost()
        generated = sum(map(sampled_tokens, collected)) + lost
        ledger = self.ledger
        ledger.count(
            generated=generated,
            trained=reasons.pop(MaskReason.TRAINED, 0),
            truncated=reasons.pop(MaskReason.TRUNCATED, 0) + dropped["truncated"],
            stale=reasons.pop(MaskReason.STALE, 0) + dropped["stale"],
            invalid=invalid,
            surplus=after["unfilled_tokens"] - before["unfilled_tokens"],
            lost=lost,
            pending=after["queued_tokens"],
        )
        filtered = after["filtered_tokens"] - before["filtered_tokens"]
        ledger.count(filtered=filtered + sum(reasons.values()))
        if written > self._capacity:
            # The storage holds the newest rows; the older ones it overwrote were surplus.
            ledger.count(surplus=ledger.carried + generated - ledger.spent - ledger.pending)
        ledger.close()
        ledger.totals = self._ranks.sums(ledger.totals)
        if self._ranks.is_main and not ledger.totals["trained"] and not self._warned:
            self._warned = True
            spent = {name: n for name, n in ledger.totals.items() if n}
            logger.warning(
                f"no token of this step is trained, the weights do not change; tokens: {spent}. "
                "Filters, bounds on returns and equal rewards leave nothing (reported once)"
            )
        return kept


def _with_reward(row: TensorDict, rewarded: TensorDict) -> TensorDict:
    """A row with the reward of its copy."""
    if row is rewarded:
        return row
    made = row.copy()
    for path in (_REWARD, task_path(_REWARD)):
        if (reward := leaf(rewarded, path)) is not None:
            set_copied(made, path, reward)
    return made


def mark_truncated(row: TensorDict, *, drop: bool) -> None:
    """Exclude the sampled tokens of a response that was cut by its length limit from the loss.

    Args:
        row: a row with a trace; its mask reasons are replaced, not changed in place.
        drop: also make its reward invalid, so that it leaves its group's baseline.
    """
    mask_trained(row, MaskReason.TRUNCATED)
    if drop:
        invalidate_reward(row)


def _was_cut(row: TensorDict) -> bool:
    return was_cut(row) or FinishReason(int(row.get(("tokens", "finish_reason")))).cut


def tokens_by_reason(rows: LazyStackedTensorDict) -> dict[int, int]:
    """Count the sampled tokens of rows by mask reason.

    Args:
        rows: 1-d stack of rows with a trace.

    Returns:
        Code of :class:`~torchrl_llm.data.enums.MaskReason` to number of sampled tokens.
    """
    source = torch.cat(read_rows(rows, ("trace", "source")))
    reason = torch.cat(read_rows(rows, ("trace", "mask_reason")))
    counts = torch.bincount(reason[source == Source.SAMPLED].long(), minlength=len(MaskReason))
    return {code: number for code, number in enumerate(counts.tolist()) if number}


def trained_rows(rows: LazyStackedTensorDict) -> LazyStackedTensorDict | None:
    """Return the rows that have a token to train on; the others would only cost a forward pass.

    Args:
        rows: 1-d stack of rows with a trace.

    Returns:
        A stack of those rows, ``None`` if there are none.
    """
    lengths = [ids.shape[0] for ids in read_rows(rows, ("trace", "source"))]
    source = torch.cat(read_rows(rows, ("trace", "source")))
    reason = torch.cat(read_rows(rows, ("trace", "mask_reason")))
    counted = (source == Source.SAMPLED) & (reason == MaskReason.TRAINED)
    kept = [bool(part.any()) for part in counted.split(lengths)]
    if all(kept):
        return rows
    left = [row for row, keep in zip(rows.unbind(0), kept, strict=True) if keep]
    return lazy_rows(left) if left else None
