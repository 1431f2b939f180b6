"""Objects that come back, without Ray: what they are given before they serve, and when it ends."""

from __future__ import annotations

import threading

import pytest

from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.modules.remote import revived_actor
from torchrl_llm.modules.remote.revived_actor import RevivedActor, Sent, SentWeights


class Remote:
    """An actor that remembers what it was given."""

    def __init__(self):
        self.given, self.ended = [], False

    def shutdown(self):
        self.ended = True


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(revived_actor, "_BACKOFF_S", 0.0)


class Revived:
    """One of them, with what it was built of."""

    def __init__(self, max_restarts=1, fails=()):
        self.built, self.deaths, self.fails = [], 0, list(fails)
        self.weights, self.meanwhile = SentWeights(), []
        self.actor = RevivedActor(
            self._build,
            what="it",
            bring=self._bring,
            weights=self.weights,
            max_restarts=max_restarts,
            on_dead=self._died,
        )

    def _build(self):
        self.built.append(Remote())
        if self.fails and (error := self.fails.pop(0)) is not None:
            raise error
        return self.built[-1]

    def _bring(self, remote, sent):
        remote.given.append(sent.version)
        if self.meanwhile:
            self.send(*self.meanwhile.pop())

    def _died(self):
        self.deaths += 1

    def send(self, version, kind="full", source="somewhere"):
        self.weights.add(Sent(source, version, kind), timeout_s=1.0)

    def die(self):
        assert self.actor.lose(WorkerError("it died"))
        self.actor.revive()


def test_what_was_sent_before_and_while_it_is_built_is_there_when_it_serves():
    it = Revived()
    it.actor.start()
    it.send(1)
    it.send(2, "delta")
    it.meanwhile = [(5, "delta"), (4,), (3, "delta")]  # a delta, all of them anew, and a delta
    it.die()
    assert it.built[0].ended
    assert it.built[1].given == [1, 2, 4, 5]
    assert (it.actor.state, it.actor.restarts, it.deaths) == ("serving", 1, 1)
    assert it.actor.remote is it.built[1]


def test_a_version_without_weights_is_told_after_the_weights():
    it = Revived()
    it.actor.start()
    for version, kind in enumerate(["full", "number", "adapter", "adapter", "number"], 1):
        it.send(version, kind)
    it.die()
    assert it.built[1].given == [1, 4, 5]


def test_it_waits_for_weights_that_can_be_opened_only_once():
    it = Revived()
    it.actor.start()
    it.send(1, source=None)
    it.die()
    assert (it.actor.state, it.built[1].given, it.actor.is_up) == ("waiting", [], True)
    it.actor.serve()
    assert it.actor.state == "serving"


def test_it_is_given_up_with_the_last_reason_and_counts_anew_after_success():
    it = Revived(max_restarts=2, fails=[None, ValueError("once"), None, ValueError("twice")])
    it.actor.start()
    it.die()
    assert (it.actor.state, it.actor.failures) == ("serving", 2)
    it.actor.failures = 0
    it.fails.append(ValueError("thrice"))
    it.die()
    assert it.actor.state == "failed"
    for ask in (it.actor.check, lambda: it.actor.remote):
        with pytest.raises(ValueError, match="thrice"):
            ask()


def test_an_error_of_its_own_is_its_end():
    it = Revived()
    it.actor.start()
    it.actor.fail(ValueError("the policy is broken"))
    assert (len(it.built), it.deaths, it.built[0].ended) == (1, 1, True)
    with pytest.raises(ValueError, match="the policy is broken"):
        it.actor.check()


def test_news_of_an_earlier_life_is_no_news():
    it = Revived()
    it.actor.start()
    first = it.actor.current.number
    it.die()
    assert not it.actor.lose(WorkerError("late"), first)
    assert it.actor.is_up


def test_while_it_is_built_it_cannot_be_asked_and_after_its_end_it_is_not_built():
    it = Revived()
    it.actor.start()
    assert it.actor.lose(WorkerError("it died"))
    with pytest.raises(WorkerError, match="it is being restarted"):
        _ = it.actor.remote
    it.weights.lock.acquire()  # so that it cannot begin to serve
    thread = threading.Thread(target=it.actor.revive)
    thread.start()
    it.actor.end()
    it.weights.lock.release()
    thread.join(10)
    assert it.built[-1].ended
    with pytest.raises(ConfigError, match="it was shut down"):
        _ = it.actor.remote
    it.actor.end()
    assert it.deaths == 1
