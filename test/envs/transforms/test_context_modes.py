"""Context strategies in text and tokens mode: what the model sees and what is trained."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs import ChatEnv, DatasetChatEnv
from torchrl_llm.envs.transforms import (
    FullDialog,
    SlidingWindow,
    StepCounter,
    TruncatedThinking,
)
from torchrl_llm.modules import FakeWrapper

USER = {"role": "user", "content": "Go"}
THOUGHTS = ["<think>one</think>A", "<think>two</think>B", "<think>three</think>C", "D"]
STRATEGIES = {
    "full": (FullDialog, [None] * 3),
    "thoughts": (TruncatedThinking, ["think_truncated"] * 3),
    "window": (lambda: SlidingWindow(1), [None, "window", "window"]),
}


class Ask(Transform):
    """The user asks again in rows that are stepped, in every input mode."""

    def _step(self, tensordict, next_tensordict):
        turns = self.parent.mode.turns(tensordict)
        stepped = tensordict.get("_step", torch.ones(len(turns), dtype=torch.bool)).tolist()
        asked = [
            [USER] if turn is not None and moves else []
            for turn, moves in zip(turns, stepped, strict=True)
        ]
        self.parent.mode.append(tensordict, next_tensordict, asked)
        return next_tensordict


def _policy(mode, tokenizer, answers=THOUGHTS, rows=2, **options):
    scripted = [answer for answer in answers for _ in range(rows)]
    return FakeWrapper(scripted, tokenizer=tokenizer, input_mode=mode, **options)


def _env(mode, tokenizer, *strategies, turns=4):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer)
    for transform in (Ask(), *strategies, StepCounter(max_steps=turns)):
        env = env.append_transform(transform)
    return env


def _rollout(mode, tokenizer, queries, *strategies, **options):
    env = _env(mode, tokenizer, *strategies)
    td = env.reset(queries("a", "bcd"))
    return env.rollout(4, _policy(mode, tokenizer, **options), tensordict=td, auto_reset=False)


def _asked(steps):
    """The ids that the model was asked with, by turn and row."""
    return [
        [ids.tolist() for ids in read_rows(steps[:, turn], ("tokens", "prompt"))]
        for turn in range(steps.shape[1])
    ]


@pytest.mark.parametrize("mode", ["text", "tokens"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_model_sees_what_it_sees_in_history_mode(mode, name, tokenizer, queries):
    strategy, causes = STRATEGIES[name]
    steps = _rollout(mode, tokenizer, queries, strategy())
    assert _asked(steps) == _asked(_rollout("history", tokenizer, queries, strategy()))
    for turn, cause in enumerate(causes, 1):
        for chat in steps[:, turn]["history"].prompt.chats:
            assert (chat.record and chat.record.fork_cause) == cause


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_turns_are_numbered_as_in_the_conversation(mode, name, tokenizer, queries):
    steps = _rollout(mode, tokenizer, queries, STRATEGIES[name][0]())
    for turn in range(4):
        columns = (read_rows(steps[:, turn], ("trace", key)) for key in ("turn", "source"))
        for numbers, source in zip(*columns, strict=True):
            assert numbers.max() == turn
            assert torch.equal(numbers >= 0, source == Source.SAMPLED)


@pytest.mark.parametrize("mode", ["text", "tokens"])
@pytest.mark.parametrize(("name", "rows"), [("full", 1), ("thoughts", 4), ("window", 3)])
def test_every_sampled_token_is_trained_once(mode, name, rows, tokenizer, queries):
    steps = _rollout(mode, tokenizer, queries, STRATEGIES[name][0]())
    flat = [steps[row, turn] for row in range(2) for turn in range(4)]
    for step in flat:
        step["next", "reward"] = torch.ones(1, 1)
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(flat)
    joined = [buffer[i] for i in range(len(buffer))]
    assert len(joined) == 2 * rows
    trained = [row["tokens", "full"][row["trace", "mask_reason"] == 0].tolist() for row in joined]
    sampled = [step["tokens", "response"].tolist() for step in flat]
    assert sorted(chain(*trained)) == sorted(chain(*sampled))


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_the_messages_are_kept_turn_by_turn(mode, tokenizer, queries):
    steps = _rollout(mode, tokenizer, queries, SlidingWindow(2))
    contents = [steps[0, turn]["history"].prompt.chats[0] for turn in range(4)]
    assert [[m["content"] for m in chat] for chat in contents] == [
        ["a"],
        ["a", THOUGHTS[0], "Go"],
        ["a", THOUGHTS[0], "Go", THOUGHTS[1], "Go"],
        ["a", THOUGHTS[1], "Go", THOUGHTS[2], "Go"],
    ]


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_padded_rows_are_rewritten_as_ragged_ones(mode, tokenizer, queries):
    env = _env(mode, tokenizer, TruncatedThinking())
    policy, td = _policy(mode, tokenizer, pad_output=True), env.reset(queries("a", "bcd"))
    asked = []
    for _ in range(4):
        asked.append([ids.tolist() for ids in read_rows(td, ("tokens", "prompt"))])
        td = env.step_mdp(env.step(policy(td)))
    ragged, td = env.reset(queries("a", "bcd")), None
    policy = _policy(mode, tokenizer)
    for ids in asked:
        assert [row.tolist() for row in read_rows(ragged, ("tokens", "prompt"))] == ids
        ragged = env.step_mdp(env.step(policy(ragged)))


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_rows_that_are_not_stepped_keep_prompt_and_messages(mode, tokenizer, queries):
    env = _env(mode, tokenizer, TruncatedThinking())
    before = env.reset(queries("a", "bcd"))
    answered = _policy(mode, tokenizer)(before.copy())
    answered["_step"] = torch.tensor([True, False])
    after = env.step(answered)["next"]
    first, second = after["history"].prompt.chats
    assert [m["content"] for m in first] == ["a", "<think>[TRUNCATED]</think>A", "Go"]
    assert [m["content"] for m in second] == ["bcd"]
    prompts = [read_rows(td, ("tokens", "prompt"))[1] for td in (answered, after)]
    assert torch.equal(*prompts)
    assert (read_rows(after, ("trace", "turn"))[1] == -1).all()


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_specs_hold_and_single_rows_begin_anew(mode, tokenizer):
    rows = [{"query": "q" * n, "answer": "0"} for n in range(1, 9)]
    env = DatasetChatEnv(
        dataset=rows, shuffle=False, num_envs=2, input_mode=mode, tokenizer=tokenizer
    )
    for transform in (Ask(), SlidingWindow(1), StepCounter(max_steps=3)):
        env = env.append_transform(transform)
    check_env_specs(env)
    collector = LLMCollector(
        env,
        policy=_policy(mode, tokenizer, ["x", "y", "z"] * 4),
        dialog_turns_per_batch=6,
        total_dialog_turns=12,
        yield_completed_trajectories=True,
    )
    for batch in collector:
        for row in batch.unbind(0):
            [chat] = row["history"].prompt.chats
            assert chat[0]["content"] == row["query"]
            assert [m["role"] for m in chat].count("assistant") == min(row["turn"].item(), 1)
            assert row["trace", "turn"].max() == row["turn"]


def test_a_strategy_in_a_compose_is_found_when_the_environment_comes(tokenizer, queries):
    base = ChatEnv(batch_size=(1,), input_mode="tokens", tokenizer=tokenizer)
    env = TransformedEnv(base, Compose(Ask(), TruncatedThinking()))
    td = _policy("tokens", tokenizer, rows=1)(env.reset(queries("a")))
    [chat] = env.step(td)["next", "history"].prompt.chats
    assert chat[1]["content"] == "<think>[TRUNCATED]</think>A"
    assert chat.record.fork_cause == "think_truncated"


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_without_a_strategy_no_messages_are_kept(mode, tokenizer, queries):
    env = ChatEnv(batch_size=(1,), input_mode=mode, tokenizer=tokenizer)
    assert "history" not in env.reset(queries("a")).keys()
    assert "history" not in env.observation_spec.keys()
