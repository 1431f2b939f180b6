"""Logs of runs: what is in the file and on the console, and from which level on."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.langmarl.run_logger import RunLogger
from torchrl_llm.langmarl.store import LocalStore

STATS = {"avg_reward": 0.5, "num_episodes": 10, "total_tokens": 1234, "cost_usd": 0.25}
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def lines(store):
    return store.read_text("runs/one/logs/train.log").splitlines()


def test_all_nine_methods_write_to_the_file_and_to_the_console(store, capsys):
    log = RunLogger(store, "one", level="DEBUG")
    log.info("I")
    log.debug("D")
    log.warning("W")
    log.error("E")
    log.iteration_start(3, {"agent_1": "Be kind.", "agent_2": ""})
    log.iteration_end(3, STATS)
    log.episode_saved(3, 7, 0.75)
    log.evaluation_done(3, 7, "central_credit", "The first\n\nagent " + "x" * 500)
    log.gradient_saved(3, "agent_2", 10)
    log.close()
    found = lines(store)
    assert [re.sub(STAMP, "", line) for line in found[:4]] == [
        "INFO I",
        "DEBUG D",
        "WARNING W",
        "ERROR E",
    ]
    assert all(re.match(STAMP, line) for line in found)
    assert found[4].endswith("agent_1 8, agent_2 0")
    for part in ("iteration 3", "0.500", "10 episodes", "1234 tokens", "0.2500 USD"):
        assert part in found[5]
    assert found[6].endswith("iteration 3: episode 7 saved, reward 0.75")
    assert "episode 7 evaluated (central_credit): The first agent xxx" in found[7]
    assert len(found[7]) < 320
    assert found[8].endswith("10 gradients of agent_2")
    assert capsys.readouterr().err.splitlines() == found


@pytest.mark.parametrize(
    ("level", "expected"), [("DEBUG", "DIWE"), ("info", "IWE"), ("WARNING", "WE"), ("ERROR", "E")]
)
def test_row_28_the_level_holds_for_the_file_and_the_console(store, capsys, level, expected):
    log = RunLogger(store, "one", level=level)
    for method, text in ((log.debug, "D"), (log.info, "I"), (log.warning, "W"), (log.error, "E")):
        method(text)
    assert "".join(line[-1] for line in lines(store)) == expected
    assert "".join(line[-1] for line in capsys.readouterr().err.splitlines()) == expected


@pytest.mark.parametrize("level", ["LOUD", "", None, 10])
def test_an_unknown_level_is_refused(store, level):
    with pytest.raises(ConfigError, match="log_level must be DEBUG, INFO, WARNING or ERROR"):
        RunLogger(store, "one", level=level)


def test_a_log_that_is_made_twice_writes_each_line_once_and_goes_on_in_the_file(store, capsys):
    first = RunLogger(store, "one")
    first.info("one")
    first.close()
    second = RunLogger(store, "one")
    second.info("two")
    assert [line[-3:] for line in lines(store)] == ["one", "two"]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_an_episode_without_a_reward_can_be_logged(store):
    log = RunLogger(store, "one", level="DEBUG")
    log.episode_saved(0, 1, math.nan)
    log.episode_saved(0, 2, None)
    assert [line.rpartition(" ")[2] for line in lines(store)] == ["nan", "None"]


def test_a_text_of_a_model_cannot_move_the_cursor_and_passwords_of_urls_are_hidden(store, capsys):
    RunLogger(store, "one").info("\x1b[31mred\x07 half \ud83d, http://me:secret@host/v1")
    [line] = lines(store)
    assert "INFO red half \ud83d" in line
    shown = line + capsys.readouterr().err
    assert not {"\x1b", "\x07"} & set(shown)
    assert "secret" not in shown


def test_a_log_that_cannot_be_written_costs_no_run(store, capsys, monkeypatch):
    log = RunLogger(store, "one")
    log.info("before")

    def full(path, text):
        raise CheckpointError("no space")

    monkeypatch.setattr(store, "append_line", full)
    log.info("after")
    assert [line[-6:] for line in lines(store)] == ["before"]
    assert capsys.readouterr().err.splitlines()[-1].endswith("after")


@pytest.mark.parametrize("name", list(STATS))
@pytest.mark.parametrize("value", ["0.5", None, True, [1.0]])
def test_a_figure_of_an_iteration_that_is_no_number_is_refused_at_any_level(store, name, value):
    log = RunLogger(store, "one", level="ERROR")
    with pytest.raises(ConfigError, match=f"need {name}, a number, got"):
        log.iteration_end(0, {**STATS, name: value})
    with pytest.raises(ConfigError, match=f"need {name}, a number, got None"):
        log.iteration_end(0, {key: each for key, each in STATS.items() if key != name})
    log.iteration_end(0, {**STATS, name: np.float32(1)})
