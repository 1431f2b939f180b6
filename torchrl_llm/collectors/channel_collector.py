"""Learner's end of a channel, with the interface of a collector.

Remote workers (threads, actors of Ray, processes that share only a Redis) collect rows and put them
into a :class:`~torchrl_llm.collectors.transport.RowChannel`. :class:`ChannelCollector` is the
collector for a training loop. It grants rows to the workers, receives and verifies their
deliveries, drops dead workers, and announces new weights.
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from tensordict import LazyStackedTensorDict, TensorDict
from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm.collectors.policy_versions import VersionedCollector, Weights
from torchrl_llm.collectors.staleness import Pacer, sampled_versions
from torchrl_llm.collectors.transport.channel import (
    Delivery,
    RowChannel,
    TokenAccounts,
    WorkerCounts,
)
from torchrl_llm.data.nodes import leaf, own_rows
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import ends_trajectory, sampled_tokens
from torchrl_llm.data.wire import pack_rows, unpack_row_list
from torchrl_llm.envs.transforms import DataLoadingPrimer
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.weights import CanaryCheck, WeightLedger, WeightUpdater

_POLL_S = 1.0
# After this many seconds without claims and deliveries, more rows are granted, because the
# remaining ones are too few for a claim.
_STARVED_S = 5.0
# A worker that has not asked for this many seconds is not waiting for a claim.
_ASKED_S = 3.0


class _Held(NamedTuple):
    """An accepted delivery: its rows, the claims that they use, and their oldest version."""

    rows: list[TensorDict]
    claims: int
    version: int

    @property
    def trajectories(self) -> int:
        return sum(map(ends_trajectory, self.rows))


def _oldest(row: TensorDict) -> int:
    if leaf(row, ("trace", "policy_version")) is None:
        return 0
    versions = sampled_versions(row)
    return int(versions.min()) if versions.numel() else 0


class ChannelCollector(VersionedCollector):
    """Iterates over batches of rows that remote workers collect.

    A batch is a lazy stack of rows ``[N]``, ``N >= batch_rows``. It consists of whole deliveries.
    Deliveries of the oldest weights come first, then the order is that of arrival. Surplus
    deliveries wait for the next batch. Between two batches the caller trains and calls
    ``update_policy_weights_``. The iterator never ends. If no rows arrive, it raises an error after
    ``timeout_s``.

    Args:
        channel: channel from the workers.
        batch_rows: least number of trajectories per batch; a single-turn trajectory is one row.
        pacer: decides how many rows are granted, and which slow workers a batch waits for. Without
            a pacer, the caller calls :meth:`grant`.
        publish: function ``publish(weights, version)``, which writes weights to a place where the
            workers find them, before the channel announces the version. It returns their digest, or
            ``None``. If this collector has a canary, ``publish`` must accept ``canary=``.
        weight_updater: alternative to ``publish``, called as ``push_weights(weights)``. Pass at
            most one of the two.
        timeout_s: most seconds to wait for an accepted delivery.
        worker_timeout_s: a worker with claims that sends no heartbeat for this many seconds is
            dropped: its claims go to other workers, and its tokens are lost.
        check: function that is called with each delivery. It rejects the delivery by raising
            :class:`~torchrl_llm.errors.WeightUpdateError`.
        version: version of the workers' first weights.
        checks: functions that are called about once a second while a batch is incomplete, and may
            raise errors.

    Attributes:
        accounts: counts of received and lost tokens.
        ledger: digests of the published weights.
        primer: draws the prompts of all workers if they share one order; ``None`` if each worker
            draws its own prompts.
        canary: set this attribute to send expected log-probs with each version, so that every
            worker checks its engine before it delivers rows. With ``None``, only the bytes are
            verified.

    Raises:
        ConfigError: arguments contradict each other.

    Example:
        >>> import torch
        >>> from torchrl_llm.collectors.staleness import StalenessRule
        >>> from torchrl_llm.collectors.transport import LocalChannel
        >>> channel = LocalChannel()
        >>> pacer = Pacer(StalenessRule(max_policy_age=0), batch_rows=2)
        >>> collector = ChannelCollector(channel, batch_rows=2, pacer=pacer)
        >>> channel.claim("a", 2, timeout_s=0)
        True
        >>> rows = pack_rows([TensorDict(x=torch.tensor(i)) for i in range(2)])
        >>> channel.put(Delivery(rows, "a", 0, claimed=2), timeout_s=1)
        >>> collector.next()["x"].tolist()
        [0, 1]
        >>> channel.claim("a", 2, timeout_s=0)  # not before the update that the batch led to
        False
        >>> collector.update_policy_weights_()
        >>> channel.claim("a", 2, timeout_s=0), channel.version()
        (True, 1)
    """

    primer: DataLoadingPrimer | None = None

    @checked
    def __init__(
        self,
        channel: RowChannel,
        *,
        batch_rows: Annotated[int, Ge(1)],
        pacer: Pacer | None = None,
        publish: Callable[..., str | None] | None = None,
        weight_updater: WeightUpdater | Callable[[], WeightUpdater] | None = None,
        timeout_s: float = 600.0,
        worker_timeout_s: float = 120.0,
        check: Callable[[Delivery], None] | None = None,
        version: int = 0,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__()
        if publish is not None and weight_updater is not None:
            raise ConfigError("pass publish or a weight_updater, not both")
        self.channel, self.batch_rows, self.pacer = channel, batch_rows, pacer
        self.timeout_s, self.worker_timeout_s = timeout_s, worker_timeout_s
        self.requested_frames_per_batch, self.total_frames = batch_rows, -1
        self._publish, self._check, self._checks = publish, check, checks
        self._version = version
        self.ledger = WeightLedger()
        self.canary: CanaryCheck | None = None
        self._held: list[_Held] = []
        self._unused = 0
        self.accounts = TokenAccounts()
        self._iter, self._frames = -1, 0
        self._watched_s = 0.0
        self._reason = ""
        self._closed = False
        self.weight_updater = weight_updater
        channel.set_version(version)
        self._top_up()

    # -- batches ----------------------------------------------------------------------------------

    def iterator(self) -> Iterator[LazyStackedTensorDict]:
        """Yield batches, one after the other."""
        while True:
            yield self.collect()

    def collect(self) -> LazyStackedTensorDict:
        """Return the next batch: whole deliveries with at least ``batch_rows`` trajectories.

        With a pacer, the batch also contains the deliveries of workers whose rows would be too old
        for the following batch.

        Raises:
            WorkerError: no delivery was accepted within the time limit, or the channel does not
                answer.
        """
        if self.pacer is not None and self._unused >= self.pacer.batch_rows:
            # A step may need more rows because some were filtered; new rows are started
            # immediately.
            self._discard(self._unused)
            self._unused = 0
        while sum(h.trajectories for h in self._held) < self.batch_rows or self.stragglers():
            self._held.append(self._take(self.timeout_s))
        # A slow worker's rows may already be in the channel, behind the rows of other workers.
        for _ in range(len(self.channel) if self.pacer is not None and self.pacer.waits else 0):
            try:
                self._held.append(self._take(0.0))
            except WorkerError:
                break  # the waiting rows were rejected
        # Rows that overtook those of a slow worker are newer, and can wait.
        self._held.sort(key=lambda held: held.version)
        rows: list[TensorDict] = []
        taken = 0
        while taken < self.batch_rows:
            held = self._held.pop(0)
            rows += held.rows
            taken += held.trajectories
            self._unused += held.claims
        self._iter += 1
        return lazy_rows(rows)

    def receive(self, *, timeout_s: float | None = None) -> list[TensorDict]:
        """Return the rows of the next accepted delivery; ignores rows that wait for a batch.

        Args:
            timeout_s: most seconds to wait; ``None`` for the collector's own limit.

        Returns:
            Rows without batch dimension, one per turn. The list may be empty.

        Raises:
            WorkerError: no delivery arrived in time, or the channel does not answer.
        """
        held = self._take(self.timeout_s if timeout_s is None else timeout_s)
        self._unused += held.claims
        return held.rows

    def _take(self, limit_s: float) -> _Held:
        if self._closed:
            raise ConfigError("this collector was shut down")
        started = starved = time.monotonic()
        while True:
            left_s = started + limit_s - time.monotonic()
            self._watch()
            try:
                delivery = self.channel.get(timeout_s=max(0.0, min(_POLL_S, left_s)))
            except queue.Empty:
                if left_s <= 0:
                    raise WorkerError(self._nothing_came(limit_s)) from None
                if not self._ask_in_vain():
                    starved = time.monotonic()
                elif time.monotonic() - starved > _STARVED_S and self.pacer is not None:
                    self._relieve()
                    starved = time.monotonic()
                continue
            held = self._accept(delivery)
            if held is not None:
                return held

    def _accept(self, delivery: Delivery) -> _Held | None:
        rows = own_rows(unpack_row_list(delivery.rows))
        tokens = sum(map(sampled_tokens, rows))
        self.accounts.receive(delivery, tokens)
        try:
            self._verify(delivery, rows)
        except WeightUpdateError as error:
            self._reason = str(error)
            logger.warning(f"delivery {delivery.sequence} of {delivery.worker!r} refused: {error}")
            self.accounts.refuse(tokens)
            self._discard(delivery.claimed)
            return None
        self._frames += len(rows)
        # Claims without a row count as used immediately; claims with rows, after the update.
        claims = min(sum(map(ends_trajectory, rows)), delivery.claimed)
        self._discard(delivery.claimed - claims)
        return _Held(rows, claims, min(map(_oldest, rows), default=self._version))

    def _verify(self, delivery: Delivery, rows: list[TensorDict]) -> None:
        """Reject rows that were not sampled by the weights whose version they carry."""
        newest = max(delivery.digests, default=self._version)
        if newest > self._version:
            raise WeightUpdateError(
                f"it was sampled by version {newest} of the weights, and this learner is at "
                f"version {self._version}"
            )
        if delivery.digests:
            used = {v for row in rows for v in sampled_versions(row).unique().tolist()}
            # Weights from before this learner, or from a sender without digests, have no digest.
            self.ledger.check(delivery.digests, used, proven=False)
        if self._check is not None:
            self._check(delivery)

    def _nothing_came(self, limit_s: float) -> str:
        known = ", ".join(
            f"{name} ({time.time() - c.seen_s:.0f} s ago, {c.claimed} rows claimed)"
            for name, c in sorted(self.channel.workers().items())
        )
        refused = f"; the last that came was refused: {self._reason}" if self._reason else ""
        workers = f"workers: {known or 'none has ever called'}"
        return f"no rows came within {limit_s:g} s; {workers}{refused}"

    # -- workers ----------------------------------------------------------------------------------

    def grant(self, num_rows: int) -> None:
        """Allow the workers to collect more rows; for callers without a pacer.

        Args:
            num_rows: number of rows; a negative number withdraws unclaimed rows.

        Raises:
            ConfigError: the collector has a pacer, which grants rows itself.
        """
        if self.pacer is not None:
            raise ConfigError("this collector has a pacer, which grants rows by itself")
        self.channel.grant(num_rows)

    def workers(self) -> dict[str, WorkerCounts]:
        """Return the channel's counts of the live workers."""
        return self.channel.workers()

    def stragglers(self) -> list[str]:
        """Return the workers that the next batch must wait for; none without a pacer."""
        if self.pacer is None:
            return []
        return self.pacer.stragglers(self._version, self.channel.workers())

    def forget(self, worker: str) -> WorkerCounts:
        """Drop a worker: its claims go to other workers, and its undelivered tokens are lost.

        Args:
            worker: name of the worker.

        Returns:
            The last counts of the worker.
        """
        counts = self.channel.forget(worker)
        logger.warning(
            f"worker {worker!r} was given up: {counts.claimed} rows go to others, "
            f"{counts.in_flight} tokens are lost"
        )
        return counts

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._watched_s < _POLL_S:
            return
        self._watched_s = now
        for check in self._checks:
            check()
        for name, counts in self.channel.workers().items():
            owes = counts.claimed > 0 or counts.in_flight > 0
            if owes and time.time() - counts.seen_s > self.worker_timeout_s:
                self.forget(name)

    def _discard(self, num_rows: int) -> None:
        """Count granted rows that do not lead to an update."""
        if self.pacer is not None and num_rows:
            self.pacer.used(num_rows)
            self._top_up()

    def _top_up(self) -> None:
        more = 0 if self.pacer is None else self.pacer.grant()
        if more:
            self.channel.grant(more)

    def _ask_in_vain(self) -> bool:
        """Return whether there are workers, but none of them has a claim.

        A worker that waits for a claim asks every second. If no worker asks (because they are
        starting), additional claims would only be too many later.
        """
        workers = self.channel.workers().values()
        asking = any(time.time() - counts.seen_s < _ASKED_S for counts in workers)
        return asking and all(counts.claimed <= 0 for counts in workers)

    def _relieve(self) -> None:
        logger.warning(
            f"no worker holds a claim and {sum(h.trajectories for h in self._held)} of "
            f"{self.batch_rows} rows are here; "
            f"granting {self.batch_rows} more (rows that a worker claims at once should divide "
            "those of a batch)"
        )
        self.pacer.outstanding += self.batch_rows
        self.channel.grant(self.batch_rows)

    # -- tokens -----------------------------------------------------------------------------------

    def take_lost(self) -> int:
        """Return the tokens lost or rejected since the last call, for the ledger of a step.

        Lost tokens are tokens that a dropped worker had sampled but not delivered, and delivered
        tokens that never arrived.
        """
        self.accounts.forget(self.channel.forgotten())
        return self.accounts.take_lost()

    # -- weights ----------------------------------------------------------------------------------

    def _update(self, weights: Weights | None) -> None:
        self.publish(weights, version=self._version + 1)
        if self.pacer is not None:
            self.pacer.used(self._unused)
            self.pacer.next_version(self._version, self.channel.workers())
            self._top_up()
        self._unused = 0

    def publish(self, weights: Weights | None = None, *, version: int | None = None) -> None:
        """Send weights to the workers without counting a training step.

        Call it once before the first batch if the workers start with different weights, and after a
        resume from a checkpoint.

        Args:
            weights: see ``update_policy_weights_``.
            version: their version number; the current version by default.

        Raises:
            WeightUpdateError: the weights did not arrive, or this version number already belongs to
                different weights (possibly from before a checkpoint).
        """
        version = self._version if version is None else version
        digest = None
        if self._publish is not None:
            told = {} if self.canary is None else {"canary": self.canary.target()}
            digest = self._publish(weights, version, **told)
        elif self.weight_updater is not None:
            self.weight_updater.push_weights(weights)
        if digest is not None:
            self.ledger.record(version, digest)
        self._version = version
        self.channel.set_version(version)

    @property
    def policy_version(self) -> int:
        """Version of the weights: the number of published updates."""
        return self._version

    # -- state ------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Raise an error: the environments are in the workers.

        Args:
            seed: not used.
            static_seed: not used.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a ChannelCollector has no environment; seed those of the workers")

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return version, digests, counts, and received rows that are not in a batch yet.

        Rows in the workers are not saved, because the workers continue to run. A learner that is
        restarted on the same channel receives them.
        """
        return OrderedDict(
            version=self._version,
            weights=self.ledger.state_dict(),
            held=[(pack_rows(held.rows), held.claims, held.version) for held in self._held],
            accounts=self.accounts.state_dict(),
            iterations=self._iter,
            rows=self._frames,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; publish the weights of its version next.

        Args:
            state_dict: state of a collector with the same configuration.
        """
        self._version = state_dict["version"]
        self.ledger.load_state_dict(state_dict["weights"])
        self._held = [
            _Held(unpack_row_list(rows), claims, version)
            for rows, claims, version in state_dict["held"]
        ]
        if self.pacer is not None and self.pacer.waits:
            # These rows are also in flight, so fewer rows may be started.
            self.channel.grant(-sum(held.claims for held in self._held))
        self.accounts.load_state_dict(state_dict["accounts"])
        self._iter, self._frames = state_dict["iterations"], state_dict["rows"]
        self.channel.set_version(self._version)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the channel, which ends the workers; can be called repeatedly.

        Args:
            timeout: ignored; this method does not wait.
            close_env: ignored; there is no environment in this process.
            raise_on_error: raise an error of the channel.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.channel.close()
        except WorkerError:
            if raise_on_error:
                raise

    def __repr__(self) -> str:
        return (
            f"ChannelCollector({type(self.channel).__name__}, batch_rows={self.batch_rows}, "
            f"version={self._version})"
        )
