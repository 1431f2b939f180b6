"""The HTTP client: what it keeps, what it never takes from its surroundings, and how it ends."""

import gzip
import multiprocessing
import pickle
import threading
import tracemalloc

import pytest
from modules.backends.openai_server import FakeServer

from torchrl_llm._http import Cancellation, HTTPClient
from torchrl_llm.errors import BackendError, ConfigError, WorkerError

PATH = "/v1/models"


@pytest.fixture(scope="module")
def running():
    fake = FakeServer()
    with fake.running() as url:
        yield fake, url


@pytest.fixture
def server(running):
    fake, _ = running
    fake.faults.clear()
    return running


def test_cancelling_closes_the_connection_so_that_the_server_drops_the_work(server):
    fake, url = server
    arrived, dropped = threading.Event(), threading.Event()

    def wait_for_the_end(handler):
        arrived.set()
        handler.connection.settimeout(10)
        if handler.rfile.read(1) == b"":
            dropped.set()
        handler.close_connection = True
        return True

    fake.faults.append(wait_for_the_end)
    client, cancellation, failures = HTTPClient(url), Cancellation(), []

    def ask():
        try:
            client.call("GET", PATH, timeout_s=30, cancellation=cancellation)
        except BackendError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert arrived.wait(10)
    cancellation.cancel()
    thread.join(5)
    assert dropped.wait(5)
    assert "was cancelled" in str(failures[0])
    with pytest.raises(BackendError, match="was cancelled"):
        client.call("GET", PATH, timeout_s=5, cancellation=cancellation)
    assert client.call("GET", PATH, timeout_s=5).status == 200


def test_one_connection_serves_many_requests_and_close_ends_it(server):
    fake, url = server
    client, before = HTTPClient(url), fake.connections
    for _ in range(5):
        client.call("GET", PATH, timeout_s=5)
    assert fake.connections == before + 1
    client.close()
    client.call("GET", PATH, timeout_s=5)
    assert fake.connections == before + 2


def test_proxies_of_the_environment_and_cookies_are_not_used(server, monkeypatch):
    fake, url = server
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    cookies = []

    def set_cookie(handler):
        cookies.append(handler.headers.get("Cookie"))
        handler.send(200, "{}", [("Set-Cookie", "a=b")])
        return True

    fake.faults.extend([set_cookie] * 2)
    client = HTTPClient(url)
    for _ in range(2):
        client.call("GET", PATH, timeout_s=5)
    assert cookies == [None, None]


def test_a_redirection_is_an_error_and_its_target_is_not_asked(server):
    fake, url = server

    def redirect(handler):
        handler.send(307, "", [("Location", f"{url}/elsewhere")])
        return True

    fake.faults.append(redirect)
    with pytest.raises(ConfigError, match="307, a redirection; give the address"):
        HTTPClient(url).call("GET", PATH, timeout_s=5)
    assert not any(path == "/elsewhere" for path, _ in fake.requests)


@pytest.mark.parametrize("key", ["s3cret\n", "a\r\nX-Other: 1", " s3cret", "sch\u00fcssel"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="api_key must be printable") as caught:
        HTTPClient("http://x", api_key=key)
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize("url", ["x:1", "ftp://x", "http://", "http://x:port", "http://a:b@x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="the address of a server looks like"):
        HTTPClient(url)


def _ask(client, found):
    found.put(client.call("GET", PATH, timeout_s=5).status)


def test_a_client_works_in_a_forked_process_and_as_a_pickled_copy(server):
    _, url = server
    client = HTTPClient(url)
    client.call("GET", PATH, timeout_s=5)
    fork = multiprocessing.get_context("fork")
    found = fork.Queue()
    child = fork.Process(target=_ask, args=(client, found))
    child.start()
    assert found.get(timeout=20) == 200
    child.join(10)
    assert pickle.loads(pickle.dumps(client)).call("GET", PATH, timeout_s=5).status == 200
    assert client.call("GET", PATH, timeout_s=5).status == 200


def test_an_address_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match=r"got 'http://user:\*\*\*@host:8000'"):
        HTTPClient("http://user:secret@host:8000")


def test_an_answer_that_is_packed_unasked_is_refused_and_not_unpacked(server):
    """60 kB that would become 60 MB."""
    fake, url = server
    packed = gzip.compress(bytes(60 << 20))

    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(packed)))
        handler.end_headers()
        handler.wfile.write(packed)
        return True

    fake.faults.append(answer)
    tracemalloc.start()
    with pytest.raises(WorkerError, match="its answer is packed by gzip"):
        HTTPClient(url, max_retries=0).call("GET", PATH, timeout_s=30)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
