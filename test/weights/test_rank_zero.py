"""Several ranks train one model in shards; the first sends all of it."""

from __future__ import annotations

import copy

import pytest
from weights.processes import Child, ShardedRank

from torchrl_llm.weights import engine_weights


@pytest.mark.slow
def test_shards_are_gathered_by_all_ranks_and_sent_by_the_first(tiny_model, tmp_path):
    ranks = [
        Child(ShardedRank, rank, tmp_path / "meeting", copy.deepcopy(tiny_model))
        for rank in range(2)
    ]
    try:
        for _ in range(2):
            for rank in ranks:
                rank.send("push")
            assert [rank.result(120) for rank in ranks] == [True, False]
        expected = engine_weights(tiny_model)
        assert ranks[0].call("differs_from", expected) == []
        assert "model.embed_tokens.weight" in ranks[1].call("differs_from", expected)
    finally:
        for rank in ranks:
            rank.kill()
