"""A server that fails: what is asked again, what becomes an error, and that nothing hangs."""

from __future__ import annotations

import pickle
import time
from functools import partial

import pytest
import torch
from modules.backends.openai_server import VOCAB, ask, connect, drip, hang_up, refuse, sleep
from waiting import in_threads

from torchrl_llm.data import FinishReason
from torchrl_llm.errors import BackendError, WorkerError
from torchrl_llm.modules import FakeBackend, SamplingParams


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("torchrl_llm._http._FIRST_PAUSE_S", 0.02)


def test_a_busy_server_is_asked_again_for_the_very_same_response(serve):
    fake, url = serve()
    backend = connect(url)
    torch.manual_seed(3)
    [wanted] = ask(backend)
    fake.faults.extend(refuse(status) for status in (429, 502, 503))
    torch.manual_seed(3)
    [got] = ask(backend)
    assert backend.num_retries == 3
    assert torch.equal(got.token_ids, wanted.token_ids)
    first, *again = (body for _, body in fake.requests[-4:])
    assert again == [first] * 3


def test_the_server_says_when_to_come_back(serve):
    fake, url = serve()
    backend = connect(url)
    fake.faults.append(refuse(429, headers=[("Retry-After", "1")]))
    start = time.monotonic()
    ask(backend)
    assert 1.0 <= time.monotonic() - start < 3.0


def test_a_broken_connection_is_tried_again_with_the_same_seed(serve):
    fake, url = serve()
    backend = connect(url)
    fake.faults.append(hang_up)
    [found] = ask(backend)
    assert len(found.token_ids) == 4
    assert backend.num_retries == 1
    bodies = [body for path, body in fake.requests if path == "/v1/completions"]
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again(serve):
    fake, url = serve()
    backend = connect(url)

    def close_after(handler):
        handler.send(*fake.answer(*fake.requests[-1]))
        handler.close_connection = True
        return True

    fake.faults.append(close_after)
    ask(backend)
    time.sleep(0.1)
    ask(backend)
    assert backend.num_retries == 0


@pytest.mark.parametrize("fault", [sleep(20), drip(20)], ids=["silent", "dripping"])
def test_an_answer_that_takes_too_long_is_an_error_and_never_asked_for_again(serve, fault):
    fake, url = serve()
    backend = connect(url, timeout_s=1.5)
    fake.faults.append(fault)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"no answer within 1.5 s"):
        ask(backend)
    assert time.monotonic() - start < 10
    assert backend.num_retries == 0


@pytest.mark.parametrize(
    "fault",
    [refuse(500, data='{"error": {"message": "engine died"}}'), hang_up],
    ids=["500", "cut"],
)
def test_a_request_that_failed_for_good_is_an_error_or_an_aborted_row(serve, fault):
    fake, url = serve()
    backend = connect(url, max_retries=1)
    fake.faults.extend([fault] * 2)
    with pytest.raises(WorkerError, match=r"engine died|attempts"):
        ask(backend)
    fake.faults.clear()
    lenient = connect(url, max_retries=1, on_failure="abort", concurrency=1)
    fake.faults.extend([fault] * (1 if backend.num_retries == 0 else 2))
    first, second = ask(lenient, num_samples=2)
    assert first.finish_reason == FinishReason.ABORT
    assert first.token_ids.shape == first.log_probs.shape == (0,)
    assert len(second.token_ids) == 4


def test_a_refused_request_is_an_error_with_the_servers_words(serve):
    fake, url = serve()
    backend = connect(url, on_failure="abort")
    fake.faults.append(refuse(400, data='{"error": {"message": "top_k is wrong"}}'))
    with pytest.raises(BackendError, match=r"400.*top_k is wrong"):
        ask(backend)


def test_the_first_error_ends_the_other_requests_at_once(serve):
    fake, url = serve()
    backend = connect(url)
    fake.faults.append(refuse(400))
    fake.faults.extend([sleep(5)] * 7)
    start = time.monotonic()
    with pytest.raises(BackendError, match="400"):
        ask(backend, num_samples=8)
    assert time.monotonic() - start < 2
    fake.faults.clear()
    assert len(ask(backend, num_samples=2)) == 2


# -- many at once ---------------------------------------------------------------------------------


def test_requests_from_many_threads_return_to_their_own_caller_over_few_connections(serve):
    fake, url = serve(work_s=0.005)
    backend = connect(url, concurrency=16)
    params = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
    reference = FakeBackend(vocab_size=VOCAB, eos_token_ids=())
    wanted = {
        token: reference.generate([torch.tensor([token])], params)[0][0].token_ids.tolist()
        for token in range(VOCAB)
    }

    def work(number):
        for token in ((number * 7 + k) % VOCAB for k in range(8)):
            [[found]] = backend.generate([torch.tensor([token])], params)
            assert found.token_ids.tolist() == wanted[token]

    assert in_threads(*(partial(work, number) for number in range(64))) == [None] * 64
    assert sum(path == "/v1/completions" for path, _ in fake.requests) == 512
    assert 1 < fake.most_busy <= 16
    assert fake.connections <= 40


def test_a_pickled_backend_goes_on_elsewhere(serve):
    _, url = serve()
    backend = connect(url)
    ask(backend)
    twin = pickle.loads(pickle.dumps(backend))
    assert len(ask(twin)[0].token_ids) == 4
    backend.close()
    assert len(ask(backend)[0].token_ids) == 4
