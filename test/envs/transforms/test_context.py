"""Context strategies: what is rewritten, the mark of the fork, each sampled token trained once."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from cases import cases
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs import Transform
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data import Chat, Source
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs import ChatEnv
from torchrl_llm.envs.transforms import (
    FullDialog,
    SlidingWindow,
    StepCounter,
    TruncatedThinking,
)
from torchrl_llm.envs.transforms.context_strategy import slide_window, truncate_thoughts
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeWrapper

CASES = cases(__file__)

USER = {"role": "user", "content": "Go"}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


# -- thoughts


def test_a_thought_becomes_the_placeholder_and_the_answer_stays_to_the_letter():
    [message] = truncate_thoughts([said("<think>long\nthought</think>\n\n 4 ")])
    assert message["content"] == "<think>[TRUNCATED]</think>\n\n 4 "


def test_what_is_not_exactly_a_thought_and_an_answer_stays():
    for content in CASES["what_is_not_exactly_a_thought_and_an_answer_stays"]:
        message = said(content)
        assert truncate_thoughts([message])[0] is message


def test_reasoning_that_was_split_off_is_replaced_and_the_raw_sample_goes():
    before = said("4", reasoning_content="2+2", raw="<think>2+2</think>4")
    assert truncate_thoughts([before]) == [said("4", reasoning_content="[TRUNCATED]")]


def test_reasoning_before_a_call_is_replaced_and_without_any_answer_kept():
    call = said("", reasoning_content="ask", tool_calls=[{"function": {"name": "f"}}])
    alone = said("", reasoning_content="ask")
    first, second = truncate_thoughts([call, alone])
    assert (first["reasoning_content"], second["reasoning_content"]) == ("[TRUNCATED]", "ask")


def test_only_the_models_thoughts_are_replaced():
    user = {"role": "user", "content": "<think>mine</think>4"}
    assert truncate_thoughts([user]) == [user]


_CONTENTS = st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=8)


@given(st.lists(_CONTENTS, max_size=4))
def test_truncating_twice_is_truncating_once(contents):
    once = truncate_thoughts([said("".join(content)) for content in contents])
    assert truncate_thoughts(once) == once


@pytest.mark.parametrize("placeholder", ["", " \n", "<think>", "a</think>"])
def test_a_placeholder_must_not_break_the_form(placeholder):
    with pytest.raises(ConfigError, match="placeholder"):
        TruncatedThinking(placeholder)


# -- windows

_ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=12)


def _chat(roles):
    return [{"role": role, "content": str(i)} for i, role in enumerate(roles)]


@given(_ROLES, st.integers(1, 4), st.booleans())
def test_a_window_keeps_order_and_the_last_turns_and_slides_only_once(roles, num_turns, keep_task):
    chat = _chat(roles)
    window = slide_window(chat, num_turns, keep_task=keep_task)
    kept = [int(message["content"]) for message in window]
    turns = [i for i, role in enumerate(roles) if role == "assistant"]
    assert kept == sorted(set(kept))
    assert set(turns[-num_turns:]) <= set(kept)
    assert kept[-1:] == [len(chat) - 1][: len(chat)]
    assert slide_window(window, num_turns, keep_task=keep_task) == window


@given(_ROLES, st.integers(1, 4), st.booleans())
def test_no_result_in_a_window_loses_its_call(roles, num_turns, keep_task):
    window = slide_window(_chat(roles), num_turns, keep_task=keep_task)
    for at, message in enumerate(window[1:], 1):
        if message["role"] == "tool":
            index = int(message["content"])
            assert int(window[at - 1]["content"]) == index - 1


def test_a_loop_of_tool_calls_slides_behind_its_task_and_not_without_it():
    chat = _chat(["system", "user", "assistant", "tool", "assistant", "tool"])
    assert [m["content"] for m in slide_window(chat, 1)] == ["0", "1", "4", "5"]
    assert slide_window(chat, 1, keep_task=False) == chat


# -- in an environment


class Next(Transform):
    """The user asks again."""

    def _step(self, tensordict, next_tensordict):
        chats = next_tensordict["history"].prompt.chats
        next_tensordict["history"].prompt = History.of([chat + [USER] for chat in chats])
        return next_tensordict


def _env(*strategies, size=2, turns=4, tokenizer=None):
    arguments = {"tokenizer": tokenizer, "with_tokenizer": True} if tokenizer else {}
    env = ChatEnv(batch_size=(size,), **arguments)
    for transform in (Next(), *strategies, StepCounter(max_steps=turns)):
        env = env.append_transform(transform)
    return env


def _rollout(env, policy, queries, turns=4):
    td = env.reset(queries("a", "bcd"))
    return env.rollout(turns, policy, tensordict=td, auto_reset=False)


def _forks(steps):
    """For each turn and row: whether the prompt extends the row before, and the recorded cause."""
    for turn in range(1, steps.shape[1]):
        before = read_rows(steps[:, turn - 1], ("tokens", "full"))
        prompts = read_rows(steps[:, turn], ("tokens", "prompt"))
        chats = steps[:, turn]["history"].full.chats
        for old, new, chat in zip(before, prompts, chats, strict=True):
            yield torch.equal(new[: len(old)], old), chat.record.fork_cause


THOUGHTS = ["<think>one</think>A", "<think>two</think>B", "<think>three</think>C", "D"]


def _policy(tokenizer, answers=THOUGHTS):
    # each answer serves both rows of a batch
    return FakeWrapper([a for a in answers for _ in range(2)], tokenizer=tokenizer)


@pytest.mark.parametrize("tokenized", [False, True])
@pytest.mark.parametrize(
    ("strategy", "causes"),
    [
        (FullDialog, {None}),
        (TruncatedThinking, {"think_truncated"}),
        (lambda: SlidingWindow(1), {None, "window"}),
    ],
)
def test_every_row_extends_the_one_before_or_is_marked_as_a_fork(
    strategy, causes, tokenized, tokenizer, queries
):
    env = _env(strategy(), tokenizer=tokenizer if tokenized else None)
    pairs = list(_forks(_rollout(env, _policy(tokenizer), queries)))
    assert {cause for _, cause in pairs} == causes
    for extends, cause in pairs:
        assert extends == (cause is None)


def test_the_model_sees_the_placeholder_and_its_own_row_keeps_the_thought(tokenizer, queries):
    steps = _rollout(_env(TruncatedThinking()), _policy(tokenizer), queries)
    assert steps[0, 2]["text", "prompt"].count("[TRUNCATED]") == 2
    assert "one" not in steps[0, 2]["text", "prompt"]
    assert steps[0, 0]["text", "response"].startswith("<think>one</think>A")


def test_in_a_fork_nothing_of_the_prompt_counts_as_sampled(tokenizer, queries):
    steps = _rollout(_env(TruncatedThinking()), _policy(tokenizer), queries)
    for turn in range(1, 4):
        for row in range(2):
            record = steps[row, turn]["history"].full.chats[0].record
            start = record.response_start
            assert not (record.source[:start] == Source.SAMPLED).any()
            assert (record.source[start:] == Source.SAMPLED).all()
            assert set(record.turn[start:].tolist()) == {turn}


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [(FullDialog(), 1), (TruncatedThinking(), 4), (SlidingWindow(1), 3), (SlidingWindow(2), 2)],
)
def test_every_sampled_token_is_trained_once_whatever_forks(strategy, rows, tokenizer, queries):
    steps = _rollout(_env(strategy), _policy(tokenizer), queries)
    buffer = ReplayBuffer(transform=JoinTurns())
    flat = [steps[row, turn] for row in range(2) for turn in range(4)]
    for step in flat:
        step["next", "reward"] = torch.ones(1, 1)
    buffer.extend(flat)
    joined = [buffer[i] for i in range(len(buffer))]
    assert len(joined) == 2 * rows
    trained = [row["tokens", "full"][row["trace", "mask_reason"] == 0].tolist() for row in joined]
    sampled = [step["tokens", "response"].tolist() for step in flat]
    assert sorted(chain(*trained)) == sorted(chain(*sampled))
    assert sum(row["num_turns"].item() for row in joined) == 8


def test_rows_that_are_done_or_not_stepped_are_left_alone(tokenizer, queries):
    env = ChatEnv(batch_size=(2,))
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(TruncatedThinking())
    td = _policy(tokenizer)(env.reset(queries("a", "b")))
    done = env.step(td)["next"]
    assert [c[-1]["content"] for c in done["history"].prompt.chats] == ["<think>one</think>A"] * 2

    env = ChatEnv(batch_size=(2,)).append_transform(TruncatedThinking())
    td = _policy(tokenizer)(env.reset(queries("a", "b")))
    td["_step"] = torch.tensor([True, False])
    chats = env.step(td)["next"]["history"].prompt.chats
    assert chats[0][-1]["content"] == "<think>[TRUNCATED]</think>A"
    assert [len(chat) for chat in chats] == [2, 1]
    assert chats[1].record is None or chats[1].record.fork_cause is None


def test_an_unfinished_turn_is_continued_before_it_is_rewritten():
    chat = Chat([USER, said("<think>a</think>b", is_complete=False)])
    assert TruncatedThinking()._rewritten(chat, starts=False) is chat


def test_a_long_query_is_cut_at_the_start_without_the_mark_of_a_fork(queries):
    env = ChatEnv(batch_size=(1,)).append_transform(SlidingWindow(1))
    td = queries("x")
    td["query"] = [[USER, said("1"), USER, said("2"), USER]]
    [chat] = env.reset(td)["history"].prompt.chats
    assert [m["content"] for m in chat] == ["Go", "2", "Go"]
    assert chat.record is None


def test_a_strategy_says_that_it_needs_messages(queries):
    class Wordless(Transform):
        """Takes the conversations away."""

        def _reset(self, tensordict, tensordict_reset):
            return tensordict_reset.exclude("history")

    env = ChatEnv(batch_size=(1,)).append_transform(Wordless()).append_transform(FullDialog())
    with pytest.raises(ConfigError, match="rewrites messages, and the prompts have none"):
        env.reset(queries("a"))


def test_specs_hold(queries):
    env = _env(TruncatedThinking(), SlidingWindow(1))
    check_env_specs(env, tensordict=env.reset(queries("a", "bcd")))
