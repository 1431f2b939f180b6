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
from gateway.program_files import NoRunner
from gateway.random_sessions import Client, ScriptedEngine, reference_text
from models_helper import make_tiny_model

from torchrl_llm.agents import ProgramAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Chat
from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.failures import Failure
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.gateway.calls import Call, RefusedCallError
from torchrl_llm.gateway.conversation_tree import ConversationTree
from torchrl_llm.gateway.program_runner import Ended
from torchrl_llm.gateway.program_sessions import ProgramSessions
from torchrl_llm.gateway.session import EngineLimits, Formatters, GatewaySession
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.objectives import MCAdvantage

README, FULL = 15, 120


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
    if asked.continues:  # what was cut goes on as it is
        known = (each.record.token_ids for each in client.engine.sampled)
        assert any(torch.equal(record.token_ids, ids) for ids in known)
        return "cut"
    messages, tools = asked.call.messages, asked.call.tools
    text = reference_text(client, messages, tools, add_generation_prompt=True)
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
    if asked.clean:
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
    """Without a cause, each answer is gone on with once, and each conversation begins once."""
    seen = set()
    for sampled in client.engine.sampled:
        prompt, messages = sampled.pending.chat.record, sampled.pending.chat.messages
        before = (prompt.source == Source.SAMPLED).nonzero().flatten()
        if len(before):
            # Two answers may have the same ids, but not the same log-probs.
            known = prompt.token_ids[: before[-1] + 1], prompt.log_probs[: before[-1] + 1]
            key = str([column.tolist() for column in known])
        else:
            roles = [message["role"] for message in messages]
            key = str([(m["role"], m["content"]) for m in messages[: roles.index("user") + 1]])
        assert key not in seen or prompt.fork_cause is not None, [m["content"] for m in messages]
        seen.add(key)


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
    assert seen["continued"] + seen["stood in"] + seen["cut"] > 0


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


# -- single calls ---------------------------------------------------------------------------------


def scripted(**limits):
    specimen, tokenizer = specimen_of("qwen"), family_tokenizer("qwen")
    return ScriptedEngine(specimen, tokenizer, random.Random(0), **limits)


def call(*texts, **more):
    return Call(messages=tuple({"role": "user", "content": text} for text in texts), **more)


def test_calls_at_once_do_not_exceed_the_limit_of_calls_together():
    engine = scripted()
    session = GatewaySession(engine, engine.formatters, max_calls=3)

    async def both():
        calls = [session.answer(call(text, num_samples=2)) for text in ("a", "b")]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = asyncio.run(both())
    assert len(first) == 2
    assert isinstance(second, RefusedCallError)
    assert len(engine.sampled) == 2


def test_where_one_of_several_answers_is_refused_the_others_are_withdrawn():
    class Full(ScriptedEngine):
        def submit(self, pending):
            if self.waiting:
                raise RefusedCallError("full", kind="busy")
            self.waiting.append(pending)

    engine = Full(specimen_of("qwen"), family_tokenizer("qwen"), random.Random(0))
    session = GatewaySession(engine, engine.formatters)

    async def ask():
        with pytest.raises(RefusedCallError, match="full"):
            await session.answer(call("a", num_samples=3))
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert engine.waiting == []
    assert engine.withdrawn == 1


@pytest.mark.parametrize(
    "sampling", [{"temperature": -1.0}, {"stop": ("",)}, {"repetition_penalty": 2.0}]
)
def test_what_no_policy_can_sample_by_is_refused_before_it_reaches_one(sampling):
    engine = scripted(keeps_support=True)
    session = GatewaySession(engine, engine.formatters)
    with pytest.raises(RefusedCallError):
        asyncio.run(session.answer(call("a", sampling=sampling)))
    assert engine.waiting == []


def test_a_window_that_slides_over_a_conversation_is_an_edit_and_a_retry_a_branch():
    tree = ConversationTree()
    first, later = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    said = {"role": "assistant", "content": "yes"}
    place = tree.find([first])
    assert place.cause is None
    assert tree.find([first]).cause == "branched"
    tree.add(place, Chat([first, said]), said)
    slid = tree.find([later, said, first])
    assert (slid.cause, slid.turns) == ("history_changed", 1)
    assert tree.find([{"role": "user", "content": "of a sub-agent"}]).cause is None


def test_a_cut_answer_that_is_gone_on_with_is_found_as_one_message():
    engine = scripted()
    session = GatewaySession(engine, engine.formatters)
    asked = call("a", sampling={"max_new_tokens": 1})

    async def run():
        messages = list(asked.messages)
        [cut] = await session.answer(asked)
        [rest] = await session.answer(Call(messages=(*messages, cut.message)))
        whole = {**cut.message, "content": cut.message["content"] + rest.message["content"]}
        await session.answer(Call(messages=(*messages, whole, *messages)))

    asyncio.run(run())
    one, two, last = (each.record for each in engine.sampled)
    prompt = engine.sampled[-1].pending.chat.record
    assert torch.equal(two.token_ids[: len(one.token_ids)], one.token_ids)
    assert torch.equal(prompt.token_ids[: len(two.token_ids)], two.token_ids)
    assert prompt.fork_cause is None
    assert last.turn.max() == 1


@pytest.mark.parametrize("is_later", [False, True])
def test_an_answer_that_the_client_has_begun_is_found_as_one_message(is_later):
    engine = scripted()
    session = GatewaySession(engine, engine.formatters)
    user = {"role": "user", "content": "a"}
    begun = {"role": "assistant", "content": "It is", "is_complete": False}

    async def run():
        messages = [user]
        if is_later:
            [answer] = await session.answer(call("a"))
            messages += [answer.message, user]
        [rest] = await session.answer(Call(messages=(*messages, begun)))
        whole = {"role": "assistant", "content": begun["content"] + rest.message["content"]}
        await session.answer(Call(messages=(*messages, whole, user)))

    asyncio.run(run())
    before, prompt = engine.sampled[-2].record, engine.sampled[-1].pending.chat.record
    assert torch.equal(prompt.token_ids[: len(before.token_ids)], before.token_ids)
    assert prompt.fork_cause is None


@pytest.fixture
def still():
    tokenizer = family_tokenizer("qwen")
    limits = EngineLimits(100, 10, len(tokenizer))
    sessions = ProgramSessions(limits, Formatters(tokenizer), 1, program={}, timeout_s=0.2)
    sessions._runner = sessions._server = NoRunner()
    sessions.begin(0, {})
    yield sessions
    sessions.close()


def test_a_call_that_was_asked_is_refused_where_its_row_is_given_up(still):
    [rollout] = still.rollouts

    async def ask():
        task = asyncio.ensure_future(rollout.session.answer(call("a")))
        await asyncio.sleep(0)
        still.take(rollout)
        still.forget(0)
        with pytest.raises(RefusedCallError, match="has ended"):
            await asyncio.wait_for(task, 5)

    asyncio.run(ask())


def test_a_program_whose_calls_were_all_given_up_still_runs_out_of_time(still):
    [rollout] = still.rollouts

    async def ask():
        task = asyncio.ensure_future(rollout.session.answer(call("a")))
        await asyncio.sleep(0)
        rollout.waiting[0].answered.cancel()  # and before its session has told of it
        still.take(rollout)
        await asyncio.wait([task])

    asyncio.run(ask())
    still.wait()
    assert rollout.ended.failure.kind == "ProgramTimeout"
