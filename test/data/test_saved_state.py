"""States by the names of attributes: whatever containers they have come back, with their rows."""

from __future__ import annotations

from collections import Counter, deque

import torch
from tensordict import TensorDict

from torchrl_llm.data.safe_state import state_from_plain, state_to_plain
from torchrl_llm.data.saved_state import SavedState


class Part(SavedState):
    saved = ("counts", "_names", "step")

    def __init__(self):
        self.counts: Counter[tuple[str, str]] = Counter()
        self._names: deque[str] = deque()
        self.step: TensorDict | None = None


class Whole(SavedState):
    saved = ("part", "number")
    saved_rows = ("open", "finished")

    def __init__(self):
        self.part, self.number = Part(), 0
        self.open: dict[str, deque] = {"a": deque()}
        self.finished: list[tuple[int, list[TensorDict]]] = []


def row(length):
    return TensorDict(tokens=TensorDict(full=torch.arange(length)))


def filled():
    whole = Whole()
    whole.number = 3
    whole.part.counts["x", "y"] += 2
    whole.part._names.append("n")
    whole.part.step = TensorDict(x=torch.ones(2, 3), batch_size=[2])
    whole.open["a"].append(row(2))
    whole.finished.append((5, [row(1), row(4)]))
    return whole


def test_everything_comes_back_in_its_containers_also_from_a_file():
    state = filled().state_dict()
    assert set(state) == {"part", "number", "open", "finished", "packed"}
    assert set(state["part"]) == {"counts", "names", "step"}
    plain = state_to_plain(state)
    for taken in (state, state_from_plain(plain.plain, plain.tensors)):
        other = Whole()
        other.load_state_dict(taken)
        assert other.number == 3
        assert isinstance(other.part.counts, Counter)
        assert other.part.counts == {("x", "y"): 2}
        assert other.part._names == deque(["n"])
        assert other.part.step.batch_size == (2,)
        assert isinstance(other.open["a"], deque)
        assert other.open["a"][0]["tokens", "full"].tolist() == [0, 1]
        [(number, rows)] = other.finished
        assert (number, [len(each["tokens", "full"]) for each in rows]) == (5, [1, 4])


def test_a_state_does_not_change_with_what_it_was_taken_of():
    whole = filled()
    state = whole.state_dict()
    whole.part.counts["x", "y"] += 1
    whole.part.step["y"] = torch.zeros(2)
    whole.open["a"].clear()
    other = Whole()
    other.load_state_dict(state)
    other.part.step["z"] = torch.zeros(2)
    assert set(state["part"]["step"].keys()) == {"x"}
    assert other.part.counts["x", "y"] == 2
    assert len(other.open["a"]) == 1


def test_without_rows_nothing_is_packed():
    assert "packed" not in Whole().state_dict()
