"""Credit by a critic: where rewards fall, what is bootstrapped, what is written."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import BOTH
from tensordict import TensorDict

from torchrl_llm.data.enums import Source
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.envs.transforms import RetrieveValues
from torchrl_llm.errors import DataError
from torchrl_llm.objectives import GAEAdvantage


def turn(
    values,
    *,
    reward=0.0,
    prompt=1,
    source=None,
    traj=0,
    done=True,
    truncated=False,
    final=None,
    valid=True,
    dtype=torch.float32,
):
    """A row whose tokens have these values; all after the prompt are sampled unless said."""
    values = torch.tensor(values, dtype=dtype)
    length = len(values)
    reward = torch.tensor(reward if isinstance(reward, list) else [reward], dtype=dtype)
    if source is None:
        source = [Source.PROMPT] * prompt + [Source.SAMPLED] * (length - prompt)
    ids = torch.arange(length)
    row = TensorDict(
        tokens={"full": ids, "prompt": ids[:prompt], "response": ids[prompt:]},
        values={"full": values},
        trace={"source": torch.tensor([int(s) for s in source], dtype=torch.int8)},
        next={
            "reward": reward[:, None],
            "reward_valid": torch.tensor([valid]),
            "done": torch.tensor([done]),
            "truncated": torch.tensor([truncated]),
            "terminated": torch.tensor([done and not truncated]),
        },
        traj_id=torch.tensor(traj),
    )
    if final is not None:
        row["next", "state_value"] = torch.tensor([[final]])
    return row


def run(*rows, transforms=(), **settings):
    settings = {"normalize": "none", **settings}
    buffer = ReplayBuffer()
    for transform in transforms:
        buffer.append_transform(transform)
    credit = GAEAdvantage(**settings)
    buffer.append_transform(credit)
    buffer.extend(lazy_rows(list(rows)))
    return [buffer[i] for i in range(len(buffer))], credit


def column(row, key):
    return row[key].flatten().tolist()


@BOTH
def test_the_reward_of_a_turn_falls_on_its_last_token(dtype, tolerance):
    # gamma 0.9, lambda 0.5: delta_2 = 2 - 0.25 = 1.75; delta_1 = 0.9 * 0.25 - 0.5 = -0.275;
    # A_1 = -0.275 + 0.45 * 1.75 = 0.5125. The prompt's value is junk.
    [row], _ = run(turn([7.0, 0.5, 0.25], reward=2.0, dtype=dtype), gamma=0.9, lmbda=0.5)
    assert row["advantage"].dtype is dtype
    assert row["advantage"].shape == (3, 1)
    assert column(row, "advantage") == pytest.approx([0.0, 0.5125, 1.75], abs=tolerance)
    assert column(row, ("value_target", "full")) == pytest.approx([0.0, 1.0125, 2.0], abs=tolerance)


def test_rewards_per_token_fall_on_theirs():
    [row], _ = run(turn([0.0, 0.5, 0.25, 1.0], reward=[1.0, 2.0, 4.0]))
    # Without discount: returns 7, 6, 4.
    assert column(row, "advantage") == pytest.approx([0.0, 6.5, 5.75, 3.0])
    assert column(row, ("value_target", "full")) == [0.0, 7.0, 6.0, 4.0]


def test_a_tools_tokens_are_no_steps_and_their_reward_goes_to_the_call():
    tool = [Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.SAMPLED]
    [row], _ = run(turn([0.0, 0.5, 9.0, 0.25], reward=[0.0, 3.0, 1.0], source=tool), gamma=0.5)
    # Steps are tokens 1 and 3: rewards 3 and 1. A_3 = 0.75; A_1 = 3 + 0.5 * 1 - 0.5.
    assert column(row, "advantage") == pytest.approx([0.0, 3.0, 0.0, 0.75])


def test_turns_of_an_episode_are_one_run_of_steps():
    rows = [
        turn([0.0, 0.5], reward=1.0, done=False),
        turn([0.0, 0.5, 0.0, 0.25], prompt=3, reward=2.0),
    ]
    first, second = run(*rows, gamma=0.5)[0]
    # A of the last: 2 - 0.25; of the first: 1 + 0.5 * 2 - 0.5.
    assert column(first, "advantage") == pytest.approx([0.0, 1.5])
    assert column(second, "advantage") == pytest.approx([0.0, 0.0, 0.0, 1.75])


def test_joined_before_or_after_the_turns_have_the_same_advantages():
    class Position(TokenScorer):
        def token_scores(self, sequences, select, **_):
            places = [mask.nonzero()[:, 0] for mask in select]
            return TokenScores(torch.zeros(0), values=torch.cat(places) / 8.0)

    def turns():
        rows = [
            turn([0.0, 0.0, 0.0], reward=1.0, done=False),
            turn([0.0] * 6, prompt=4, reward=2.0),
        ]
        for row in rows:
            del row["values"]
            count = row["tokens", "full"].shape[0]
            row["log_probs", "full"] = torch.zeros(count)
        rows[1]["trace", "source"][1:3] = int(Source.SAMPLED)
        return lazy_rows(rows)

    def written(*transforms):
        buffer = ReplayBuffer()
        for transform in transforms:
            buffer.append_transform(transform)
        buffer.extend(turns())
        return buffer[0]

    credit = GAEAdvantage(normalize="none", gamma=0.5, lmbda=0.9)
    after = written(JoinTurns(), credit, RetrieveValues(Position()))
    # The joined row has one reward, at its end, so it is given per token.
    assert column(after, ("values", "full")) == [0.0, 0.125, 0.25, 0.0, 0.5, 0.625]
    # Steps with values 1/8, 1/4, 1/2, 5/8 and rewards 0, 1, 0, 2, from the end:
    #   2 - 0.625 = 1.375; 0.3125 - 0.5 + 0.45 * 1.375 = 0.43125
    #   1 + 0.25 - 0.25 + 0.45 * 0.43125 = 1.1940625; 0.125 - 0.125 + 0.45 * 1.1940625
    expected = [0.0, 0.537328125, 1.1940625, 0.0, 0.43125, 1.375]
    assert column(after, "advantage") == pytest.approx(expected)
    targets = [0.0, 0.662328125, 1.4440625, 0.0, 0.93125, 2.0]
    assert column(after, ("value_target", "full")) == pytest.approx(targets)


def test_what_was_cut_is_bootstrapped_and_what_ended_is_not():
    cut = {"reward": 1.0, "truncated": True, "final": 4.0}
    [row], _ = run(turn([0.0, 0.5], **cut), gamma=0.5)
    assert column(row, "advantage") == [0.0, 2.5]  # 1 + 0.5 * 4 - 0.5
    [row], _ = run(turn([0.0, 0.5], **cut), truncated="keep")
    assert column(row, "advantage") == [0.0, 0.5]
    [row], _ = run(turn([0.0, 0.5], reward=1.0, final=4.0))
    assert column(row, "advantage") == [0.0, 0.5]
    rows, credit = run(turn([0.0, 0.5], **cut), truncated="drop")
    assert rows == []
    assert credit.get_stats()["filtered_tokens"] == 1


def test_advantages_are_normalised_over_the_tokens_of_a_batch_and_targets_are_not():
    rows, _ = run(turn([0.0, 0.0, 0.0], reward=3.0), turn([0.0, 0.0], traj=1), normalize="sample")
    # Advantages 3, 3, 0: mean 2, deviation sqrt(3).
    assert column(rows[0], "advantage") == pytest.approx([0.0, 3**-0.5, 3**-0.5], abs=1e-6)
    assert column(rows[1], "advantage") == pytest.approx([0.0, -2 * 3**-0.5], abs=1e-6)
    assert column(rows[0], ("value_target", "full")) == [0.0, 3.0, 3.0]


def test_values_and_rewards_of_half_precision_are_summed_in_float32():
    [row], _ = run(turn([0.0, 0.0, 0.0], reward=[1.0, 2.0**-9], dtype=torch.bfloat16))
    assert column(row, "advantage") == [0.0, 1 + 2.0**-9, 2.0**-9]
    assert column(row, ("value_target", "full")) == [0.0, 1 + 2.0**-9, 2.0**-9]


def test_equal_advantages_are_exactly_zero():
    rows, _ = run(*[turn([0.0, 0.1], reward=0.3, traj=t) for t in range(7)], normalize="sample")
    assert all(column(row, "advantage") == [0.0, 0.0] for row in rows)


def test_a_batch_may_be_larger_than_a_write():
    buffer = ReplayBuffer(transform=GAEAdvantage(batch_size=2, normalize="population"))
    assert len(buffer.extend([turn([0.0, 0.0], reward=1.0)])) == 0
    assert len(buffer.extend([turn([0.0, 0.0], reward=3.0, traj=1)])) == 2
    assert [column(buffer[i], "advantage") for i in range(2)] == [[0.0, -1.0], [0.0, 1.0]]


def test_an_invalid_episode_is_not_written_and_enters_no_statistic():
    rows, _ = run(
        turn([0.0, 0.0], reward=1.0),
        turn([0.0, 0.0], reward=math.nan, traj=1),
        turn([0.0, 0.0], reward=3.0, traj=2),
        normalize="population",
    )
    assert [column(row, "advantage")[1] for row in rows] == [-1.0, 1.0]


def test_an_empty_response_has_no_advantage_and_its_reward_goes_to_the_turn_before():
    rows, _ = run(
        turn([0.0, 0.5], done=False), turn([0.0, 0.5, 0.0], prompt=3, reward=1.0), lmbda=0.0
    )
    assert column(rows[0], "advantage") == [0.0, 0.5]
    assert column(rows[1], "advantage") == [0.0, 0.0, 0.0]
    for reward in (1.0, []):
        [row], _ = run(turn([0.0, 0.5], prompt=2, reward=reward))
        assert column(row, "advantage") == [0.0, 0.0]


def test_a_reward_stays_in_its_episode_where_that_begins_or_is_empty():
    tool_first = [Source.PROMPT, Source.TOOL, Source.SAMPLED]
    rows, _ = run(
        turn([0.0, 0.0], reward=1.0, traj=0),
        turn([0.0, 0.0], prompt=2, reward=7.0, traj=1),
        turn([0.0, 0.0, 0.0], reward=[2.0, 4.0], source=tool_first, traj=2),
        turn([0.0, 0.0], prompt=2, reward=7.0, traj=3),
    )
    assert [column(row, "advantage")[1:] for row in rows] == [[1.0], [0.0], [0.0, 6.0], [0.0]]


def test_what_is_missing_is_an_error_that_says_what_to_do():
    bare = turn([0.0, 0.0])
    del bare["values"]
    with pytest.raises(DataError, match="RetrieveValues"):
        run(bare)
    with pytest.raises(DataError, match="NaN or infinite"):
        run(turn([0.0, math.nan]))
    with pytest.raises(DataError, match="state_value"):
        run(turn([0.0, 0.0], truncated=True))
    with pytest.raises(DataError, match="2 rewards"):
        run(turn([0.0, 0.0, 0.0, 0.0], reward=[1.0, 2.0]))
