"""The journal of calls: nothing is asked twice, everything is counted, and a budget ends it."""

from __future__ import annotations

import errno
import json
import os
import signal
from functools import partial

import pytest
from fork_server import run_program
from waiting import in_threads

from torchrl_llm import _log
from torchrl_llm.errors import CheckpointError
from torchrl_llm.langmarl import calls
from torchrl_llm.langmarl.calls import Asked, Budget, BudgetUsedUp, CallLog, Prices, spent_in
from torchrl_llm.rewards import ScriptedTextModel

PRICES = Prices(2.0, 10.0)


def question(text):
    return ({"role": "user", "content": text},)


class Counting:
    """Repeats what it is asked, and counts."""

    def __init__(self):
        self.texts = []

    def __call__(self, messages):
        self.texts.append(messages[-1]["content"])
        if "fail" in self.texts[-1]:
            raise RuntimeError("no")
        return self.texts[-1]


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def asked(counting):
    return Asked(ScriptedTextModel(counting), "m", PRICES)


def test_an_answer_in_the_journal_is_not_asked_for_again(tmp_path, asked, counting):
    path = tmp_path / "calls.jsonl"
    first = CallLog(path)
    found = first.ask(asked, "actor", ["0/a", "0/b"], [question("one"), question("two")])
    texts = [answer.text for answer in found]
    first.close()
    again = CallLog(path)
    same = again.ask(asked, "actor", ["0/b", "0/a"], [question("two"), question("one")])
    assert [answer.text for answer in same] == texts[::-1] == ["two", "one"]
    assert [answer.usage.seconds for answer in same] == [found[k].usage.seconds for k in (1, 0)]
    assert counting.texts == ["one", "two"]
    assert again.num_reused == 2
    assert again.total().calls == 2


def test_another_question_under_the_same_key_is_asked(tmp_path, asked, counting):
    log = CallLog(tmp_path / "calls.jsonl")
    log.ask(asked, "actor", ["0/a"], [question("one")])
    [answer] = log.ask(asked, "actor", ["0/a"], [question("other")])
    assert answer.text == "other"
    assert counting.texts == ["one", "other"]


def test_a_failure_is_counted_and_asked_again(tmp_path, asked, counting):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    [error] = log.ask(asked, "critic", ["0/a"], [question("fail")])
    assert isinstance(error, RuntimeError)
    log.close()
    log = CallLog(path)
    assert (log.total().calls, log.total().failed, log.total().lost) == (1, 1, 0)
    log.ask(asked, "critic", ["0/a"], [question("fail")])
    assert len(counting.texts) == 2


def test_tokens_and_money_by_role_and_model_also_after_a_restart(tmp_path, asked):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    # Eight characters are two tokens, asked and answered.
    log.ask(asked, "actor", ["1", "2"], [question("12345678")] * 2)
    log.ask(asked, "critic", ["3"], [question("1234")])
    for each in (log, CallLog(path)):
        actor, critic = each.account()["actor", "m"], each.account()["critic", "m"]
        assert (actor.calls, actor.input_tokens, actor.output_tokens) == (2, 4, 4)
        assert actor.cost_usd == pytest.approx((4 * 2 + 4 * 10) / 1e6)
        assert (critic.calls, critic.input_tokens, critic.estimated) == (1, 1, 1)
        assert each.spent_for("3").output_tokens == 1


def test_half_a_line_of_a_killed_process_is_left_out_and_its_call_is_lost(tmp_path, asked):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    log.ask(asked, "actor", ["1", "2"], [question("a"), question("b")])
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    log = CallLog(path)
    assert (log.total().calls, log.total().lost) == (2, 1)
    log.ask(asked, "actor", ["2"], [question("b")])
    log.close()
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert keys == ["1", "1", "2", "2", "2"]
    assert CallLog(path).total().lost == 1


def test_a_reader_changes_nothing_and_sees_what_came_since_when_it_reads_again(tmp_path, asked):
    path = tmp_path / "calls.jsonl"
    writer = CallLog(path)
    writer.ask(asked, "actor", ["1"], [question("a")])
    with path.open("ab") as file:
        file.write(b'{"event": "begun", "ke')  # as another process is about to write it
    before, reader = path.read_bytes(), CallLog(path)
    assert reader.total().calls == 1
    assert path.read_bytes() == before
    with path.open("ab") as file:
        file.write(b'y": "2", "role": "actor", "model": "m"}\n')
    reader.reload()
    assert (reader.total().calls, reader.total().lost) == (2, 1)


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_whole_lines(
    tmp_path, asked, monkeypatch
):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    log.ask(asked, "actor", ["1"], [question("a")])
    real = os.write

    def half(descriptor, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return (
            real(descriptor, data[:-10])
            if data.startswith(b'{"event": "answered"')
            else (real(descriptor, data))
        )

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(CheckpointError, match=r"calls\.jsonl cannot be written: No space left"):
        log.ask(asked, "actor", ["2"], [question("b")])
    monkeypatch.undo()
    [answer] = log.ask(asked, "actor", ["3"], [question("c")])
    log.close()
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert keys == ["1", "1", "2", "3", "3"]
    assert CallLog(path).total().lost == 1
    assert answer.text == "c"


def test_a_damaged_line_names_its_place(tmp_path, asked):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    log.ask(asked, "actor", ["1"], [question("a")])
    log.close()
    path.write_text("what?\n" + path.read_text())
    with pytest.raises(CheckpointError, match="line 1 is damaged"):
        CallLog(path)


def test_a_budget_of_calls_is_kept_to_the_call(tmp_path, asked, counting):
    log = CallLog(tmp_path / "calls.jsonl", budget=Budget(max_calls=3))
    with pytest.raises(BudgetUsedUp, match="max_calls=3"):
        log.ask(asked, "actor", list("abcde"), [question(k) for k in "abcde"])
    assert counting.texts == ["a", "b", "c"]
    log.close()
    # What was answered is there still, and costs nothing.
    log = CallLog(tmp_path / "calls.jsonl", budget=Budget(max_calls=3))
    assert [each.text for each in log.ask(asked, "actor", ["b"], [question("b")])] == ["b"]
    with pytest.raises(BudgetUsedUp):
        log.ask(asked, "actor", ["d"], [question("d")])


def test_a_budget_counts_the_other_runs_of_the_folder(tmp_path, asked):
    for run in ("one", "two"):
        log = CallLog(tmp_path / "runs" / run / "calls.jsonl")
        log.ask(asked, "actor", ["1", "2"], [question("12345678"), question("fail")])
        log.close()
    before = spent_in(tmp_path, but="two")
    assert (before.calls, before.failed, before.input_tokens) == (2, 1, 2)
    log = CallLog(budget=Budget(max_total_tokens=4), before=before)
    with pytest.raises(BudgetUsedUp, match="max_total_tokens=4, spent 4"):
        log.ask(asked, "actor", ["1"], [question("x")])
    log = CallLog(budget=Budget(max_cost_usd=1e-6), before=before)
    with pytest.raises(BudgetUsedUp, match="max_cost_usd"):
        log.ask(asked, "actor", ["1"], [question("x")])


def test_a_price_of_nothing_is_a_price_and_an_unknown_one_is_told_of_once(counting, monkeypatch):
    told = []
    monkeypatch.setattr(_log.logger, "warning", told.append)
    monkeypatch.setattr(_log, "_told", set())
    model = ScriptedTextModel(counting)
    log = CallLog()
    log.ask(Asked(model, "free", Prices(0.0, 0.0)), "actor", ["1"], [question("a")])
    assert told == []
    for key in "23":
        log.ask(Asked(model, "unknown"), "actor", [key], [question("a")])
    assert len(told) == 1
    assert "'unknown' cost" in told[0]


def test_calls_within_a_scope_are_numbered_and_those_outside_are_not_kept(asked):
    log = CallLog()
    with calls.scope(log, "critic", "0/critic/7"):
        calls.ask(asked, question("a"))
        calls.ask(asked, question("b"))
    calls.ask(asked, question("c"))
    assert log.spent_for("0/critic/7#0").output_tokens == 1
    assert log.spent_for("0/critic/7#1").output_tokens == 1
    assert log.total().calls == 2


def test_threads_share_a_journal_without_losing_a_line(tmp_path):
    asked = Asked(ScriptedTextModel(lambda m: m[-1]["content"], concurrency=8), "m", PRICES)
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)

    def work(name):
        keys = [f"{name}/{k}" for k in range(50)]
        return len(log.ask(asked, "actor", keys, [question(key) for key in keys]))

    assert in_threads(*(partial(work, name) for name in "abcd")) == [50] * 4
    log.close()
    assert CallLog(path).total().calls == 200
    assert CallLog(path).total().lost == 0
    assert len(path.read_text().splitlines()) == 400


def test_a_killed_process_leaves_what_was_answered(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from torchrl_llm.langmarl.calls import Asked, CallLog\n"
        "from torchrl_llm.rewards import ScriptedTextModel\n"
        "def answer(messages):\n"
        "    if messages[-1]['content'] == '3': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 'ok'\n"
        "log = CallLog(sys.argv[1])\n"
        "asked = Asked(ScriptedTextModel(answer), 'm')\n"
        "questions = [({'role': 'user', 'content': k},) for k in '12345']\n"
        "log.ask(asked, 'actor', list('12345'), questions)\n"
    )
    path = tmp_path / "calls.jsonl"
    assert run_program(program, str(path)).returncode == -signal.SIGKILL
    log = CallLog(path)
    # Two were answered, the third was under way.
    assert (log.total().calls, log.total().lost) == (3, 1)
    asked = Asked(ScriptedTextModel(lambda messages: "new"), "m")
    questions = [question(key) for key in "12345"]
    found = log.ask(asked, "actor", list("12345"), questions)
    assert [answer.text for answer in found] == ["ok", "ok", "new", "new", "new"]
