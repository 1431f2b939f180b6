"""Checks of tokens and chat template: trained tokens equal sampled tokens, and turns end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text.formatter import ChatFormatter, assistant_mask
from torchrl_llm.recipes.doctor.finding import Finding, error, note, ok, warning
from torchrl_llm.recipes.doctor.subject import Subject

MODEL, TEMPLATE = "model.name", "model.chat_template_name"

_WORDS = ("kqxone", "kqxtwo", "kqxthree", "kqxfour", "kqxfive")
_CHAT = [{"role": ("user", "assistant")[at % 2], "content": word} for at, word in enumerate(_WORDS)]
_MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>")
# Upper and lower case, a line break, an indentation, digits, tags, and characters outside ASCII.
_TEXTS = ("The answer:\n    x = 12,345\n", "<answer>7</answer> <think>so</think>", "é 数 🙂\t~")


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Check that every id of the tokenizer has a row in the model's embedding."""
    ids = subject.tokenizer.get_vocab()
    rows = subject.model.get_input_embeddings().num_embeddings
    beyond = sorted((number, token) for token, number in ids.items() if number >= rows)
    if beyond:
        yield error(
            MODEL,
            f"{len(beyond)} tokens, {beyond[0][1]!r} ({beyond[0][0]}) first, have ids beyond the "
            f"{rows:,} rows of the model's embedding. Take the tokenizer that belongs to the "
            "model, or save both after model.resize_token_embeddings",
        )
    else:
        yield ok(MODEL, f"{len(ids):,} tokens, {rows:,} rows of the embedding")


def markers(subject: Subject) -> Iterator[Finding]:
    """Check that the special tokens of the template are tokens of the tokenizer."""
    known = subject.tokenizer.get_vocab()
    marks = dict.fromkeys(_MARK.findall(subject.formatter.render(_CHAT)))
    if plain := ", ".join(mark for mark in marks if mark not in known):
        yield warning(
            TEMPLATE,
            f"the chat template writes {plain}, which the tokenizer reads as plain text: choose "
            "the template of the model's family, or add the tokens to tokenizer and model",
        )


def turns(subject: Subject) -> Iterator[Finding]:
    """Check that the template writes all turns in order, and that later prompts keep them."""
    text = subject.formatter.render(_CHAT)
    places = [text.find(word) for word in _WORDS]
    if -1 in places or places != sorted(places):
        yield error(
            TEMPLATE,
            f"the chat template drops turns, or changes their order: of {len(_CHAT)} it writes "
            f"{sum(place >= 0 for place in places)}. Choose another",
        )
    elif (cause := _rewritten(subject.formatter)) is None:
        yield ok(TEMPLATE, "the template writes all turns, and continues sampled ids")
    elif subject.max_turns > 1:
        yield warning(
            TEMPLATE,
            f"the chat template rewrites earlier turns ({cause}), so that each of up to "
            f"{subject.max_turns} turns is a row of its own. Choose one that does not "
            "(docs: howto/templates)",
        )


def _rewritten(formatter: ChatFormatter) -> str | None:
    """Return why the next prompt does not begin with a sampled turn's ids; ``None`` if it does."""
    prompt = formatter.encode(_CHAT[:1]).token_ids
    ids, mask = assistant_mask(formatter, _CHAT[:2])
    turn = formatter.parse_response(prompt, ids[mask], FinishReason.STOP)
    whole, start = torch.cat([prompt, ids[mask]]), len(prompt)
    chat = [_CHAT[0], turn]
    more = formatter.extend(whole, chat, FinishReason.STOP, _CHAT[2:3], response_start=start)
    return more.cause


def end_of_turn(subject: Subject) -> Iterator[Finding]:
    """Check that the model's turn ends with a token that is trained."""
    formatter, stops = subject.formatter, subject.formatter.stop_token_ids
    ids, mask = assistant_mask(formatter, _CHAT[:2])
    last = int(ids[mask][-1])
    if last in stops:
        yield ok(TEMPLATE, f"a turn ends with {formatter.decode([last])!r}, which is trained")
    elif not stops:
        yield error(
            TEMPLATE,
            "nothing ends an answer: the tokenizer has no eos_token, and the chat template closes "
            "no turn with a special token. Choose a template that does, or set the token",
        )
    else:
        # Sampled answers end with the sampled token, even if the template writes a different one.
        level = warning if "inference_model.max_tokens" in subject.keys else error
        names = ", ".join(f"{formatter.decode([each])!r}" for each in stops)
        yield level(
            TEMPLATE,
            f"a written answer does not teach to stop: behind it the chat template writes none of "
            f"{names}, and {formatter.decode([last])!r} is the last token that is trained. Choose "
            "a template that closes the model's turns",
        )


def padding(subject: Subject) -> Iterator[Finding]:
    """Check that the padding token ends no turn."""
    pad = subject.tokenizer.pad_token_id
    if pad in {*subject.formatter.stop_token_ids, subject.tokenizer.eos_token_id} - {None}:
        yield note(
            MODEL,
            f"the padding token {subject.tokenizer.pad_token!r} also ends a turn: right here, as "
            "training goes by lengths, but other programs may take the end of a turn for padding. "
            "Give the tokenizer a pad_token of its own",
        )


def round_trip(subject: Subject) -> Iterator[Finding]:
    """Check that decoding returns the text, and encoding it again returns the same ids."""
    formatter, tokenizer = subject.formatter, subject.tokenizer
    chats = [[{"role": "user", "content": text}] for text in _TEXTS]
    if "inference_model.max_tokens" in subject.keys:
        chats += [chat for task in subject.tasks for chat in task.prompts[:32]]
    encoded = [each.token_ids.tolist() for each in formatter.encode_batch(chats)]
    pairs = list(zip(map(formatter.render, chats), map(formatter.decode, encoded), strict=True))
    if lost := [pair for pair in pairs if pair[0] != pair[1]]:
        at = next((i for i, (a, b) in enumerate(zip(*lost[0], strict=False)) if a != b), 0)
        before, after = (text[at : at + 30] for text in lost[0])
        yield warning(
            MODEL,
            f"the tokenizer changes {len(lost)} of {len(chats)} texts, {before!r} to {after!r}: "
            "rewards read decoded text. Take a tokenizer without normalization",
        )
    else:
        again = [
            tokenizer.encode(text, add_special_tokens=False, verbose=False) for _, text in pairs
        ]
        same = sum(a == b for a, b in zip(again, encoded, strict=True))
        yield ok(MODEL, f"{len(chats)} texts survive the tokenizer, {same} with the same ids")
