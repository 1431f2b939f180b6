"""Conversations that fill the model's context end their episode in the step that did it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from data.text.tokenizers_of_the_zoo import make_tokenizer as make_zoo_tokenizer
from tensordict import TensorDict
from torchrl.envs import Transform
from torchrl.envs.utils import check_env_specs, step_mdp

from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs import ChatEnv, KeyDoorEnv, TicTacToeEnv
from torchrl_llm.envs.datasets import CalculatorEnv
from torchrl_llm.envs.transforms import ContextLimit, SlidingWindow
from torchrl_llm.errors import ConfigError, OverlongError
from torchrl_llm.modules import FakeWrapper, load_tokenizer

MODES = ("history", "text", "tokens")
TURNS = 5
NONE, FULL = TruncationReason.NONE, TruncationReason.MAX_SEQ_LEN
CALL = json.dumps({"name": "calculator", "arguments": {"expression": "2*3"}})


def talk(prompt):
    """Nonsense whose length follows from what was said before."""
    return "hmm " * (1 + len(prompt) % 7)


def call(prompt):
    """Calls the calculator twice, which takes no step, and answers."""
    called = prompt.count("<tool_call>\n{")
    return "<answer>6</answer>" if called > 1 else f"<tool_call>\n{CALL}\n</tool_call>"


TASKS = {
    "key_door": (KeyDoorEnv, talk),
    "tic_tac_toe": (TicTacToeEnv, talk),
    "calculator": (CalculatorEnv, call),
}


def play(env, policy, *, rows=None):
    """Of each row its turns: tokens of the prompt, reward, done, why it was cut."""
    td, episodes = env.reset(), [[] for _ in range(env.batch_size[0])]
    running = torch.ones(len(episodes), 1, dtype=torch.bool)
    if rows is not None:
        running = torch.tensor(rows).unsqueeze(-1)
        td["_step"] = running
    for _ in range(TURNS):
        td = env.step(policy(td))
        lengths = [len(ids) for ids in read_rows(td, ("tokens", "prompt"))]
        for row, turns in enumerate(episodes):
            if running[row]:
                after = td["next"][row]
                facts = (after["reward"].item(), after["done"].item())
                turns.append((lengths[row], *facts, after["truncation_reason"].item()))
        running = running & ~td["next", "done"]
        if not running.any():
            break
        td = step_mdp(td).set("_step", running)
    return episodes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", TASKS)
def test_an_episode_ends_before_the_first_prompt_that_is_too_long_and_is_else_the_same(task, mode):
    make, rule = TASKS[task]
    tokenizer = load_tokenizer()

    def played(limit):
        env = make(num_envs=3, seed=0, shuffle=False, input_mode=mode, tokenizer=tokenizer)
        policy = FakeWrapper(
            rule,
            tokenizer=tokenizer,
            input_mode=mode,
            max_length=None,
            max_prompt_length=limit,
            generate_kwargs={"max_new_tokens": 80},
        )
        if limit is not None:
            env.append_transform(ContextLimit(policy.longest_prompt, policy.formatter))
        return play(env, policy)

    free = played(None)
    assert all(len(turns) > 2 for turns in free)
    firsts = max(turns[0][0] for turns in free)
    lengths = sorted({turn[0] for turns in free for turn in turns if turn[0] >= firsts})
    for limit in (firsts, *lengths[1::3], lengths[-1]):
        for limited, whole in zip(played(limit), free, strict=True):
            fits = asked(whole, limit)
            assert [turn[:2] for turn in limited] == [turn[:2] for turn in fits]
            assert limited[:-1] == fits[:-1]
            if len(fits) < len(whole):
                assert limited[-1][2:] == (True, FULL)


def asked(turns, limit):
    """The turns up to the first prompt that is too long."""
    return list(itertools.takewhile(lambda turn: turn[0] <= limit, turns))


class GoOn(Transform):
    """The user goes on behind every turn, and each is worth something."""

    def _step(self, tensordict, next_tensordict):
        more = [[{"role": "user", "content": "Go on"}]] * len(next_tensordict["turn"])
        self.parent.mode.append(tensordict, next_tensordict, more)
        return next_tensordict.set("reward", torch.ones(len(more), 1, 1))


@pytest.mark.parametrize("template", ["faithful", "drops_thoughts", "strips", "joins_turns"])
def test_a_prompt_that_the_template_wrote_anew_counts_as_the_policy_will_see_it(template):
    tokenizer = make_zoo_tokenizer(template, "bytes")
    long = "<think>" + "so " * 40 + "</think>yes"

    def played(limit):
        policy = FakeWrapper(
            long,
            tokenizer=tokenizer,
            max_length=None,
            max_prompt_length=limit,
            generate_kwargs={"max_new_tokens": 400},
        )
        env = ChatEnv(batch_size=(1,)).append_transform(GoOn())
        if limit is not None:
            env.append_transform(ContextLimit(limit, policy.formatter))
        env = env.append_transform(Query())
        [turns] = play(env, policy)
        return turns

    free = played(None)
    for limit, *_ in free:
        assert [turn[0] for turn in played(limit)] == [turn[0] for turn in asked(free, limit)]


class Query(Transform):
    """Every conversation begins alike."""

    def _reset_env_preprocess(self, tensordict):
        return TensorDict({"query": ["What is it?"]}, batch_size=[1])


def test_rows_that_are_not_stepped_or_done_are_left_alone(tokenizer):
    policy = FakeWrapper(talk, tokenizer=tokenizer)
    env = TicTacToeEnv(num_envs=3, shuffle=False, tokenizer=tokenizer, max_steps=1)
    env.append_transform(ContextLimit(1, policy.formatter))
    td = env.reset()
    td["_step"] = torch.tensor([True, False, True])
    after = env.step(policy(td))["next"]
    # max_steps=1 has ended what was stepped, and says so.
    reasons = [TruncationReason.MAX_STEPS, NONE, TruncationReason.MAX_STEPS]
    assert after["truncation_reason"].flatten().tolist() == reasons
    assert after["done"].flatten().tolist() == [True, False, True]
    env = TicTacToeEnv(num_envs=3, shuffle=False, tokenizer=tokenizer)
    env.append_transform(ContextLimit(1, policy.formatter))
    episodes = play(env, policy, rows=[True, False, True])
    assert [len(turns) for turns in episodes] == [1, 0, 1]


def test_tokens_are_counted_only_where_there_may_be_too_many(tokenizer, monkeypatch):
    policy = FakeWrapper(talk, tokenizer=tokenizer)
    counted = []
    count = type(policy.formatter).continue_record
    env = TicTacToeEnv(num_envs=2, shuffle=False, tokenizer=tokenizer)
    env.append_transform(ContextLimit(100_000, policy.formatter))
    monkeypatch.setattr(
        type(policy.formatter),
        "continue_record",
        lambda self, *args: counted.append(args) or count(self, *args),
    )
    td = env.step(policy(env.reset()))
    assert not td["next", "done"].any()
    assert not counted


def test_messages_that_were_left_out_do_not_count(tokenizer):
    policy = FakeWrapper(talk, tokenizer=tokenizer)

    def turns(window):
        env = TicTacToeEnv(num_envs=1, shuffle=False, tokenizer=tokenizer)
        if window:
            env.append_transform(SlidingWindow(1))
        [episode] = play(env.append_transform(ContextLimit(420, policy.formatter)), policy)
        return len(episode)

    assert turns(window=False) < turns(window=True) == TURNS


def test_an_environment_with_a_limit_keeps_its_specs(tokenizer):
    policy = FakeWrapper(tokenizer=tokenizer)
    env = TicTacToeEnv(num_envs=2, tokenizer=tokenizer)
    check_env_specs(env.append_transform(ContextLimit(policy.longest_prompt, policy.formatter)))


def test_what_cannot_count_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"history mode needs formatter=policy\.formatter"):
        TicTacToeEnv(num_envs=1).append_transform(ContextLimit(9))
    formatter = FakeWrapper(tokenizer=tokenizer).formatter
    env = TicTacToeEnv(num_envs=1, input_mode="tokens", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="tokens mode needs none"):
        env.append_transform(ContextLimit(9, formatter))


def test_without_it_the_error_names_it_where_a_conversation_grew_and_only_there(tokenizer):
    env = TicTacToeEnv(num_envs=1, tokenizer=tokenizer)
    td = env.reset()
    fits = len(
        read_rows(FakeWrapper("a", tokenizer=tokenizer)(td.clone()), ("tokens", "prompt"))[0]
    )
    policy = FakeWrapper(talk, tokenizer=tokenizer, max_length=fits + 8)
    after = step_mdp(env.step(policy(td)))
    with pytest.raises(OverlongError, match=r"ContextLimit\(policy.longest_prompt"):
        policy(after)
    with pytest.raises(OverlongError) as error:
        FakeWrapper(talk, tokenizer=tokenizer, max_length=fits)(env.reset())
    assert "ContextLimit" not in str(error.value)
    assert policy.longest_prompt == fits + 7
