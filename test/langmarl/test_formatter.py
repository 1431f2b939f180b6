"""Episodes as texts that a critic reads."""

from __future__ import annotations

import math

import pytest

from torchrl_llm.langmarl.environment import Trajectory
from torchrl_llm.langmarl.formatter import TrajectoryFormatter

FORMATS = (
    TrajectoryFormatter.format_trajectory,
    TrajectoryFormatter.format_for_credit_assignment,
    TrajectoryFormatter.format_trajectory_minimal,
)


def _episode(**changes):
    steps = [
        {"agent_id": "a", "observation": "seen by a", "action": "A" * 501, "policy": "p" * 201},
        {"agent_id": "b", "observation": "seen by b", "action": "B" * 501, "policy": "short"},
    ]
    task = {"question": "Who?", "context": "c" * 501, "ground_truth": "t" * 201}
    return {"task": task, "transitions": steps, "reward": 0.456, "metadata": {}} | changes


def test_the_global_format_cuts_what_is_long():
    assert TrajectoryFormatter.format_trajectory(_episode()) == "\n".join(
        (
            "Task: Who?",
            f"Context: {'c' * 500}...",
            "",
            "Agents:",
            f"- a: {'p' * 200}...",
            "- b: short",
            "",
            "What they did:",
            f"1. a: {'A' * 500}...",
            f"2. b: {'B' * 500}...",
            "",
            f"Final answer: {'B' * 500}...",
            f"Ground truth: {'t' * 200}...",
            "Score: 0.46",
        )
    )


def test_what_is_just_as_long_as_allowed_is_not_cut():
    task = {"question": "Who?", "context": "c" * 500, "ground_truth": "t" * 200}
    step = {"agent_id": "a", "action": "A" * 500, "policy": "p" * 200}
    assert "..." not in TrajectoryFormatter.format_trajectory(
        _episode(task=task, transitions=[step])
    )


def test_the_credit_format_has_a_section_for_each_agent_and_cuts_nothing():
    assert TrajectoryFormatter.format_for_credit_assignment(_episode()) == "\n".join(
        (
            "Task: Who?",
            f"Context: {'c' * 501}",
            "",
            "=== a (1 of 2) ===",
            "Policy:",
            "p" * 201,
            "Turn 1, it saw:",
            "seen by a",
            "Turn 1, it did:",
            "A" * 501,
            "",
            "=== b (2 of 2) ===",
            "Policy:",
            "short",
            "Turn 2, it saw:",
            "seen by b",
            "Turn 2, it did:",
            "B" * 501,
            "",
            "=== Outcome ===",
            f"Final answer: {'B' * 501}",
            f"Ground truth: {'t' * 201}",
            "Score: 0.46",
        )
    )


def test_turns_keep_their_number_where_an_agent_acts_again():
    steps = [{"agent_id": name, "action": f"{name}{n}"} for n, name in enumerate("aba", 1)]
    text = TrajectoryFormatter.format_for_credit_assignment(_episode(transitions=steps))
    assert text.index("Turn 1, it did:\na1") < text.index("Turn 3, it did:\na3")
    assert text.index("Turn 3, it did:\na3") < text.index("=== b (2 of 2) ===")


def test_the_minimal_format_has_four_lines():
    episode = _episode(transitions=[{"agent_id": "a", "action": "yes"}], reward=1)
    assert TrajectoryFormatter.format_trajectory_minimal(episode) == (
        "Task: Who?\nAgents: a\nFinal answer: yes\nScore: 1.00"
    )


@pytest.mark.parametrize("write", FORMATS)
def test_a_trajectory_is_written_as_its_dictionary_is(write):
    episode = Trajectory(**{k.replace("transitions", "steps"): v for k, v in _episode().items()})
    assert write(episode) == write(_episode())


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("reward", [None, math.nan, "none"])
def test_a_reward_that_is_none_is_not_available(write, reward):
    assert "Score: N/A" in write(_episode(reward=reward))


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize(
    "episode",
    [{}, {"task": None, "transitions": None}, {"task": {}, "transitions": [{}], "metadata": None}],
)
def test_missing_fields_are_not_available(write, episode):
    lines = write(episode).splitlines()
    assert {"Task: N/A", "Final answer: N/A", "Score: N/A"} <= set(lines)


def test_a_verified_score_and_an_error_are_shown():
    text = TrajectoryFormatter.format_trajectory(
        _episode(metadata={"verified_score": 1, "error": "timeout", "final_answer": "Rome"})
    )
    assert text.endswith("Score: 0.46\nVerified score: 1.00\nError: timeout")
    assert "Final answer: Rome\n" in text


def test_policies_of_the_episode_are_shown_also_of_agents_that_did_not_act():
    text = TrajectoryFormatter.format_for_credit_assignment(
        _episode(policies={"a": "new p", "idle": "wait"})
    )
    assert "=== a (1 of 3) ===\nPolicy:\nnew p\n" in text
    assert "=== idle (2 of 3) ===\nPolicy:\nwait\n\n=== b" in text


def test_a_task_of_an_unknown_kind_is_shown_by_its_fields_but_not_its_tests():
    episode = _episode(task={"layout": "ring", "seed": 3, "tests": "assert f() == 7"})
    text = TrajectoryFormatter.format_trajectory(episode)
    assert text.startswith("Task: layout: ring\nseed: 3\nContext: N/A\n")
    assert "assert" not in text


def test_a_score_of_zero_is_a_score_and_an_answer_of_zero_an_answer():
    text = TrajectoryFormatter.format_trajectory(
        {"task": {"question": "0?", "answer": 0}, "reward": 0}
    )
    assert "Ground truth: 0\nScore: 0.00" in text
