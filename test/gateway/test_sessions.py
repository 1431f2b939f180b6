"""Random sessions against references of their own: prompts, records, rows."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from gateway.families import EACH_FAMILY, family_tokenizer, specimen_of
from gateway.random_sessions import Client, ScriptedEngine, reference_text
from models_helper import make_tiny_model

from torchrl_llm.agents import ProgramAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.failures import Failure
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.gateway.program_runner import Ended
from torchrl_llm.gateway.program_sessions import ProgramSessions
from torchrl_llm.gateway.session import GatewaySession
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.objectives import MCAdvantage

README, FULL = 30, 500


def play(name, seed, steps=9):
    specimen, tokenizer = specimen_of(name), family_tokenizer(name)
    rng = random.Random(f"{name} {seed}")
    engine = ScriptedEngine(specimen, tokenizer, rng)
    client = Client(engine, GatewaySession(engine, engine.formatters), rng)
    asyncio.run(client.run(steps))
    return client


# -- prompts --------------------------------------------------------------------------------------


def runs_of(record):
    """The ids as runs, and whether each was sampled."""
    sampled = record.source == Source.SAMPLED
    at = [0, *((sampled[1:] != sampled[:-1]).nonzero().flatten() + 1).tolist(), len(sampled)]
    return [(record.token_ids[a:b], bool(sampled[a])) for a, b in pairwise(at)]


def check_prompt(client, asked, record):
    tokenizer = client.engine.tokenizer
    ends = {"continue_final_message": True} if asked.continues else {"add_generation_prompt": True}
    text = reference_text(client, asked.call.messages, asked.call.tools, **ends)
    runs = runs_of(record)
    if not any(was_sampled for _, was_sampled in runs):
        said = "".join(str(message) for message in asked.call.messages)
        assert tokenizer.decode(record.token_ids) == text
        if any(marker in said for marker in tokenizer.get_added_vocab()):
            return "spelled"  # a content that spells a special token stays text
        want = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert record.token_ids.tolist() == want, (tokenizer.decode(record.token_ids), text)
        return "fresh"
    shown = tokenizer.decode(record.token_ids)
    if asked.clean and not asked.continues:
        assert shown == text
        return "continued"
    parts = [".*" if was else re.escape(tokenizer.decode(ids)) for ids, was in runs]
    assert re.fullmatch("".join(parts), text, re.DOTALL), (shown, text)
    return "stood in"


def check_record(asked, answer, sampled):
    """The answer is what was sampled, in a turn of its own or the one that was cut."""
    prompt, record = sampled.pending.chat.record, sampled.record
    start = len(prompt.token_ids)
    assert torch.equal(answer.log_probs, record.log_probs[start:])
    assert record.source[start:].eq(Source.SAMPLED).all()
    assert record.policy_version[start:].eq(3).all()
    before = prompt.turn[prompt.source == Source.SAMPLED]
    [turn] = record.turn[start:].unique().tolist()
    if prompt.continues:
        assert turn == before.max()
    elif len(before):
        assert turn == before.max() + 1
        assert sorted(before.unique().tolist()) == [*range(int(before.min()), turn)]
    if prompt.fork_cause is None:
        said = [message["role"] for message in asked.call.messages].count("assistant")
        assert turn <= said - asked.continues  # fewer where other tools have had some of them


def check_causes(client):
    """A prompt that extends the last turn of no row has a cause, but that of a new conversation."""
    rows, begun = [], set()
    for sampled in client.engine.sampled:
        prompt, whole = sampled.pending.chat.record, sampled.record.token_ids.tolist()
        ids = prompt.token_ids.tolist()
        at = next((k for k in reversed(range(len(rows))) if ids[: len(rows[k])] == rows[k]), None)
        messages = sampled.pending.chat.messages
        roles = [message["role"] for message in messages]
        beginning = str([(m["role"], m["content"]) for m in messages[: roles.index("user") + 1]])
        if at is not None:
            rows[at] = whole
            continue
        rows.append(whole)
        if beginning in begun:
            assert prompt.fork_cause is not None, [m["content"] for m in messages]
        begun.add(beginning)


def sessions(request):
    return FULL if request.config.getoption("markexpr") == "full" else README


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_prompt_is_what_the_template_writes_but_for_sampled_ids(name, request):
    seen = Counter()
    for seed in range(sessions(request)):
        client = play(name, seed)
        for asked in client.asked:
            for answer, sampled in zip(asked.answers or (), asked.records, strict=True):
                seen[check_prompt(client, asked, sampled.pending.chat.record)] += 1
                check_record(asked, answer, sampled)
        check_causes(client)
    assert seen["fresh"] > 0
    assert seen["continued"] + seen["stood in"] > 0


# -- rows -----------------------------------------------------------------------------------------


class InThread:
    """A runner of programs whose program is a random client, without HTTP."""

    url = "http://nowhere"

    def __init__(self, sessions, on_end, name, seed):
        self.sessions, self.on_end, self.name, self.seed = sessions, on_end, name, seed
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def start(self, number, row, base_url, api_key):
        work = self.run(number, self.sessions._by_key[api_key].session)
        asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, number, session):
        rng = random.Random(f"{self.name} {self.seed} {number}")
        engine = Asking(specimen_of(self.name), family_tokenizer(self.name))
        client = Client(engine, session, rng)
        client.temperatures = (0.5, 1.0, 1.0, 1.5)
        await client.run(6)
        failure = Failure.told("Broken", "at its end", source="program")
        bad = number % 5 == 0
        self.on_end(number, Ended(None, failure) if bad else Ended(rng.random()))

    def stop(self, number):
        pass

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class Asking:
    """The part of a scripted engine that a client needs, where a policy answers."""

    def __init__(self, specimen, tokenizer):
        self.specimen, self.tokenizer = specimen, tokenizer
        self.sampled, self.tools = [], ()


def recorded(row, at):
    """A sampled token with all that was recorded of it, and its number in its row."""
    return (
        int(row["traj_id"]),
        int(row["tokens", "full"][at]),
        float(row["log_probs", "full"][at]),
        int(row["trace", "policy_version"][at]),
        int(row["trace", "turn"][at]),
        at,
    )


def trained(row):
    """Places of a row that are trained: sampled, in the response, and not masked."""
    start = len(row["tokens", "prompt"])
    is_sampled = row["trace", "source"] == Source.SAMPLED
    places = is_sampled & (row["trace", "mask_reason"] == MaskReason.TRAINED)
    return [at for at in places.nonzero().flatten().tolist() if at >= start]


@pytest.fixture(scope="module", params=["qwen3", "drops_thoughts"])
def rollout(request):
    """Turns of random sessions, whose policy's weights change, and the weights by version."""
    name = request.param
    tokenizer = family_tokenizer(name)
    settings = {"eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.1}
    model = make_tiny_model(len(tokenizer), **settings)
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="history", generate_kwargs={"max_new_tokens": 8}
    )
    env = DatasetChatEnv(
        dataset=[{"query": f"q{i}"} for i in range(3)],
        shuffle=False,
        num_envs=15,
        repeats=5,
        group_repeats=True,
        tokenizer=tokenizer,
    )
    patch = pytest.MonkeyPatch()
    patch.setattr("torchrl_llm.agents.program_agent.check_program", lambda *_: None)
    env = ProgramAgent(program="client.py:run").wrap(env, policy)

    def open_(sessions):
        if sessions._runner is None:
            sessions._runner = InThread(sessions, sessions._ended, name, 0)
            sessions._server = sessions._runner

    patch.setattr(ProgramSessions, "_open", open_)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    versions = {policy.policy_version: deepcopy(model).eval()}
    calls = 0

    def update():
        nonlocal calls
        calls += 1
        if calls % 4:
            return
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
        collector.increment_version()
        versions[policy.policy_version] = deepcopy(model).eval()

    collector._rollout.after_call = update
    turns = row_list(next(iter(collector)))
    assert collector.sampled_tokens == sum(map(sampled_tokens, turns)) + collector.tokens_in_flight
    yield turns, versions
    collector.shutdown()
    env.close(raise_if_closed=False)
    patch.undo()


def joined(turns):
    buffer = ReplayBuffer()
    buffer.append_transform(MCAdvantage(grpo_size=5))
    buffer.append_transform(JoinTurns())
    buffer.extend(lazy_rows(turns))
    return [buffer[index] for index in range(len(buffer))]


def broken(turns):
    return {int(row["traj_id"]) for row in turns if not bool(row["next", "reward_valid"])}


def test_each_sampled_token_is_trained_in_one_row_with_what_was_recorded_of_it(rollout):
    turns, versions = rollout
    rows = joined(turns)
    invalid = broken(turns)
    assert len(invalid) == 3
    assert len(versions) > 2  # a session sees several
    given, kept = Counter(), Counter()
    for row in turns:
        start = len(row["tokens", "prompt"])
        if int(row["traj_id"]) not in invalid:
            places = range(start, len(row["tokens", "full"]))
            given.update(recorded(row, at) for at in places)
    for row in rows:
        kept.update(recorded(row, at) for at in trained(row))
    assert given
    assert kept == given
    assert not invalid & {int(row["traj_id"]) for row in rows}
    mixed = [{recorded(row, at)[3] for at in trained(row)} for row in rows]
    assert any(len(own) > 1 for own in mixed)


def leaves(turns):
    """Turns that no later turn goes on with at once, each being gone on with once at most."""
    open_ = []
    for row in turns:
        ids, heat = row["tokens", "full"].tolist(), float(row["tokens", "temperature"])
        prompt = row["tokens", "prompt"].tolist()
        before = (row["trace", "source"][: len(prompt)] == Source.SAMPLED).nonzero().flatten()
        last = int(before[-1]) + 1 if len(before) else 0
        if last and (prompt[:last], heat) in open_:
            open_.remove((prompt[:last], heat))
        open_.append((ids, heat))
    return len(open_)


def test_a_session_has_a_row_a_leaf_and_all_its_rows_have_one_advantage(rollout):
    turns, _ = rollout
    rows = joined(turns)
    by_session, of_session = {}, {}
    for row in turns:
        by_session.setdefault(int(row["traj_id"]), []).append(row)
    for row in rows:
        of_session.setdefault(int(row["traj_id"]), []).append(row)
    assert set(of_session) == set(by_session) - broken(turns)
    for session, own in of_session.items():
        assert len(own) == leaves(by_session[session])
        assert len({float(row["advantage"]) for row in own}) == 1
        [reward] = [float(row["next", "reward"]) for row in own if row["next", "done"]]
        assert sum(float(row["next", "reward"]) for row in own) == reward
    assert any(len(own) > 2 for own in of_session.values())


def test_recorded_log_probs_are_the_models_own_at_each_calls_temperature(rollout):
    turns, versions = rollout
    heats = set()
    for row in turns:
        ids, start = row["tokens", "full"], len(row["tokens", "prompt"])
        heat = float(row["tokens", "temperature"])
        [version] = row["trace", "policy_version"][start:].unique().tolist()
        with torch.no_grad():
            logits = versions[version](ids[None]).logits[0, start - 1 : -1]
        own = (logits / heat).log_softmax(-1).gather(1, ids[start:, None])[:, 0]
        torch.testing.assert_close(row["log_probs", "response"], own, atol=1e-5, rtol=0)
        heats.add(heat)
    assert heats == {0.5, 1.0, 1.5}
