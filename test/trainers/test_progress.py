import signal

import pytest

from torchrl_llm.trainers.progress import StopRequest, compare_conversations


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


def test_conversations_are_shown_in_pairs():
    text = compare_conversations(["a\nb", "c"], ["d", "e"])
    assert text.splitlines() == [
        "held-out conversation 1, before training",
        "  a",
        "  b",
        "held-out conversation 1, after training",
        "  d",
        "held-out conversation 2, before training",
        "  c",
        "held-out conversation 2, after training",
        "  e",
    ]


def test_conversations_cannot_control_the_terminal():
    text = compare_conversations(["\x1b[2Ja"], ["b\x07"])
    assert text.splitlines()[1::2] == ["  a", "  b"]


def test_a_signal_that_the_process_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
