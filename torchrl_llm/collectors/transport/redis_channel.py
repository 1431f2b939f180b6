"""Channel over Redis, between processes that share nothing else.

Messages are bytes that cannot execute code (:mod:`torchrl_llm.data.wire`). So a malicious client of
the Redis can at worst send wrong rows, or no rows. The scripts for the server are in this folder;
``redis_begin.lua`` documents their keys.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm._redis import RECONNECT_S, RedisLink
from torchrl_llm.collectors.transport.channel import (
    Delivery,
    RowChannel,
    WorkerCounts,
    closed_error,
    forgotten_error,
)
from torchrl_llm.data.wire import PackedRows, encode
from torchrl_llm.errors import DataError

_MOST_BYTES = 500 << 20
# Largest values that the scripts accept: for a number of rows, and for any other number.
_MOST_CLAIMS, _MOST = 1 << 20, 1 << 53
_PAUSE_S = (0.005, 0.1)
_KEPT_S = 3600
_ABOUT = [entry.name for entry in fields(Delivery) if entry.name != "rows"]
_T = TypeVar("_T")
KEYS = (
    *("state", "queue", "queued", "taken"),
    *("claimed", "generated", "delivered", "sent", "seen", "forgotten"),
)


def _script(name: str) -> str:
    """Return a script of this folder, preceded by the shared functions."""
    files = (Path(__file__).with_name(f"redis_{each}.lua") for each in ("begin", name))
    return "".join(file.read_text(encoding="utf-8") for file in files)


WORK, LEAD, FORGET = map(_script, ("work", "lead", "forget"))


@dataclass
class _Own:
    """State of a worker's handle: claimed rows, and number of deliveries."""

    claims: int = 0
    deliveries: int = 0


@dataclass
class _Lead:
    """State of the learner's end, which survives a loss of the server's data.

    ``out`` is the number of granted rows that have not arrived: free, claimed, or waiting in the
    server.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    version: int = 0
    out: int = 0
    got: str = ""
    closed: bool = False
    begun: bool = False
    next: dict[str, int] = field(default_factory=dict)
    forgotten: dict[str, bytes] = field(default_factory=dict)


def delivery_to_bytes(delivery: Delivery) -> bytes:
    """Convert a delivery to bytes.

    Args:
        delivery: :func:`~torchrl_llm.data.wire.encode` must support its rows.

    Raises:
        DataError: a value has no safe form, or the message is too large for Redis.
    """
    about = {name: getattr(delivery, name) for name in _ABOUT}
    data = encode(delivery.rows, about | {"digests": dict(delivery.digests)})
    if len(data) > _MOST_BYTES:
        raise DataError(
            f"a delivery of {len(data) >> 20} MiB is more than a Redis takes at once; let workers "
            "collect fewer rows at a time"
        )
    return data


def delivery_from_bytes(data: bytes) -> Delivery:
    """Read the result of :func:`delivery_to_bytes`.

    Args:
        data: untrusted bytes.

    Raises:
        DataError: the bytes are not a delivery.
    """
    rows = PackedRows.open(data)
    about = rows.about
    numbers = [about.get(name) for name in ("sequence", "claimed", "generated")]
    if about.get("sent") is not None:
        numbers.append(about["sent"])
    digests = about.get("digests")
    holds = (
        type(about.get("worker")) is str
        and all(type(number) is int and 0 <= number < 1 << 60 for number in numbers)
        and type(digests) is dict
        and all(type(v) is int and type(digest) is str for v, digest in digests.items())
        and about["claimed"] <= _MOST_CLAIMS
        and set(about) == set(_ABOUT)
    )
    if not holds:
        raise DataError("a message holds rows, and does not say who collected them")
    return Delivery(rows, **about)


class RedisChannel(RowChannel):
    """A channel between processes that share a Redis.

    The channel survives restarts of the server: calls wait for the server up to ``reconnect_s``
    beyond their own time limit. If the server returns without its data, waiting deliveries are
    lost. The learner detects the gap, grants their rows again, and continues, as the workers do.

    A worker must claim and put through the same handle. A row that contains a value without a safe
    form raises :class:`~torchrl_llm.errors.DataError`. Only one learner's end may exist. After a
    kill, replace it by a handle with ``begin=True``.

    Args:
        url: URL of the Redis, ``redis://host:port/db``.
        name: name of the channel; several channels may share a Redis.
        max_size: most waiting deliveries; the value of the learner's handle applies.
        begin: whether this is the learner's end of a new run. Waiting deliveries are then dropped,
            and claims and counts start at zero. Live workers continue.
        reconnect_s: most seconds that the server may be unreachable.
        on_return: function that the learner's end calls after the server was unreachable, to
            restore other lost data.

    Attributes:
        place: the URL without user and password.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: the size is below 1, or the URL is malformed.
        WorkerError: the server does not answer.
    """

    @checked
    def __init__(
        self,
        url: str,
        name: str,
        max_size: Annotated[int, Ge(1)] = 8,
        *,
        begin: bool = False,
        reconnect_s: float = RECONNECT_S,
        on_return: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.max_size, self.on_return = name, max_size, on_return
        self._link = RedisLink(url, feature="RedisChannel", reconnect_s=reconnect_s)
        # The braces keep all keys of a channel on one node of a cluster.
        self._keys = [f"{{{name}}}:{key}" for key in KEYS]
        self.place = self._link.place
        self._own: dict[str, _Own] = {}
        self._lead: _Lead | None = None
        self._prepare()
        if begin:
            self._call(lambda again: self._link.client.delete(*self._keys))
            self._lead = _Lead()
            self._leading()

    def _prepare(self) -> None:
        self._work = self._link.client.register_script(WORK)
        self._leads = self._link.client.register_script(LEAD)
        self._forgets = self._link.client.register_script(FORGET)
        self._mutex = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        without = ("_work", "_leads", "_forgets", "_mutex", "on_return")
        return {key: value for key, value in self.__dict__.items() if key not in without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, on_return=None)
        self._prepare()

    def _call(self, command: Callable[[bool], _T]) -> _T:
        return self._link.call(command)

    # -- the workers' end -------------------------------------------------------------------------

    def _act(self, worker: str, own: _Own, action: str, *arguments: Any) -> str:
        arguments = (worker, own.claims, action, *arguments)
        answer = self._call(lambda again: self._work(keys=self._keys, args=arguments)).decode()
        if answer == "closed":
            raise closed_error()
        if answer == "forgotten":
            raise forgotten_error(worker)
        return answer

    def _do(self, method: str, *args: Any) -> Any:
        return getattr(self, f"_{method}")(*args)

    def _wait(self, method: str, *args: Any, timeout_s: float) -> Any:
        deadline, pause_s = time.monotonic() + timeout_s, _PAUSE_S[0]
        if method == "try_put":
            args = (*args, delivery_to_bytes(*args))
        while True:
            done = self._do(method, *args)
            left_s = deadline - time.monotonic()
            if done or left_s <= 0:
                return done
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _PAUSE_S[1])

    def _try_put(self, delivery: Delivery, data: bytes) -> bool:
        worker, sent = delivery.worker, "" if delivery.sent is None else delivery.sent
        place = (delivery.sequence, self.max_size, delivery.claimed)
        with self._mutex:
            own = self._own.setdefault(worker, _Own())
            if delivery.sequence < own.deliveries:
                return True
            # Check for room first, so that rows are not sent without effect.
            answer = self._act(worker, own, "room", *place)
            if answer == "done":
                answer = self._act(worker, own, "put", *place, delivery.generated, sent, data)
            if answer == "wait":
                return False
            own.claims -= delivery.claimed
            own.deliveries = delivery.sequence + 1
            return True

    def _try_claim(self, worker: str, num_rows: int) -> bool:
        with self._mutex:
            own = self._own.setdefault(worker, _Own())
            if self._act(worker, own, "claim", num_rows) == "wait":
                return False
            own.claims += num_rows
            return True

    def _report(self, worker: str, generated: int) -> None:
        with self._mutex:
            self._act(worker, self._own.setdefault(worker, _Own()), "report", generated)

    def _version(self) -> int:
        (version,) = self._link.read(lambda pipe: pipe.hget(self._keys[0], "version"))
        return _whole(version)

    def learner_silence_s(self) -> float | None:
        """Return the seconds since the learner's last call; ``None`` without a learner."""
        time_, led = self._link.read(lambda pipe: (pipe.time(), pipe.hget(self._keys[0], "led")))
        led_s = _seconds(led)
        return max(time_[0] + time_[1] / 1e6 - led_s, 0.0) if led_s else None

    # -- the learner's end ------------------------------------------------------------------------

    def _leading(self, delta: int = 0, *, wants: bool = False) -> tuple[int, str, bytes]:
        """Make one call of the learner: returns granted rows, number and bytes of a delivery."""
        was_away = False
        with self._mutex:
            lead = self._lead = self._lead or self._join()

            def run(again: bool) -> list[Any]:
                nonlocal was_away
                was_away |= again
                closed, wanted = int(lead.closed), int(wants)
                arguments = [lead.run, lead.version, self.max_size, closed]
                arguments += [lead.out, delta, lead.got, wanted]
                return self._leads(keys=self._keys, args=arguments)

            lost, granted, foreign, number, data = self._call(run)
            lead.out += granted
            if foreign:
                key = foreign.decode(errors="replace")
                logger.warning(
                    f"{key!r} in the Redis at {self.place} held what neither the learner nor a "
                    "worker writes; it was dropped, and the run goes on"
                )
            if lost and lead.begun:
                logger.warning(f"the Redis of channel {self.name!r} lost its data; what waited too")
                if lead.forgotten:
                    self._call(
                        lambda again: self._link.client.hset(self._keys[-1], mapping=lead.forgotten)
                    )
            returned = lead.begun and (lost or was_away)
            lead.begun = True
        if returned and self.on_return is not None:
            self.on_return()
        return granted, number.decode(), data

    def _join(self) -> _Lead:
        """Join an existing channel as the learner."""
        state, claimed, queued, taken = self._link.read(
            lambda pipe: (
                pipe.hgetall(self._keys[0]),
                pipe.hvals(self._keys[4]),
                pipe.lrange(self._keys[2], 0, -1),
                pipe.hget(self._keys[3], "claims"),
            )
        )
        state = state or {}
        held = sum(min(_whole(n), _MOST_CLAIMS) for n in (*(claimed or ()), *(queued or ()), taken))
        out = held + _whole(state.get(b"granted"))
        run = state.get(b"run", b"").decode(errors="replace") or uuid.uuid4().hex
        return _Lead(run, _whole(state.get(b"version")), out, closed=b"closed" in state)

    def _try_get(self) -> Delivery | None:
        """Return the next delivery; log and skip invalid bytes."""
        with self._mutex:
            if self._lead is not None and self._lead.begun and not self._waits():
                return None
            _, number, data = self._leading(wants=True)
            if not number:
                return None
            lead = self._lead
            lead.got = number
            try:
                delivery = delivery_from_bytes(data)
            except DataError as error:
                logger.warning(f"channel {self.name!r} held something else: {error}")
                return None
            if delivery.sequence < lead.next.get(delivery.worker, 0):
                return None  # a server that returned with old data repeats this delivery
            lead.next[delivery.worker] = delivery.sequence + 1
            lead.out -= delivery.claimed
            return delivery

    def _waits(self) -> bool:
        """Return whether a full call is needed: a delivery waits, or the server lost this run."""
        size, handed, run = self._link.read(
            lambda pipe: (
                pipe.llen(self._keys[1]),
                pipe.hget(self._keys[3], "number"),
                pipe.hget(self._keys[0], "run"),
            )
        )
        unseen = handed is not None and handed != self._lead.got.encode()
        return bool(size) or unseen or run != self._lead.run.encode()

    def _grant(self, num_rows: int) -> None:
        self._leading(num_rows)

    def _set_version(self, version: int) -> None:
        with self._mutex:
            self._lead = self._lead or self._join()
            self._lead.version = version
        self._leading()

    def _workers(self) -> dict[str, WorkerCounts]:
        if self._lead is not None:
            self._leading()  # losses by a restart of the server are noticed here at the latest
        time_, *columns = self._link.read(
            lambda pipe: (pipe.time(), *(pipe.hgetall(key) for key in self._keys[4:9]))
        )
        now_s = time_[0] + time_[1] / 1e6
        columns = [column or {} for column in columns]
        counts = {}
        for name in columns[4]:
            *numbers, seen = (column.get(name) for column in columns)
            seen_s = _seconds(seen)
            # A timestamp in the future would never expire.
            silence_s = now_s - (seen_s if seen_s < now_s + _KEPT_S else 0.0)
            known = WorkerCounts(*map(_whole, numbers), time.time() - silence_s)
            counts[name.decode(errors="replace")] = known
        return counts

    def _forget(self, worker: str) -> WorkerCounts:
        with self._mutex:
            self._lead = self._lead or self._join()
            arguments = [worker]
            data = self._call(lambda again: self._forgets(keys=self._keys, args=arguments))
            self._lead.forgotten[worker] = data
        return _counts(data)

    def _forgotten(self) -> dict[str, WorkerCounts]:
        (found,) = self._link.read(lambda pipe: pipe.hgetall(self._keys[-1]))
        return {
            name.decode(errors="replace"): _counts(data) for name, data in (found or {}).items()
        }

    def _size(self) -> int:
        return self._link.read(lambda pipe: pipe.llen(self._keys[1]))[0] or 0

    def _close(self) -> None:
        """Close the channel; the server deletes it after an hour."""
        with self._mutex:
            self._lead = self._lead or self._join()
            self._lead.closed = True
        self._leading()
        self._link.read(lambda pipe: [pipe.expire(key, _KEPT_S) for key in self._keys])


# The server may contain data of other programs; invalid numbers count as missing.


def _whole(text: Any) -> int:
    try:
        number = int(text)
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 <= number <= _MOST else 0


def _seconds(text: Any) -> float:
    try:
        seconds = float(text)
    except (TypeError, ValueError):
        return 0.0
    return seconds if 0 <= seconds <= _MOST else 0.0


def _counts(data: bytes) -> WorkerCounts:
    try:
        known = json.loads(data)
    except (ValueError, RecursionError):
        known = None
    known = known if isinstance(known, dict) else {}
    numbers = (known.get(name) for name in ("claimed", "generated", "delivered", "sent"))
    return WorkerCounts(*map(_whole, numbers), _seconds(known.get("seen")))
