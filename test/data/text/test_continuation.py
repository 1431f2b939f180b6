"""Old ids and new messages: every specimen of the zoo, every turn, every way to end."""

from __future__ import annotations

from collections import Counter
from itertools import count
from zlib import crc32

import pytest
import torch
from data.text import scenarios
from data.text.scenarios import expected_cause, plain_ids, squeezed
from data.text.tokenizers_of_the_zoo import make_tokenizer
from data.text.zoo import ZOO

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import TemplateError

USER = {"role": "user", "content": "Hi"}


def formatter_of(name, kind="bytes", **options):
    tools = scenarios.TOOLS if ZOO[name].tools else None
    tokenizer = make_tokenizer(name, kind)
    return ChatFormatter(tokenizer, **{"debug": kind == "bytes", "tools": tools, **options})


FULL = ("answer", "thought", "inline", "call")


def cases(formatter, name, kind, whole=True):
    """(prompt, turn, ending) with their names: every pair, not every triple; or a third of them."""
    chosen = count(crc32(name.encode()))
    specimen = ZOO[name]
    for prompt_name, prompt in scenarios.prompts(specimen).items():
        for turn_name, turn in scenarios.turns(specimen).items():
            if prompt_name != "bare" and (turn_name not in FULL or kind != "bytes"):
                continue
            for ending, (tail, finish) in scenarios.endings(formatter, turn).items():
                every = kind == "bytes" and turn_name in FULL and prompt_name == "bare"
                wanted = every or ending in ("closer", "length")
                if wanted and (whole or next(chosen) % 3 == 0):
                    yield (prompt_name, turn_name, ending), prompt, turn, tail, finish


def extended(formatter, prompt, turn, tail, finish):
    """The ids with a sampled turn, its message, the messages behind it, and the extension."""
    start = formatter.encode(prompt).token_ids
    response = scenarios.sampled_ids(formatter, prompt, turn) + tail
    message = formatter.parse_response(start, response, finish)
    new = scenarios.following(message)
    ids = torch.cat([start, torch.tensor(response, dtype=torch.int64)])
    result = formatter.extend(ids, [*prompt, message], finish, new, response_start=len(start))
    return ids, message, new, result


def asked_again(formatter, prompt, response):
    """The ids of a conversation and of a sampled turn, its message, and what a question adds."""
    start, response = formatter.encode(prompt).token_ids, torch.tensor(response)
    message = formatter.parse_response(start, response, FinishReason.STOP)
    ids, chat = torch.cat([start, response]), [*prompt, message]
    new = formatter.extend(ids, chat, FinishReason.STOP, [USER], response_start=len(start))
    return ids, message, new


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bytes", "metaspace", "prepend"])
@pytest.mark.parametrize("name", ZOO)
def test_whatever_is_sampled_stays_and_only_what_is_new_is_encoded(name, kind):
    check_cases(name, kind, whole=True)


@pytest.mark.parametrize(("name", "kind"), scenarios.EACH_TEMPLATE[: len(ZOO)])
def test_sampled_ids_stay_and_only_what_is_new_is_encoded(name, kind):
    check_cases(name, kind, whole=False)


def check_cases(name, kind, whole):
    formatter, specimen = formatter_of(name, kind), ZOO[name]
    special = formatter._codec.special_ids
    for case, prompt, turn, tail, finish in cases(formatter, name, kind, whole):
        ids, message, new, result = extended(formatter, prompt, turn, tail, finish)
        cause = expected_cause(specimen, *case)
        assert result.forked == (cause is not None), (case, result.cause)
        anew = formatter.encode([*prompt, message, *new])
        if result.forked:
            assert result.cause == cause, case
            assert result.num_kept == 0
            assert result.token_ids.tolist() == anew.token_ids.tolist(), case
            assert result.source.tolist() == anew.source.tolist(), case
            continue
        assert result.num_kept == len(ids)
        assert torch.equal(result.token_ids[: len(ids)], ids), case
        assert result.source.shape[0] == len(result.token_ids) - len(ids)
        if case[2] == "stop_string" and "tool_calls" in message:
            continue  # text behind a call is written in front of it by every template
        # Another eos stays where it was sampled, and is not a part of the rendering.
        extra = Counter(tail) if case[2] in ("other_eos", "eos") else Counter()
        counted = Counter(i for i in result.token_ids.tolist() if i in special) - extra
        # One end-of-turn token a turn, and no header more or less.
        assert counted == Counter(i for i in anew.token_ids.tolist() if i in special), case
        text = formatter.decode(result.token_ids)
        if extra:
            text = text.replace(formatter.decode(tail), "", 1)
        assert squeezed(text) == squeezed(formatter.render([*prompt, message, *new])), case
        added = result.token_ids[len(ids) :]
        for source, role in ((Source.PROMPT, "user"), (Source.TOOL, "tool")):
            said = formatter.decode(added[result.source == source])
            want = "".join(m["content"] for m in new if m["role"] == role)
            assert squeezed(said) == squeezed(want), (case, role)


@pytest.mark.parametrize(("name", "kind"), scenarios.EACH_TEMPLATE)
def test_a_dialogue_of_four_turns_keeps_every_sampled_token_until_it_forks(name, kind):
    formatter, specimen = formatter_of(name, kind), ZOO[name]
    chat = Chat([USER])
    record = formatter.continue_record(None, chat)
    turns = [{"role": "assistant", "content": c} for c in ("It is.", " \n", "  a\n\nb ", "end")]
    if specimen.tools:
        turns[1] = {"role": "assistant", "content": "", "tool_calls": scenarios.CALLS}
    kept = []
    for turn in turns:
        body = scenarios.sampled_ids(formatter, chat.messages, turn)
        closer = formatter.probe.terminal
        called = "tool_calls" in turn
        tail = list(closer[-1 if called else 0].ids) if closer else []
        response = torch.tensor(body + tail, dtype=torch.int64)
        before = record
        record = record.respond(response, torch.full((len(response),), -1.0), 3, FinishReason.STOP)
        message = formatter.parse_response(before.token_ids, response, FinishReason.STOP)
        chat = chat + [message]
        chat = chat + scenarios.following(message)
        after = formatter.continue_record(record, chat)
        assert after.num_messages == len(chat)
        assert formatter.continue_record(after, chat) is after
        if after.num_turns > after.earlier_turns:  # it holds turns, so it has not just forked
            assert kept or record.num_turns - record.earlier_turns == 1
            kept.append(response.tolist())
            assert torch.equal(after.token_ids[: len(record.token_ids)], record.token_ids)
            sampled = after.token_ids[after.source == Source.SAMPLED].tolist()
            assert sampled == [i for ids in kept for i in ids]
            assert (after.log_probs[after.source == Source.SAMPLED] == -1).all()
        else:
            kept = []
            assert after.token_ids.tolist() == formatter.encode(chat).token_ids.tolist()
            assert after.fork_cause is not None
        record = after


def test_defect_02_ids_that_no_text_encodes_to_are_kept_in_the_next_prompt():
    # Sampled character by character: encoding the decoded text gives other, longer tokens.
    formatter = formatter_of("faithful")
    letters = [i for c in "Hello there" for i in plain_ids(formatter, c)]
    assert len(letters) > len(plain_ids(formatter, "Hello there"))
    ids, _, result = asked_again(formatter, [USER], [*letters, *formatter.closers[0].ids])
    assert torch.equal(result.token_ids[: len(ids)], ids)


def test_defect_03_the_next_prompt_holds_the_tool_result():
    formatter = formatter_of("faithful")
    turn = {"role": "assistant", "content": "", "tool_calls": scenarios.CALLS}
    closer = list(formatter.closers[0].ids)
    ids, _, _, result = extended(formatter, [USER], turn, closer, FinishReason.STOP)
    new = formatter.decode(result.token_ids[len(ids) :])
    assert new.startswith("\n<|im_start|>user\n<tool_response>\n21 ")
    assert new.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_defect_32_the_window_does_not_grow_with_the_conversation():
    formatter = formatter_of("faithful")
    rendered = []
    render = formatter._renderer.render

    def counting(messages, **options):
        rendered.append(len(messages))
        return render(messages, **options)

    formatter._renderer.render = counting
    chat = [USER, {"role": "assistant", "content": "Hello"}] * 200
    prompt = formatter.encode(chat[:-1]).token_ids
    ids = torch.cat([prompt, torch.tensor(plain_ids(formatter, "Hello"))])
    result = formatter.extend(ids, chat, FinishReason.LENGTH, [USER], response_start=len(prompt))
    assert rendered[0] == len(chat) - 1
    assert max(rendered[1:]) <= 3
    assert not result.forked


@pytest.mark.parametrize("name", ZOO)
def test_the_window_decides_as_the_whole_conversation_does(name, monkeypatch):
    formatter, specimen = formatter_of(name), ZOO[name]
    lead = [{"role": "system", "content": "Be kind."}] if specimen.system else []
    prompt = [*lead, USER, {"role": "assistant", "content": "A"}, USER]
    if specimen.tools:
        prompt += [
            {"role": "assistant", "content": "", "tool_calls": scenarios.CALLS},
            {"role": "tool", "content": "1", "name": "get_weather", "tool_call_id": "abcdef123"},
        ] * 8
    for turn_name, turn in scenarios.turns(specimen).items():
        for ending, (tail, finish) in scenarios.endings(formatter, turn).items():
            if turn_name not in FULL or ending not in ("closer", "length"):
                continue
            *_, windowed = extended(formatter, prompt, turn, tail, finish)
            with monkeypatch.context() as patch:
                patch.setattr(
                    "torchrl_llm.data.text.splice.window_start",
                    lambda messages, turn, *, short: list(range(turn + 1)),
                )
                *_, whole = extended(formatter, prompt, turn, tail, finish)
            assert torch.equal(windowed.token_ids, whole.token_ids)
            assert windowed.cause == whole.cause


def test_a_long_tool_loop_is_cut_to_its_last_calls():
    formatter = formatter_of("keeps_thoughts")
    call = {"role": "assistant", "content": "", "tool_calls": scenarios.CALLS}
    result = {"role": "tool", "content": "21", "tool_call_id": "abcdef123", "name": "get_weather"}
    loop = [{"role": "system", "content": "Be kind."}, USER]
    for _ in range(30):
        loop += [call, result]
    seen = []
    render = formatter._renderer.render
    formatter._renderer.render = lambda m, **kw: (seen.append(len(m)), render(m, **kw))[1]
    closer = list(formatter.closers[0].ids)
    _, message, new, out = extended(formatter, loop, call, closer, FinishReason.STOP)
    assert not out.forked
    assert max(seen[-2:]) <= 14
    text = formatter.render([*loop, message, *new])
    assert formatter.decode(out.token_ids) == text


def test_an_empty_thought_block_is_dropped_only_if_it_was_sampled():
    formatter = formatter_of("drops_thoughts")
    for text, cause in (("Fine.", None), ("<think>\n\n</think>\n\nFine.", "think_dropped")):
        response = [*formatter._codec.ids(text), *formatter.closers[0].ids]
        _, message, result = asked_again(formatter, [USER], response)
        assert message["content"] == "Fine."
        assert result.cause == cause
        assert result.forked == (cause is not None)


def test_a_user_behind_a_tool_loop_drops_the_thoughts_of_all_its_turns():
    formatter = formatter_of("drops_thoughts")
    thinking = {
        "role": "assistant",
        "content": "",
        "tool_calls": scenarios.CALLS,
        "reasoning_content": "first",
    }
    result = {"role": "tool", "content": "21", "tool_call_id": "abcdef123", "name": "get_weather"}
    # The last turn itself is sampled without a block, as history would have it.
    response = [*plain_ids(formatter, "Warm."), *formatter.closers[0].ids]
    _, _, out = asked_again(formatter, [USER, thinking, result], response)
    assert out.cause == "think_dropped"


def test_keep_appends_where_history_is_rewritten_and_names_the_cause():
    for name, turn in (
        ("drops_thoughts", {"role": "assistant", "content": "A", "reasoning_content": "B"}),
        ("prompt_shuts_thought", {"role": "assistant", "content": "A"}),
        ("closes_last_otherwise", {"role": "assistant", "content": "A"}),
        ("header_closes", {"role": "assistant", "content": "A", "reasoning_content": "B"}),
    ):
        formatter = formatter_of(name, on_rewrite="keep")
        closer = formatter.probe.terminal[0]
        ids, _, new, out = extended(formatter, [USER], turn, list(closer.ids), FinishReason.STOP)
        assert not out.forked
        assert out.cause is not None
        assert torch.equal(out.token_ids[: len(ids)], ids)
        text = formatter.decode(out.token_ids[len(ids) :])
        assert squeezed(new[0]["content"]) in squeezed(text)
        # The turn was closed by the model: the template's own closer is not written behind it.
        assert not any(text.startswith(c.text) for c in formatter.closers)
        assert text.endswith(formatter.probe.generation_prompt)


def test_keep_closes_a_turn_that_was_cut():
    formatter = formatter_of("drops_thoughts", on_rewrite="keep")
    turn = {"role": "assistant", "content": "A", "reasoning_content": "B"}
    ids, _, _, out = extended(formatter, [USER], turn, [], FinishReason.LENGTH)
    assert out.token_ids[len(ids)] == formatter.closers[0].ids[0]


def test_error_raises_where_history_is_rewritten_and_only_there():
    formatter = formatter_of("drops_thoughts", on_rewrite="error")
    closer = list(formatter.closers[0].ids)
    turn = {"role": "assistant", "content": "A", "reasoning_content": "B"}
    with pytest.raises(TemplateError, match="think_dropped"):
        extended(formatter, [USER], turn, closer, FinishReason.STOP)
    call = {**turn, "content": "", "tool_calls": scenarios.CALLS}
    assert not extended(formatter, [USER], call, closer, FinishReason.STOP)[-1].forked


def test_an_unfinished_turn_without_new_messages_is_continued_with_the_same_ids():
    formatter = formatter_of("faithful")
    prompt = formatter.encode([USER])
    record = TokenRecord.from_prompt(prompt.token_ids, prompt.source, 1)
    half = record.respond(torch.tensor([300]), torch.tensor([-1.0]), 0, FinishReason.LENGTH)
    chat = Chat([USER, {"role": "assistant", "content": "x", "is_complete": False}])
    assert formatter.continue_record(half, chat) is half
    out = formatter.extend(
        half.token_ids, chat, FinishReason.LENGTH, [], response_start=len(prompt.token_ids)
    )
    assert out.token_ids is half.token_ids
    assert out.num_kept == len(half.token_ids)


def test_messages_behind_an_unanswered_prompt_continue_the_last_response():
    formatter = formatter_of("faithful")
    chat = Chat([USER])
    record = formatter.continue_record(None, chat)
    response = torch.tensor(plain_ids(formatter, "Yes") + list(formatter.closers[0].ids))
    record = record.respond(response, torch.zeros(len(response)), 0, FinishReason.STOP)
    chat = chat + [{"role": "assistant", "content": "Yes"}, USER]
    once = formatter.continue_record(record, chat)
    twice = formatter.continue_record(once, chat + [{"role": "user", "content": "Again"}])
    assert torch.equal(twice.token_ids[: len(record.token_ids)], record.token_ids)
    whole = formatter.render([*chat.messages, {"role": "user", "content": "Again"}])
    assert formatter.decode(twice.token_ids) == whole
    # Nothing was sampled at all: the prompt is encoded anew, which is no fork.
    fresh = formatter.continue_record(
        formatter.continue_record(None, Chat([USER])), chat[:1] + [USER]
    )
    assert fresh.fork_cause is None
    assert formatter.decode(fresh.token_ids) == formatter.render([USER, USER])


def test_a_chat_that_lost_messages_starts_anew():
    formatter = formatter_of("faithful")
    chat = Chat([USER])
    record = formatter.continue_record(None, chat)
    record = record.respond(torch.tensor([5]), torch.zeros(1), 0, FinishReason.STOP)
    again = formatter.continue_record(record, chat)
    assert again.fork_cause == "history_changed"
    assert (again.num_turns, again.earlier_turns) == (1, 1)  # one before, and none in these ids


def test_an_empty_response_is_closed_and_followed():
    formatter = formatter_of("faithful")
    record = formatter.continue_record(None, Chat([USER]))
    empty = torch.zeros(0, dtype=torch.int64)
    record = record.respond(empty, torch.zeros(0), 0, FinishReason.LENGTH)
    chat = Chat([USER, {"role": "assistant", "content": ""}, USER])
    after = formatter.continue_record(record, chat)
    assert after.fork_cause is None
    assert formatter.decode(after.token_ids) == formatter.render(chat)


@pytest.mark.parametrize("said", ["It is", "", "  "])
def test_a_cut_turn_is_followed_by_another_one_where_headers_close_turns(said):
    formatter = formatter_of("header_closes")
    prompt = formatter.encode([USER]).token_ids
    body = formatter._codec.ids(said)
    ids = torch.tensor([*prompt.tolist(), *body])
    turn = formatter.parse_response(prompt, body, FinishReason.LENGTH)
    more = {"role": "assistant", "content": "So."}
    new = [more, USER]
    found = formatter.extend(
        ids, [USER, turn], FinishReason.LENGTH, new, response_start=len(prompt)
    )
    assert (found.forked, found.num_kept) == (False, len(ids))
    whole = formatter.render([USER, turn, *new])
    assert squeezed(formatter.decode(found.token_ids)) == squeezed(whole)
    # A turn that ended with the user's header forks: history has the assistant's in its place.
    ended = torch.cat([ids, torch.tensor(formatter.probe.terminal[0].ids)])
    found = formatter.extend(
        ended, [USER, turn], FinishReason.STOP, new, response_start=len(prompt)
    )
    assert (found.forked, found.cause) == (True, "closer_changed" if said.strip() else found.cause)


def test_the_last_old_message_must_be_the_sampled_turn():
    formatter = formatter_of("faithful")
    with pytest.raises(TemplateError, match="sampled turn"):
        formatter.extend(torch.tensor([1]), [USER], FinishReason.STOP, [USER], response_start=0)


def test_a_message_that_the_template_refuses_is_an_error_that_says_so():
    formatter = formatter_of("alternates")
    turn = {"role": "assistant", "content": "A"}
    with pytest.raises(TemplateError, match="alternate"):
        formatter.extend(
            torch.tensor([1, 2]), [USER, turn], FinishReason.LENGTH, [turn], response_start=1
        )
    with pytest.raises(TemplateError, match="message 2 is a tool result"):
        formatter.extend(
            torch.tensor([1, 2]),
            [USER, turn],
            FinishReason.LENGTH,
            [{"role": "tool", "content": "x"}],
            response_start=1,
        )


@pytest.mark.parametrize("name", ["faithful", "drops_thoughts", "plain_text", "strips"])
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_many_records_are_continued_as_one_alone(name, kind):
    formatter = formatter_of(name, kind)
    records, chats = [None], [Chat([USER])]
    for number, (_, prompt, turn, tail, finish) in enumerate(cases(formatter, name, kind)):
        sampled = scenarios.sampled_ids(formatter, prompt, turn) + tail
        ids = torch.tensor(sampled, dtype=torch.int64)
        start = formatter.encode(prompt)
        asked = TokenRecord.from_prompt(start.token_ids, start.source, len(prompt))
        message = formatter.parse_response(start.token_ids, ids, finish)
        support = Support.whole(len(ids)) if number % 3 == 0 else None
        said = asked.respond(ids, torch.full((len(ids),), -0.5), number, finish, support)
        chat = Chat([*prompt, message])
        new = scenarios.following(message)
        records += [said, asked, said]
        chats += [chat + new, chat + new, chat]
        if len(new) == 1:  # a prompt that was not answered
            records.append(formatter.continue_record(said, chat + new))
            chats.append(chat + new + new)
    causes = Counter()
    for one, record, chat in zip(
        formatter.continue_records(records, chats), records, chats, strict=True
    ):
        alone = formatter.continue_record(record, chat)
        causes[alone.fork_cause] += 1
        for column, other in zip(one.columns().values(), alone.columns().values(), strict=True):
            assert torch.equal(column, other)
            assert column.dtype == other.dtype
        assert (one.support is None) == (alone.support is None)
        assert all(map(torch.equal, one.support or (), alone.support or ()))
        rest = ("num_messages", "finish_reason", "response_start", "fork_cause", "earlier_turns")
        assert [getattr(one, key) for key in rest] == [getattr(alone, key) for key in rest]
    assert causes[None] > 20
    assert formatter.continue_records([], []) == []
