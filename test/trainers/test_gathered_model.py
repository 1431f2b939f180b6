"""A model in shards that each rank runs as often as it likes: two real processes with gloo."""

import pytest
import torch
from fork_server import run_both_ranks
from trainers.gathered_helper import rank_uses


@pytest.mark.parametrize("gathers", ["layer", "model"])
def test_ranks_sample_and_score_at_their_own_pace_with_the_weights_of_all(gathers, tmp_path):
    run_both_ranks(rank_uses, tmp_path, gathers, timeout=120)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["at first"] == [False, False]
        assert found["results"]
        assert found["then"] == [gathers == "model", True]
        assert found["where ranks meet"] == [False, False]
        if rank == 1:
            assert found["whole"] == ([True, True], True)
        assert found["after"] == ([False, False], True, True)
        assert found["cut"] == (rank == 0)
        assert found["again"]
