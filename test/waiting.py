"""Waiting for what another process or thread will do."""

import threading
import time


def wait_until(condition, seconds=60.0):
    """Return when a condition holds; a busy machine has a minute for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.005)


def in_threads(*calls, seconds=60.0):
    """Make calls in threads that begin together; what each returned or raised, in their order."""
    found, begin = [None] * len(calls), threading.Barrier(len(calls))

    def run(index):
        begin.wait()
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), f"a caller waits after {seconds} s"
    return found
