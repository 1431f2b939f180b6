"""From one step to the next by every way that TorchRL offers, with ragged and with padded rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torchrl.envs import step_mdp

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs import GSM8KEnv
from torchrl_llm.modules import FakeWrapper

MODES = ("history", "text", "tokens")
ROWS = [{"question": "Q" * n, "answer": f"#### {n}"} for n in range(1, 9)]


def _env(mode, tokenizer):
    # no answer is ever right, so episodes last for two turns
    return GSM8KEnv(
        dataset=ROWS, input_mode=mode, tokenizer=tokenizer, num_envs=3, max_steps=2, shuffle=False
    )


def _policy(mode, tokenizer, *, padded=False):
    def wordy(prompt):
        return "wel" + "l" * (len(prompt) % 5)

    return FakeWrapper(wordy, tokenizer=tokenizer, input_mode=mode, pad_output=padded)


def _reset_by_hand(td, step):
    reset = td["done"].clone()
    reset[0] |= step == 1
    if not reset.any():
        return td, reset
    td["_reset"] = reset
    return td, reset


def _walk(mode, tokenizer, how, *, padded=False):
    """What the policy is asked in each of four steps: query, turn and ids of every row."""
    env, policy = _env(mode, tokenizer), _policy(mode, tokenizer, padded=padded)
    td, seen = env.reset(), []
    for step in range(4):
        answered = policy(td)
        mask = answered["masks", "all_attention_mask"] if padded else None
        full = read_rows(answered, ("tokens", "full"))
        if mask is not None:
            full = [ids[valid] for ids, valid in zip(full, mask, strict=True)]
        seen.append((list(td["query"]), td["turn"].tolist(), [ids.tolist() for ids in full]))
        stepped = env.step(answered)
        td = step_mdp(stepped) if how == "function" else env.step_mdp(stepped)
        td, reset = _reset_by_hand(td, step)
        if reset.any():
            td = env.reset(td)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", ["function", "method"])
def test_single_rows_begin_anew_on_what_step_mdp_returns(mode, padded, how, tokenizer):
    seen = _walk(mode, tokenizer, how, padded=padded)
    assert [turns for _, turns, _ in seen] == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert [row[0] for row, _, _ in seen] == ["Q", "Q", "QQQQ", "QQQQ"]
    for (_, _, before), (_, turns, after) in pairwise(seen):
        for old, turn, new in zip(before, turns, after, strict=True):
            assert (new[: len(old)] == old) == (turn == 1)
    assert seen == _walk(mode, tokenizer, "method")


@pytest.mark.parametrize("mode", MODES)
def test_one_row_of_several_begins_anew(mode, tokenizer):
    env, policy = _env(mode, tokenizer), _policy(mode, tokenizer)
    td = step_mdp(env.step(policy(env.reset())))
    td["_reset"] = torch.tensor([[False], [True], [False]])
    td = env.reset(td)
    assert td["turn"].tolist() == [1, 0, 1]
    assert list(td["query"]) == ["Q", "QQQQ", "QQQ"]
    after = policy(td)
    full = read_rows(after, ("tokens", "full"))
    texts = [tokenizer.decode(ids) for ids in full]
    assert [text.count("wel") for text in texts] == [2, 1, 2]
    assert "QQQQ" in texts[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_padded_policy_steps_and_resets_as_a_ragged_one(mode, padded, tokenizer):
    env, policy = _env(mode, tokenizer), _policy(mode, tokenizer, padded=padded)
    td, seen = env.reset(), []
    for _ in range(5):
        stepped, td = env.step_and_maybe_reset(policy(td))
        if padded:  # what the policy has written stays as it was
            assert stepped["tokens"].full.shape == stepped["masks"].all_attention_mask.shape
        prompts = read_rows(stepped["next"], ("tokens", "prompt"), None)
        seen.append((stepped["turn"].tolist(), prompts and [ids.tolist() for ids in prompts]))
    assert [turns for turns, _ in seen] == [[0] * 3, [1] * 3, [0] * 3, [1] * 3, [0] * 3]
    env, policy = _env(mode, tokenizer), _policy(mode, tokenizer)
    td = env.reset()
    for _, prompts in seen:
        stepped, td = env.step_and_maybe_reset(policy(td))
        ragged = read_rows(stepped["next"], ("tokens", "prompt"), None)
        assert prompts == (ragged and [ids.tolist() for ids in ragged])


@pytest.mark.parametrize("mode", ["history", "text"])
def test_columns_stay_columns_in_what_step_mdp_returns(mode, tokenizer):
    env, policy = _env(mode, tokenizer), _policy(mode, tokenizer)
    td = step_mdp(env.step(policy(env.reset())))
    node = td.get(mode)._tensordict
    node = (
        node.get("prompt")._tensordict.get("messages") if mode == "history" else node.get("prompt")
    )
    assert isinstance(node, Column)
