"""Which replica gets the next request, by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.modules.remote import LoadBalancer, LoadSnapshot
from torchrl_llm.modules.remote.balancer import LoadBook


def loads(*requests, cache=None, dead=()):
    cache = cache or [None] * len(requests)
    return [
        LoadSnapshot(k, n, c, k not in dead)
        for k, (n, c) in enumerate(zip(requests, cache, strict=True))
    ]


def choose(given, strategy, count=1, **options):
    settings = {k: options.pop(k) for k in ("prefix_length", "overload_threshold") if k in options}
    balancer = LoadBalancer(lambda: given, strategy, **settings)
    return [balancer.select_actor_index(**options) for _ in range(count)]


def test_the_fewest_requests_win_and_of_equals_the_first():
    assert choose(loads(3, 1, 1, 2), "requests") == [1]
    assert choose(loads(3, 1, 1, 2), "requests", exclude={1}) == [2]
    assert choose(loads(3, 1, 0, 2, dead={2}), "requests") == [1]


def test_a_replica_is_chosen_by_torchrls_name():
    balancer = LoadBalancer(lambda: loads(3, 1, 1, 2), "requests")
    assert balancer.select_actor("a prompt", request_context={"turn": 1}) == 1


def test_who_is_excluded_is_taken_before_nobody_is():
    assert choose(loads(3, 1, dead={0}), "requests", exclude={1}) == [1]
    with pytest.raises(WorkerError, match="none of 2 replicas serves"):
        choose(loads(0, 0, dead={0, 1}), "requests")


def test_the_least_used_cache_wins_where_it_is_known():
    assert choose(loads(0, 5, 1, cache=[0.9, 0.2, 0.2]), "kv-cache") == [2]
    assert choose(loads(0, 5, 1, cache=[None, 0.7, 0.8]), "kv-cache") == [1]
    # Nobody tells: the next strategy, at last that of requests.
    assert choose(loads(2, 1, 3), ["kv-cache", "round-robin"], count=2) == [0, 1]
    assert choose(loads(2, 1, 3), "kv-cache") == [1]


def test_round_robin_goes_round_and_leaves_out_who_does_not_serve():
    assert choose(loads(9, 0, 0, 0, dead={2}), "round-robin", count=5) == [0, 1, 3, 0, 1]


@pytest.mark.parametrize("kind", [str, list, torch.tensor])
def test_prompts_that_begin_alike_go_to_one_replica(kind):
    def prompt(start, end):
        ids = [start] * 8 + [end]
        return "".join(chr(97 + i % 26) for i in ids) if kind is str else kind(ids)

    given = loads(*[0] * 16)
    homes = [choose(given, "prefix-aware", prompt=prompt(k, 0))[0] for k in range(20)]
    assert homes == [choose(given, "prefix-aware", prompt=prompt(k, 9))[0] for k in range(20)]
    assert len(set(homes)) > 5


def test_a_replica_with_too_much_to_do_passes_its_prompts_on():
    prompt = [5, 6, 7]
    [home] = choose(loads(*[4] * 8), ["prefix-aware", "requests"], prompt=prompt)

    def with_home(requests):
        rest = [4] * 8
        rest[home] = requests
        rest[(home + 1) % 8] = 3
        return loads(*rest)

    # The mean is then (5 + 3 + 6 * 4) / 8 = 4 and the limit 1.5 * 4 = 6.
    assert choose(with_home(5), ["prefix-aware", "requests"], prompt=prompt) == [home]
    # (7 + 27) / 8 = 4.25, limit 6.375.
    assert choose(with_home(7), ["prefix-aware", "requests"], prompt=prompt) == [(home + 1) % 8]
    assert choose(
        with_home(7), ["prefix-aware", "requests"], prompt=prompt, overload_threshold=2.0
    ) == [home]


def test_the_prompts_of_a_dead_replica_go_to_its_neighbour_and_come_back():
    prompt = [5, 6, 7]
    [home] = choose(loads(*[0] * 8), "prefix-aware", prompt=prompt)
    assert choose(loads(*[0] * 8, dead={home}), "prefix-aware", prompt=prompt) == [(home + 1) % 8]
    assert choose(loads(*[0] * 8), "prefix-aware", prompt=prompt) == [home]


def test_without_a_prompt_the_prefix_says_nothing():
    assert choose(loads(2, 1), ["prefix-aware", "requests"]) == [1]
    assert choose(loads(2, 1), ["prefix-aware", "requests"], prompt=[]) == [1]


def test_two_drawn_at_random_spread_what_all_see_alike():
    # A hundred clients that know the same loads: the least loaded replica would get them all.
    given = loads(*[5] * 50, *[4] * 50)
    drawn = LoadBalancer(lambda: given, "requests", sample_size=2, seed=1)
    counts = Counter(drawn.select_actor_index() for _ in range(1000))
    assert max(counts.values()) < 40
    assert sum(counts[k] for k in range(50, 100)) > 700
    assert drawn.get_stats()["strategies"] == {"requests": 1000}


def test_a_book_counts_its_own_requests_over_news_that_are_older():
    book = LoadBook()
    book.told(loads(0, 7))
    book.count(0, 3)
    book.count(1, 2)
    assert [load.requests for load in book.loads()] == [3, 9]
    # News from before the three were sent, and others' requests on replica 1 are done.
    book.told(loads(1, 2))
    assert [load.requests for load in book.loads()] == [3, 2]
    book.count(0, -3)
    book.lost(1)
    assert book.loads() == loads(0, 2, dead={1})


@pytest.mark.parametrize("strategy", ["hope", ["requests", "hope"], []], ids=str)
def test_a_strategy_that_there_is_not_is_refused(strategy):
    with pytest.raises(ConfigError, match="strategy must be"):
        LoadBalancer(lambda: [], strategy)
