"""Worker loop that collects rows for a remote learner, independent of the transport.

:class:`CollectorWorker` joins an :class:`~torchrl_llm.collectors.LLMCollector` to the workers' end
of a :class:`~torchrl_llm.collectors.transport.RowChannel`. It does not depend on Ray or Redis. The
actor of :class:`~torchrl_llm.collectors.RayLLMCollector` runs it; a thread or a process can also
run it. If the learner cannot call the worker, :class:`WeightFollower` fetches its weights.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from tensordict import TensorDictBase
from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm._threads import BackgroundLoop
from torchrl_llm.collectors.llm_collector import LLMCollector
from torchrl_llm.collectors.transport.channel import ChannelClosedError, Delivery, RowChannel
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.weights import CanaryJudge, engine_weights
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_WAIT_S = 1.0
"""Longest single wait in seconds; short, so that a stop is noticed and heartbeats continue."""

_POLL_S = 0.1
"""Seconds between two checks for new weights."""


class CollectorWorker:
    """Claims rows, collects them, reports sampled tokens, and puts rows into a channel.

    The worker reports every policy call, so that the learner knows that the worker is alive and how
    many tokens are lost if it dies. Tokens that the worker drops (of conversations ended by
    ``in_flight="abort"``) appear as a gap between deliveries, and also count as lost.

    Args:
        collector: the collector, which must not have a buffer or queue.
        channel: the workers' end of the channel.
        name: name of this worker; must be different after a restart.
        claim_rows: rows to claim before each batch; by default the turns of a batch.
        give_up_s: most seconds to retry a delivery to a full channel.

    Attributes:
        digests: digest of the weights that this worker received, by version.
        before_batch: called after a claim, before the batch is collected.

    Raises:
        ConfigError: the collector writes its batches itself, or ``claim_rows`` is below 1.

    Example:
        >>> import torch
        >>> from torchrl.envs import StepCounter
        >>> from torchrl_llm.collectors.transport import LocalChannel
        >>> from torchrl_llm.data import History
        >>> from torchrl_llm.envs import DatasetChatEnv
        >>> env = DatasetChatEnv(dataset=[{"query": "Hi"}], num_envs=2)
        >>> env = env.append_transform(StepCounter(max_steps=1))
        >>> def policy(td):
        ...     answer = [{"role": "assistant", "content": "Hello"}]
        ...     chats = td["history"].prompt.chats
        ...     td["history"].full = History.of([chat + answer for chat in chats])
        ...     return td
        >>> collector = LLMCollector(
        ...     env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2
        ... )
        >>> channel = LocalChannel()
        >>> channel.grant(2)
        >>> CollectorWorker(collector, channel, name="a").run()
        'it has collected all its turns'
        >>> channel.get(timeout_s=0).rows.num_rows
        2
    """

    @checked
    def __init__(
        self,
        collector: LLMCollector,
        channel: RowChannel,
        *,
        name: str,
        claim_rows: Annotated[int, Ge(1)] | None = None,
        give_up_s: float = 600.0,
    ) -> None:
        if collector.replay_buffer is not None or collector.queue is not None:
            raise ConfigError("the collector of a worker must have no replay_buffer and no queue")
        self.collector, self.channel, self.name = collector, channel, name
        self.claim_rows = collector.dialog_turns_per_batch if claim_rows is None else claim_rows
        self.give_up_s = give_up_s
        self.digests: dict[int, str] = {}
        self.before_batch: Callable[[], object] | None = None
        self._sequence = 0
        self._stopping = threading.Event()
        self._changing = threading.Lock()
        self._proving = threading.Lock()
        self._judge = CanaryJudge()
        self._unproven: WeightUpdateError | None = None
        collector.after_call = self._report
        self._name_first_weights()

    def _name_first_weights(self) -> None:
        version = self.collector.policy_version
        try:
            weights = engine_weights(self.collector.policy_module)
        except ConfigError:
            return  # a remote engine or no model: there is nothing to hash
        if isinstance(version, int):
            self.digests[version] = weights_digest(weights)

    def _report(self) -> None:
        self.channel.report(self.name, generated=self.collector.sampled_tokens)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> str:
        """Collect until :meth:`stop`, the end of the collector's budget, or a closed channel.

        Returns:
            The reason of the end.

        Raises:
            WorkerError: the channel does not answer, was full for too long, or dropped this worker
                as dead.
            WeightUpdateError: the policy does not compute with the weights that it received; rows
                sampled with these weights are not delivered.
            Exception: an exception of the policy or environment.
        """
        try:
            while not self._stopping.is_set():
                if self.collector.exhausted:
                    return "it has collected all its turns"
                if self.channel.claim(self.name, self.claim_rows, timeout_s=_WAIT_S):
                    if self.before_batch is not None:
                        self.before_batch()
                    self._check_proven()
                    self._put(self.collector.rollout())
        except ChannelClosedError:
            return "the channel was closed"
        return "it was stopped"

    def _check_proven(self) -> None:
        # Wait for a running check, because these rows may be sampled by the weights that are being
        # checked.
        with self._proving:
            if self._unproven is not None:
                raise self._unproven

    def _put(self, batch: TensorDictBase) -> None:
        self._check_proven()
        rows = split_rollout(batch)
        collector = self.collector
        delivery = Delivery(
            pack_rows(rows),
            self.name,
            self._sequence,
            claimed=self.claim_rows,
            generated=collector.sampled_tokens,
            sent=collector.sampled_tokens - collector.tokens_in_flight,
            digests=self._digests_of(rows),
        )
        deadline = time.monotonic() + self.give_up_s
        while not self._stopping.is_set():
            try:
                self.channel.put(delivery, timeout_s=_WAIT_S)
            except queue.Full:
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"the channel has been full for {self.give_up_s:g} s: nobody takes what "
                        f"{self.name!r} collects"
                    ) from None
                continue
            self._sequence += 1
            return
        logger.warning(f"{self.name}: stopped with {len(rows.tensordicts)} rows not handed over")

    def _digests_of(self, rows: Any) -> dict[int, str]:
        """Return the digests of the versions that sampled these rows; none if one is unknown."""
        versions: set[int] = set()
        for row in rows.tensordicts:
            traced = leaf(row, ("trace", "policy_version"))
            if traced is not None:
                versions.update(traced.unique().tolist())
        versions.discard(-1)
        with self._changing:
            known = {v: self.digests[v] for v in versions if v in self.digests}
        return known if len(known) == len(versions) else {}

    def stop(self) -> None:
        """End :meth:`run` after the current batch."""
        self._stopping.set()

    # -- weights ----------------------------------------------------------------------------------

    def load_weights(
        self,
        source: WeightSource,
        version: int,
        in_flight: Literal["wait", "keep", "abort"] = "wait",
    ) -> list[WeightReceipt]:
        """Load new weights, and verify them if the sender provides a canary.

        See :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.

        Raises:
            WeightUpdateError: the weights did not arrive, and the old weights stay. Or the policy
                does not compute with the new weights; then :meth:`run` ends, unless newer weights
                arrive before the next batch.
        """
        with self._proving:
            receipts = self._load(source, version, in_flight)
            self._prove(source, version)
        return receipts

    def _prove(self, source: WeightSource, version: int) -> None:
        scorer = getattr(self.collector.policy, "backend", None)
        if source.canary is None or not isinstance(scorer, TokenScorer):
            self._unproven = None
            return
        try:
            self._judge.check(scorer, source.canary, version=version)
        except WeightUpdateError as error:
            self._unproven = error
            raise
        self._unproven = None

    def _load(
        self, source: WeightSource, version: int, in_flight: Literal["wait", "keep", "abort"]
    ) -> list[WeightReceipt]:
        with self._changing:
            # The digest is registered before the weights are used, because a row may be delivered
            # immediately.
            if source.kind == "full" and source.digest is not None:
                self.digests[version] = source.digest
        try:
            receipts = self.collector.load_weights(source, version=version, in_flight=in_flight)
        except BaseException:
            with self._changing:
                self.digests.pop(version, None)
            raise
        if source.kind == "full":
            with self._changing:
                self.digests[version] = receipts[0].digest
        return receipts


class WeightFollower:
    """Loads the newest published weights into a worker.

    The worker checks for new weights before each batch, so that rows start with the newest weights.
    If ``in_flight`` is not ``wait``, a thread also checks (:meth:`start`).

    Args:
        worker: receives the weights.
        newest: function that returns version and source of the newest weights, or ``None`` before
            the first weights.
        in_flight: what happens to unfinished conversations when new weights arrive, see
            :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.

    Attributes:
        version: version of the worker's weights; ``None`` before the first weights.

    Raises:
        ConfigError: the worker already has a ``before_batch`` function.
    """

    def __init__(
        self,
        worker: CollectorWorker,
        newest: Callable[[], tuple[int, WeightSource] | None],
        *,
        in_flight: Literal["wait", "keep", "abort"] = "wait",
    ) -> None:
        if worker.before_batch is not None:
            raise ConfigError("this worker has something that it does before each batch already")
        self.version: int | None = None
        self._worker, self._newest, self._in_flight = worker, newest, in_flight
        self._has: tuple[int, str | None] | None = None
        self._lock = threading.Lock()
        self._loop = BackgroundLoop(self._look_again, name="weights")
        worker.before_batch = self.refresh

    def refresh(self) -> bool:
        """Load the newest weights if the worker does not have them yet.

        If the weights do not arrive completely, the error is logged, and the next call retries. The
        worker continues with its current weights, and its rows carry their version.

        Returns:
            Whether new weights were loaded.

        Raises:
            WorkerError: the source does not answer.
        """
        with self._lock:
            try:
                found = self._newest()
                if found is None or (found[0], found[1].digest) == self._has:
                    return False
                version, source = found
                # A learner resumed from a checkpoint reuses some version numbers. A conversation
                # that began with the earlier weights of a number must not continue with the later
                # weights of the same number.
                source.recounted = self.version is not None and version <= self.version
                rule = "abort" if source.recounted else self._in_flight
                self._worker.load_weights(source, version, rule)
            except WeightUpdateError as error:
                logger.warning(f"{self._worker.name} goes on with version {self.version}: {error}")
                return False
            self.version, self._has = version, (version, source.digest)
            return True

    def wait(self, *, timeout_s: float) -> None:
        """Wait for the first weights.

        Args:
            timeout_s: most seconds to wait.

        Raises:
            WorkerError: no learner published weights in time.
        """
        deadline = time.monotonic() + timeout_s
        while self.version is None and not self.refresh():
            if time.monotonic() > deadline:
                raise WorkerError(f"no learner has published weights for {timeout_s:g} s")
            time.sleep(_POLL_S)

    def start(self) -> None:
        """Also check for new weights in a thread, until :meth:`shutdown`."""
        if self._in_flight != "wait" and not self._loop.is_running:
            self._loop.start()

    def _look_again(self) -> bool:
        try:
            self.refresh()
        except WorkerError as error:
            logger.warning(f"{self._worker.name} cannot see whether weights came: {error}")
        return not self._loop.stopping.wait(_POLL_S)

    def shutdown(self) -> None:
        """End the thread."""
        self._loop.stop()
