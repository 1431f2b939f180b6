"""IdCounter: ids that no two workers share."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest

from torchrl_llm.envs import ids as ids_module
from torchrl_llm.envs.ids import IdCounter, set_process_number
from torchrl_llm.errors import ConfigError


def _take_two(pipe):
    pipe.send(IdCounter("process test").take(2).tolist())


def test_ids_count_up_within_the_range_of_their_worker():
    counter = IdCounter("t", worker_id=3)
    assert counter.take(2).tolist() == [3 * 2**35, 3 * 2**35 + 1]
    assert counter.next_id() == 3 * 2**35 + 2
    assert counter.take(0).tolist() == []


def test_counters_of_one_process_do_not_overlap():
    ids = [i for _ in range(4) for i in IdCounter("overlap test").take(3).tolist()]
    assert len(set(ids)) == 12
    assert ids[:3] == [0, 1, 2]


def test_counters_of_child_processes_do_not_overlap():
    context = multiprocessing.get_context("fork")
    results = []
    for _ in range(2):
        receiver, sender = context.Pipe(False)
        child = context.Process(target=_take_two, args=(sender,))
        child.start()
        results.append(receiver.recv())
        child.join()
    ids = IdCounter("process test").take(2).tolist() + results[0] + results[1]
    assert len(set(ids)) == 6


def test_a_copy_counts_under_a_number_of_its_own_unless_one_was_given():
    derived = IdCounter("copy test")
    ids = set(derived.take(5).tolist())
    for other in (copy.deepcopy(derived), pickle.loads(pickle.dumps(derived))):
        assert not ids & set(other.take(5).tolist())
    given = IdCounter("copy test", worker_id=9)
    assert pickle.loads(pickle.dumps(given)).worker_id == 9


def test_a_saved_counter_continues():
    counter = IdCounter("resume test")
    counter.take(5)
    state = counter.state_dict()
    expected = counter.take(2).tolist()
    other = IdCounter("resume test")
    other.load_state_dict(state)
    assert other.take(2).tolist() == expected


@pytest.mark.parametrize("worker_id", [-1, 2**28])
def test_a_worker_id_out_of_range_is_refused(worker_id):
    with pytest.raises(ConfigError, match="worker_id"):
        IdCounter("t", worker_id=worker_id)


def test_processes_that_look_alike_are_told_apart_by_their_number(monkeypatch):
    monkeypatch.setattr(ids_module, "_numbers", [])
    plain = IdCounter("told").next_id()
    set_process_number(5)
    numbered = IdCounter("told")
    own = numbered.next_id()
    assert own >> 47 == 5 != plain >> 47
    set_process_number(2**16 - 1)
    assert numbered.next_id() == own + 1
    assert IdCounter("told").next_id() < 2**63
    set_process_number(6, first=100)
    assert IdCounter("told").next_id() % 2**35 == 100
    assert IdCounter("told", worker_id=3).next_id() == 3 * 2**35
    for wrong in ({"number": 2**16}, {"number": 6, "first": 2**34}):
        with pytest.raises(ConfigError, match=r"must be in \[0, "):
            set_process_number(**wrong)
