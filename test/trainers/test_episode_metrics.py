"""Metrics of episodes, and the two answers that a run shows."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_llm.data.enums import FinishReason, MaskReason, Source, TruncationReason
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.tools.tool_call import ToolCall, ToolResult
from torchrl_llm.trainers.episode_metrics import rollout_metrics
from torchrl_llm.trainers.samples import sample_text

NAN = float("nan")


def turn(
    reward,
    *,
    group=0,
    traj,
    done=True,
    agent=None,
    calls=None,
    finish=FinishReason.STOP,
    masked=(),
    parts=None,
    **texts,
):
    """A row as a collector delivers it."""
    valid = reward == reward
    error = {"type": "" if valid else "ValueError", "message": "" if valid else "no", "place": ""}
    after = {
        "reward": torch.tensor([[reward]]),
        "reward_valid": torch.tensor(valid),
        "reward_seconds": torch.tensor(0.25),
        "done": torch.tensor([done]),
        "error": TensorDict(error),
    }
    if calls is not None:
        records = tuple(call.record() for call in calls)
        after["tools"] = TensorDict(
            calls=NonTensorData(records), num_calls=torch.tensor(len(records))
        )
    if parts is not None:
        after["rewards"] = TensorDict(
            {
                name: TensorDict(value=torch.tensor([[value]]), valid=torch.tensor(True))
                for name, value in parts.items()
            }
        )
    reason = torch.tensor([MaskReason.NOT_SAMPLED, *masked, MaskReason.TRAINED], dtype=torch.int8)
    row = TensorDict(
        group_id=torch.tensor(group),
        traj_id=torch.tensor(traj),
        tokens={
            "response": torch.zeros(3, dtype=torch.int64),
            "finish_reason": torch.tensor(int(finish), dtype=torch.int8),
        },
        trace={
            "source": torch.tensor(
                [Source.PROMPT, *[Source.SAMPLED] * (len(masked) + 1)], dtype=torch.int8
            ),
            "mask_reason": reason,
        },
        next=after,
    )
    for name, text in texts.items():
        row.set(name, NonTensorData(text) if isinstance(text, str) else TensorDict(text))
    return row if agent is None else row.set("agent", NonTensorData(agent))


def test_turns_are_counted_per_episode():
    rows = [turn(0.0, traj=0, done=False), turn(1.0, traj=0), turn(1.0, traj=1)]
    assert rollout_metrics(lazy_rows(rows))["train/turns"] == 1.5


def test_the_share_of_groups_without_variance_counts_whole_episodes():
    rows = [
        # 1 in two turns, and 1 in one: no variance.
        turn(0.5, traj=0, done=False),
        turn(0.5, traj=0),
        turn(1.0, traj=1),
        # 0 and 1, and what has no reward.
        turn(0.0, group=1, traj=2),
        turn(1.0, group=1, traj=3),
        turn(NAN, group=1, traj=4),
        # One that is valid is no group.
        turn(1.0, group=2, traj=5),
        turn(NAN, group=2, traj=6),
        # An episode with an invalid turn is left out, and two others are equal.
        turn(NAN, group=3, traj=7, done=False),
        turn(1.0, group=3, traj=7),
        turn(2.0, group=3, traj=8),
        turn(2.0, group=3, traj=9),
    ]
    assert rollout_metrics(lazy_rows(rows))["train/zero_variance"] == pytest.approx(2 / 3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = lazy_rows([rows[i] for i in order])
    assert rollout_metrics(shuffled)["train/zero_variance"] == pytest.approx(2 / 3)


def test_players_of_a_game_are_groups_of_their_own():
    both = [(0, "x", 1.0), (1, "x", 1.0), (0, "o", 0.0), (1, "o", 0.0)]
    rows = [turn(reward, traj=traj, agent=agent) for traj, agent, reward in both]
    assert rollout_metrics(lazy_rows(rows))["train/zero_variance"] == 1.0


def test_rows_that_are_compared_with_nothing_have_no_share_without_variance():
    alone = lazy_rows([turn(1.0, group=n, traj=n) for n in range(3)])
    assert "train/zero_variance" not in rollout_metrics(alone)
    without = lazy_rows([turn(1.0, traj=n).exclude("group_id") for n in range(3)])
    assert "train/zero_variance" not in rollout_metrics(without)


def test_calls_failures_and_seconds_are_counted_by_tool():
    add, sql = ToolCall("add"), ToolCall("sql")
    calls = [
        ToolResult(add, "3", seconds=0.5),
        ToolResult(add, "Invalid arguments", error="InvalidArguments", seconds=0.25),
        ToolResult(sql, "No answer", error="ToolTimeout", seconds=10.0),
    ]
    # What a model makes up is no name of a tool.
    made_up = [
        ToolResult(ToolCall("banana"), "There is no tool", error="UnknownTool"),
        ToolResult(ToolCall(""), "cannot be read", error="MalformedCall"),
        ToolResult(ToolCall("apple"), "too many", error="TooManyCalls"),
    ]
    rows = [turn(0.0, traj=0, done=False, calls=calls), turn(1.0, traj=0, calls=made_up)]
    metrics = rollout_metrics(lazy_rows(rows))
    assert {name: value for name, value in metrics.items() if "tool" in name} == {
        "train/tool_calls": 6,
        "train/tool_failures": 5,
        "train/tool_errors": 0,  # the tools told no exception of their own
        "train/tool_calls_add": 2,
        "train/tool_failures_add": 1,
        "perf/tool_add_s": 0.75,
        "train/tool_calls_sql": 1,
        "train/tool_failures_sql": 1,
        "perf/tool_sql_s": 10.0,
    }
    assert metrics["perf/reward_s"] == 0.5


def test_a_step_without_calls_counts_none():
    metrics = rollout_metrics(lazy_rows([turn(0.0, traj=0, calls=[])]))
    assert metrics["train/tool_calls"] == metrics["train/tool_failures"] == 0


# -- two answers -----------------------------------------------------------------------------------


def shown(*rows):
    return sample_text(lazy_rows(list(rows))).splitlines()


def answer(reward, text, **more):
    return turn(reward, query="1+1?", answer="2", text={"response": text}, **more)


def test_the_answers_are_the_best_and_the_worst_of_the_prompt_that_differs_most():
    lines = shown(
        answer(0.5, "other prompt, worst", group=1, traj=0),
        answer(9.0, "other prompt, best of all", group=2, traj=1),
        answer(9.0, "other prompt, as good", group=2, traj=2),
        answer(0.75, "worst", traj=3),
        answer(0.8, "between", traj=4),
        answer(2.0, "best", traj=5),
    )
    assert lines == [
        "  best answer of a prompt: reward 2.000",
        "    query:    1+1?",
        "    response: best",
        "    answer:   2",
        "  worst: reward 0.750",
        "    query:    1+1?",
        "    response: worst",
        "    answer:   2",
    ]


def test_components_and_what_keeps_an_answer_from_being_trained_are_said():
    first, *_, second = (
        line
        for line in shown(
            answer(1.0, "two", traj=0, done=False, parts={"right": 0.5, "short": 0.5}),
            answer(0.5, "turns", traj=0, parts={"right": 0.5, "short": 0.0}),
            answer(
                0.0,
                "1 1 1",
                traj=1,
                parts={"right": 0.0, "short": 0.0},
                finish=FinishReason.LENGTH,
                masked=[MaskReason.OVERLONG, MaskReason.OVERLONG],
            ),
        )
        if "reward" in line
    )
    assert first == "  best answer of a prompt: reward 1.500 (right 1.000, short 0.500), 2 turns"
    assert second == (
        "  worst: reward 0.000 (right 0.000, short 0.000), cut by its length limit, "
        "2 tokens masked (overlong)"
    )


def test_a_batch_without_any_reward_shows_an_answer_and_why():
    first, *_ = shown(answer(NAN, "three", traj=0), answer(NAN, "four", traj=1))
    assert first == "  an answer: no reward ValueError: no"


def test_answers_that_are_worth_the_same_are_not_called_best_and_worst():
    lines = shown(answer(1.0, "a", traj=0), answer(1.0, "b", traj=1), answer(1.0, "c", traj=2))
    titles = [line.partition(":")[0].strip() for line in lines if "reward" in line]
    assert titles == ["an answer", "another, worth the same"]


def test_where_each_prompt_has_one_answer_the_batch_is_compared():
    lines = shown(*(answer(float(n), str(n), group=n, traj=n) for n in range(3)))
    assert lines[0] == "  best answer of the batch: reward 2.000"
    assert lines[4] == "  worst: reward 0.000"


def test_an_episode_that_was_cut_says_by_what():
    row = answer(1.0, "two", traj=0)
    row["next", "truncation_reason"] = torch.tensor([int(TruncationReason.MAX_STEPS)])
    first, *_ = shown(row)
    assert first.endswith("reward 1.000, episode cut (max_steps)")


def test_what_a_model_writes_cannot_control_the_terminal():
    text = sample_text(lazy_rows([answer(1.0, "\x1b[2Jred\x07\r\x9b1A", traj=0)]))
    assert "response: red1A" in text
    assert not {character for character in text if ord(character) < 32} - {"\n"}
