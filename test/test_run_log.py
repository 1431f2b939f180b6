"""What a run says: on the terminal, in a pipe, in a notebook, and in run.log."""

# ruff: noqa: T201 (what is printed is what is tested)

import contextlib
import io
import logging
import multiprocessing
import re
import subprocess
import sys
import types

import pytest
from torchrl._utils import logger as torchrl_logger

from torchrl_llm import _run_log
from torchrl_llm._progress import ProgressBar
from torchrl_llm._run_log import RunLog, say, show, show_traceback
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import launch
from torchrl_llm.trainers.results import text_table


class Pipe(io.StringIO):
    encoding = "utf-8"


class Terminal(Pipe):
    def isatty(self):
        return True

    def screen(self):
        """The lines that somebody would see, without their colours."""
        lines, line = [], ""
        for part in re.split(r"(\r\x1b\[2K|\n)", self.getvalue()):
            if part == "\n":
                lines.append(line)
            line = "" if part in ("\n", "\r\x1b[2K") else line + re.sub(r"\x1b\[[\d;]*m", "", part)
        return [*lines, line]


@pytest.fixture
def streams(monkeypatch):
    """Standard output and standard error, both of one kind."""

    def put(kind):
        out = kind()
        error = out if kind is Terminal else kind()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        return out, error

    return put


def lines(folder):
    """What run.log holds below its heads."""
    text = (folder / "run.log").read_text()
    return [line for line in text.splitlines() if not line.startswith("---")]


def speak():
    """All the ways in which a program says something."""
    print("a print")
    sys.stderr.write("half a line,")
    sys.stderr.write(" and its rest\n")
    torchrl_logger.warning("a warning of TorchRL")
    logging.getLogger("user").error("an error of a logger")
    show("a result")
    say("a notice")


SPOKEN = [
    "a print",
    "half a line, and its rest",
    "a warning of TorchRL",
    "an error of a logger",
    "a result",
    "a notice",
]


@pytest.fixture
def loggers(streams, monkeypatch):
    """Handlers that were made before the run, for the streams that there were."""

    def make(kind):
        out, error = streams(kind)
        handler = next(h for h in torchrl_logger.handlers if hasattr(h, "stream"))
        monkeypatch.setattr(handler, "stream", error)
        mine = logging.StreamHandler(error)
        logging.getLogger("user").addHandler(mine)
        logging.getLogger("user").propagate = False
        return out, error, mine

    yield make
    logging.getLogger("user").handlers.clear()


@pytest.mark.parametrize("kind", [Terminal, Pipe])
def test_whatever_is_said_is_on_the_terminal_and_in_the_log(kind, loggers, tmp_path):
    out, error, handler = loggers(kind)
    with RunLog(tmp_path), ProgressBar("step", 10) as bar:
        bar.update(1)
        speak()
    logged = "\n".join(lines(tmp_path))
    for text in SPOKEN:
        assert text in logged
        assert text in out.getvalue() + error.getvalue()
    assert "\x1b" not in logged
    assert (sys.stdout, sys.stderr, handler.stream) == (out, error, error)


def test_results_go_to_standard_output_and_all_else_to_standard_error(loggers, tmp_path):
    out, error, _ = loggers(Pipe)
    with RunLog(tmp_path), ProgressBar("step", 2) as bar:
        bar.update(2, "reward 0.500")
        show("a result")
        say("a notice")
        torchrl_logger.warning("a warning")
    assert out.getvalue() == "a result\n"
    assert "step 2/2, reward 0.500" in error.getvalue()
    assert "a notice\n" in error.getvalue()
    # TorchRL colours what it logs, and nobody asked for that in a file.
    assert "\x1b" not in error.getvalue()


def test_colours_in_a_pipe_stay_where_somebody_asks_for_them(streams, tmp_path, monkeypatch):
    out, _ = streams(Pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunLog(tmp_path):
        print("\x1b[31mred\x1b[0m")
    assert "\x1b[31m" in out.getvalue()
    assert lines(tmp_path) == ["red"]


def test_no_line_that_is_printed_is_mixed_with_the_bar(loggers, tmp_path):
    out, _, _ = loggers(Terminal)
    with RunLog(tmp_path), ProgressBar("step", 10) as bar:
        for done in (1, 2):
            bar.update(done, "reward 0.500")
            speak()
    *above, last, _ = out.screen()
    assert last.startswith("step 2/10 ━━━━━───")
    assert last.endswith("reward 0.500")
    assert not [line for line in above if "━" in line or "step" in line]
    assert above.count("half a line, and its rest") == 2
    # The log has lines of the bar now and then, and none so soon.
    assert not [line for line in lines(tmp_path) if "step" in line]


def test_a_line_is_not_drawn_behind_one_that_has_not_ended(streams, tmp_path):
    out, _ = streams(Terminal)
    with RunLog(tmp_path), ProgressBar("step", 10) as bar:
        sys.stdout.write("loading ...")
        bar.update(5)
        assert out.screen()[-1] == "loading ..."
        sys.stdout.write(" done\n")
    assert out.screen()[0] == "loading ... done"


def test_a_program_that_does_not_end_its_last_line_has_it_in_the_log(streams, tmp_path):
    streams(Pipe)
    with RunLog(tmp_path):
        sys.stdout.write("no end")
    assert lines(tmp_path) == ["no end"]


def test_the_log_of_a_bar_of_another_library_is_its_last_state(streams, tmp_path):
    streams(Terminal)
    with RunLog(tmp_path):
        for percent in (0, 50, 100):
            sys.stderr.write(f"\rloading {percent}%")
        sys.stderr.write("\r\n")
    assert lines(tmp_path) == ["loading 100%"]


def test_a_run_that_goes_on_appends_to_its_log_without_passwords(streams, tmp_path, monkeypatch):
    streams(Pipe)
    monkeypatch.setattr(sys, "argv", ["train.py", "redis.url=redis://:secret@host"])
    for text in ("first", "second redis://:secret@host"):
        with RunLog(tmp_path):
            say(text)
    assert lines(tmp_path) == ["first", "second redis://:***@host"]
    text = (tmp_path / "run.log").read_text()
    assert text.count("train.py redis.url=redis://:***@host") == 2
    assert "secret" not in text


def test_a_log_may_be_entered_within_itself_and_within_another(streams, tmp_path):
    out, _ = streams(Pipe)
    inner = tmp_path / "inner"
    inner.mkdir()
    with RunLog(tmp_path) as log:
        assert RunLog.of(tmp_path) is log
        with RunLog.of(tmp_path), RunLog(inner):
            print("to both")
        print("to one")
    assert lines(tmp_path) == ["to both", "to one"]
    assert lines(inner) == ["to both"]
    assert out.getvalue() == "to both\nto one\n"


def test_what_keeps_a_stream_of_a_run_can_use_it_after_the_run(streams, tmp_path):
    out, _ = streams(Pipe)
    with RunLog(tmp_path):
        kept = sys.stdout
    kept.write("later\n")
    assert out.getvalue() == "later\n"
    assert lines(tmp_path) == []


def test_a_stream_whose_reader_is_gone_costs_no_run(streams, tmp_path):
    class Closed(Pipe):
        def write(self, text):
            raise BrokenPipeError

    streams(Closed)
    with RunLog(tmp_path):
        print("lost")
        say("in the log")
    assert lines(tmp_path) == ["lost", "in the log"]


def test_a_log_that_cannot_be_written_costs_no_run(streams, tmp_path):
    out, _ = streams(Pipe)
    (tmp_path / "run.log").mkdir()
    with RunLog(tmp_path):
        print("said")
    assert out.getvalue() == "said\n"


def test_a_terminal_that_lacks_a_letter_shows_another(streams, tmp_path, monkeypatch):
    class Latin(io.TextIOWrapper):
        pass

    out = Latin(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    with RunLog(tmp_path):
        show("⡎ 0.5")
    assert out.buffer.getvalue() == b"? 0.5\n"
    assert lines(tmp_path) == ["⡎ 0.5"]


def test_a_process_that_is_forked_says_it_on_the_terminal_only(streams, tmp_path):
    streams(Pipe)
    with RunLog(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=print, args=("a child",))
        child.start()
        child.join()
        print("a parent")
    assert child.exitcode == 0
    assert lines(tmp_path) == ["a parent"]


LOOP = """
import sys
from torchrl_llm._run_log import RunLog, say
def steps():
    with RunLog(sys.argv[1]):
        for step in range(3):
            say(f"step {step}")
            yield step
"""
ENDS = {
    "in the loop": "for step in steps():\n    1 / 0",
    "outside a function's loop": "def main():\n    for step in steps():\n        1 / 0\nmain()",
    "in the run": "with RunLog(sys.argv[1]):\n    say('step 0')\n    1 / 0",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_error_that_ends_a_program_is_in_the_log_and_on_the_terminal(end, tmp_path):
    command = [sys.executable, "-c", LOOP + ENDS[end], str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("step 0\nTraceback (most recent call last):")
    told = lines(tmp_path)
    assert told[:2] == ["step 0", "Traceback (most recent call last):"]
    assert told[-1] == "ZeroDivisionError: division by zero"
    assert told.count("ZeroDivisionError: division by zero") == 1
    assert done.stderr.count("ZeroDivisionError") == 1


def test_what_is_printed_into_a_pipe_is_there_when_the_process_is_killed(tmp_path):
    program = LOOP + "import os, signal, warnings\nfor step in steps():\n    print('a print')\n"
    program += "    warnings.warn('a warning')\n    os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True)
    assert done.stdout == b"a print\n"
    assert lines(tmp_path)[:2] == ["step 0", "a print"]
    assert lines(tmp_path)[2].endswith("UserWarning: a warning")


# -- sessions in which a person types ------------------------------------------------------------


def test_an_interactive_session_keeps_its_streams_and_gets_no_live_line(
    streams, tmp_path, monkeypatch
):
    out, _ = streams(Terminal)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with RunLog(tmp_path), ProgressBar("step", 1) as bar:
        assert sys.stdout is out
        print("a print")
        bar.update(1)
        say("a notice")
    assert "\x1b" not in out.getvalue()
    assert [line.partition(",")[0] for line in lines(tmp_path)] == ["step 1/1", "a notice"]


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, data, raw):
        self.shown[-1] = data["text/plain"]


def test_a_notebook_shows_one_line_that_changes(streams, tmp_path, monkeypatch):
    shown = []

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle(shown)

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    out, error = streams(Pipe)
    with RunLog(tmp_path):
        for title in ("step", "again"):
            with ProgressBar(title, 4) as bar:
                bar.update(4, "reward 0.500")
        say("a notice")
    assert [text.split("  ")[0] for text in shown] == [
        f"{t} 4/4 {'━' * 24} 0:00" for t in ("step", "again")
    ]
    # Standard error looks like a failure there.
    assert (out.getvalue(), error.getvalue()) == ("a notice\n", "")
    assert _run_log.in_notebook()


# -- bars ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("torchrl_llm._progress.time", clock)
    return clock


def test_a_pipe_gets_a_line_now_and_then_and_the_last(streams, tmp_path, clock):
    _, error = streams(Pipe)
    with RunLog(tmp_path), ProgressBar("step", 1000, done=400) as bar:
        for done in range(401, 1001):
            clock.now += 1
            bar.update(done, "reward 0.500")
    told = error.getvalue().splitlines()
    # Ten seconds apart at first, later a tenth of the time that has passed.
    assert told[0] == "step 410/1,000, reward 0.500, 0:10 < 9:50"
    assert told[-1] == "step 1,000/1,000, reward 0.500, 10:00"
    assert 25 < len(told) < 35
    assert lines(tmp_path) == told


def test_a_bar_inside_another_takes_its_place_and_gives_it_back(streams, tmp_path, clock):
    out, _ = streams(Terminal)
    with RunLog(tmp_path), ProgressBar("step", 10) as bar:
        clock.now += 1
        bar.update(5, "reward 0.500")
        with ProgressBar("evaluating", 128) as inner:
            clock.now += 1
            inner.update(64, "accuracy 0.250")
            assert out.screen()[-1].startswith("step 5/10, evaluating 64/128 ━━━")
            assert "0:01 < 0:01" in out.screen()[-1]
        assert out.screen()[-1].startswith("step 5/10 ━━━")
    assert len(out.screen()) == 2


def test_what_came_before_the_first_step_is_no_pace(streams, tmp_path, clock):
    _, error = streams(Pipe)
    with RunLog(tmp_path), ProgressBar("step", 200) as bar:
        with ProgressBar("evaluating", 1) as inner:
            clock.now += 60
            inner.update(1)
        clock.now += 1
        bar.update(1)
    assert error.getvalue().splitlines()[-1] == "step 1/200, 1:01 < 3:19"


def test_a_step_that_takes_long_says_what_it_is_at(streams, tmp_path, clock):
    out, _ = streams(Terminal)
    with RunLog(tmp_path), ProgressBar("step", 10) as bar:
        clock.now += 0.1
        bar.update(1)
        bar.phase("sample")
        assert "sample" not in out.getvalue()  # short steps would flicker
        clock.now += 30
        bar.update(2)
        bar.phase("train")
        assert out.screen()[-1].endswith("  train")


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_line_is_never_wider_than_the_terminal(streams, tmp_path, monkeypatch, clock, columns):
    out, _ = streams(Terminal)
    monkeypatch.setenv("COLUMNS", columns)
    with RunLog(tmp_path), ProgressBar("step", 100) as bar:
        clock.now += 1
        bar.update(50, "reward 0.500, " * 20)
        assert len(out.screen()[-1]) == int(columns) - 1
        assert "━" in out.screen()[-1]


def test_without_a_log_or_without_progress_a_bar_is_silent(streams, tmp_path):
    out, _ = streams(Terminal)
    with ProgressBar("step", 1) as bar:
        bar.update(1)
    log = RunLog(tmp_path)
    log.progress = False
    with log, ProgressBar("step", 1) as bar:
        bar.update(1)
        say("a notice")
    assert out.getvalue() == "a notice\n"


def test_a_loop_that_is_dropped_after_the_terminal_was_closed_ends_without_an_error(tmp_path):
    with RunLog(tmp_path) as log:
        _run_log.terminal.close(log)
    assert (tmp_path / "run.log").is_file()


# -- texts of models, tools, files and exceptions ------------------------------------------------

# A title, a cleared screen, a cursor that moves up, a colour, a reply of the terminal, 8-bit
# controls, letters that are turned around and an invisible tag.
HOSTILE = (
    "\x1b]0;owned\x07 \x1b[2J \x1b[1A \x1b[31mred \x1bP$q\x1b\\ \x9b2J \x9d0;t\x9c \x07\x08\r"
    "\u202eevil\u202c \u2066a\u2069 \u200f\u061c\u2028 \U000e0041 \ttab é 😀"
)


def is_harmless(text):
    """Nothing but tabulators, line ends and what can be seen."""
    return all(char in "\t\n" or char.isprintable() for char in text)


def test_what_is_printable_keeps_words_tabulators_and_line_ends():
    text = _run_log.printable(f"one\n{HOSTILE}\ntwo")
    assert is_harmless(text)
    assert text.split("\n")[::2] == ["one", "two"]
    for kept in ("red", "evil", "\ttab é 😀"):
        assert kept in text
    assert "owned" not in text


@pytest.mark.parametrize("kind", [Terminal, Pipe])
@pytest.mark.parametrize("is_open", [True, False])
def test_nothing_hostile_reaches_the_terminal_or_the_log(kind, is_open, loggers, tmp_path):
    out, error, _ = loggers(kind)
    log = RunLog(tmp_path) if is_open else contextlib.nullcontext()
    with log:
        say(HOSTILE)
        show(HOSTILE.replace("\x1b[31m", ""))
        torchrl_logger.warning("failed: %s", HOSTILE)
        torchrl_logger.warning(f"failed: {HOSTILE}")
        show(text_table([["name", HOSTILE], [HOSTILE, "value"]]))
        show_traceback(ValueError, ValueError(HOSTILE), None)
    shown = re.sub(r"\x1b\[[\d;]*m|\r\x1b\[2K", "", out.getvalue() + error.getvalue())
    assert is_harmless(shown)
    assert shown.count("evil") >= 7
    if is_open:
        assert is_harmless((tmp_path / "run.log").read_text())


def test_of_what_others_print_titles_and_turned_letters_are_left_out_and_colours_stay(
    streams, tmp_path
):
    out, _ = streams(Terminal)
    with RunLog(tmp_path):
        print("\x1b]0;owned\x07\u202ea \x1b[31mred\x1b[0m\x9d")
    assert "a \x1b[31mred\x1b[0m\n" in out.getvalue()
    assert not re.search("owned|\u202e|\x9d", out.getvalue())


def test_an_error_that_ends_a_command_is_shown_without_its_controls(capsys, monkeypatch):
    @launch.tells_errors
    def fails(error):
        raise error

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit):
        fails(ConfigError(HOSTILE))
    assert is_harmless(capsys.readouterr().err)
    with pytest.raises(KeyError) as caught:
        fails(KeyError(HOSTILE))
    sys.excepthook(KeyError, KeyError(HOSTILE), caught.tb)
    assert is_harmless(capsys.readouterr().err)


def test_a_message_with_wrong_arguments_is_left_to_logging():
    record = logging.LogRecord("torchrl", logging.WARNING, "", 0, "%d", ("no number",), None)
    assert _run_log.clean_record(record)
    assert (record.msg, record.args) == ("%d", ("no number",))
