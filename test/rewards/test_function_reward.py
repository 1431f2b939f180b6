"""Plain functions as rewards: what they are called with, and what cannot be one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data import History
from torchrl_llm.data.failures import Failure
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards import (
    Component,
    CompositeReward,
    FormatReward,
    FunctionReward,
    GSM8KRewardParser,
    RewardScore,
    Scorer,
    as_reward,
)

ROWS = [
    {"query": "2+2?", "answer": "4", "level": "easy"},
    {"query": "3*3?", "answer": "9", "level": "hard"},
]


def answered(reward, texts, rows=ROWS):
    """What follows a step in which the rows are answered."""
    env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=len(rows))
    env.append_transform(as_reward(reward))
    td = env.reset()
    chats = [
        chat + [{"role": "assistant", "content": text}]
        for chat, text in zip(td["history"].prompt.chats, texts, strict=True)
    ]
    td["history"].full = History.of(chats)
    return env.step(td)["next"]


def right(response, answer):
    return response == answer


def by_level(response, row):
    return 2.0 * (response == row["answer"]) if row["level"] == "hard" else 0.5


def short(response):
    return len(response) < 2


def counted(sample):
    return float(len(sample.response)) if sample.answer else 0.0


class Mine:
    def scored(self, response, answer):
        return float(response == answer)


@pytest.mark.parametrize(
    ("reward", "values"),
    [
        (right, [1.0, 0.0]),
        (by_level, [0.5, 0.0]),
        (short, [1.0, 0.0]),
        (counted, [1.0, 2.0]),
        (lambda response, answer: response == answer, [1.0, 0.0]),
        (Mine().scored, [1.0, 0.0]),
        (lambda response, answer=None: float(answer == "4"), [1.0, 0.0]),
        (lambda response, expected: response == expected, [1.0, 0.0]),
    ],
)
def test_a_function_gets_what_its_arguments_name(reward, values):
    td = answered(reward, ["4", "10"])
    assert td["reward"].flatten().tolist() == values
    assert td["reward_valid"].all()
    assert td["success"].flatten().tolist() == [value > 0 for value in values]


def test_several_functions_add_up_by_their_weights_and_the_first_says_what_a_success_is():
    td = answered({"right": right, "level": (by_level, 0.1), "format": FormatReward()}, ["4", "9"])
    # 1 + 0.1 * 0.5 and 1 + 0.1 * 2; neither has the blocks of the format
    assert td["reward"].flatten().tolist() == pytest.approx([1.05, 1.2])
    assert td["rewards", "level", "value"].flatten().tolist() == [0.5, 2.0]
    assert td["success"].all()


def test_a_function_that_raises_makes_its_row_invalid_and_no_other():
    def typo(response, answer):
        return response.strp() == answer if answer == "9" else 1.0

    td = answered(typo, ["4", "9"])
    assert td["reward_valid"].tolist() == [True, False]
    assert list(td["error", "type"]) == ["", "AttributeError"]
    assert td["reward"].isnan().flatten().tolist() == [False, True]


def test_rows_without_an_answer_are_scored_by_their_response_alone():
    rows = [{"query": "Say a"}, {"query": "Say b"}]
    td = answered(lambda response, answer: float(answer is None), ["a", "b"], rows)
    assert td["reward"].flatten().tolist() == [1.0, 1.0]


def test_a_score_of_a_function_may_say_more_than_a_number():
    td = answered(lambda response, answer: RewardScore(0.3, success=False), ["4", "9"])
    assert td["success"].sum() == 0
    assert td["reward"].flatten().tolist() == pytest.approx([0.3, 0.3])


def test_rows_can_be_scored_outside_an_environment():
    reward = FunctionReward(by_level, input_mode="text")
    td = TensorDict(
        {"text": {"full": ["2+2?4", "3*3?9"], "response": ["4", "9"]}, "answer": ["4", "9"]}
        | {"level": ["easy", "hard"]},
        batch_size=[2],
    )
    assert reward(td)["next", "reward"].flatten().tolist() == [0.5, 2.0]


def test_what_is_a_reward_already_stays_itself():
    parser = GSM8KRewardParser()
    assert as_reward(parser) is parser
    assert isinstance(as_reward(GSM8KRewardParser), GSM8KRewardParser)
    assert isinstance(as_reward(Component(right, 2.0)), CompositeReward)
    assert as_reward(Component(right, 2.0)).score("4", "4").reward == 2.0
    assert torch.equal(as_reward({"a": (right, 3.0)})._weights, torch.tensor([3.0]).double())


async def later(response, answer):
    return 1.0


REFUSED = [
    (lambda prompts, completions, **kwargs: [0.0], r"one of TRL's.*def reward\(response, answer\)"),
    (lambda completions, **kwargs: [0.0], "one of TRL's"),
    (lambda completion_ids, **kwargs: [0.0], "one of TRL's"),
    (lambda response, answer, third: 0.0, r"must take \(response, answer\)"),
    (lambda answer, response: 0.0, "would get the response first"),
    (lambda: 0.0, "cannot be called"),
    (lambda response, *, scale: 0.0, "cannot be called"),
    (lambda response, *, row: 0.0, "never get 'row'"),
    (lambda response, answer, row=None: 0.0, "never get 'row'"),
    (lambda response, finish_reason=None: 0.0, "never get 'finish_reason'"),
    (lambda response, finish_reason: 0.0, "never get 'finish_reason'"),
    (lambda response, row, finish_reason=None: 0.0, "never get 'finish_reason'"),
    (later, "is a coroutine"),
    (3, "a reward is a function of"),
    ("exact", "a reward is a function of"),
    (FormatReward(), None),
]


@pytest.mark.parametrize(("reward", "message"), REFUSED)
def test_what_cannot_be_a_reward_is_refused_before_anything_is_scored(reward, message):
    if message is None:
        assert as_reward(reward).score("<think>a</think><answer>b</answer>", None).reward == 1.0
        return
    with pytest.raises(ConfigError, match=message):
        as_reward(reward)


@pytest.mark.parametrize("error", [KeyError("table"), SystemExit(0), TypeError("no table")])
def test_a_class_that_fails_while_it_is_made_is_told_with_its_line(error):
    class Lookup(Scorer):
        def __init__(self):
            raise error

        def score(self, sample):
            return 1.0

    with pytest.raises(
        ConfigError, match=rf"Lookup\(\) raised {type(error).__name__}: .*{error}"
    ) as told:
        as_reward(Lookup)
    assert f"{__file__}:" in str(told.value)


def test_what_is_kept_of_an_exception_holds_no_password():
    error = OSError("https://user:secret@host/x?api_key=secret of Bearer 0123456789abcdef")
    for failure in (Failure.of(error), Failure.told("OSError", str(error))):
        told = "https://user:***@host/x?api_key=*** of Bearer ***"
        assert (failure.message, failure.traceback) == (told, f"OSError: {told}")
