"""Agents in environments: what they add, what a step is, and what becomes of cut answers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer

from torchrl_llm.agents import Agent, LastRequest, ReActAgent, ReToolAgent, ToolAgent
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs import ArithmeticEnv, CalculatorEnv, ChatEnv, LetterCountingEnv, TicTacToeEnv
from torchrl_llm.envs.actions import BoxedAction, CallAction, ParserChain, TagAction, ThinkPrefix
from torchrl_llm.envs.datasets.rows_env import RowsEnv
from torchrl_llm.envs.transforms import ContextStrategy, SlidingWindow
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.modules.backends.fake import Answer
from torchrl_llm.objectives.credit import MonteCarloReturn
from torchrl_llm.rewards import Component, CompositeReward, FunctionReward, WrittenReward
from torchrl_llm.sandbox import Limits, SubprocessSandbox

MODES = ("history", "text", "tokens")
LOOKUP = '<tool_call>\n{"name": "lookup", "arguments": {"word": "abc"}}\n</tool_call>'
CODE = "```python\nprint(6 * 7)\n```"


def lookup(word: str) -> int:
    """How long a word is.

    Args:
        word: the word.
    """
    return len(word)


def move(place: str) -> str:
    """A tool of the agent's with the name of the game's.

    Args:
        place: where.
    """
    return place


@pytest.fixture(scope="module")
def tokenizer():
    """The embedded model's, whose template knows tools."""
    return AutoTokenizer.from_pretrained(embedded_model_path())


def play(agent, env, answers, tokenizer, *, steps=None):
    """The rows of an episode, in which the model says these answers."""
    env = agent.wrap(env)
    mode = env.base_env.mode.name
    policy = FakeWrapper(answers, tokenizer=tokenizer, input_mode=mode)
    td, rows = env.reset(), []
    for _ in range(len(answers) if steps is None else steps):
        td = env.step(policy(td))
        rows.append(td.unbind(0)[0].clone())
        if td["next", "done"].all():
            break
        td = env.step_mdp(td)
    env.close()
    return rows


def values(rows, *key):
    return [row.get(key).flatten()[0].item() for row in rows]


# Three agents, and what each thinks with; three environments, and two of the answers of each.
AGENTS = {
    "tool": (ToolAgent(tools=[lookup]), LOOKUP, "3"),
    "react": (ReActAgent(tools=[lookup], max_auxiliary_turns=2), LOOKUP, "3"),
    "retool": (ReToolAgent(), CODE, "<interpreter>\n42\n</interpreter>"),
}
ENVS = {
    "calculator": (CalculatorEnv, {"split": "test"}, ["60032"], [1.0]),
    "tic_tac_toe": (TicTacToeEnv, {"player": "X"}, ["<move>5</move>", "<move>x</move>"], [0, -0.3]),
    "letters": (LetterCountingEnv, {"split": "test"}, ["<answer>2</answer>"], None),
}


@pytest.mark.parametrize("env_name", ENVS)
@pytest.mark.parametrize("agent_name", AGENTS)
def test_an_agent_acts_in_any_environment_and_mode(agent_name, env_name, tokenizer):
    agent, thought, told = AGENTS[agent_name]
    make, options, said, worth = ENVS[env_name]
    if worth is None:
        plain = make(num_envs=1, shuffle=False, tokenizer=tokenizer, **options)
        worth = values(play(Agent(), plain, said, tokenizer), "next", "reward")
    answers = [each for answer in said for each in (thought, answer)]
    prompts = {}
    for mode in MODES:
        env = make(num_envs=1, shuffle=False, tokenizer=tokenizer, input_mode=mode, **options)
        rows = play(agent, env, answers, tokenizer)
        assert len(rows) == len(answers)
        prompts[mode] = [row["tokens", "prompt"].tolist() for row in rows]
        assert told in tokenizer.decode(prompts[mode][1])
        assert values(rows, "next", "reward")[1::2] == pytest.approx(worth)
        assert values(rows, "next", "reward")[::2] == [0.0] * len(said)
        # A thought and its answer are one step of the environment.
        assert values(rows, "env_step") == [n // 2 for n in range(len(rows))]
        assert values(rows, "turn") == list(range(len(rows)))
        rows[-1]["next", "done"] |= True
        buffer = ReplayBuffer(transform=JoinTurns())
        buffer.extend(rows)
        [joined] = [buffer[i] for i in range(len(buffer))]
        trained = joined["tokens", "full"][joined["trace", "mask_reason"] == 0].tolist()
        assert trained == [n for row in rows for n in row["tokens", "response"].tolist()]
    assert prompts["history"] == prompts["text"] == prompts["tokens"]


# -- the record -----------------------------------------------------------------------------------


def test_an_agent_is_frozen_and_holds_no_state(tokenizer):
    agent = ToolAgent(tools=[lookup], context=SlidingWindow(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.tools = ()
    envs = [agent.wrap(ArithmeticEnv(num_envs=1, seed=0)) for _ in range(2)]
    own = [{id(t) for t in env.transform} | {id(env.tool_schemas)} for env in envs]
    assert not own[0] & own[1]
    envs[0].close()
    assert agent == ToolAgent(tools=(lookup,), context=agent.context)


def test_a_policy_is_told_of_its_tools_and_of_the_environments(tokenizer):
    agent = ToolAgent(tools=[lookup])
    policy = FakeWrapper("4", tokenizer=tokenizer)
    env = agent.wrap(CalculatorEnv(num_envs=1, shuffle=False))
    alone, both = agent.policy(policy), agent.policy(policy, env)
    td = env.reset()
    prompts = [
        tokenizer.decode(read_rows(each(td.clone()), ("tokens", "prompt"))[0])
        for each in (policy, alone, both)
    ]
    assert [("lookup" in p, '"calculator"' in p) for p in prompts] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    env.close()


def test_tools_stand_in_front_of_what_looks_at_them():
    env = ReActAgent(tools=[lookup], context=SlidingWindow(2), parser=BoxedAction("n", "it")).wrap(
        ArithmeticEnv(num_envs=1)
    )
    assert [type(each).__name__ for each in env.transform][1:] == [
        "ToolTransform",
        "CutAnswers",
        "ParseAnswers",
        "ArithmeticRewardParser",
        "StepCounter",
        "SlidingWindow",
        "LastRequest",
    ]


@pytest.mark.parametrize(
    ("agent", "env", "why"),
    [
        (ToolAgent(tools=["calculator"]), CalculatorEnv, "both have a tool named 'calculator'"),
        (ToolAgent(tools=[move]), lambda: TicTacToeEnv(actions="call"), "named 'move'"),
        (ToolAgent(), ArithmeticEnv, "no tool to call"),
        (ReActAgent(), TicTacToeEnv, "no tool to call"),
        (Agent(parser=CallAction("a", "it")), ArithmeticEnv, "reads an action"),
        (Agent(parser=BoxedAction("a", "it")), ChatEnv, "without a reward"),
        (Agent(), torch.nn.Identity, "acts in conversations"),
    ],
)
def test_what_an_environment_cannot_honour_is_refused(agent, env, why):
    with pytest.raises(ConfigError, match=why):
        agent.wrap(env())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ToolAgent(tools=lookup), "is a list"),
        (lambda: ToolAgent(tools=[3]), "must be a Tool or a function"),
        (lambda: ToolAgent(tools=["calculater"]), "calculator"),
        (lambda: ToolAgent(tools=[lookup], max_auxiliary_turns=0), "at least 1"),
        (lambda: ReActAgent(last_request=" "), "text of a last request is empty"),
    ],
)
def test_a_record_that_cannot_be_is_refused(make, why):
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_tool_call_that_acts_stays_one_beside_tools_of_the_agent(tokenizer):
    act = '<tool_call>\n{"name": "move", "arguments": {"move": "5"}}\n</tool_call>'
    env = TicTacToeEnv(num_envs=1, actions="call", player="X", shuffle=False, tokenizer=tokenizer)
    rows = play(ToolAgent(tools=[lookup]), env, [LOOKUP, act], tokenizer)
    assert values(rows, "env_step") == [0, 0]
    assert [row["next", "game_action"] for row in rows] == ["", "5"]
    assert values(rows[-1:], "next", "env_step") == [1]


# -- ReAct ----------------------------------------------------------------------------------------


def test_after_its_turns_with_tools_it_has_to_answer_and_the_request_is_not_kept(tokenizer):
    agent = ReActAgent(tools=[lookup], max_auxiliary_turns=2, last_request="Now!")
    answers = [LOOKUP, LOOKUP, LOOKUP, "<move>5</move>"]
    for mode in MODES:
        env = TicTacToeEnv(
            num_envs=1, player="X", shuffle=False, input_mode=mode, tokenizer=tokenizer
        )
        rows = play(agent, env, answers, tokenizer)
        asked = [tokenizer.decode(row["tokens", "prompt"]).count("Now!") for row in rows]
        assert asked == [0, 0, 1, 0]
        # The third turn may not call any more: it is a move, and no legal one.
        assert values(rows, "next", "tools", "auxiliary") == [True, True, False, False]
        assert values(rows, "env_step") == [0, 0, 0, 1]
        assert "No tool was called" in tokenizer.decode(rows[3]["tokens", "prompt"])
        rows[-1]["next", "done"] |= True
        buffer = ReplayBuffer(transform=JoinTurns())
        buffer.extend(rows)
        assert len(buffer) == 2  # the row forks where the request is gone


def test_a_request_leaves_what_others_say_alone():
    request = LastRequest(2)
    said = [{"role": "user", "content": request.text}, {"role": "assistant", "content": "4"}]
    assert request.rewrite(tuple(said)) == said[1:]
    assert request.rewrite(tuple(said[:1])) == said[:1]


def test_the_limit_holds_for_the_tools_of_the_environment(tokenizer):
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    env = CalculatorEnv(num_envs=1, shuffle=False, tokenizer=tokenizer)
    rows = play(ReActAgent(max_auxiliary_turns=3), env, [call] * 4, tokenizer)
    assert values(rows, "next", "tools", "auxiliary") == [True, True, True, False]
    assert values(rows, "next", "done") == [False, False, False, True]
    assert ReActAgent(max_auxiliary_turns=3).auxiliary_turns(2) == 3
    assert ToolAgent(tools=[lookup], max_auxiliary_turns=3).auxiliary_turns(9) == 9


# -- ReTool ---------------------------------------------------------------------------------------


def test_a_sandbox_of_ones_own_keeps_its_limits():
    own = SubprocessSandbox(Limits(memory_bytes=300 << 20))
    for agent, wanted in (
        (ReToolAgent(sandbox=own), 300),
        (ReToolAgent(memory_bytes=1 << 30), 1024),
    ):
        code = agent.make_transforms()[0]
        (tool,) = code.tools.values()
        assert tool.executor.limits.memory_bytes == wanted << 20


def test_code_comes_before_the_answer(tokenizer):
    both = f"{CODE}\nThe answer is 60032."
    env = CalculatorEnv(num_envs=1, split="test", shuffle=False, tokenizer=tokenizer)
    rows = play(ReToolAgent(), env, [both, f"{CODE}\n{CODE}", "60032"], tokenizer)
    assert values(rows, "next", "reward") == [0.0, 0.0, 1.0]
    told = tokenizer.decode(rows[2]["tokens", "prompt"])
    assert told.count("<interpreter>\n42\n") == 2
    assert "1 further calls were not run" in told


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        ("while True: pass", "did not end within 4 s"),
        ("import os; os._exit(3)", "<interpreter>"),
    ],
)
def test_code_that_fails_is_told(code, told, tokenizer):
    env = CalculatorEnv(num_envs=1, split="test", shuffle=False, tokenizer=tokenizer)
    rows = play(ReToolAgent(timeout=4.0), env, [f"```python\n{code}\n```", "60032"], tokenizer)
    assert told in tokenizer.decode(rows[1]["tokens", "prompt"])
    assert values(rows, "next", "reward") == [0.0, 1.0]


# -- answers that were cut ------------------------------------------------------------------------


def cut(text):
    return Answer(text, FinishReason.LENGTH)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agent", [Agent(), *(agent for agent, *_ in AGENTS.values())])
def test_a_cut_answer_is_scored_and_its_reward_is_told_that_it_was_cut(agent, mode, tokenizer):
    told = []

    def reward(response, row):
        told.append((response, row["finish_reason"]))
        return float("2" in response)

    options = {"dataset": [{"query": "1+1?", "answer": "2"}], "reward": reward, "num_envs": 1}
    options |= {"input_mode": mode, "tokenizer": tokenizer, "max_steps": 2}
    for said, ended, penalty, expected in [
        ("It is 2", "length", 0.0, 1.0),
        ("It is", "length", 0.0, 0.0),
        ("It is 2", "length", 0.25, 0.75),
        ("2", "stop", 0.25, 1.0),
    ]:
        answer = Answer(said, FinishReason[ended.upper()])
        [row] = play(agent, RowsEnv(cut_penalty=penalty, **options), [answer], tokenizer)
        assert row["next", "reward"].item() == expected
        assert row["next", "success"].item() == ("2" in said)
        assert row["next", "reward_valid"].item()
        assert row["next", "error", "type"] == ""
        assert told.pop() == (said, ended)


def test_every_kind_of_reward_sees_how_an_answer_ended_and_a_column_of_that_name_is_refused(
    tokenizer,
):
    def of_sample(sample):
        return float(sample.finish_reason == FinishReason.LENGTH) + sample.num_tokens / 100

    def of_row(response, row):
        return float(row["finish_reason"] == "length")

    rows = [{"query": "1+1?", "answer": "2"}]
    options = {"num_envs": 1, "tokenizer": tokenizer}
    both = {"row": of_row, "sample": (of_sample, 0.5)}
    for reward, expected in ((of_sample, 1.01), (both, 1.505)):
        env = RowsEnv(dataset=rows, reward=reward, **options)
        [row] = play(Agent(), env, [cut("2")], tokenizer)
        assert row["next", "reward"].item() == pytest.approx(expected)
    logged = [{**rows[0], "finish_reason": "stop"}]
    env = RowsEnv(dataset=logged, reward=of_row, **options)
    with pytest.raises(DataError, match=r"column 'finish_reason'.*rename"):
        play(Agent(), env, [cut("2")], tokenizer)


def test_a_row_that_was_cut_is_scored_alone_as_in_a_batch(tokenizer):
    def of_row(response, row):
        return float(row["finish_reason"] == "length")

    env = RowsEnv(dataset=[{"query": "1+1?", "answer": "2"}], reward=of_row, num_envs=1)
    [row] = play(Agent(), env, [cut("2")], tokenizer)
    bare = row.exclude("next")
    for kind, scored_by in ((FunctionReward, of_row), (CompositeReward, {"a": of_row})):
        reward = kind(scored_by, input_mode="history", tokenizer=tokenizer)
        buffer = ReplayBuffer(transform=reward)
        buffer.extend([bare])
        assert buffer[0]["next", "reward"].tolist() == [[1.0]]
        assert buffer[:]["next", "reward"].tolist() == [[[1.0]]]


def test_a_task_in_which_no_cut_answer_is_refused_says_that_accepting_has_no_effect():
    env = RowsEnv(dataset=[{"query": "1+1?", "answer": "2"}], reward=lambda response: 1.0)
    with pytest.raises(ConfigError, match="accept_cut has no effect in RowsEnv"):
        Agent(accept_cut=True).wrap(env)


@pytest.mark.parametrize("name", ["tool", "retool"])
def test_calls_of_a_cut_answer_are_not_made_unless_it_is_accepted(name, tokenizer):
    agent, thought, told = AGENTS[name]
    options = {"dataset": [{"query": "1+1?", "answer": "2"}], "max_steps": 2, "num_envs": 1}
    options |= {"reward": lambda response, answer: 1.0, "tokenizer": tokenizer}
    rows = play(agent, RowsEnv(**options), [cut(thought), "2"], tokenizer)
    assert values(rows, "next", "reward") == [0.0, 1.0]
    assert [row["next", "error", "type"] for row in rows] == ["IncompleteCompletion", ""]
    assert values(rows, "env_step") == [0, 1]
    said = tokenizer.decode(rows[1]["tokens", "prompt"])
    assert said.count("your answer was cut") == 1
    assert "Your answer was cut off" not in said  # told once
    accepts = dataclasses.replace(agent, accept_cut=True)
    rows = play(accepts, RowsEnv(**options), [cut(thought), "2"], tokenizer)
    assert told in tokenizer.decode(rows[1]["tokens", "prompt"])
    assert values(rows, "next", "reward") == [0.0, 1.0]


def test_a_cut_move_is_an_invalid_one_with_its_reason(tokenizer):
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False, tokenizer=tokenizer)
    [row] = play(Agent(), env, [cut("<move>5</move>")], tokenizer)
    assert values([row], "next", "reward") == pytest.approx([-0.3])
    assert row["next", "error", "type"] == "IncompleteCompletion"
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False, tokenizer=tokenizer)
    [row] = play(Agent(accept_cut=True), env, [cut("<move>5</move>")], tokenizer)
    assert row["next", "game_action"] == "5"


def test_the_penalty_counts_once_beside_other_parts_of_the_reward(tokenizer):
    rows = [{"query": "1+1?", "answer": "2"}]
    env = RowsEnv(
        dataset=rows, reward=lambda response, answer: 1.0, num_envs=1, cut_penalty=0.5, max_steps=2
    )
    bonus = Component(lambda sample: 1.0, weight=4.0)
    parts = {"task": Component(WrittenReward()), "bonus": bonus}
    env.append_transform(CompositeReward(parts, set_done_if_answer=False))
    told = play(Agent(), env, [cut("2")], tokenizer)
    assert values(told, "next", "reward") == [4.5]
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(told)
    assert buffer[0]["next", "reward"].item() == 4.5
    assert buffer[0]["next", "reward_cut"].item() == -0.5


# -- parsers --------------------------------------------------------------------------------------


def test_the_parser_of_an_agent_reads_a_game_and_judges_a_plain_answer(tokenizer):
    chain = ParserChain(
        ThinkPrefix(reward=0.25, penalty=-0.5), TagAction("cell", "a free cell", reward=0.125)
    )
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False, tokenizer=tokenizer)
    said = ["<think>x</think><cell>5</cell>", "<move>1</move>"]
    rows = play(Agent(parser=chain), env, said, tokenizer)
    assert [row["next", "game_action"] for row in rows] == ["5", ""]
    assert values(rows, "next", "reward") == pytest.approx([0.375, -0.8])
    prompt = tokenizer.decode(rows[0]["tokens", "prompt"])
    assert ("<cell>" in prompt, "<move>" in prompt) == (True, False)
    boxed = BoxedAction("sum", "it", reward=0.5, penalty=-1.0)
    rows = [{"query": "1+1?", "answer": "2"}]
    env = RowsEnv(dataset=rows, reward=lambda r, answer: 1.0, num_envs=1, max_steps=2)
    rows = play(Agent(parser=boxed), env, ["2", r"\boxed{2}"], tokenizer)
    assert values(rows, "next", "reward") == [-1.0, 1.5]
    assert values(rows, "next", "reward_parser") == [-1.0, 0.5]
    assert rows[0]["next", "error", "type"] == "ActionError"
    assert r"Answer with it in \boxed{}." in tokenizer.decode(rows[1]["tokens", "prompt"])


# -- credit and context ---------------------------------------------------------------------------


def test_rows_of_one_step_are_not_discounted_against_each_other(tokenizer):
    env = CalculatorEnv(num_envs=1, split="test", shuffle=False, tokenizer=tokenizer)
    rows = play(ToolAgent(tools=[lookup]), env, [LOOKUP, "60032"], tokenizer)
    credited = MonteCarloReturn(0.5).inv(lazy_rows(rows))
    assert credited["advantage"].flatten().tolist() == [1.0, 1.0]
    # Whoever makes steps of calls writes the column; the number of calls says nothing.
    steps = [(0, 0.0), (0, 0.0), (1, 1.0)]
    made = [
        row.clone()
        .set("env_step", torch.tensor(step))
        .set("turn", torch.tensor(turn))
        .set(("next", "reward"), torch.tensor([[reward]]))
        .set(("next", "done"), torch.tensor([reward > 0]))
        .set(("next", "tools", "auxiliary"), torch.tensor([False]))
        for turn, (row, (step, reward)) in enumerate(zip([*rows, rows[1]], steps, strict=True))
    ]
    credited = MonteCarloReturn(0.5).inv(lazy_rows(made))
    assert credited["advantage"].flatten().tolist() == [0.5, 0.5, 1.0]


class Forgetful(ContextStrategy):
    """Takes away what tools have said."""

    cause = "forgot"

    def rewrite(self, messages):
        return [m for m in messages if m["role"] != "tool"]


def test_a_context_that_takes_a_call_from_its_result_is_refused(tokenizer):
    env = ArithmeticEnv(num_envs=1, shuffle=False, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="Forgetful drops"):
        play(ToolAgent(tools=[lookup], context=Forgetful()), env, [LOOKUP, "4"], tokenizer)


def test_a_conversation_that_was_broken_before_is_left_alone():
    chat = [{"role": "tool", "content": "3"}, {"role": "user", "content": "So?"}]
    strategy = Forgetful()
    env = ChatEnv(batch_size=(1,)).append_transform(strategy)
    td = env.reset(type(env.rand_action())({"query": History.of([chat])}, batch_size=(1,)))
    assert td["history"].prompt.chats[0].messages == tuple(chat[1:])
