"""Two real processes with gloo: every average is over the rows of both."""

from __future__ import annotations

import pytest
from fork_server import fork_server
from objectives.rows_helper import make_rows
from trainers.ranks_helper import SETTINGS, make_loss, rank_main, rows


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    context = fork_server()
    results, folder = context.Queue(), tmp_path_factory.mktemp("ranks")
    processes = [context.Process(target=rank_main, args=(r, folder, results)) for r in (0, 1)]
    for process in processes:
        process.start()
    try:
        answers = dict(results.get(timeout=60) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    return answers


@pytest.mark.parametrize("aggregation", SETTINGS)
def test_gradients_and_metrics_of_two_ranks_are_those_of_one(two_ranks, aggregation):
    loss = make_loss(aggregation)
    output = loss(make_rows(*rows()))
    output.total_loss().backward()
    for rank in (0, 1):
        normalizer, gradient, metrics = two_ranks[rank][aggregation]
        assert normalizer == loss.normalizer(make_rows(*rows()))
        assert gradient == pytest.approx(loss.actor_network.table.grad.tolist(), abs=1e-12)
        expected = {key: value.item() for key, value in output.metrics().items()}
        assert metrics == pytest.approx(expected, abs=1e-6)
