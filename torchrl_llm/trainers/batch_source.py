"""Rows of one training step: collected, filtered, grouped, and every token accounted for.

:class:`BatchSource` stands between a collector and the loop. It marks responses that were cut,
writes the rows into the buffer (whose transforms group them and write advantages), collects further
prompts where filtered groups left room, and closes the token ledger:

``generated = trained + stale + filtered + truncated + invalid + surplus + lost``, where tokens that
still wait in a queue (a group that has not filled) are carried into the next step's ``pending``. A
ledger that does not close means that tokens vanished or were counted twice, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor
from torchrl._utils import logger
from torchrl.data import ReplayBuffer

from torchrl_llm.collectors.staleness import StalenessRule, age_histogram, age_metrics
from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.failures import WORLD, failures_of, tell_failures_of
from torchrl_llm.data.nodes import leaf, set_copied
from torchrl_llm.data.overlong import FittedRows, LengthRule
from torchrl_llm.data.ragged import lazy_rows, read_rows, row_values
from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.data.replay_buffers.trajectory_queues import task_path, trajectory_of, was_cut
from torchrl_llm.data.rollouts import ends_trajectory, row_list, sampled_tokens, unpadded
from torchrl_llm.data.row_transform import RowTransform
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.trainers.episode_metrics import Episodes, episode_metrics
from torchrl_llm.trainers.kept_rollouts import RowOutcomes
from torchrl_llm.trainers.ranks import ALONE, Ranks

_REWARD = ("next", "reward")
# Batches worth of stale rows in one step, after which it is not bad luck.
_MAX_STALE_BATCHES = 100


class BatchSource:
    """Fills a replay buffer with the rows of one step.

    A step takes one batch of the collector. With a ``staleness`` rule, whose collectors run during
    training, it takes as many as hold ``num_rows`` rows that are not dropped for their age. Rows
    are judged when they come, and those that wait for their group again in every step.

    Args:
        collector: iterated for batches of finished trajectories; it goes on where it was left.
        buffer: emptied at each step; its transform ends with ``credit``.
        credit: the buffer's credit assigner or selection, whose counts say what was filtered.
        num_rows: trajectories that a step needs, a row each in the buffer's storage.
        length: how long a row may be, and what becomes of a longer one; ``None`` for any length.
        truncated: responses cut by their length limit, or by ``length``: ``keep`` trains them,
            ``mask`` keeps them in their group's baseline only, ``drop`` takes them out of that too.
        max_resamples: batches that may be collected in addition while filtered groups leave the
            buffer short of ``num_rows``; 0 for none.
        staleness: how old the weights may be that sampled what is trained, and what becomes of
            older rows; the age is that at the collector's ``policy_version``. ``None`` where all
            rows are of the present weights.
        lost: tokens that collectors sampled and lost since it was called last, for the ledger.
        rows_per_trajectory: rows that a trajectory of several turns becomes at most, where its
            history is rewritten between them; the storage has room for so many.
        ranks: the processes that train together, each with a source of its own that fills its own
            buffer; all have to fill at the same time.

    Attributes:
        policy_age: ``train/policy_age_mean`` and ``train/policy_age_max`` of the last step, in
            updates; empty without ``staleness``.
        overlong: ``train/overlong_rows`` and ``train/tokens_overlong`` of the last step; empty
            without ``length``.

    Raises:
        ConfigError: the storage cannot hold exactly the rows of a step, or the collector counts no
            versions and ``staleness`` is given.
    """

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
            Every row that was collected, also those that were filtered out, for metrics; in rank 0
            those of all ranks. Of rows that are too long, the tokens that are not trained have the
            mask reason ``OVERLONG``. Their rewards are those that the credit assigner saw, with
            the penalties of the buffer's transforms.

        Raises:
            OverlongError: a row is longer than it may be, and ``length`` makes that an error.
            DataError: the token ledger does not close, or all rows are too old and stay so.
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
        # Rows of earlier steps whose group is full now, or was given up.
        decided = [row for row in carried if trajectory_of(row) not in waiting]
        self._outcomes = RowOutcomes(
            [*collected, *decided], [*judged, *decided], kept, waiting, len(decided)
        )
        return self._ranks.rows(lazy_rows(shown))

    def outcomes(self) -> RowOutcomes:
        """What became of the rows of the last step; a run keeps it with them."""
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
        """The rows as they were collected, and as they fit into training."""
        if self._length is None:
            return FittedRows.of(rows)
        fitted = self._length.fit(rows)
        out = [row for row, gone in zip(fitted.kept, fitted.dropped, strict=True) if gone]
        dropped = sum(map(sampled_tokens, out))
        self._dropped["truncated"] += dropped
        # What is cut off is nowhere from here on; what is dropped is counted with its group.
        self.ledger.count(truncated=fitted.cut_tokens)
        self.overlong["train/overlong_rows"] += fitted.overlong
        self.overlong["train/tokens_overlong"] += fitted.cut_tokens + dropped
        return fitted

    def _judged(self, fitted: FittedRows) -> tuple[list[TensorDict], int]:
        """Rows with what must not be trained marked, and how many last turns are too old."""
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
                row = row.clone(False)  # metrics report the rows as they were collected
                aged = self._aged(row)
                num_stale += aged and ends_trajectory(row)
            if not aged and self._truncated != "keep" and _was_cut(row):
                row = row.clone(False)
                drop = self._truncated == "drop"
                self._dropped["truncated"] += mark_truncated([row], drop=drop)
            judged.append(row)
        return judged, num_stale

    def _rewarded(self, rows: list[TensorDict]) -> list[TensorDict]:
        """Rows with what the buffer's first transforms write: penalties are in their rewards."""
        for transform in reversed(list(self._buffer.transform.transforms)):
            if not isinstance(transform, RowTransform):
                break
            rows = row_list(transform._inv_call(lazy_rows([row.copy() for row in rows])))
        return rows

    def _too_old(self, row: TensorDict) -> bool:
        return self._staleness.verdict(row, self._collector.policy_version) != "keep"

    def _aged(self, row: TensorDict) -> bool:
        """Mark what is too old; whether the row was dropped by that."""
        if self._staleness.mark(row, self._collector.policy_version) != "drop":
            return False
        self._dropped["stale"] += sampled_tokens(row)
        return True

    def _judge_waiting(self) -> None:
        """Rows that came in earlier steps and wait for others have aged since."""
        if self._staleness is None:
            return
        for trajectory in self._credit.waiting():
            if trajectory.valid:
                # Every row is to be marked, not only the first.
                aged = [self._aged(row) for row in trajectory.rows]
                trajectory.valid = not any(aged)
        for row in self._credit.unfinished():
            valid = leaf(row, ("next", "reward_valid"))
            if valid is None or bool(valid.all()):
                self._aged(row)

    def _account(
        self, collected: list[TensorDict], before: dict[str, int], written: int
    ) -> list[TensorDict]:
        """Close the ledger; the rows of the buffer."""
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
        # Dropped responses are invalid to the credit assigner; the ledger says why.
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
                f"no token of this step is trained, the weights stay as they are; tokens: {spent}. "
                "Filters, bounds on returns and equal rewards leave nothing (said once)"
            )
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The ledger's carry; collector and buffer have states of their own."""
        return {"ledger": self.ledger.state_dict(), "dropped": dict(self._dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`."""
        self.ledger.load_state_dict(state["ledger"])
        self._dropped = dict(state["dropped"])


def _with_reward(row: TensorDict, rewarded: TensorDict) -> TensorDict:
    """A row with the reward of its copy."""
    if row is rewarded:
        return row
    made = row.copy()
    for path in (_REWARD, task_path(_REWARD)):
        if (reward := leaf(rewarded, path)) is not None:
            set_copied(made, path, reward)
    return made


def mark_truncated(rows: Iterable[TensorDict], *, drop: bool) -> int:
    """Take the sampled tokens of responses that were cut by their length limit out of the loss.

    Args:
        rows: each with ``("tokens", "finish_reason")`` and a trace; changed in place.
        drop: also make their reward invalid, so that they leave their group's baseline.

    Returns:
        Sampled tokens of the rows that were dropped; 0 without ``drop``.
    """
    dropped = 0
    for row in rows:
        if not _was_cut(row):
            continue
        source, reason = row.get(("trace", "source")), row.get(("trace", "mask_reason"))
        cut = reason.masked_fill(source == Source.SAMPLED, int(MaskReason.TRUNCATED))
        row.set(("trace", "mask_reason"), cut)
        if drop:
            valid = row.get(("next", "reward_valid"), None)
            flag = torch.zeros((), dtype=torch.bool) if valid is None else torch.zeros_like(valid)
            row.set(("next", "reward_valid"), flag)
            dropped += sampled_tokens(row)
    return dropped


def _was_cut(row: TensorDict) -> bool:
    return was_cut(row) or int(row.get(("tokens", "finish_reason"))) == FinishReason.LENGTH


def tokens_by_reason(rows: LazyStackedTensorDict) -> dict[int, int]:
    """Sampled tokens of rows by their mask reason.

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
    """The rows that have a token to train on; all others would only cost their forward.

    Args:
        rows: 1-d stack of rows with a trace.

    Returns:
        A stack of those rows, ``None`` without any.
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


def rollout_metrics(rows: LazyStackedTensorDict) -> dict[str, float]:
    """What the policy did in a step, from every row that was collected.

    Args:
        rows: 1-d stack of rows with rewards, one row per turn.

    Returns:
        ``train/reward`` (mean return of the valid episodes as advantages see it, a KL penalty
        included; NaN without any), ``train/reward_std`` and ``train/success`` (of the last turn,
        where rows say it) over the same episodes, ``train/invalid`` and ``train/truncated``
        (fractions of the rows), ``train/response_length`` (mean tokens); those of
        :func:`~torchrl_llm.trainers.episode_metrics.episode_metrics`. For each component of the
        reward, before its weight, ``train/reward_<name>`` over those of the same episodes in which
        it is valid, and ``train/invalid_<name>``. ``train/reward_errors``: rows whose reward
        raised, or was none; ``train/tool_errors``, where there are tools: rows with a call that a
        tool itself failed at; ``train/env_errors``, where there are any: rows whose world failed;
        ``train/out_of_context``, where episodes have several turns: the fraction of them that
        ended because the conversation had filled the model's context.
    """
    episodes = Episodes(rows)
    invalid = episodes.rewards.isnan()
    mean = episodes.mean(episodes.returns)
    lengths = [ids.shape[0] for ids in read_rows(rows, ("tokens", "response"))]
    finish = row_values(rows, ("tokens", "finish_reason"), torch.sum)
    metrics = {
        "train/reward": mean,
        "train/reward_std": episodes.mean((episodes.returns - mean).square()) ** 0.5,
        "train/invalid": invalid.float().mean().item(),
        "train/truncated": (finish == FinishReason.LENGTH).float().mean().item(),
        "train/response_length": sum(lengths) / len(lengths),
    }
    success = row_values(rows, ("next", "success"), torch.any, None)
    if success is not None and not isnan(mean):
        metrics["train/success"] = episodes.mean(success[episodes.last].double())
    metrics |= _component_metrics(rows, episodes) | _error_metrics(rows, invalid)
    return metrics | _context_metrics(rows, episodes) | episode_metrics(rows, episodes)


def _error_metrics(rows: LazyStackedTensorDict, invalid: Tensor) -> dict[str, int]:
    """Rows by what failed in them."""
    failed = [{f.source for f in failures_of(row)} for row in row_list(rows)]
    worlds = sum(WORLD in sources for sources in failed)
    metrics = {"train/reward_errors": int(invalid.sum()) - worlds}
    if worlds:
        metrics["train/env_errors"] = worlds
    if leaf(rows[0], ("next", "tools")) is not None:
        tools = [any(name.startswith("tool ") for name in sources) for sources in failed]
        metrics["train/tool_errors"] = sum(tools)
    return metrics


def _context_metrics(rows: LazyStackedTensorDict, episodes: Episodes) -> dict[str, float]:
    """How many episodes ended with the context, where they have several turns."""
    turns = row_values(rows, "turn", torch.any, None)
    reasons = row_values(rows, ("next", "truncation_reason"), torch.sum, None)
    if turns is None or reasons is None:
        return {}
    full = int((reasons == TruncationReason.MAX_SEQ_LEN).sum())
    if not full and not turns.any():
        return {}
    return {"train/out_of_context": full / len(episodes.last)}


def _component_metrics(rows: LazyStackedTensorDict, episodes: Episodes) -> dict[str, float]:
    """Return and failures of each component of the reward, where it has some."""
    node = rows[0].get(("next", "rewards"), None)
    metrics: dict[str, float] = {}
    for name in () if node is None else node.keys():
        path = ("next", "rewards", name)
        values = row_values(rows, (*path, "value"), torch.sum).double()
        valid = row_values(rows, (*path, "valid"), torch.all)
        metrics[f"train/reward_{name}"] = episodes.mean(episodes.sums(values.where(valid, nan)))
        metrics[f"train/invalid_{name}"] = (~valid).float().mean().item()
    return metrics


_FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost")


@dataclass(kw_only=True)
class TokenLedger:
    """Sampled tokens of one step by what became of them.

    Attributes:
        carried: tokens that were pending when the step began.
        generated: tokens whose fate this step began to decide: of the rows that came, and those
            that were lost.
        trained: tokens that entered the loss, each counted once whatever the number of epochs.
        stale: sampled by weights that were too old.
        filtered: of groups whose rewards are all equal, or otherwise filtered.
        truncated: of responses cut by a length limit, where those are masked or dropped; and what
            is beyond the length that a row may have.
        invalid: of rows without a valid reward, or of groups with fewer than two valid members.
        surplus: complete and valid, but more than the step needed.
        lost: sampled by a worker that died, or in a delivery that did not arrive or was refused.
        pending: still waiting for their group at the end of the step.

    Example:
        >>> ledger = TokenLedger()
        >>> ledger.count(generated=10, trained=7, filtered=3)
        >>> ledger.close()
        0
        >>> ledger.metrics()["train/tokens_trained"]
        7
    """

    carried: int = 0
    generated: int = 0
    trained: int = 0
    stale: int = 0
    filtered: int = 0
    truncated: int = 0
    invalid: int = 0
    surplus: int = 0
    lost: int = 0
    pending: int = 0
    totals: dict[str, int] = field(default_factory=dict, repr=False)

    def count(self, **tokens: int) -> None:
        """Add tokens under their names, ``count(generated=64, trained=60)``.

        Raises:
            AttributeError: for a name that is not a column of the ledger.
        """
        for name, number in tokens.items():
            setattr(self, name, getattr(self, name) + int(number))

    @property
    def spent(self) -> int:
        """Tokens whose fate is decided in this step."""
        return sum(getattr(self, name) for name in _FATES)

    def close(self) -> int:
        """Check the sum and begin the next step.

        Returns:
            Tokens that are pending, carried into the next step.

        Raises:
            DataError: the columns do not add up.
        """
        spent = self.spent
        if self.carried + self.generated != spent + self.pending:
            columns = " + ".join(f"{name} {getattr(self, name)}" for name in (*_FATES, "pending"))
            raise DataError(
                f"the token ledger does not close: carried {self.carried} + generated "
                f"{self.generated} = {self.carried + self.generated} tokens, but {columns} = "
                f"{spent + self.pending}"
            )
        self.totals = {name: getattr(self, name) for name in ("generated", *_FATES, "pending")}
        self.carried = self.pending
        for name in ("generated", *_FATES, "pending"):
            setattr(self, name, 0)
        return self.carried

    def metrics(self) -> dict[str, int]:
        """The columns of the last closed step, named ``train/tokens_<column>``."""
        return {f"train/tokens_{name}": number for name, number in self.totals.items()}

    def state_dict(self) -> dict[str, int]:
        """What the next step starts from."""
        return {"carried": self.carried}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after :meth:`state_dict`."""
        self.carried = state["carried"]
