"""Programs of users, and rollouts of them in real host processes over HTTP."""

from __future__ import annotations

import sys
from contextlib import contextmanager

from torchrl_llm.agents import ProgramAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.modules import FakeWrapper

# What every program below begins with: a client of the standard library.
CLIENT = """
import asyncio, json, os, signal, subprocess, sys, threading, time, urllib.error, urllib.request

def ask(base_url, key, *messages, **more):
    messages = [{"role": "user", "content": text} for text in messages]
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def status_of(*arguments, **more):
    try:
        ask(*arguments, **more)
    except urllib.error.HTTPError as error:
        return error.code
    return 200

def good(row, base_url, key):
    first = ask(base_url, key, row["query"])
    ask(base_url, key, row["query"], "Again " + first)
    return 0.5
"""
COMMAND = """
if __name__ == "__main__":
    row = json.loads(os.environ["ROW"])
    value = run(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    if value is not None:
        with open(os.environ["REWARD_FILE"], "w") as out:
            json.dump(value, out)
"""


def write_program(folder, text, *, is_command=False):
    """A file with a program; returns the arguments of its agent."""
    path = folder / "program.py"
    path.write_text(CLIENT + text + (COMMAND if is_command else ""))
    if is_command:
        return {"command": f"{sys.executable} {path}"}
    return {"program": f"{path}:run"}


def make_env(rows, policy, tokenizer, *, num_envs=None, repeats=None, reward=None, **agent):
    env = DatasetChatEnv(
        dataset=rows,
        shuffle=False,
        num_envs=num_envs or len(rows),
        repeats=repeats,
        group_repeats=repeats is not None,
        tokenizer=tokenizer,
    )
    if reward is not None:
        env.append_transform(reward)
    return ProgramAgent(**{"timeout_s": 30.0, **agent}).wrap(env, policy)


@contextmanager
def waves(rows, tokenizer, *, policy=None, **options):
    """A collector of whole waves, and what it gives out one by one; it is closed behind."""
    if policy is None:
        policy = FakeWrapper("Yes.", tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16})
    env = make_env(rows, policy, tokenizer, **options)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    try:
        yield collector, map(row_list, iter(collector))
    finally:
        collector.shutdown()
        env.close(raise_if_closed=False)


def by_query(rows):
    """The turns of each trajectory, by the query of its row."""
    found = {}
    for row in rows:
        found.setdefault(row["query"], []).append(row)
    return found


def error_of(row, field="type"):
    return str(row["next", "error", field])


def ledger_closes(collector, given):
    tokens = sum(map(sampled_tokens, given))
    return collector.sampled_tokens == tokens + collector.tokens_in_flight


class NoRunner:
    """Runs nothing: the test makes the calls itself."""

    url = "http://nowhere"

    def start(self, number, row, base_url, key):
        self.key = key

    def stop(self, number):
        pass

    def close(self):
        pass
