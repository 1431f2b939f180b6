"""Games in history, text and tokens mode: the same game, and no token is encoded twice."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from torchrl.envs.utils import step_mdp

from torchrl_llm.data.enums import Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.envs.actions import ActionParser
from torchrl_llm.envs.games import KeyDoorEnv, TicTacToeEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import FakeWrapper, TransformersWrapper
from torchrl_llm.tools.tool_transform import ToolTransform

MODES = ("history", "text", "tokens")


def qwen_tokenizer(make_tokenizer):
    from torchrl_llm.data.text.templates import resolve_template

    tokenizer = make_tokenizer(extra=["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = resolve_template(None, None, "qwen").template
    return tokenizer


def first_free(prompt):
    """A player that takes the first free cell, and every other time says nothing of use."""
    asked = prompt.count("assistant\n")
    if asked % 2 == 0:
        return "well,  hmm\n"
    board = prompt.rpartition("\nYou are ")[0].rpartition("|>")[2].split("\n", 1)[1]
    return f"  I take <move>{re.findall('[1-9]', board[-17:])[0]}</move>\n"


def call_of(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def make_policy(mode, tokenizer, rule, **options):
    return FakeWrapper(rule, tokenizer=tokenizer, input_mode=mode, **options)


def played(env, policy, turns):
    """Rows of every turn, in which no row was reset."""
    td, rows = env.reset(), []
    for _ in range(turns):
        td = env.step(policy(td))
        rows.append(td)
        done = td["next", "done"].flatten()
        if done.all():
            break
        td = step_mdp(td).set("_step", ~done)
    return rows


@pytest.mark.parametrize("mode", MODES)
def test_a_game_is_the_same_in_every_mode_and_its_tokens_only_grow(mode, tokenizer):
    env = TicTacToeEnv(
        num_envs=3, seed=5, player="X", max_steps=9, input_mode=mode, tokenizer=tokenizer
    )
    rows = played(env, make_policy(mode, tokenizer, first_free), 9)
    legal = [td["next", "game_legal"].tolist() for td in rows]
    assert legal[0] == [True] * 3
    assert legal[1] == [False] * 3
    for before, after in itertools.pairwise(rows):
        old, new = read_rows(before, ("tokens", "full")), read_rows(after, ("tokens", "full"))
        prompts = read_rows(after, ("tokens", "prompt"))
        source = read_rows(after, ("trace", "source"))
        for row in after["_step"].nonzero().flatten().tolist():
            length = len(old[row])
            assert torch.equal(new[row][:length], old[row])
            added = prompts[row][length:]
            told = tokenizer.decode(added)
            assert "You are X. Your move." in told or "Answer with the number" in told
            kinds = set(source[row][length : len(prompts[row])].tolist())
            assert kinds == {Source.TEMPLATE, Source.PROMPT}
    last = rows[-1]
    assert last["next", "done"].all()
    # The same sums in every mode: they are worked out from the states alone.
    total = sum(td["next", "reward"].flatten() for td in rows)
    wins = {"X": 1.0, "O": -1.0, None: 0.0}
    for row in range(3):
        state = env.game.load(last["next", "game_state"][row])
        invalid = sum(not flags[row] for flags in legal)
        lines = ["123", "456", "789", "147", "258", "369", "159", "357"]
        marks = [{state.board[int(c) - 1] for c in line} for line in lines]
        winner = next((m for m in "XO" if {m} in marks), None)
        assert total[row].item() == pytest.approx(wins[winner] - 0.3 * invalid)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_babbles_keeps_its_tokens_turn_after_turn(mode, tokenizer, tiny_model):
    env = KeyDoorEnv(num_envs=3, size=3, max_steps=3, input_mode=mode, tokenizer=tokenizer)
    policy = TransformersWrapper(
        tiny_model,
        tokenizer=tokenizer,
        input_mode=mode,
        generate_kwargs={"max_new_tokens": 5, "temperature": 1.0},
    )
    rows = played(env, policy, 3)
    assert len(rows) == 3
    for before, after in itertools.pairwise(rows):
        old, new = read_rows(before, ("tokens", "full")), read_rows(after, ("tokens", "prompt"))
        for a, b in zip(old, new, strict=True):
            assert torch.equal(b[: len(a)], a)
    assert rows[-1]["next", "truncated"].all()
    assert not rows[-1]["next", "game_legal"].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_call_can_be_the_action_and_is_answered_as_one(mode, make_tokenizer):
    tokenizer = qwen_tokenizer(make_tokenizer)
    env = TicTacToeEnv(num_envs=1, player="X", actions="call", input_mode=mode, tokenizer=tokenizer)
    answers = [call_of("move", move="5"), call_of("move", move=5), call_of("fly", to="moon"), "5"]
    shown = {"tools": [env.action_tool.schema]} if mode == "history" else {}
    policy = make_policy(mode, tokenizer, answers, **shown)
    rows = played(env, policy, 4)
    assert [td["next", "game_legal"].item() for td in rows] == [True, False, False, False]
    assert env.game.load(rows[0]["next", "game_state"][0]).board[4] == "X"
    source = read_rows(rows[1], ("trace", "source"))[0]
    ids = read_rows(rows[1], ("tokens", "full"))[0]
    tool = tokenizer.decode(ids[source == Source.TOOL])
    assert "You are X. Your move." in tool
    text = tokenizer.decode(read_rows(rows[3], ("tokens", "full"))[0])
    assert '"name": "move"' in text.partition("<|im_start|>user")[0]  # the template shows the tool
    assert "Cell 5 is taken." in text
    assert "Call the tool 'move' once; there is no call of it." in text
    for before, after in itertools.pairwise(rows):
        old = read_rows(before, ("tokens", "full"))[0]
        assert torch.equal(read_rows(after, ("tokens", "prompt"))[0][: len(old)], old)


def test_a_turn_that_thinks_with_a_tool_is_no_turn_of_the_game(make_tokenizer):
    tokenizer = qwen_tokenizer(make_tokenizer)

    def count(text: str) -> int:
        """Count characters.

        Args:
            text: the characters.
        """
        return len(text)

    env = TicTacToeEnv(num_envs=1, player="X", actions="call", max_steps=2)
    with pytest.raises(ConfigError, match=r"env\.action_tool next to \['count'\]"):
        env.append_transform(ToolTransform([count]))
    env = env.append_transform(ToolTransform([count, env.action_tool]))
    answers = [call_of("count", text="abc"), call_of("move", move="5"), call_of("move", move="5")]
    schemas = [env.action_tool.schema]
    rows = played(env, make_policy("history", tokenizer, answers, tools=schemas), 3)
    assert [td["next", "tools", "auxiliary"].item() for td in rows] == [True, False, False]
    assert [td["next", "step_count"].item() for td in rows] == [0, 1, 2]
    assert [td["next", "reward"].item() for td in rows] == [0.0, 0.0, pytest.approx(-0.3)]
    chat = rows[1]["next", "history"].prompt.chats[0]
    assert [m["role"] for m in chat][2:] == ["assistant", "tool", "assistant", "tool", "user"]
    assert chat[3]["content"] == "3"
    assert chat[6]["content"].endswith("You are X. Your move.")
    assert rows[2]["next", "truncated"].item()


def test_an_action_parser_that_tells_the_model_nothing_is_refused_as_a_class():
    with pytest.raises(ConfigError, match="Mute does not say how the model is to answer"):
        type("Mute", (ActionParser,), {"parse": lambda self, message: "1"})
