"""IfEvalScorer: verdicts to rewards, in environments and over tables."""

from __future__ import annotations

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.errors import ConfigError, DataError, RewardError
from torchrl_llm.rewards.ifeval import (
    IFEvalData,
    IFEvalExample,
    IFEvalScoreData,
    IfEvalScorer,
    Verdict,
)
from torchrl_llm.rewards.reward_parser import RewardParser

COMMA, LOWER, TITLE = (
    "punctuation:no_comma",
    "change_case:english_lowercase",
    "detectable_format:title",
)
BOTH = IFEvalExample((COMMA, LOWER), ({}, {}))
ROWS = [
    {
        "query": f"question {n}",
        "key": torch.tensor(n),
        "instruction_id_list": names,
        "kwargs": ({},) * len(names),
    }
    for n, names in enumerate([(COMMA,), (COMMA, LOWER), (COMMA, LOWER, TITLE)])
]


def make_env(scorer=None, rows=ROWS, mode="history", tokenizer=None):
    env = DatasetChatEnv(
        dataset=rows, shuffle=False, num_envs=len(rows), input_mode=mode, tokenizer=tokenizer
    )
    return env.append_transform(IfEvalScorer() if scorer is None else scorer)


def flags(td, name):
    return [row.tolist() for row in read_rows(td, ("ifeval_score", name))]


def test_the_reward_of_a_response():
    for response, reward, success, has_answer, has_think in [
        # all four accuracies are 1
        ("<answer>this is fine</answer>", 1.0 + 0.1, True, True, False),
        ("<think>So, so.</think><answer>this is fine</answer>", 1.15, True, True, True),
        ("So, so.</think><answer>this is fine</answer>", 1.15, True, True, True),
        # no comma, but a capital: instruction-level 1/2 strictly and loosely
        ("<answer>This is fine</answer>", 0.3 / 2 + 0.1 / 2 + 0.1, False, True, False),
        # loosely all: 0.2 + 0.1, and strictly no comma: 0.3 / 2
        ("<answer>Sure:\nthis is fine</answer>", 0.15 + 0.3 + 0.1, False, True, False),
        ("<answer>Oh, No</answer>", 0.1, False, True, False),
        # nothing to look at, whatever the rest says
        ("this is fine", 0.0, False, False, False),
        ("<think>so</think>this is fine", 0.05, False, False, True),
        ("<think><answer>this is fine</answer></think>", 0.05, False, False, True),
        ("<answer></answer>", 0.1, False, True, False),
        ("<answer>this is fine", 0.0, False, False, False),
        ("", 0.0, False, False, False),
        # the last block counts, and two of them are no form
        ("<answer>Oh, No</answer><answer>this is fine</answer>", 1.0, True, True, False),
        ("<think>a</think><think>b</think><answer>this is fine</answer>", 1.1, True, True, True),
    ]:
        score = IfEvalScorer().score(response, BOTH)
        assert score[0] == pytest.approx(reward)
        assert score[1:] == (success, has_answer, has_think)


def test_the_whole_response_behind_the_reasoning_can_be_scored():
    scorer = IfEvalScorer(scored_part="response")
    assert scorer.score("this is fine", BOTH).reward == pytest.approx(1.0)
    assert scorer.score("<think>Oh, No</think>\nthis is fine", BOTH).reward == pytest.approx(1.0)
    assert scorer.score("<answer>This is fine</answer>", BOTH).reward == pytest.approx(0.2)
    assert scorer.score("<think>this is fine</think>", BOTH)[0:3] == (0.0, False, False)
    assert scorer.score("this is fine", BOTH)[1:] == (True, True, False)


def test_the_weights_can_be_chosen():
    scorer = IfEvalScorer(format_weights=[0, 0, 2, 1])
    score = scorer.score("<answer>Sure:\nthis is fine</answer>", BOTH)
    assert score.reward == pytest.approx(3.1)
    for weights in ([1, 2, 3], [1, 2, 3, float("nan")]):
        with pytest.raises(ConfigError, match="four finite numbers"):
            IfEvalScorer(format_weights=weights)
    with pytest.raises(ConfigError, match="no effect"):
        IfEvalScorer(format_weights=[1, 0, 0, 0], aggregate_reward=len)


def test_many_tags_take_linear_time():
    for tag in ("<answer>", "</answer>", "<think>", "</think>", "<answer></think>"):
        assert IfEvalScorer().score(tag * 50_000, BOTH).reward <= 0.15


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_scores_are_written_in_every_input_mode(mode, tokenizer):
    texts = iter(
        ["<answer>Oh, no</answer>", "<answer>Sure:\nso it is</answer>", "<answer>so it is</answer>"]
    )
    policy = AnsweringPolicy(mode, lambda prompt: next(texts), tokenizer)
    env = make_env(mode=mode, tokenizer=tokenizer)
    td = env.step(policy(env.reset()))["next"]
    assert flags(td, "inst_level_strict_acc") == [[False], [True, False], [True, True, False]]
    assert flags(td, "inst_level_loose_acc") == [[False], [True, True], [True, True, False]]
    assert flags(td, "prompt_level_strict_acc") == [[False], [False], [False]]
    assert flags(td, "prompt_level_loose_acc") == [[False], [True], [False]]
    # 0.1 | 0.3 / 2 + 0.2 + 0.1 + 0.1 | (0.3 + 0.1) * 2 / 3 + 0.1
    assert td["reward"].flatten().tolist() == pytest.approx([0.1, 0.55, 0.4 * 2 / 3 + 0.1])
    assert td["reward"].shape == (3, 1, 1)
    assert td["reward"].dtype == torch.float32
    assert td["success"].flatten().tolist() == [False] * 3
    assert td["done"].flatten().tolist() == [True] * 3
    assert td["reward_valid"].all()


def test_the_specs_hold_with_and_without_a_reward():
    check_env_specs(make_env())
    check_env_specs(make_env(IfEvalScorer(aggregate_reward=False)))


def test_scores_without_a_reward(answer):
    env = make_env(IfEvalScorer(aggregate_reward=False))
    td = env.step(answer(env.reset(), *["<answer>so it is</answer>"] * 3))["next"]
    assert flags(td, "prompt_level_strict_acc") == [[True], [True], [False]]
    assert "success" not in td.keys()
    assert "reward_answer" not in td.keys()
    assert td["reward_valid"].all()
    assert td["done"].all()


def test_scores_without_a_reward_leave_the_validity_of_another_reward(answer):
    class Failing(RewardParser):
        def score(self, response, answer):
            raise ValueError("no luck")

    rows = [{**row, "answer": ""} for row in ROWS]
    env = make_env(Failing(), rows).append_transform(IfEvalScorer(aggregate_reward=False))
    td = env.step(answer(env.reset(), *["<answer>so it is</answer>"] * 3))["next"]
    assert td["reward_valid"].tolist() == [False] * 3
    assert list(td["error", "message"]) == ["no luck"] * 3


def test_an_answer_ends_the_episode_unless_told_otherwise(answer):
    for ends in (True, False):
        env = make_env(IfEvalScorer(set_done_if_answer=ends))
        td = env.step(answer(env.reset(), "<answer>a</answer>", "b", "<answer>"))["next"]
        assert td["done"].flatten().tolist() == [ends, False, False]
        assert td["terminated"].flatten().tolist() == [ends, False, False]


def test_a_row_with_an_unknown_instruction_is_invalid_and_no_other(answer):
    bad = [
        {**ROWS[0], "instruction_id_list": ("punctuation:no_colon",)},
        {**ROWS[0], "kwargs": ({"num_words": 3},)},
        {**ROWS[1], "kwargs": ({},)},
    ]
    env = make_env(rows=[*ROWS, *bad])
    td = env.step(answer(env.reset(), *["<answer>so it is</answer>"] * 6))["next"]
    assert td["reward_valid"].tolist() == [True] * 3 + [False] * 3
    assert td["reward"].flatten().isnan().tolist() == [False] * 3 + [True] * 3
    assert list(td["error", "type"]) == [""] * 3 + ["RewardError"] * 3
    messages = list(td["error", "message"])
    assert "did you mean 'punctuation:no_comma'" in messages[3]
    assert "takes the arguments [], got ['num_words']" in messages[4]
    assert "2 instructions and 1 arguments" in messages[5]
    assert flags(td, "prompt_level_strict_acc")[3:] == [[False]] * 3
    assert td["done"].flatten().tolist() == [True] * 3 + [False] * 3
    scores = IFEvalScoreData.from_tensordict(td["ifeval_score"])
    # 1 + 2 + 2 of 6 instructions; the invalid rows are no zeros
    assert scores.accuracies(td["reward_valid"])["inst_level_strict_acc"] == pytest.approx(5 / 6)


def test_rows_that_are_not_stepped_and_turns_of_tools_alone_are_not_scored(answer):
    env = make_env()
    td = answer(env.reset(), *["<answer>so it is</answer>"] * 3)
    td["_step"] = torch.tensor([[True], [False], [True]])
    after = env.step(td)["next"]
    assert flags(after, "prompt_level_strict_acc") == [[True], [False], [False]]
    assert after["reward"].flatten()[1] == 0
    assert after["done"].flatten().tolist() == [True, False, True]
    del td["_step"]
    td["next", "tools", "auxiliary"] = torch.tensor([[False], [True], [False]])
    after = IfEvalScorer(input_mode="history")(td)["next"]
    assert flags(after, "prompt_level_strict_acc") == [[True], [False], [False]]
    assert after["reward"].flatten().tolist() == pytest.approx([1.1, 0.0, 0.4 * 2 / 3 + 0.1])
    assert after["reward_valid"].all()


def test_a_function_makes_the_reward():
    seen = []

    def longest(score, *, think_blocks, answer_blocks, complete):
        seen.append((think_blocks, answer_blocks, complete))
        assert score.batch_size == ()
        assert score.prompt_level_strict_acc.shape == (1,)
        return score.inst_level_strict_acc.float().mean(-1, keepdim=True)

    data = IFEvalData.from_rows(
        [dict(row, prompt=row["query"], key=int(row["key"])) for row in ROWS],
        responses=["<answer>a</answer>", "<think>t</think><answer>A</answer>", "x"],
    )
    td = data.to_tensordict()
    td["tokens"] = ragged_rows({"finish_reason": [torch.tensor(i) for i in (0, 1, 0)]})
    scored = IfEvalScorer(aggregate_reward=longest, response_column="response")(td)
    assert scored["next", "reward"].flatten().tolist() == [1.0, 0.5, 0.0]
    assert seen == [([], ["a"], True), (["t"], ["A"], False), ([], [], True)]
    seen.clear()
    IfEvalScorer(aggregate_reward=longest, response_column="response")(data.to_tensordict())
    assert [complete for *_, complete in seen] == [None] * 3


def test_a_function_that_fails_or_returns_no_number_is_data():
    def broken(score, **blocks):
        raise ZeroDivisionError("no such weight")

    td = TensorDict(
        text=Column.of(["<answer>a</answer>"] * 2),
        ids=Column.of([(COMMA,)] * 2),
        arguments=Column.of([({},)] * 2),
        batch_size=[2],
    )
    names = {
        "instruction_ids_key": "ids",
        "keyword_args_key": "arguments",
        "response_column": "text",
    }
    out = IfEvalScorer(aggregate_reward=broken, **names)(td.copy())["next"]
    assert list(out["error", "type"]) == ["ZeroDivisionError"] * 2
    assert not out["reward_valid"].any()
    out = IfEvalScorer(aggregate_reward=lambda *a, **k: "good", **names)(td.copy())["next"]
    assert list(out["error", "type"]) == ["RewardError"] * 2
    assert IfEvalScorer(num_threads=2, **names)(td.copy())["next", "success"].all()


def test_a_table_of_responses_without_text_or_columns():
    td = TensorDict(
        instruction_id_list=Column.of([(COMMA,)] * 2),
        kwargs=Column.of([({},)] * 2),
        text=Column.of(["<answer>a</answer>", None]),
        batch_size=[2],
    )
    out = IfEvalScorer(response_column="text")(td.copy())["next"]
    assert out["reward_valid"].tolist() == [True, False]
    assert list(out["error", "message"])[1] == "a response must be text, got None"
    with pytest.raises(DataError, match="lack 'answers'"):
        IfEvalScorer(response_column="answers")(td.copy())
    del td["kwargs"]
    with pytest.raises(DataError, match="lack 'kwargs'"):
        IfEvalScorer(response_column="text")(td)


def test_verdicts_are_logged_when_asked(monkeypatch):
    from torchrl import logger

    said = []
    monkeypatch.setattr(logger, "info", said.append)
    example = BOTH._replace(prompt="Say hi.", key=7)
    IfEvalScorer().score("<answer>Hi</answer>", example)
    assert not said
    IfEvalScorer(verbose=True).score("<answer>Hi</answer>", example)
    [text] = said
    assert "prompt 7 'Say hi.': 'Hi'" in text
    assert f"('{LOWER}', False, False)" in text


def test_accuracies_are_over_prompts_and_over_instructions():
    verdicts = [Verdict((True,), (True,)), Verdict((True, False, False), (True, True, False))]
    rows = IFEvalScoreData.rows([*verdicts, Verdict((True, True), (True, True))])
    scores = IFEvalScoreData.from_tensordict(rows)
    assert scores.accuracies() == {
        "prompt_level_strict_acc": 2 / 3,
        "inst_level_strict_acc": 4 / 6,
        "prompt_level_loose_acc": 2 / 3,
        "inst_level_loose_acc": 5 / 6,
        "num_prompts": 3,
    }
    some = scores.accuracies(torch.tensor([True, True, False]))
    assert some["inst_level_strict_acc"] == 2 / 4
    nothing = scores.accuracies(torch.zeros(3, dtype=torch.bool))
    assert nothing["num_prompts"] == 0
    assert nothing["prompt_level_strict_acc"] != nothing["prompt_level_strict_acc"]


def test_an_unknown_instruction_raises_where_one_response_is_scored():
    with pytest.raises(RewardError, match="unknown instruction"):
        IfEvalScorer().score("a", IFEvalExample(("a:b",), ({},)))


def test_the_default_reward_of_a_batch_of_scores_is_a_tensor():
    # 0.4 p_s + 0.3 i_s + 0.2 p_l + 0.1 i_l: row 0 has (1, 1, 1, 0), row 1 has (0, 0, 0, 1).
    column = torch.tensor([[True], [False]])
    data = IFEvalScoreData(
        prompt_level_strict_acc=column,
        inst_level_strict_acc=column,
        prompt_level_loose_acc=column,
        inst_level_loose_acc=~column,
        batch_size=(2,),
    )
    reward = IfEvalScorer().default_reward_aggregator(data, answer_blocks=["a"])
    assert reward.shape == (2, 1, 1)
    assert reward.dtype == torch.get_default_dtype()
    assert reward.flatten().tolist() == pytest.approx([1.0, 0.2])
