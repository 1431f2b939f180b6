"""Checks of tokens and chat template: what is sampled must be what is trained, and end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text.formatter import assistant_mask
from torchrl_llm.recipes.doctor.finding import Finding
from torchrl_llm.recipes.doctor.subject import Subject

MODEL, TEMPLATE = "model.name", "model.chat_template_name"

_WORDS = ("kqxone", "kqxtwo", "kqxthree", "kqxfour", "kqxfive")
_CHAT = [{"role": ("user", "assistant")[at % 2], "content": word} for at, word in enumerate(_WORDS)]
_MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>")
# Upper and lower case, a line break, an indentation, digits, tags, and what is no ASCII.
_TEXTS = ("The answer:\n    x = 12,345\n", "<answer>7</answer> <think>so</think>", "é 数 🙂\t~")


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Every id of the tokenizer has a row in the model's embedding."""
    ids = subject.tokenizer.get_vocab()
    rows = subject.model.get_input_embeddings().num_embeddings
    beyond = sorted((number, token) for token, number in ids.items() if number >= rows)
    if beyond:
        shown = ", ".join(f"{token!r} ({number})" for number, token in beyond[:3])
        yield Finding(
            "error",
            MODEL,
            f"{len(beyond)} tokens have ids beyond the {rows:,} rows of the model's embedding, "
            f"{shown} first: a text with one of them ends the run. Take the tokenizer that belongs "
            "to the model, or resize its embedding (model.resize_token_embeddings) and save both",
        )
    else:
        yield Finding("ok", MODEL, f"{len(ids):,} tokens, {rows:,} rows of the embedding")


def markers(subject: Subject) -> Iterator[Finding]:
    """What the template writes as special tokens are special tokens of the tokenizer."""
    text = subject.formatter.render(_CHAT)
    sizes = {
        mark: len(subject.tokenizer.encode(mark, add_special_tokens=False))
        for mark in dict.fromkeys(_MARK.findall(text))
    }
    plain = [mark for mark, size in sizes.items() if size != 1]
    if plain:
        yield Finding(
            "warning",
            TEMPLATE,
            f"the chat template writes {', '.join(plain)}, which the tokenizer does not have: they "
            f"are plain text of up to {max(sizes.values())} tokens. Choose the template of the "
            "model's family, or add the tokens to tokenizer and model",
        )


def turns(subject: Subject) -> Iterator[Finding]:
    """All turns are written, in their order, and a sampled turn is continued as it was sampled."""
    text = subject.formatter.render(_CHAT)
    places = [text.find(word) for word in _WORDS]
    if -1 in places or places != sorted(places):
        lost = [message for message, place in zip(_CHAT, places, strict=True) if place < 0]
        what = f"drops {lost[0]['role']} messages" if lost else "changes the order of the turns"
        yield Finding(
            "error",
            TEMPLATE,
            f"the chat template {what}: of five turns it writes {5 - len(lost)}. What is trained "
            "would not be what was said; choose another template, or another model",
        )
        return
    cause = _rewritten(subject)
    if cause is None:
        yield Finding("ok", TEMPLATE, "the template writes all turns, and continues sampled ids")
    elif subject.max_turns > 1:
        yield Finding(
            "warning",
            TEMPLATE,
            f"the chat template rewrites earlier turns ({cause}): the next prompt does not begin "
            f"with what was sampled, so that each turn of an episode (up to {subject.max_turns}) "
            "becomes a row of its own. Choose a template that does not (docs: howto/templates)",
        )


def _rewritten(subject: Subject) -> str | None:
    """Why the ids of a sampled turn are not how the next prompt begins; ``None`` if they are."""
    formatter = subject.formatter
    prompt = formatter.encode(_CHAT[:1]).token_ids
    ids, mask = assistant_mask(formatter, _CHAT[:2])
    sampled = ids[mask]
    turn = formatter.parse_response(prompt, sampled, FinishReason.STOP)
    more = formatter.extend(
        torch.cat([prompt, sampled]),
        [_CHAT[0], turn],
        FinishReason.STOP,
        _CHAT[2:3],
        response_start=len(prompt),
    )
    return more.cause


def end_of_turn(subject: Subject) -> Iterator[Finding]:
    """A token ends the model's turn, it can be sampled, and it is trained."""
    formatter, stops = subject.formatter, subject.formatter.stop_token_ids
    if not stops:
        yield Finding(
            "error",
            MODEL,
            "nothing ends an answer: the tokenizer has no end-of-sequence token and the chat "
            "template closes no turn with a special token. Set tokenizer.eos_token, or choose "
            f"{TEMPLATE}",
        )
        return
    ids, mask = assistant_mask(formatter, _CHAT[:2])
    last = int(ids[mask][-1])
    names = ", ".join(f"{formatter.decode([each])!r}" for each in stops)
    if last in stops:
        yield Finding("ok", TEMPLATE, f"a turn ends with {formatter.decode([last])!r}, trained")
        return
    learns = "data.completion" in subject.keys
    yield Finding(
        "error" if learns else "warning",
        TEMPLATE,
        f"the end of a turn is not in what is trained: behind an answer the chat template writes "
        f"none of {names}, and the last token that is learned is {formatter.decode([last])!r}. "
        + ("The model would never learn to stop" if learns else "A history does not show stops")
        + "; choose a template that closes the model's turns",
    )


def padding(subject: Subject) -> Iterator[Finding]:
    """The padding token ends no turn."""
    tokenizer = subject.tokenizer
    pad = tokenizer.pad_token_id
    if pad is not None and pad in {*subject.formatter.stop_token_ids, tokenizer.eos_token_id}:
        yield Finding(
            "note",
            MODEL,
            f"the padding token is {tokenizer.pad_token!r}, which also ends a turn. Training here "
            "goes by lengths and is not affected. Other programs that train the checkpoint may "
            "take the end of a turn for padding; give the tokenizer a pad_token of its own",
        )


def round_trip(subject: Subject) -> Iterator[Finding]:
    """A text that is encoded and decoded is the same text, and has the same ids again."""
    formatter = subject.formatter
    chats = [[{"role": "user", "content": text}] for text in _TEXTS]
    if "env.repeats" in subject.keys or "tasks" in subject.keys:
        chats += [chat for task in subject.tasks for chat in task.prompts[:32]]
    lost, moved = [], 0
    for chat, encoded in zip(chats, formatter.encode_batch(chats), strict=True):
        text, again = formatter.render(chat), formatter.decode(encoded.token_ids)
        if text != again:
            lost.append((text, again))
        else:
            ids = subject.tokenizer.encode(again, add_special_tokens=False)
            moved += ids != encoded.token_ids.tolist()
    if lost:
        text, again = lost[0]
        at = next((i for i, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), 0)
        yield Finding(
            "warning",
            MODEL,
            f"the tokenizer changes {len(lost)} of {len(chats)} texts: {text[at : at + 30]!r} is "
            f"decoded as {again[at : at + 30]!r}. Rewards read decoded text, and may find a right "
            "answer wrong; take a tokenizer without normalization",
        )
    else:
        more = f"; {moved} have other ids when they are encoded again" if moved else ""
        yield Finding("ok", MODEL, f"{len(chats)} texts survive the tokenizer{more}")
