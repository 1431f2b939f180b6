"""Random sessions against references of their own: prompts, records, rows."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from itertools import pairwise

import pytest
import torch
from gateway.families import EACH_FAMILY, family_tokenizer, specimen_of
from gateway.random_sessions import Client, ScriptedEngine, reference_text

from torchrl_llm.data.enums import Source
from torchrl_llm.gateway.session import GatewaySession

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
