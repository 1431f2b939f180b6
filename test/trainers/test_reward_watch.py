"""RewardWatch: steps without a valid reward, steps without a signal, and what failed most."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data.enums import FinishReason, TruncationReason
from torchrl_llm.data.failures import Failure
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.trainers import RewardWatch, rollout_metrics
from torchrl_llm.trainers.reward_watch import FailureTally

NAN = float("nan")
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def row(reward, *, success=False, reason=STOP, error=None, traj=0, turn=0, done=True, end=None):
    end = TruncationReason.NONE if end is None else end
    names = ("type", "message", "place", "source", "traceback")
    after = {
        "reward": torch.tensor([[reward]]),
        "reward_valid": torch.tensor(error is None),
        "done": torch.tensor([done]),
        "success": torch.tensor([[success]]),
        "truncation_reason": torch.tensor([int(end)], dtype=torch.int8),
        "error": TensorDict(dict(zip(names, error or Failure(source=""), strict=True))),
    }
    return TensorDict(
        query=f"{traj}?",
        answer=f"{traj}!",
        text={"response": f"it is {traj}"},
        traj_id=torch.tensor(traj),
        turn=torch.tensor(turn),
        tokens={"response": torch.arange(3), "finish_reason": torch.tensor(int(reason))},
        next=after,
    )


def step(*rewards, **options):
    return lazy_rows([row(reward, traj=n, **options) for n, reward in enumerate(rewards)])


def seen(watch, *steps):
    return [watch.see(rows) for rows in steps]


def test_equal_rewards_are_told_once_and_again_only_after_a_signal():
    watch = RewardWatch(no_signal_steps=3)
    flat, signal = step(0.0, 0.0), step(0.0, 1.0)
    said = seen(watch, flat, flat, flat, flat, flat, flat, flat, flat)
    assert [text is not None for text in said] == [False, False, True] + [False] * 5
    said = seen(watch, signal, flat, flat, signal, flat, flat, flat, flat)
    assert [text is not None for text in said] == [False] * 6 + [True, False]


def test_the_notice_shows_two_answers_and_what_to_look_at():
    watch = RewardWatch(no_signal_steps=1)
    assert watch.see(step(0.0, 0.0, 0.0)).splitlines() == [
        "no signal: in each of the last 1 steps all answers had the same reward (0), and "
        "comparing them teaches nothing. Two of the 3 answers of this step:",
        "  query:    0?",
        "  response: it is 0",
        "  answer:   0!",
        "  reward:   0",
        "",
        "  query:    2?",
        "  response: it is 2",
        "  answer:   2!",
        "  reward:   0",
        "Look at the form that the reward expects: a correct answer in a different form earns "
        "nothing; the model, which may be too small for the task: none of them is right.",
    ]


@pytest.mark.parametrize(
    ("rows", "wanted", "unwanted"),
    [
        (step(1.0, 1.0, success=True), "the prompts are too easy", "Look at"),
        (step(0.1, 0.1, reason=LENGTH), "inference_model.max_tokens, which cut 100% of", "easy"),
        (step(0.0, 0.0), "too small", "max_tokens"),
        (lazy_rows([row(0.5), row(0.5, traj=1, success=True)]), "does not tell right", "too small"),
    ],
)
def test_the_advice_is_what_the_answers_suggest(rows, wanted, unwanted):
    text = RewardWatch(no_signal_steps=1).see(rows)
    assert wanted in text
    assert unwanted not in text


def test_rewards_that_are_equal_in_each_step_but_not_over_them_are_no_signal_either():
    watch = RewardWatch(no_signal_steps=2)
    text = seen(watch, step(0.0, 0.0), step(1.0, 1.0))[1]
    assert "(1 in the last)" in text


def test_the_return_of_a_trajectory_is_what_is_compared():
    def game(first, last):
        return [row(first, done=False), row(last, turn=1)]

    def both(one, other):
        for turn in other:
            turn["traj_id"] = torch.tensor(1)
        return lazy_rows(one + other)

    watch = RewardWatch(no_signal_steps=1)
    assert watch.see(both(game(0.0, 1.0), game(1.0, 0.0))) is not None
    assert watch.see(both(game(0.0, 1.0), game(0.0, 0.0))) is None


def test_one_answer_says_nothing_and_no_steps_switch_it_off():
    assert seen(RewardWatch(no_signal_steps=1), step(0.0), step(NAN)) == [None, None]
    assert seen(RewardWatch(no_signal_steps=None), *[step(0.0, 0.0)] * 9) == [None] * 9


ERROR = Failure("KeyError", "'x'", "reward.py:3, in score", "reward", "...")


def test_a_step_is_all_invalid_where_no_trajectory_is_valid_to_its_end():
    watch = RewardWatch()
    invalid = lazy_rows(
        [
            row(NAN, error=ERROR, done=False),
            row(0.0, turn=1),
            row(NAN, traj=1, error=ERROR._replace(kind="ValueError")),
            row(NAN, traj=2, error=ERROR),
        ]
    )
    watch.see(invalid)
    assert watch.ends_run
    assert watch.explain() == (
        "none of the 4 rows of this step has a valid reward, so that nothing can be learned from "
        "them: reward failed 3 times, 2 of them by KeyError: 'x' at reward.py:3, in score"
    )
    watch.see(lazy_rows([row(NAN, error=ERROR), row(0.0, traj=1)]))
    assert not watch.is_all_invalid
    going = RewardWatch(on_all_invalid="continue")
    going.see(invalid)
    assert going.is_all_invalid
    assert not going.ends_run


def test_a_step_without_a_recorded_error_says_so():
    watch = RewardWatch()
    watch.see(step(NAN, NAN))
    assert watch.ends_run
    assert watch.explain().endswith("nothing can be learned from them: no error is recorded")


def test_the_state_goes_on_where_it_was():
    def fresh():
        return RewardWatch(no_signal_steps=3)

    flat = step(0.0, 0.0)
    before, after = fresh(), fresh()
    before.see(step(NAN, 0.0, error=ERROR))
    assert seen(before, flat, flat) == [None, None]
    after.load_state_dict(before.state_dict())
    assert after.see(flat) is not None
    told = fresh()
    told.load_state_dict(after.state_dict())
    assert told.see(flat) is None
    assert told.failures.most_frequent() == (
        "reward failed 2 times, 2 of them by KeyError: 'x' at reward.py:3, in score"
    )


def test_the_tally_is_of_the_source_that_failed_most_and_stays_small():
    tally = FailureTally()
    assert tally.most_frequent() == ""
    tally.add([Failure(f"Error{n}", "", "", "tool 'sql'") for n in range(3000)])
    tally.add([Failure("Error1", "", "", "tool 'sql'"), ERROR])
    assert tally.most_frequent() == "tool 'sql' failed 3001 times, 2 of them by Error1"


def test_metrics_count_worlds_apart_from_rewards_and_episodes_that_filled_the_context():
    rows = lazy_rows(
        [
            row(0.0, done=False),
            row(0.0, turn=1, end=TruncationReason.MAX_SEQ_LEN),
            row(NAN, traj=1, error=ERROR),
            row(NAN, traj=2, error=ERROR._replace(source="environment")),
            row(1.0, traj=3, end=TruncationReason.MAX_STEPS),
        ]
    )
    metrics = rollout_metrics(rows)
    assert metrics["train/reward_errors"] == metrics["train/env_errors"] == 1
    assert metrics["train/out_of_context"] == 0.25
    assert "train/tool_errors" not in metrics
    assert "train/out_of_context" not in rollout_metrics(step(0.0, 1.0))
