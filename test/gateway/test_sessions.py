"""Random sessions against references of their own: prompts, records, rows."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter

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


# -- prompts ----------------------------------------------------------------------------------------


def runs_of(record):
    """The ids as runs, and whether each was sampled."""
    sampled = record.source == Source.SAMPLED
    at = [0, *((sampled[1:] != sampled[:-1]).nonzero().flatten() + 1).tolist(), len(sampled)]
    return [(record.token_ids[a:b], bool(sampled[a])) for a, b in zip(at, at[1:])]


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


def sessions(request):
    return FULL if request.config.getoption("markexpr") == "full" else README


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_prompt_is_what_the_template_writes_but_for_sampled_ids(name, request):
    seen = Counter()
    for seed in range(sessions(request)):
        client = play(name, seed)
        for asked in client.asked:
            for sampled in asked.records:
                seen[check_prompt(client, asked, sampled.pending.chat.record)] += 1
    assert seen["fresh"] and (seen["continued"] or seen["stood in"])
