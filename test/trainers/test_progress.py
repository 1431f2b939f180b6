import signal

import pytest

from torchrl_llm.trainers.progress import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_wish(number):
    notices = []
    with StopRequest(lambda: notices.append(1)) as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
    assert notices == [1]


def test_the_second_ctrl_c_interrupts_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_that_comes_twice_at_once_does_not_interrupt():
    with StopRequest(presses=3) as stop:  # from the terminal, and from torchrun
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_the_process_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
