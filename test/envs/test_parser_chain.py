"""Parsers of actions in a chain: what is read and what it is worth, in games and plain tasks."""

from __future__ import annotations

import pytest
from tensordict import TensorDict

from torchrl_llm.data.history import History
from torchrl_llm.envs.actions import (
    ActionError,
    BareAction,
    BoxedAction,
    CallAction,
    ParsedScore,
    ParserChain,
    TagAction,
    ThinkPrefix,
)
from torchrl_llm.envs.datasets.rows_env import RowsEnv
from torchrl_llm.envs.games import GameEnv, TicTacToe
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.tasks import check_options


def _said(text: str, **more):
    return {"role": "assistant", "content": text, **more}


def _chain(**penalties: float) -> ParserChain:
    return ParserChain(
        ThinkPrefix(reward=0.125, penalty=penalties.get("think", 0.0)),
        TagAction("move", "a cell", reward=0.25, penalty=penalties.get("tag", 0.0)),
        BoxedAction("cell", "it", reward=0.5, penalty=penalties.get("box", 0.0)),
    )


def test_each_link_reads_what_the_one_before_has_left():
    parsed = _chain().read(_said(r"<think>\boxed{1}</think><move>so \boxed{\frac{5}{1}}</move>"))
    assert parsed == (r"\frac{5}{1}", 0.875)


@pytest.mark.parametrize(
    ("text", "reward", "why"),
    [
        ("<move>5</move>", -1.0, "does not begin"),
        (r"<think>x</think> \boxed{5}", -1.875, "No <move>"),
        ("<think>x</think><move>5</move>", -2.625, "boxed"),
        ("<think>never closed", -1.0, "does not begin"),
        ("", -1.0, "does not begin"),
    ],
)
def test_the_first_that_fails_ends_it_and_its_reward_counts(text, reward, why):
    with pytest.raises(ActionError, match=why) as raised:
        _chain(think=-1.0, tag=-2.0, box=-3.0).read(_said(text))
    assert raised.value.reward == reward


def test_a_chain_writes_what_it_reads():
    for chain in (_chain(), ParserChain(ThinkPrefix(), CallAction("move", "a cell"))):
        assert chain.parse(chain.message("5")) == "5"


def test_a_call_is_read_of_the_message_behind_a_prefix_of_thinking():
    call = {"type": "function", "function": {"name": "move", "arguments": {"move": "5"}}}
    chain = ParserChain(ThinkPrefix(penalty=-1.0), CallAction("move", "a cell", reward=0.5))
    assert chain.read(_said("<think>a</think>", tool_calls=[call])) == ("5", 0.5)
    with pytest.raises(ActionError) as raised:
        chain.read(_said("now", tool_calls=[call]))
    assert raised.value.reward == -1.0


@pytest.mark.parametrize(
    "links", [(), (CallAction("move", "a cell"), BareAction("move", "a cell"))]
)
def test_a_chain_that_cannot_be_is_refused(links):
    with pytest.raises(ConfigError, match=r"last link|at least one"):
        ParserChain(*links)


def _answered(env, text: str) -> TensorDict:
    td = env.reset()
    td["history"].full = History.of([td["history"].prompt.chats[0] + [_said(text)]])
    return env.step(td)["next"]


@pytest.mark.parametrize(
    ("text", "reward", "legal"),
    [
        (r"<think>a</think><move>\boxed{5}</move>", 0.875, True),
        (r"<think>a</think><move>\boxed{12}</move>", -0.3 + 0.875, False),
        (r"<move>\boxed{5}</move>", -0.3 - 1.0, False),
    ],
)
def test_a_game_adds_the_rewards_of_the_form_to_its_own(text, reward, legal):
    chain = _chain(think=-1.0)
    env = GameEnv(TicTacToe(player="X"), num_envs=1, shuffle=False, actions=chain)
    told = _answered(env, text)
    assert told["reward"].item() == pytest.approx(reward)
    assert told["game_legal"].item() is legal
    assert chain.help in env.base_env.system_prompt


def test_a_game_whose_chain_ends_with_a_call_shows_its_tool():
    chain = ParserChain(ThinkPrefix(), CallAction("move", "a cell"))
    env = GameEnv(TicTacToe(player="X"), num_envs=1, shuffle=False, actions=chain)
    assert env.tool_schemas == [chain.links[-1].tool.schema]


def test_a_plain_task_is_scored_by_what_a_chain_reads():
    score = ParsedScore(_chain(think=-1.0), lambda action, answer: float(action == answer))
    rows = [{"query": "2+3?", "answer": "5"}]
    for text, reward in (
        (r"<think>a</think><move>\boxed{5}</move>", 1.875),
        (r"<think>a</think><move>\boxed{4}</move>", 0.875),
        ("5", -1.0),
    ):
        env = RowsEnv(dataset=rows, reward=score, num_envs=1)
        told = _answered(env, text)
        assert told["reward"].item() == reward


def test_a_plain_task_refuses_a_chain_of_calls():
    with pytest.raises(ConfigError, match="tool calls"):
        ParsedScore(CallAction("move", "a cell"), lambda action, answer: 0.0)


def test_a_form_that_there_is_not_is_refused_by_the_name_of_its_key():
    check_options("tic_tac_toe", {"actions": "boxed"})
    with pytest.raises(
        ConfigError, match=r"env\.options\.actions must be one of \['tag', .*'boxed'\]"
    ):
        check_options("tic_tac_toe", {"actions": "tga"})
