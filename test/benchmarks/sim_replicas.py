"""A thousand replicas, simulated: the real balancer, pacer and staleness rule.

``python sim_replicas.py [--replicas 1000] [--part balancer|staleness|sync]`` prints the tables of
``docs/source/a_thousand_replicas.rst``. Nothing here needs Ray, a GPU or more than a minute a part.

The engines are simulated; who gets which request (``LoadBalancer`` over what ``LoadBook`` knows),
how many rows may be begun (``Pacer``) and which are trained (``StalenessRule``) is decided by the
code that runs in a real cluster.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.collectors.transport import WorkerCounts
from torchrl_llm.modules.remote.balancer import LoadBalancer, LoadBook, LoadSnapshot

MEAN_TOKENS = 1000
SIGMA = 1.0  # of the logarithm: the longest of a thousand responses is some 13 times the mean
TOKENS_PER_S = 50.0  # of one request alone
CAPACITY = 32  # requests that a replica runs at full speed; more share it


def lengths(rng):
    """Tokens of responses: lognormal with the mean above."""
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    while True:
        yield max(1.0, rng.lognormvariate(mu, SIGMA))


# -- balancer -----------------------------------------------------------------------------------


class Engine:
    """A replica that batches continuously: every request gets the same share of its speed."""

    def __init__(self):
        self.done = 0.0  # tokens that each request has got that was there from the start
        self.now = 0.0
        self.running = []  # (value of done at which it ends, request)
        self.stamp = 0
        self.work = 0.0  # tokens of all requests

    def advance(self, now):
        if self.running:
            share = min(1.0, CAPACITY / len(self.running))
            self.done += (now - self.now) * TOKENS_PER_S * share
            self.work += (now - self.now) * TOKENS_PER_S * share * len(self.running)
        self.now = now

    def next_end(self):
        if not self.running:
            return math.inf
        share = min(1.0, CAPACITY / len(self.running))
        return self.now + max(0.0, self.running[0][0] - self.done) / (TOKENS_PER_S * share)


class BalancerResult(NamedTuple):
    busy: float
    p50_s: float
    p99_s: float
    most: int
    select_us: float


def simulate_balancer(
    strategy,
    sample_size,
    *,
    replicas=1000,
    clients=32,
    load=24,
    seconds=90.0,
    refresh_s=0.5,
    prompts=4000,
    seed=0,
):
    """Clients keep ``load`` requests a replica under way between them; measured after a third.

    Returns:
        Share of the engines' speed that was used, against a perfect spread; response times; the
        most requests that any replica held; microseconds a choice.
    """
    rng = random.Random(seed)
    size = lengths(rng)
    engines = [Engine() for _ in range(replicas)]
    books = [LoadBook() for _ in range(clients)]
    balancers = [
        LoadBalancer(book.loads, strategy, None, sample_size=sample_size, seed=k)
        for k, book in enumerate(books)
    ]
    table = [LoadSnapshot(k, 0) for k in range(replicas)]
    for book in books:
        book.told(table)
    ticket = itertools.count()
    events, latencies, most, before, chosen_s, choices = [], [], 0, None, 0.0, 0

    def send(client, now):
        nonlocal most, chosen_s, choices
        prompt = [rng.randrange(prompts)]
        started = time.perf_counter()
        index = balancers[client].select_actor_index(prompt)
        chosen_s += time.perf_counter() - started
        choices += 1
        books[client].count(index, 1)
        engine = engines[index]
        engine.advance(now)
        length = next(size)
        end = engine.done + length
        heapq.heappush(engine.running, (end, next(ticket), client, now, length))
        most = max(most, len(engine.running)) if now > seconds / 3 else most
        schedule(index)

    def worked(now):
        for engine in engines:
            engine.advance(now)
        return sum(engine.work for engine in engines)

    def schedule(index):
        engine = engines[index]
        engine.stamp += 1
        heapq.heappush(events, (engine.next_end(), next(ticket), "end", index, engine.stamp))

    # The supervisor asks once a second; each client asks it on its own clock.
    heapq.heappush(events, (1.0, next(ticket), "watch", 0, 0))
    for client in range(clients):
        at = refresh_s * client / clients
        heapq.heappush(events, (at, next(ticket), "refresh", client, 0))
        for _ in range(load * replicas // clients):
            heapq.heappush(events, (rng.random(), next(ticket), "send", client, 0))
    while True:
        now, _, kind, index, stamp = heapq.heappop(events)
        if now > seconds / 3 and before is None:
            before = worked(now)
        if now > seconds:
            break
        if kind == "send":
            send(index, now)
        elif kind == "watch":
            table = [LoadSnapshot(k, len(engine.running)) for k, engine in enumerate(engines)]
            heapq.heappush(events, (now + 1.0, next(ticket), "watch", 0, 0))
        elif kind == "refresh":
            books[index].told(table)
            heapq.heappush(events, (now + refresh_s, next(ticket), "refresh", index, 0))
        elif stamp == engines[index].stamp:
            engine = engines[index]
            engine.advance(now)
            _, _, client, begun, length = heapq.heappop(engine.running)
            books[client].count(index, -1)
            if begun > seconds / 3:
                # Seconds for each token, so that long responses do not hide slow ones.
                latencies.append((now - begun) / length * MEAN_TOKENS)
            schedule(index)
            send(client, now)
    ideal = min(load, CAPACITY) * replicas * TOKENS_PER_S * seconds * 2 / 3
    cuts = statistics.quantiles(latencies, n=100)
    return BalancerResult(
        (worked(seconds) - before) / ideal, cuts[49], cuts[98], most, chosen_s / choices * 1e6
    )


# -- staleness ----------------------------------------------------------------------------------


@dataclass
class Worker:
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    version: int = 0
    busy_s: float = 0.0


class StalenessResult(NamedTuple):
    step_s: float
    busy: float
    dropped: float
    mean_age: float
    max_age: int


def simulate_staleness(
    rule, *, workers=1000, slots=4, group=8, batch_rows=32000, train_s=60.0, steps=40, seed=0
):
    """Each replica collects ``slots`` groups at a time; a step trains ``batch_rows`` rows.

    A row has the version at which it was begun (the oldest of its tokens). Weights arrive within
    the step.
    """
    rng = random.Random(seed)
    size = lengths(rng)
    pacer = Pacer(rule, batch_rows)
    crew = {f"w{k}.{s}": Worker() for k in range(workers) for s in range(slots)}
    counts = {name: worker.counts for name, worker in crew.items()}
    idle, events, ready = deque(crew), [], []
    ticket = itertools.count()
    granted, version, now, dropped, used = pacer.grant(), 0, 0.0, 0, 0
    ages: Counter[int] = Counter()
    training, ends, fresh = None, [], []

    def begin():
        nonlocal granted
        while idle and granted >= group:
            name = idle.popleft()
            worker = crew[name]
            granted -= group
            worker.counts.claimed += group
            worker.version = version
            # A group is done with its longest response.
            took = max(next(size) for _ in range(group)) / TOKENS_PER_S
            worker.busy_s += took
            heapq.heappush(events, (now + took, next(ticket), name))

    def start_step():
        """Take the oldest rows, once nobody has older ones and there are enough."""
        nonlocal dropped, used, training, fresh
        if training is not None or (pacer.waits and pacer.stragglers(version, counts)):
            return
        while ready and len(fresh) < batch_rows // group:
            begun = heapq.heappop(ready)
            used += group
            if rule.allows(version - begun):
                fresh.append(begun)
            else:
                dropped += group
                if pacer.waits:
                    pacer.used(group)
        if len(fresh) == batch_rows // group:
            ages.update(version - begun for begun in fresh)
            fresh = []
            training = now + train_s
            heapq.heappush(events, (training, next(ticket), None))

    begin()
    while len(ends) < steps:
        now, _, name = heapq.heappop(events)
        if name is None:
            version += 1
            pacer.used(batch_rows)
            pacer.next_version(version, counts)
            granted += pacer.grant()
            training = None
            ends.append(now)
        else:
            worker = crew[name]
            worker.counts.claimed -= group
            worker.counts.delivered += 1
            heapq.heappush(ready, worker.version)
            idle.append(name)
        begin()
        start_step()
    first = steps // 4
    total = sum(ages.values())
    busy = sum(worker.busy_s for worker in crew.values())
    return StalenessResult(
        (ends[-1] - ends[first]) / (steps - 1 - first),
        min(1.0, busy / (len(crew) * now)),
        dropped / max(1, used),
        sum(age * n for age, n in ages.items()) / total,
        max(ages),
    )


# -- bringing weights over ----------------------------------------------------------------------

LINK = 50e9  # bytes a second of a machine: 400 Gbit/s
DISC = 100e9  # of a shared file system, all readers together
MEMORY = 20e9  # of one copy inside a machine
HOP_S = 50e-6
BUCKET = 256 << 20


class Model(NamedTuple):
    name: str
    num_bytes: float
    gpus: int  # of one replica
    tensors: int


MODELS = [
    Model("0.5B", 0.99e9, 1, 290),
    Model("7B", 15.2e9, 1, 339),
    Model("70B", 141e9, 8, 723),
]


class SyncCost(NamedTuple):
    messages: float
    sent_bytes: float  # by the busiest machine
    total_bytes: float
    seconds: float


def sync_costs(model, replicas=1000, gpus_per_machine=8):
    """Seconds, messages and bytes of one sync by each path."""
    machines = math.ceil(replicas * model.gpus / gpus_per_machine)
    size, buckets = model.num_bytes, math.ceil(model.num_bytes / BUCKET)
    wire, local = size / LINK, size / MEMORY
    hops = math.ceil(math.log2(replicas + 1))
    rounds = math.ceil(math.log2(machines + 1))
    return {
        "one after the other": SyncCost(
            replicas * model.tensors, size * replicas, size * replicas, replicas * wire
        ),
        "flat broadcast (ring)": SyncCost(
            replicas * buckets, size, size * replicas, wire + (replicas + buckets) * HOP_S
        ),
        "tree of buckets": SyncCost(
            replicas * buckets, 2 * size, size * replicas, 2 * wire + (hops + buckets) * HOP_S
        ),
        "object store": SyncCost(
            machines + 2 * replicas, size * rounds, size * machines, rounds * wire + local
        ),
        "files": SyncCost(
            2 * replicas, size, size * (machines + 1), wire + machines * size / DISC + local
        ),
    }


# -- tables -------------------------------------------------------------------------------------


def print_balancer(replicas):
    print(f"{'strategy':34} {'speed':>6} {'p50 s':>6} {'p99 s':>6} {'most':>5} {'us':>6}")
    rows = [
        ("one drawn at random", "requests", 1),
        ("round-robin", "round-robin", None),
        ("requests, all compared", "requests", None),
        ("requests, two drawn", "requests", 2),
        ("prefix-aware, then requests", ("prefix-aware", "requests"), None),
    ]
    for name, strategy, sample in rows:
        found = simulate_balancer(strategy, sample, replicas=replicas)
        print(
            f"{name:34} {found.busy:6.3f} {found.p50_s:6.1f} {found.p99_s:6.1f} {found.most:5d} "
            f"{found.select_us:6.0f}"
        )


def print_staleness(replicas):
    print(f"{'rule':16} {'step s':>7} {'busy':>6} {'dropped':>8} {'mean age':>9} {'max age':>8}")
    for on_stale in ("wait", "drop"):
        for age in (0, 1, 2, 4):
            if (on_stale, age) == ("drop", 0):
                continue
            rule = StalenessRule(max_policy_age=age, on_stale=on_stale)
            found = simulate_staleness(rule, workers=replicas, batch_rows=32 * replicas)
            print(
                f"{on_stale + ' ' + str(age):16} {found.step_s:7.1f} {found.busy:6.2f} "
                f"{found.dropped:8.3f} {found.mean_age:9.2f} {found.max_age:8d}"
            )


def print_sync(replicas):
    print(f"{'model':6} {'path':24} {'messages':>10} {'busiest GB':>11} {'all TB':>8} {'s':>8}")
    for model in MODELS:
        for path, cost in sync_costs(model, replicas).items():
            print(
                f"{model.name:6} {path:24} {cost.messages:10.0f} {cost.sent_bytes / 1e9:11.1f} "
                f"{cost.total_bytes / 1e12:8.2f} {cost.seconds:8.2f}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--part", choices=["balancer", "staleness", "sync"])
    given = parser.parse_args()
    parts = {"sync": print_sync, "staleness": print_staleness, "balancer": print_balancer}
    for name, part in parts.items():
        if given.part in (None, name):
            started = time.perf_counter()
            print(f"\n{name}, {given.replicas} replicas")
            part(given.replicas)
            print(f"({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
