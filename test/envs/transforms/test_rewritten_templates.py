"""Turns that are edited and prompts that are rewritten, with every kind of chat template."""

from __future__ import annotations

import pickle
from itertools import chain

import pytest
import torch
from data.text.tokenizers_of_the_zoo import make_tokenizer
from data.text.zoo import ZOO
from tensordict import TensorDict
from torchrl.envs import Transform
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data import Chat
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.wire import PackedRows, encode, pack_rows
from torchrl_llm.envs import ChatEnv
from torchrl_llm.envs.transforms import AddThinkingPrompt, SlidingWindow, TruncatedThinking
from torchrl_llm.envs.transforms.context_strategy import forked
from torchrl_llm.modules import FakeWrapper

# One of each way to treat earlier turns; the others in the run of whole grids.
SAMPLE = {"faithful", "drops_thoughts", "keeps_thoughts", "prompt_opens_thought", "two_closers"}
SAMPLE |= {"closes_last_otherwise", "strips", "joins_turns"}
TEMPLATES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in ZOO]


class GoOn(Transform):
    """The user goes on behind every finished turn."""

    def _step(self, tensordict, next_tensordict):
        chats = next_tensordict["history"].prompt.chats
        more = [{"role": "user", "content": "Go on"}]
        next_tensordict["history"].prompt = History.of(
            [chat if chat[-1].get("is_complete") is False else chat + more for chat in chats]
        )
        return next_tensordict


class First:
    """True for the first turn."""

    def __call__(self, row):
        return row["turn"].item() == 1


def rollout(tokenizer, transforms, answers, *, tokenized):
    arguments = {"tokenizer": tokenizer, "with_tokenizer": True} if tokenized else {}
    env = ChatEnv(batch_size=(1,), **arguments)
    for transform in transforms:
        env = env.append_transform(transform)
    td = env.reset(TensorDict({"query": ["What is it?"]}, batch_size=[1]))
    policy = FakeWrapper(list(answers), tokenizer=tokenizer)
    return env.rollout(len(answers), policy, tensordict=td, auto_reset=False)


def check_trained_once_and_forks_marked(steps):
    turns = [steps[0, turn] for turn in range(steps.shape[1])]
    for turn, row in enumerate(turns):
        row["next", "reward"] = torch.ones(1, 1)
        row["next", "done"] = torch.tensor([turn == len(turns) - 1])
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(turns)
    rows = [buffer[i] for i in range(len(buffer))]
    trained = [row["tokens", "full"][row["trace", "mask_reason"] == 0].tolist() for row in rows]
    sampled = [row["tokens", "response"].tolist() for row in turns]
    assert list(chain(*trained)) == list(chain(*sampled))
    for turn in range(1, len(turns)):
        [old] = read_rows(steps[:, turn - 1], ("tokens", "full"))
        [new] = read_rows(steps[:, turn], ("tokens", "prompt"))
        [chat] = steps[:, turn]["history"].full.chats
        assert torch.equal(new[: len(old)], old) or chat.record.fork_cause


@pytest.mark.parametrize("tokenized", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_was_opened_again_stays_one_message(name, tokenized):
    steps = rollout(
        make_tokenizer(name, "bytes"),
        [AddThinkingPrompt(First(), "But wait,"), GoOn()],
        ["I say <answer>13</answer>", " no: 12", "Fine"],
        tokenized=tokenized,
    )
    check_trained_once_and_forks_marked(steps)
    [chat] = steps[:, 1]["history"].full.chats
    assert [message["role"] for message in chat] == ["user", "assistant"]
    said = "".join(filter(None, (chat[-1].get("reasoning_content"), chat[-1]["content"])))
    assert said.strip() == "I say But wait, no: 12"


@pytest.mark.parametrize("tokenized", [True, False])
def test_a_thought_that_never_ended_is_opened_inside(tokenized):
    steps = rollout(
        make_tokenizer("keeps_thoughts", "bytes"),
        [AddThinkingPrompt(First(), "But wait,"), GoOn()],
        ["<think>hm <answer>13</answer>", " no</think>12", "Fine"],
        tokenized=tokenized,
    )
    check_trained_once_and_forks_marked(steps)
    opened = steps[0, 1]["history"].prompt.chats[0][-1]
    assert (opened["reasoning_content"], opened["content"]) == ("hm But wait,", "")


@pytest.mark.parametrize("strategy", [TruncatedThinking, lambda: SlidingWindow(1)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_rewritten_prompt_trains_every_token_once(name, strategy):
    thought = "<think>\nlet me see\n</think>\n\n"
    steps = rollout(
        make_tokenizer(name, "bytes"),
        [GoOn(), strategy()],
        [f"{thought}one", f"{thought}two", "three"],
        tokenized=True,
    )
    check_trained_once_and_forks_marked(steps)


def test_the_mark_of_a_fork_survives_pickling():
    chat = pickle.loads(pickle.dumps(forked([{"role": "user", "content": "Hi"}], "window")))
    assert isinstance(chat, Chat)
    assert chat.record.fork_cause == "window"
    assert chat.record.token_ids.shape == (0,)


def test_specs_hold_where_turns_are_opened_again(tokenizer):
    env = ChatEnv(batch_size=(1,), tokenizer=tokenizer)
    env = env.append_transform(AddThinkingPrompt(First(), "But wait,"))
    td = env.reset(TensorDict({"query": ["Hi"]}, batch_size=[1]))
    check_env_specs(env, tensordict=td)


def test_the_mark_of_a_fork_travels_with_packed_rows():
    fork = forked([{"role": "user", "content": "Hi"}], "window")
    row = TensorDict(history=TensorDict(prompt=History.of([fork]), batch_size=[1]), batch_size=[1])
    packed = pack_rows(lazy_rows([row[0]]))
    for back in (packed.unpack(), PackedRows.open(encode(packed)).unpack()):
        [chat] = back["history", "prompt"].chats
        assert chat.record.fork_cause == "window"
