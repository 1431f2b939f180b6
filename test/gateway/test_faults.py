"""Programs that fail in every way, in real processes: no other row suffers, and nothing stays."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gateway.program_files import (
    NoRunner,
    by_query,
    error_of,
    ledger_closes,
    waves,
    write_program,
)

from torchrl_llm.data.record import respond_records
from torchrl_llm.gateway.calls import Call
from torchrl_llm.gateway.policy_engine import PolicyEngine, limits_of
from torchrl_llm.gateway.program_runner import Ended
from torchrl_llm.gateway.program_sessions import ProgramSessions
from torchrl_llm.gateway.session import Formatters, GatewaySession
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.modules.backends.backend_port import SamplingParams

pytest.importorskip("uvicorn")

FAULTS = """
LATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "late")

class Broken(Exception): pass

def raises(row, *where): raise Broken("by the user")
def late(row, *where): good(row, *where); raise Broken("after two calls")
def text(row, *where): good(row, *where); return "0.9"
def nan(row, *where): good(row, *where); return float("nan")
def strings(row, *where): good(row, *where); return {"reward": "much"}
def nothing(row, *where): good(row, *where); return {}
def sleeps(row, *where): good(row, *where); time.sleep(60)
def spins(row, *where):
    good(row, *where)
    while True: pass
def exits(row, *where): good(row, *where); sys.exit(3)
def silent(row, *where): return 1.0
def refused(row, *where): return float(status_of(*where, "q", temperature=-1) == 400)
def prints(row, *where): print("x" * 70_000); return good(row, *where)
def reads(row, *where): good(row, *where); return float(sys.stdin.read() == "")
def greedy(row, *where):
    codes = [status_of(*where, str(i)) for i in range(9)]
    return float(codes == [200] * 8 + [400])
def broad(row, *where):
    found = []
    def one(number): found.append(ask(*where, str(number)))
    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for each in threads: each.start()
    for each in threads: each.join()
    return 0.25 if found == ["Yes."] * 8 else 0.0
def haunts(row, base_url, key):
    def later():
        time.sleep(0.2)
        code = status_of(base_url, key, "after the end")
        with open(LATE, "w") as out: out.write(str(code))
    threading.Thread(target=later).start()
    return good(row, base_url, key)
def haunted(row, *where):
    while not os.path.exists(LATE): time.sleep(0.05)
    ask(*where, "q")
    return float(open(LATE).read() == "401")
def stranger(row, base_url, key):
    ask(base_url, key, "q")
    return float(status_of(base_url, key + "x", "q") == 401)

def run(row, base_url, key):
    return globals()[row["fault"]](row, base_url, key)
"""
# Type of the error and a part of its traceback, or the reward.
EXPECTED = {
    "good": 0.5,
    "raises": ("Broken", "by the user"),
    "late": ("Broken", "Broken: after two calls"),
    "text": ("TypeError", "got '0.9'"),
    "nan": ("TypeError", "got nan"),
    "strings": ("TypeError", "got {'reward': 'much'}"),
    "nothing": ("TypeError", "got {}"),
    "sleeps": ("ProgramTimeout", "more than 5 s"),
    "spins": ("ProgramTimeout", "more than 5 s"),
    "exits": ("SystemExit", "SystemExit: 3"),
    "silent": ("NoCallError", "without an answer"),
    "refused": ("NoCallError", "without an answer"),
    "prints": 0.5,
    "reads": 1.0,
    "greedy": 1.0,
    "broad": 0.25,
    "haunts": 0.5,
    "haunted": 1.0,
    "stranger": 1.0,
}


def check(found, expected):
    """A trajectory's last row has the reward or the error, and only the last one is its end."""
    last = found[-1]
    assert [bool(row["next", "done"]) for row in found] == [False] * (len(found) - 1) + [True]
    reward, valid = last["next", "reward"], bool(last["next", "reward_valid"])
    if isinstance(expected, tuple):
        assert error_of(last) == expected[0], error_of(last, "traceback")
        assert torch.isnan(reward).all()
        assert not valid
        assert expected[1] in error_of(last, "traceback")
        assert error_of(last, "source") == "program"
    else:
        assert error_of(last, "traceback") == "", last["query"]
        assert (reward.item(), valid) == (pytest.approx(expected), True)


def of_us():
    """Processes whose ancestor is this one."""
    out = subprocess.run(
        ["ps", "-wweo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    parents = {}
    for line in out.splitlines():
        pid, parent, state, words = line.split(None, 3)
        if not state.startswith("Z"):
            parents[int(pid)] = (int(parent), words)
    found, more = {}, {os.getpid()}
    while more:
        more = {pid for pid, (parent, _) in parents.items() if parent in more}
        found |= {pid: parents[pid][1] for pid in more}
    return {pid: words for pid, words in found.items() if not words.startswith("ps ")}


def until(true, seconds=10.0):
    """Wait for something that other processes do."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """No process, thread or folder of a test outlives it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    processes, threads = set(of_us()), set(threading.enumerate())
    yield
    until(lambda: set(of_us()) <= processes)
    names = {"gateway", "program-host", "gateway-policy"}
    until(lambda: not {each.name for each in {*threading.enumerate()} - threads} & names)
    until(lambda: not list(folder.iterdir()))


def test_each_fault_is_an_invalid_row_with_its_traceback_and_no_other_row_suffers(
    tmp_path, tokenizer, monkeypatch
):
    said = []
    monkeypatch.setattr("torchrl_llm.data.failures.logger.warning", said.append)
    rows = [{"query": name, "fault": name} for name in EXPECTED]
    agent = write_program(tmp_path, FAULTS)
    with waves(rows, tokenizer, timeout_s=5.0, max_calls=8, **agent) as (collector, batches):
        given = []
        for _ in range(2):  # a rollout that follows is as good
            batch = next(batches)
            given += batch
            found = by_query(batch)
            assert sorted(found) == sorted(EXPECTED)
            for name, expected in EXPECTED.items():
                check(found[name], expected)
            assert len(found["good"]) == 2
            assert len(found["broad"]) == 8
            assert ledger_closes(collector, given)
    assert "program.py" in error_of(found["late"][-1], "traceback")
    assert "program_host.py" not in error_of(found["late"][-1], "traceback")
    assert sum("Broken: by the user" in text for text in said) == 1


# -- processes that die ---------------------------------------------------------------------------

DEATHS = """
def run(row, base_url, key):
    if row["query"].startswith("bad"):
        ask(base_url, key, "q")
        if row["how"] == "exit": os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return good(row, base_url, key)
"""


@pytest.mark.parametrize(("how", "told"), [("exit", "status 7"), ("kill", "signal 9")])
def test_a_program_that_takes_its_host_down_leaves_the_other_host_and_the_next_rollout_alone(
    tmp_path, tokenizer, how, told
):
    # Jobs go to the two hosts in turn: the second has the rows "bad" and "good 1".
    wave = ["good 0", "bad 0"]
    rows = [{"query": q, "how": how} for q in (*wave, "good 2", "good 3")]
    agent = write_program(tmp_path, DEATHS)
    with waves(rows, tokenizer, num_envs=2, **agent) as (collector, batches):
        given = next(batches)
        found = by_query(given)
        check(found["good 0"], 0.5)
        check(found["bad 0"], ("ProgramDied", told))
        assert len(found["bad 0"]) == 1
        given += (more := next(batches))
        for query, turns in by_query(more).items():
            assert query in ("good 2", "good 3")
            check(turns, 0.5)
        assert ledger_closes(collector, given)


def test_a_host_that_is_killed_ends_its_commands_and_leaves_no_folder(tmp_path, tokenizer):
    waits = "def run(row, *where):\n    ask(*where, 'q')\n    time.sleep(600)\n"
    agent = write_program(tmp_path, waits, is_command=True)
    before = set(of_us())

    def own():
        return {pid: words for pid, words in of_us().items() if pid not in before}

    def kill():
        until(lambda: sum("program.py" in words for words in own().values()) >= 3)
        time.sleep(0.3)
        os.kill(next(pid for pid, words in own().items() if "program_host" in words), 9)

    with waves([{"query": "q0"}, {"query": "q1"}], tokenizer, **agent) as (collector, batches):
        killer = threading.Thread(target=kill)
        killer.start()
        given = next(batches)
        killer.join()
        for turns in by_query(given).values():
            check(turns, ("ProgramDied", "signal 9"))
        assert ledger_closes(collector, given)
        until(lambda: not own())


COLLECTS = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from gateway.program_files import waves, write_program
from models_helper import make_tokenizer
text = {text!r}
agent = write_program(Path({folder!r}), text, is_command={is_command})
with waves([{{"query": str(i)}} for i in range(3)], make_tokenizer(), **agent) as (_, batches):
    next(batches)
"""


@pytest.mark.parametrize("is_command", [False, True])
def test_hosts_and_programs_of_a_collector_that_is_killed_end_themselves(tmp_path, is_command):
    text = """
def run(row, *where):
    ask(*where, "q")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__])
    open(os.path.join(os.path.dirname(__file__), "begun" + row["query"]), "w").close()
    time.sleep(600)
"""
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    script = COLLECTS.format(path=path, text=text, folder=str(tmp_path), is_command=is_command)
    process = subprocess.Popen([sys.executable, "-c", script])
    until(lambda: len(list(tmp_path.glob("begun*"))) == 3, 60)
    process.kill()
    process.wait()

    def left():
        out = subprocess.run(["ps", "-wweo", "args="], capture_output=True, text=True, check=True)
        return [line for line in out.stdout.splitlines() if str(tmp_path) in line]

    until(lambda: not left())


# -- commands -------------------------------------------------------------------------------------

COMMANDS = """
def exits(row, *where): ask(*where, "q"); print("said before"); sys.exit(3)
def killed(row, *where): os.kill(os.getpid(), 9)
def raises(row, *where): raise ValueError("of a command")
def text(row, *where): ask(*where, "q"); return "0.9"
def sleeps(row, *where): ask(*where, "q"); time.sleep(60)
def silent(row, *where): return 1.0
def reads(row, *where): ask(*where, "q"); return float(sys.stdin.read() == "")
def leaves(row, *where):
    ask(*where, "q")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return 0.75
def parts(row, *where): ask(*where, "q"); return {"reward": 0.25, "style": 3.0, "success": 1}
def run(row, *where): return globals()[row["fault"]](row, *where)
"""
OF_COMMANDS = {
    "good": 0.5,
    "exits": ("CommandError", "said before"),
    "killed": ("CommandError", ""),
    "raises": ("CommandError", "ValueError: of a command"),
    "text": ("TypeError", "got '0.9'"),
    "sleeps": ("ProgramTimeout", "more than 4 s"),
    "silent": ("NoCallError", ""),
    "reads": 1.0,
    "leaves": 0.75,
    "parts": 0.25,
}


def test_faults_of_commands_are_invalid_rows_and_their_groups_are_gone(tmp_path, tokenizer):
    rows = [{"query": name, "fault": name} for name in OF_COMMANDS]
    agent = write_program(tmp_path, COMMANDS, is_command=True)
    before = set(of_us())
    with waves(rows, tokenizer, timeout_s=4.0, **agent) as (collector, batches):
        given = next(batches)
        found = by_query(given)
        for name, expected in OF_COMMANDS.items():
            check(found[name], expected)
        assert bool(found["parts"][-1]["next", "success"])
        assert ledger_closes(collector, given)
        # Only the host is there: what "leaves" left and the group of "sleeps" are gone.
        until(lambda: len(set(of_us()) - before) == 1)


# -- coroutines and clients -----------------------------------------------------------------------

COROUTINES = """
async def run(row, base_url, key):
    await asyncio.to_thread(ask, base_url, key, row["query"])
    if row["query"] == "sleeps": await asyncio.sleep(60)
    if row["query"] == "raises": raise ValueError("of a coroutine")
    if row["query"].startswith("blocks"): time.sleep(60)
    if row["query"] == "cancels": raise asyncio.CancelledError
    return 0.5
"""


def test_faults_of_coroutines_are_invalid_rows(tmp_path, tokenizer):
    rows = [{"query": q} for q in ("good 0", "good 1", "sleeps", "raises", "cancels", "good 2")]
    agent = write_program(tmp_path, COROUTINES)
    with waves(rows, tokenizer, timeout_s=5.0, **agent) as (collector, batches):
        given = next(batches)
        found = by_query(given)
        for number in range(3):
            check(found[f"good {number}"], 0.5)
        check(found["sleeps"], ("ProgramTimeout", "more than 5 s"))
        check(found["raises"], ("ValueError", "of a coroutine"))
        check(found["cancels"], ("CancelledError", ""))
        assert ledger_closes(collector, given)


def test_a_coroutine_that_blocks_its_loop_is_not_in_the_way_of_later_rollouts(tmp_path, tokenizer):
    rows = [{"query": q} for q in ("blocks", "good 0", "good 1", "good 2")]
    agent = write_program(tmp_path, COROUTINES)
    with waves(rows, tokenizer, num_envs=2, timeout_s=5.0, **agent) as (collector, batches):
        given = next(batches)
        found = by_query(given)
        check(found["blocks"], ("ProgramTimeout", "more than 5 s"))
        check(found["good 0"], 0.5)  # of the other host
        given += (more := next(batches))
        for turns in by_query(more).values():
            check(turns, 0.5)
        assert ledger_closes(collector, given)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("async def run(row): pass", "TypeError"),
        ("def run(row): pass", "TypeError"),
        ("async def run(row, client): raise KeyError(type(client).__name__)", "KeyError"),
        ("raise ZeroDivisionError('as it is read')", "ZeroDivisionError"),
        ("other = 3", "AttributeError"),
    ],
)
def test_what_cannot_begin_is_an_invalid_row_with_its_traceback(tmp_path, tokenizer, text, kind):
    pytest.importorskip("openai")
    rows = [{"query": f"q{i}"} for i in range(6)]
    with waves(rows, tokenizer, num_envs=3, **write_program(tmp_path, text)) as (_, batches):
        for _ in range(2):
            found = by_query(next(batches))
            assert len(found) == 3
            for turns in found.values():
                check(turns, (kind, kind))


CLIENTS = """
import socket
from urllib.parse import urlparse

def send(base_url, key, text, path="/v1/chat/completions"):
    where = urlparse(base_url)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]})
    line = socket.create_connection((where.hostname, where.port))
    head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n"
    line.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    return line

def leaves(row, *where):
    for number in range(5):
        send(*where, f"bye {number}").close()
        time.sleep(0.01)
    ask(*where, "q")
    return 0.25

def slow(row, *where):
    line, got = send(*where, "q"), b""
    line.settimeout(10)
    while b"}]" not in got:
        got += line.recv(1)
        time.sleep(0.001)
    return 0.25

def broad(row, *where):
    found = []
    def one(number): found.append(ask(*where, f"number {number}"))
    threads = [threading.Thread(target=one, args=(number,)) for number in range(50)]
    for each in threads: each.start()
    for each in threads: each.join()
    return len(found) / 100

def lends(row, base_url, key):
    ask(base_url, key, "q")
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "key")
    with open(path + ".new", "w") as out: out.write(key)
    os.rename(path + ".new", path)
    while not os.path.exists(path + ".done"): time.sleep(0.02)
    return 0.5

def steals(row, base_url, key):
    ask(base_url, key, "q")
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "key")
    while not os.path.exists(path): time.sleep(0.02)
    other = open(path).read()
    line = send(base_url, key, "q", f"/session/{other}/v1/chat/completions")
    refused = b" 401 " in line.recv(100)
    open(path + ".done", "w").close()
    return 0.5 if refused else 0.0

def vanishes(row, base_url, key):
    send(base_url, key, "q").close()
    return 1.0

def run(row, *where): return globals()[row["query"]](row, *where)
"""


def test_clients_that_leave_read_slowly_or_use_another_key_disturb_nobody(tmp_path, tokenizer):
    rows = [{"query": q} for q in ("good", "leaves", "slow", "broad", "lends", "steals")]
    with waves(rows, tokenizer, **write_program(tmp_path, CLIENTS)) as (collector, batches):
        given = next(batches)
        found = by_query(given)
        expected = {"leaves": 0.25, "slow": 0.25}
        for query, turns in found.items():
            check(turns, expected.get(query, 0.5))
        # A key of another session beside one's own is refused, and costs that session no turn.
        turns = {query: len(turns) for query, turns in found.items() if query != "leaves"}
        assert turns == {"good": 2, "slow": 1, "broad": 50, "lends": 1, "steals": 1}
        assert len({str(row["text", "prompt"]) for row in found["broad"]}) == 50
        assert ledger_closes(collector, given)


# -- memory ---------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """What of a policy's row is read."""

    chats: list

    @property
    def full(self):
        return self

    def __getitem__(self, name):
        return self


async def one_session(sessions, runner, policy, number):
    """A session of two calls, one of which extends the other, and its end."""
    sessions.begin(0, {"query": "q"})
    rollout = sessions._by_key[runner.key]
    messages = [{"role": "user", "content": f"number {number}"}]
    for _ in range(2):
        task = asyncio.ensure_future(rollout.session.answer(Call(messages=tuple(messages))))
        await asyncio.sleep(0)
        sessions.take(rollout)
        prompt = rollout.asked.chat.record
        [[done]] = policy.backend.generate([prompt.token_ids], SamplingParams(max_new_tokens=8))
        [record] = respond_records([prompt], [done], 0)
        sessions.answer(rollout, Answered([rollout.asked.chat.with_record(record)]))
        [answer] = await task
        messages += [answer.message, {"role": "user", "content": "on"}]
    sessions._ended(rollout.number, Ended(1.0))


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(run, count):
    """How many tracked objects and bytes ``count`` runs add, behind a quarter of as many."""
    for number in range(count // 4):
        run(number)
    gc.collect()
    objects, size = len(gc.get_objects()), resident()
    for number in range(count):
        run(number)
    gc.collect()
    return len(gc.get_objects()) - objects, resident() - size


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_memory_does_not_grow_with_sessions(tokenizer, count):
    policy = FakeWrapper("Yes.", tokenizer=tokenizer)
    runner = NoRunner()
    sessions = ProgramSessions(limits_of(policy), Formatters(tokenizer), 1, program={})
    sessions._runner = sessions._server = runner
    loop = asyncio.new_event_loop()
    run = lambda n: loop.run_until_complete(one_session(sessions, runner, policy, n))  # noqa: E731
    objects, size = growth(run, count)
    assert objects < 200
    assert size < 8 * 2**20
    sessions.close()
    with PolicyEngine(policy) as engine:
        formatters = Formatters(tokenizer)
        call = Call(messages=({"role": "user", "content": "q"},))

        def serve(number):
            session = GatewaySession(engine, formatters)
            [answer] = loop.run_until_complete(session.answer(call))
            assert answer.message["content"] == "Yes."

        objects, size = growth(serve, count)
    assert objects < 200
    assert size < 8 * 2**20
    loop.close()
