"""The calculator task: problems, the tool, rewards by turn, and what becomes of bad calls."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.enums import TruncationReason
from torchrl_llm.data.history import History
from torchrl_llm.envs.datasets.number_tasks import (
    CalculatorEnv,
    calculator_problem,
    calculator_problems,
)
from torchrl_llm.envs.transforms import StepCounter
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.calculator import Calculator
from torchrl_llm.tools.tool_call import ToolCall
from torchrl_llm.tools.tool_transform import ToolTransform


def _call(expression):
    return {"function": {"name": "calculator", "arguments": {"expression": expression}}}


def _act(td, *turns):
    """Each row's turn: an expression to call, or a text to say."""
    chats = []
    for chat, (kind, value) in zip(td["history"].prompt.chats, turns, strict=True):
        message = {"role": "assistant", "content": value if kind == "say" else ""}
        if kind == "call":
            message["tool_calls"] = [_call(value)]
        chats.append(chat + [message])
    td["history"].full = History.of(chats)
    return td


def test_each_problem_belongs_to_one_split_and_the_answers_are_right():
    train, test = calculator_problems("train"), calculator_problems("test")
    assert len({*train.tolist(), *test.tolist()}) == len(train) + len(test) == 162_000
    for number in torch.cat([train[:300], test[:300]]).tolist():
        row = calculator_problem(number)
        first, second = (int(part) for part in row["expression"].replace("*", "-").split("-"))
        value = first * second if "*" in row["expression"] else first - second
        assert row["answer"] == str(value)
        assert row["query"] == f"What is {row['expression']}?"
    with pytest.raises(ConfigError, match="split"):
        calculator_problems("dev")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("347*28", "9716"),
        ("12-100", "-88"),
        ("-(2+3)*4", "-20"),
        ("1/3", "0.333333333333"),
        ("7/2", "3.5"),
        ("9" * 40 + "*10", "9" * 40 + "0"),
    ],
)
def test_the_calculator_is_exact(expression, result):
    assert Calculator().run(ToolCall("calculator", {"expression": expression})) == result


@pytest.mark.parametrize(
    "expression",
    ["", "2**3", "99**98**97", "1/0", "__import__('os')", "a+1", "1,5+2", "(1", "1" * 2000, "2 3"],
)
def test_what_is_no_expression_is_answered_with_what_is(expression):
    output = Calculator().run(ToolCall("calculator", {"expression": expression}))
    assert output.error == "ValueError"
    assert "allowed are" in output.content


def test_a_call_is_thinking_and_the_turn_behind_it_is_scored():
    env = CalculatorEnv(num_envs=3, split="test", shuffle=False)
    td = env.reset()
    right, wrong = td["answer"][0], "7"
    first = CalculatorEnv(num_envs=1, split="test", shuffle=False).reset()
    expression = first["query"][0].removeprefix("What is ").removesuffix("?")
    td = env.step(_act(td, ("call", expression), ("say", wrong), ("call", "1/0")))
    after = td["next"]
    assert after["tools", "auxiliary"].flatten().tolist() == [True, False, True]
    assert after["done"].flatten().tolist() == [False, True, False]
    assert after["reward"].flatten().tolist() == [0.0, 0.0, 0.0]
    assert after["step_count"].flatten().tolist() == [0, 1, 0]
    assert after["tools", "num_failed"].tolist() == [0, 0, 1]
    assert after["history"].prompt.chats[0][-1]["content"] == right
    assert "cannot be computed" in after["history"].prompt.chats[2][-1]["content"]

    running = ~after["done"]
    td = env.step_mdp(td).set("_step", running)
    td = env.step(_act(td, ("say", f"It is {right}."), ("say", ""), ("say", "no idea")))["next"]
    assert td["reward"].flatten().tolist() == [1.0, 0.0, 0.0]
    assert td["done"].flatten().tolist() == [True, True, True]
    assert td["terminated"].flatten().tolist() == [True, True, False]
    reasons = td["truncation_reason"].flatten().tolist()
    assert reasons[2] == int(TruncationReason.MAX_STEPS)
    env.close()


def test_a_model_that_only_calls_comes_to_an_end():
    env = CalculatorEnv(num_envs=1)
    td = env.reset()
    for turn in range(CalculatorEnv.max_turns()):
        assert not td.get("done").any(), turn
        td = env.step(_act(td, ("call", "1+1")))
        td = env.step_mdp(td)
    assert td["truncated"].all()
    assert td["turn"].item() == CalculatorEnv.max_turns() == 3
    env.close()


def test_tools_stand_before_reward_and_limit_whenever_they_are_appended():
    env = CalculatorEnv(num_envs=1)
    env.append_transform(ToolTransform([], max_auxiliary_turns=1))
    names = [type(transform).__name__ for transform in env.transform]
    assert names == [
        "DataLoadingPrimer",
        "ToolTransform",
        "ToolTransform",
        "CutAnswers",
        "ArithmeticRewardParser",
        "StepCounter",
    ]
    assert isinstance(env.transform[-1], StepCounter)
    env.close()


def test_the_specs_describe_what_it_gives():
    env = CalculatorEnv(num_envs=2)
    check_env_specs(env)
    env.close()


def test_the_records_of_calls_are_plain_data():
    env = CalculatorEnv(num_envs=1)
    td = env.step(_act(env.reset(), ("call", "6*7")))["next"]
    (record,) = td["tools", "calls"][0]
    assert json.loads(json.dumps(record))["tool"] == "calculator"
    assert record["error"] == ""
    assert not record["truncated"]
    assert record["seconds"] >= 0
    assert isinstance(td, TensorDict)
    env.close()
