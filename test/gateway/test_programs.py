"""Forms of programs and of what they return, in real processes over HTTP."""

from __future__ import annotations

import math

import pytest
from gateway.program_files import (
    by_query,
    error_of,
    ledger_closes,
    make_env,
    waves,
    write_program,
)

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.rewards import RewardParser

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

PLAIN = {
    "sync with an address": "def run(row, base_url, api_key): ask(base_url, api_key, 'q'); RETURN",
    "async with an address": """
async def run(row, base_url, api_key):
    await asyncio.to_thread(ask, base_url, api_key, 'q')
    RETURN
""",
    "sync with a client": """
def run(row, client):
    message = {"role": "user", "content": row["query"]}
    client.chat.completions.create(model="policy", messages=[message])
    RETURN
""",
    "async with a client": """
async def run(row, client):
    message = {"role": "user", "content": row["query"]}
    await client.chat.completions.create(model="policy", messages=[message])
    RETURN
""",
}
# What is returned, and the reward and success that come of it.
VALUES = [
    ("0.25", 0.25, True),
    ("-1", -1.0, False),
    ("True", 1.0, True),
    ("{'reward': 0.5, 'style': 9.0}", 0.5, True),
    ("{'reward': 0.5, 'success': False}", 0.5, False),
    ("{'right': 0.5, 'short': 0.25}", 0.75, True),
]


class Echo(RewardParser):
    """1.0 for the answer of the row."""

    def score(self, response, answer):
        return float(response == answer)


@pytest.mark.parametrize("form", PLAIN)
def test_each_form_of_a_program_gives_what_it_returns(tmp_path, tokenizer, form):
    cases = ", ".join(f"{i}: {value}" for i, (value, _, _) in enumerate(VALUES))
    text = PLAIN[form].replace("RETURN", f"return {{{cases}}}[int(row['query'])]")
    rows = [{"query": str(i)} for i in range(len(VALUES))]
    with waves(rows, tokenizer, **write_program(tmp_path, text)) as (collector, batches):
        found = by_query(given := next(batches))
        for number, (_, reward, success) in enumerate(VALUES):
            [row] = found[str(number)]
            assert error_of(row, "traceback") == ""
            assert row["next", "reward"].item() == reward
            assert bool(row["next", "success"]) is success
        assert ledger_closes(collector, given)


@pytest.mark.parametrize("is_command", [False, True])
def test_the_tasks_reward_scores_the_last_answer_of_programs_that_return_nothing(
    tmp_path, tokenizer, is_command
):
    text = """
def run(row, *where):
    good(row, *where)
    return {"none": None, "own": 0.25, "zero": 0.0}[row["query"]]
"""
    # A program that knows no key of its table has raised, and is not scored.
    rows = [{"query": query, "answer": "Yes."} for query in ("none", "own", "zero", "bad")]
    agent = write_program(tmp_path, text, is_command=is_command)
    with waves(rows, tokenizer, reward=Echo(), **agent) as (collector, batches):
        found = by_query(given := next(batches))
        rewards = {q: [float(row["next", "reward"]) for row in own] for q, own in found.items()}
        assert math.isnan(rewards.pop("bad")[-1])
        assert rewards == {"none": [0.0, 1.0], "own": [0.0, 0.25], "zero": [0.0, 0.0]}
        assert not bool(found["bad"][-1]["next", "reward_valid"])
        assert "KeyError" in error_of(found["bad"][-1], "traceback")
        won = {query for query in rewards if found[query][-1]["next", "success"]}
        assert won == {"none", "own"}
        assert ledger_closes(collector, given)


def test_all_repeats_of_a_row_begin_together_and_an_invalid_one_leaves_its_group_whole(
    tmp_path, tokenizer
):
    text = """
def run(row, *where):
    name = os.path.join(os.path.dirname(os.path.abspath(__file__)), row["query"])
    good(row, *where)
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 0.5
    raise RuntimeError("the first of its group")
"""
    rows = [{"query": query} for query in "ab"]
    agent = write_program(tmp_path, text)
    with waves(rows, tokenizer, num_envs=8, repeats=4, **agent) as (collector, batches):
        turns = next(batches)
        assert ledger_closes(collector, turns)
    groups = {}
    for row in turns:
        groups.setdefault(int(row["group_id"]), {}).setdefault(int(row["traj_id"]), []).append(row)
    assert [len(sessions) for sessions in groups.values()] == [4, 4]
    for sessions in groups.values():
        valid = [all(bool(row["next", "reward_valid"]) for row in own) for own in sessions.values()]
        assert sorted(valid) == [False, True, True, True]


def test_a_collector_that_goes_on_from_a_state_runs_programs_anew_without_their_old_turns(
    tmp_path, tokenizer
):
    text = """
def run(row, *where):
    good(row, *where)
    for number in range(int(row["query"])):
        ask(*where, row["query"], f"more {number}")
    return 0.5
"""
    agent = write_program(tmp_path, text)
    rows = [{"query": str(number)} for number in range(4)]
    policy = FakeWrapper("Yes.", tokenizer=tokenizer)

    def open_collector():
        env = make_env(rows, policy, tokenizer, **agent)
        return env, LLMCollector(env, policy=policy, yield_completed_trajectories=True)

    env, collector = open_collector()
    next(iter(collector))
    state = collector.state_dict()
    collector.shutdown()
    env.close(raise_if_closed=False)
    env, collector = open_collector()
    collector.load_state_dict(state)
    batches = map(row_list, iter(collector))
    turns = [row for _ in range(6) for row in next(batches)]
    trajectories = {}
    for row in turns:
        trajectories.setdefault((int(row["traj_id"]), row["query"]), []).append(row)
    collector.shutdown()
    env.close(raise_if_closed=False)
    assert {query for _, query in trajectories} == {"0", "1", "2", "3"}
    assert all(len(own) == 2 + int(query) for (_, query), own in trajectories.items())


def test_an_evaluation_counts_what_programs_return_and_the_invalid_ones(tmp_path, tokenizer):
    text = """
def run(row, *where):
    good(row, *where)
    return [0.5, 0.0, None][int(row["query"])] + 0.0
"""
    agent = write_program(tmp_path, text)
    rows = [{"query": str(number)} for number in range(3)]
    policy = FakeWrapper("Yes.", tokenizer=tokenizer)
    env = make_env(rows, policy, tokenizer, num_envs=2, **agent)
    found = evaluate(env, policy, num_prompts=3, max_turns=64)
    env.close(raise_if_closed=False)
    assert found.invalid == pytest.approx(1 / 3)
    assert (found.num_prompts, found.accuracy) == (3, pytest.approx(1 / 3))
