import pytest
import torch

from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.envs.transforms import DataLoadingPrimer
from torchrl_llm.errors import CheckpointError
from torchrl_llm.trainers.rank_state import rank_state

ROWS = pack_rows(ragged_rows({"ids": [torch.tensor([1])]}))
NO_ROWS = pack_rows([])


def state(worker, count, *, epoch=0, index=0, known=None, version=0, waiting=NO_ROWS, rng=0):
    """What a rank saves, with one of each thing that matters."""
    return {
        "rng": rng,
        "parts": {
            "collector": {
                "rollout": {
                    "carrier": None,
                    "env": [
                        {
                            "feed": {
                                "loader": {"seed": 0, "epoch": epoch, "index": index},
                                "element": 0,
                                "offset": 0,
                            },
                            "groups": {"worker_id": worker, "count": count},
                            "repeats_left": 0,
                        },
                    ],
                    "assembly": {"open": [0] * 4, "rows": waiting},
                },
                "versions": {"parts": [version]},
            },
            "buffer": {
                "rows": ROWS,
                "transforms": {"spo": {"tracker": {"known": known or {}, "shift": {"rows": ROWS}}}},
            },
            "curriculum": {"epoch": epoch, "solved": torch.tensor([count > 1])},
            "source": {"ledger": {"carried": 0}},
        },
    }


def env_of(state):
    return state["parts"]["collector"]["rollout"]["env"][0]


def test_as_many_ranks_take_up_each_its_own():
    saved = [state(0, 3), state(1, 4)]
    for rank in range(2):
        mine, retired, notice = rank_state(saved, ["x"], state(9, 9), rank=rank, world=2)
        assert mine is saved[rank]
        assert (retired, notice) == (["x"], None)


def test_with_more_ranks_all_go_on_from_the_same_place_and_the_new_ones_count_afresh():
    saved = [state(0, 30, epoch=1, index=4, version=7, known={"a": (1, 2)}, rng=5)]
    for rank, counter in enumerate([(0, 30), (1, 0), (2, 0)]):
        fresh = state(rank, 0, index=rank, rng=100 + rank)
        mine, retired, notice = rank_state(saved, [], fresh, rank=rank, world=3)
        assert env_of(mine)["feed"]["loader"] == {"seed": 0, "epoch": 1, "index": 4}
        assert tuple(env_of(mine)["groups"].values()) == counter
        assert mine["rng"] == (100 + rank if rank else 5)
        assert mine["parts"]["collector"]["versions"] == {"parts": [7]}
        tracker = mine["parts"]["buffer"]["transforms"]["spo"]["tracker"]
        assert tracker["known"] == {"a": (1, 2)}
        assert mine["parts"]["curriculum"]["solved"].tolist() == [True]
        assert retired == []
        assert "is of 1 ranks, and 3 resume" in notice
        assert "unequally" not in notice


def test_ranks_that_are_no_more_keep_their_counters_for_when_they_come_again():
    saved = [
        state(0, 8, index=6, known={"a": 1, "b": 2}),
        state(1, 9, index=6, known={"a": 3, "c": 4}),
    ]
    mine, retired, _ = rank_state(saved, [], state(0, 0), rank=0, world=1)
    assert tuple(env_of(mine)["groups"].values()) == (0, 8)
    known = mine["parts"]["buffer"]["transforms"]["spo"]["tracker"]["known"]
    assert known == {"a": 1, "b": 2, "c": 4}, "what its own rank knows comes first"
    assert retired == saved[1:]
    again, retired, _ = rank_state([mine], retired, state(1, 0), rank=1, world=2)
    assert tuple(env_of(again)["groups"].values()) == (1, 9)
    assert env_of(again)["feed"]["loader"]["index"] == 6
    assert retired == []


def test_the_farthest_place_counts_and_it_is_told():
    saved = [state(0, 8, epoch=1, index=2), state(1, 9, epoch=0, index=9)]
    mine, _, notice = rank_state(saved, [], state(0, 0), rank=0, world=1)
    assert env_of(mine)["feed"]["loader"] == {"seed": 0, "epoch": 1, "index": 2}
    assert "unequally many prompts" in notice


def test_what_was_begun_cannot_be_handed_over():
    for begun, said in (
        (state(1, 1, waiting=ROWS), "rows in collector.rollout.assembly.rows"),
        (state(1, 1), "carried is 3"),
        (state(1, 1), "repeats_left is 2"),
    ):
        if "carried" in said:
            begun["parts"]["source"]["ledger"]["carried"] = 3
        if "repeats" in said:
            env_of(begun)["repeats_left"] = 2
        with pytest.raises(CheckpointError, match=rf"rank 1 of 2 .*{said}.*resume with 2"):
            rank_state([state(0, 1), begun], [], state(0, 0), rank=0, world=1)
        assert rank_state([state(0, 1), begun], [], state(0, 0), rank=1, world=2)[0] is begun


def test_where_the_first_rank_collects_for_all_it_goes_on_with_what_it_has_begun():
    first, other = state(0, 1, waiting=ROWS), {"parts": {}, "rng": 1}
    for saved, world in (([first], 2), ([first, other], 1), ([first, other], 3)):
        for rank in range(world):
            fresh = state(9, 9) if rank == 0 else {"parts": {}, "rng": 10 + rank}
            mine, *_ = rank_state(saved, [], fresh, rank=rank, world=world, is_shared=False)
            if rank == 0:
                assert mine == first
            else:
                assert mine == {"parts": {}, "rng": 1 if rank < len(saved) else 10 + rank}


def test_a_loader_may_be_a_part_itself():
    def with_loader(epoch, index):
        return {"parts": {"rows": {"seed": 1, "epoch": epoch, "index": index}}, "rng": 0}

    saved = [with_loader(0, 6), with_loader(0, 6)]
    for world in (1, 3):
        for rank in range(world):
            mine, _, notice = rank_state(saved, [], with_loader(0, 0), rank=rank, world=world)
            assert mine["parts"]["rows"] == {"seed": 1, "epoch": 0, "index": 6}
            assert "unequally" not in notice


@pytest.mark.parametrize("num_rows", [5, 6, 7])
@pytest.mark.parametrize("drawn", range(1, 12))
def test_a_place_in_the_data_means_the_same_for_any_number_of_ranks(num_rows, drawn):
    """Each prompt once an epoch, whoever goes on from wherever the two ranks have come."""

    def primer(part):
        loader = RowLoader([{"query": str(i)} for i in range(num_rows)], seed=3)
        loader.part = part
        return DataLoadingPrimer(dataloader=loader)

    alone = primer((0, 1))
    expected = [alone._feed.take()["query"] for _ in range(2 * drawn + 6)]
    ranks = [primer((rank, 2)) for rank in range(2)]
    taken = [each._feed.take()["query"] for _ in range(drawn) for each in ranks]
    assert taken == expected[: 2 * drawn]
    places = [each._feed.state_dict() for each in ranks]
    for world in (1, 2, 3):
        for place in places:
            later = [primer((rank, world)) for rank in range(world)]
            for each in later:
                each._feed.load_state_dict(place)
            rest = [each._feed.take()["query"] for _ in range(6 // world) for each in later]
            assert rest == expected[2 * drawn :]
