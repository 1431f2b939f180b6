"""Turns of a trajectory joined into one row; every value worked by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data import Chat, MaskReason, Source
from torchrl_llm.data.history import History
from torchrl_llm.data.nodes import cell
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import sampled_tokens
from torchrl_llm.errors import DataError
from torchrl_llm.objectives import MCAdvantage

T, P, S, TOOL = Source.TEMPLATE, Source.PROMPT, Source.SAMPLED, Source.TOOL


def _turn(
    prompt,
    response,
    sources,
    *,
    turn=0,
    version=0,
    log_probs=None,
    reward=0.0,
    done=False,
    traj=0,
    temperature=1.0,
    group=0,
):
    """One turn as the policy writes it: ids of prompt and response, a source for each."""
    full = torch.tensor([*prompt, *response])
    source = torch.tensor([int(s) for s in sources], dtype=torch.int8)
    sampled = source == S
    own = torch.arange(len(full)) >= len(prompt)
    row = TensorDict(
        {
            "tokens": TensorDict(
                {
                    "prompt": full[: len(prompt)],
                    "response": full[len(prompt) :],
                    "full": full,
                    "temperature": torch.tensor(temperature),
                    "truncated_support": torch.tensor(False),
                }
            ),
            "log_probs": TensorDict({"full": torch.zeros(len(full))}),
            "masks": TensorDict({"all_assistant_mask": sampled.clone()}),
            "trace": TensorDict(
                {
                    "source": source,
                    # only its own response is filled in: earlier turns must come from their rows
                    "turn": torch.where(own & sampled, turn, -1).to(torch.int16),
                    "policy_version": torch.where(own & sampled, version, -1).to(torch.int32),
                    "mask_reason": torch.where(sampled, 0, 1).to(torch.int8),
                }
            ),
            "traj_id": torch.tensor(traj),
            "group_id": torch.tensor(group),
            "next": TensorDict(
                {"reward": torch.full((1, 1), reward), "done": torch.tensor([done])}
            ),
        }
    )
    if log_probs is not None:
        row["log_probs", "full"][len(prompt) :] = torch.tensor(log_probs)
    return row


def _two_turns():
    """Prompt 1 2, answer 3 4, tool 5, answer 6."""
    return [
        _turn([1, 2], [3, 4], [T, P, S, S], version=7, log_probs=[-1.0, -2.0], reward=0.25),
        _turn(
            [1, 2, 3, 4, 5],
            [6],
            [T, P, S, S, TOOL, S],
            turn=1,
            version=8,
            log_probs=[-3.0],
            reward=1.0,
            done=True,
        ),
    ]


def _write(rows, transform=None):
    transform = transform or JoinTurns()
    buffer = ReplayBuffer(transform=transform)
    buffer.extend(lazy_rows(rows))
    return buffer, transform


def test_two_turns_become_one_row_with_each_turns_own_values():
    buffer, join = _write(_two_turns())
    (row,) = buffer[:].unbind(0)

    assert row["tokens", "prompt"].tolist() == [1, 2]
    assert row["tokens", "response"].tolist() == [3, 4, 5, 6]
    assert row["tokens", "full"].tolist() == [1, 2, 3, 4, 5, 6]
    assert row["log_probs", "full"].tolist() == [0, 0, -1, -2, 0, -3]
    assert row["log_probs", "response"].tolist() == [-1, -2, 0, -3]
    assert row["trace", "turn"].tolist() == [-1, -1, 0, 0, -1, 1]
    assert row["trace", "policy_version"].tolist() == [-1, -1, 7, 7, -1, 8]
    assert row["masks", "all_assistant_mask"].tolist() == [False, False, True, True, False, True]
    assert row["next", "reward"].tolist() == [[1.25]]
    assert row["next", "done"].item() is True
    assert row["num_turns"].item() == 2
    assert join.get_stats() == {
        "trajectories": 1,
        "turns": 2,
        "rows": 1,
        "forks": 0,
        "open_trajectories": 0,
    }


def _with_support(row, counts, ids):
    row["support"] = TensorDict(
        {
            "counts": torch.tensor(counts, dtype=torch.int32),
            "token_ids": torch.tensor(ids, dtype=torch.int32),
        }
    )
    return row


def test_kept_ids_of_each_turn_stand_at_its_response():
    first, last = _two_turns()
    # The second turn's row knows its own kept ids only; those of 3 and 4 come from the first.
    rows = [
        _with_support(first, [0, 0, 2, 1], [3, 30, 4]),
        _with_support(last, [0, 0, 0, 0, 0, 3], [6, 60, 61]),
    ]
    (row,) = _write(rows)[0][:].unbind(0)
    assert row["support", "counts"].tolist() == [0, 0, 2, 1, 0, 3]
    assert row["support", "token_ids"].tolist() == [3, 30, 4, 6, 60, 61]
    assert row["support", "counts"].dtype == row["support", "token_ids"].dtype == torch.int32


def test_a_turn_without_kept_ids_joins_as_one_that_kept_all():
    first, last = _two_turns()
    rows = [first, _with_support(last, [0, 0, 0, 0, 0, 1], [6])]
    (row,) = _write(rows)[0][:].unbind(0)
    assert row["support", "counts"].tolist() == [0, 0, 0, 0, 0, 1]
    assert "support" not in _write(_two_turns())[0][0].keys()


def test_a_row_that_goes_on_elsewhere_forgets_the_kept_ids_of_its_prompt():
    first, _ = _two_turns()
    branch = _turn([1, 2, 3, 5], [6], [T, P, S, TOOL, S], turn=1, log_probs=[-3.0], done=True)
    rows = [
        _with_support(first, [0, 0, 2, 1], [3, 30, 4]),
        _with_support(branch, [0, 0, 2, 0, 1], [3, 30, 6]),
    ]
    one, two = _write(rows)[0][:].unbind(0)
    assert one["support", "token_ids"].tolist() == [3, 30, 4]
    assert two["support", "counts"].tolist() == [0, 0, 0, 0, 1]
    assert two["support", "token_ids"].tolist() == [6]


def test_each_sampled_token_is_trained_exactly_once():
    rows = _two_turns()
    sampled = sum(sampled_tokens(row) for row in rows)
    (row,) = _write(rows)[0][:].unbind(0)
    trained = (row["trace", "source"] == S) & (row["trace", "mask_reason"] == MaskReason.TRAINED)

    assert sampled == 3  # not the 5 that the two rows hold together
    assert trained.sum().item() == sampled == sampled_tokens(row)


def test_the_turns_rows_are_left_as_they_were():
    rows = _two_turns()
    _write(rows)
    assert rows[1]["tokens", "prompt"].tolist() == [1, 2, 3, 4, 5]
    assert rows[1]["log_probs", "full"].tolist() == [0, 0, 0, 0, 0, -3]
    assert rows[1]["next", "reward"].item() == 1.0


def test_a_rewritten_history_goes_on_in_a_second_row():
    first, _ = _two_turns()
    rewritten = _turn([1, 2, 9, 5], [6], [T, P, P, TOOL, S], turn=0, log_probs=[-3.0], done=True)
    buffer, join = _write([first, rewritten])
    one, two = buffer[:].unbind(0)

    assert one["tokens", "full"].tolist() == [1, 2, 3, 4]
    assert two["tokens", "full"].tolist() == [1, 2, 9, 5, 6]
    assert sampled_tokens(one) + sampled_tokens(two) == 3
    assert join.get_stats()["forks"] == 1


def test_sampled_tokens_in_the_prompt_of_a_second_row_are_trained_in_the_first_only():
    first, _ = _two_turns()
    # the prompt keeps the sampled 3 (with its record) and loses the 4
    branch = _turn([1, 2, 3, 5], [6], [T, P, S, TOOL, S], turn=1, log_probs=[-3.0], done=True)
    branch["log_probs", "full"][2] = -1.0
    one, two = _write([first, branch])[0][:].unbind(0)

    assert one["trace", "source"].tolist() == [T, P, S, S]
    assert two["trace", "source"].tolist() == [T, P, P, TOOL, S]
    assert two["trace", "mask_reason"].tolist() == [1, 1, 1, 1, 0]
    assert two["log_probs", "full"].tolist() == [0, 0, 0, 0, -3]
    assert two["masks", "all_assistant_mask"].tolist() == [False, False, False, False, True]


def test_three_turns_with_a_fork_after_the_first_join_the_last_two():
    first = _turn([1], [2], [P, S])
    second = _turn([9], [3], [P, S])
    third = _turn([9, 3, 5], [4], [P, S, TOOL, S], turn=1, done=True)
    one, two = _write([first, second, third])[0][:].unbind(0)

    assert one["tokens", "full"].tolist() == [1, 2]
    assert two["tokens", "prompt"].tolist() == [9]
    assert two["tokens", "response"].tolist() == [3, 5, 4]
    assert (one["num_turns"].item(), two["num_turns"].item()) == (1, 2)
    assert not one["next", "done"].item()


def test_turns_of_another_temperature_are_not_joined():
    first, second = _two_turns()
    second["tokens", "temperature"] = torch.tensor(0.5)
    assert len(_write([first, second])[0]) == 2


def test_trajectories_may_come_mixed_and_in_portions():
    join = JoinTurns()
    buffer = ReplayBuffer(transform=join)
    a, b = _two_turns(), _two_turns()
    for row in b:
        row["traj_id"] = torch.tensor(1)
    assert buffer.extend([a[0], b[0]]).numel() == 0
    assert join.get_stats()["open_trajectories"] == 2
    assert buffer.extend([b[1]]).tolist() == [0]
    assert buffer.extend([a[1]]).tolist() == [1]
    assert buffer[:]["traj_id"].tolist() == [1, 0]


def test_given_up_trajectories_leave_the_queue():
    join = JoinTurns()
    ReplayBuffer(transform=join).extend([_two_turns()[0]])
    assert join.clear_queues() == 1
    assert join.get_stats()["open_trajectories"] == 0


def test_history_and_text_show_the_whole_response():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "done"},
    ]
    rows = _two_turns()
    for row, (prompt, full) in zip(rows, [(1, 2), (3, 4)], strict=True):
        views = TensorDict(batch_size=[])
        for field, part in (("prompt", messages[:prompt]), ("full", messages[:full])):
            views[field] = History.from_chats(part)
        row["history"] = views
        row["text"] = TensorDict({"prompt": cell("a" * prompt), "full": cell("a" * full)})
    (row,) = _write(rows)[0][:].unbind(0)

    assert row["history", "prompt"].content == ["q"]
    assert row["history", "response"].content == ["call", "result", "done"]
    assert row["history", "full"].content == ["q", "call", "result", "done"]
    assert row["text", "response"] == "aaa"
    assert isinstance(row["history", "full"].chats[0], Chat)


def test_per_token_rewards_fall_on_their_tokens():
    first, second = _two_turns()
    first["next", "reward"] = torch.tensor([[0.1], [0.2]])
    (row,) = _write([first, second])[0][:].unbind(0)
    # response 3 4 5 6: the first turn's two, none for the tool, the second turn's on its last token
    assert torch.allclose(row["next", "reward"].flatten(), torch.tensor([0.1, 0.2, 0.0, 1.0]))


def test_an_invalid_turn_makes_the_row_invalid_and_hands_on_its_error():
    first, second = _two_turns()
    first["next", "reward_valid"] = torch.tensor([False])
    first["next", "error"] = TensorDict({"message": cell("boom")})
    second["next", "reward_valid"] = torch.tensor([True])
    (row,) = _write([first, second])[0][:].unbind(0)

    assert not row["next", "reward_valid"].item()
    assert row["next", "error", "message"] == "boom"


def _component(value, *, valid=True, error="", seconds=0.5):
    return TensorDict(
        {
            "value": torch.full((1, 1), value),
            "valid": torch.tensor(valid),
            "seconds": torch.tensor(seconds),
            "error": cell(error),
        }
    )


def test_components_and_parts_of_the_reward_are_joined_as_the_reward_is():
    first, second = _two_turns()
    first["next", "rewards"] = TensorDict({"a": _component(0.5), "b": _component(1.0)})
    second["next", "rewards"] = TensorDict({"a": _component(0.25), "b": _component(2.0)})
    for turn, right in ((first, 0.25), (second, 1.0)):
        turn["next", "reward_right"] = torch.full((1, 1), right)
        turn["next", "reward_seconds"] = torch.tensor(0.125)
        turn["next", "success"] = torch.full((1, 1), right == 1.0)
    (row,) = _write([first, second])[0][:].unbind(0)

    assert row["next", "rewards", "a", "value"].tolist() == [[0.75]]
    assert row["next", "rewards", "b", "value"].tolist() == [[3.0]]
    assert row["next", "rewards", "a", "seconds"].item() == 1.0
    assert row["next", "rewards", "a", "valid"].item() is True
    assert row["next", "rewards", "a", "error"] == ""
    assert row["next", "reward_right"].tolist() == [[1.25]]
    assert row["next", "reward_seconds"].item() == 0.25
    assert row["next", "success"].item() is True
    assert first["next", "rewards", "a", "value"].item() == 0.5


def test_a_component_that_failed_in_any_turn_is_invalid_and_says_why():
    first, second = _two_turns()
    failed = _component(float("nan"), valid=False, error="nobody there")
    first["next", "rewards"] = TensorDict({"a": failed, "b": _component(1.0)})
    second["next", "rewards"] = TensorDict({"a": _component(1.0), "b": _component(1.0)})
    (row,) = _write([first, second])[0][:].unbind(0)

    assert row["next", "rewards", "a", "value"].isnan().all()
    assert row["next", "rewards", "a", "valid"].item() is False
    assert row["next", "rewards", "a", "error"] == "nobody there"
    assert row["next", "rewards", "b", "valid"].item() is True
    assert row["next", "rewards", "b", "value"].item() == 2.0


def test_components_that_not_every_turn_has_are_the_last_turns():
    first, second = _two_turns()
    second["next", "rewards"] = TensorDict({"a": _component(1.0)})
    second["next", "reward_right"] = torch.ones(1, 1)
    (row,) = _write([first, second])[0][:].unbind(0)
    assert row["next", "rewards", "a", "value"].item() == 1.0
    assert row["next", "reward_right"].item() == 1.0


def _with_credit_first(rows, **options):
    # the transform appended last runs first
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.append_transform(MCAdvantage(2, **options))
    buffer.extend(lazy_rows(rows))
    return buffer


def _two_trajectories():
    rows = _two_turns() + _two_turns()
    for row in rows[2:]:
        row["traj_id"] = torch.tensor(1)
        row["next", "reward"] = torch.zeros(1, 1)
    return rows


def test_equal_advantages_of_the_turns_are_kept_as_one():
    row = _with_credit_first(_two_trajectories())[0]
    # returns 1.25 and 0: mean 0.625, deviation 1.25 / sqrt 2
    assert row["advantage"].shape == (1, 1)
    assert row["advantage"].item() == pytest.approx(0.5**0.5)


def test_different_advantages_of_the_turns_are_spread_over_their_tokens():
    row = _with_credit_first(_two_trajectories(), trajectory_return=None)[0]
    # rewards 0.25, 1, 0, 0: mean 0.3125, squares of the differences 0.671875 together
    deviation = (0.671875 / 3) ** 0.5
    first, second = -0.0625 / deviation, 0.6875 / deviation
    expected = torch.tensor([0, 0, first, first, 0, second]).unsqueeze(-1)
    assert torch.allclose(row["advantage"], expected, atol=1e-6)


def test_rows_without_tokens_pass_through_and_open_ends_without_id_are_an_error():
    row = TensorDict({"next": TensorDict({"done": torch.tensor([True])})})
    assert _write([row])[0][0]["num_turns"].item() == 1
    row = TensorDict({"next": TensorDict({"done": torch.tensor([False])})})
    with pytest.raises(DataError, match="whole trajectories"):
        _write([row])
    with pytest.raises(DataError, match="done"):
        _write([TensorDict({"x": torch.ones(1)})])


def test_rows_without_id_are_trajectories_one_after_the_other():
    rows = [row.exclude("traj_id") for row in _two_turns() + _two_turns()]
    assert len(_write(rows)[0]) == 2


def test_a_turn_between_two_at_another_temperature_is_trained_once():
    one = _turn([1], [2], [P, S])
    warm = _turn([1, 2, 3], [4], [P, S, T, S], turn=1, temperature=2.0)
    last = _turn([1, 2, 3, 4, 5], [6], [P, S, T, S, T, S], turn=2, done=True)
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(lazy_rows([one, warm, last]))
    rows = [buffer[index] for index in range(len(buffer))]
    found = [row["tokens", "full"][row["trace", "mask_reason"] == 0].tolist() for row in rows]
    assert found == [[2], [4], [6]]


def test_a_turn_goes_on_with_the_answer_in_its_prompt_not_with_a_shorter_one():
    # The same prompt was answered twice; the younger answer is the beginning of the older one.
    old = _turn([1], [2, 3], [P, S, S])
    young = _turn([1], [2], [P, S])
    last = _turn([1, 2, 3, 4], [5], [P, S, S, T, S], turn=1, done=True)
    buffer = ReplayBuffer(transform=JoinTurns())
    buffer.extend(lazy_rows([old, young, last]))
    rows = [buffer[index] for index in range(len(buffer))]
    found = [row["tokens", "full"][row["trace", "mask_reason"] == 0].tolist() for row in rows]
    assert sorted(found) == [[2], [2, 3, 5]]
