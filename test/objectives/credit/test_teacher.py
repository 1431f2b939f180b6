"""The teacher's divergence on top of any advantage estimator."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import BOTH, TableActor, make_row, make_rows
from tensordict import TensorDict

from torchrl_llm.data.enums import Source
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs.transforms import RetrieveTeacherLogProb
from torchrl_llm.errors import DataError
from torchrl_llm.objectives import (
    ConstantCredit,
    GRPOLoss,
    GSPOTokenLoss,
    MCAdvantage,
    OnPolicyDistillationLoss,
    TeacherKL,
)


def row(advantage, sampled, teacher, *, prompt=1, dtype=torch.float32, source=None, **further):
    sampled, teacher = (torch.tensor(x, dtype=dtype) for x in (sampled, teacher))
    length = len(sampled)
    ids = torch.arange(length)
    if source is None:
        source = [Source.PROMPT] * prompt + [Source.SAMPLED] * (length - prompt)
    made = TensorDict(
        tokens={"full": ids, "prompt": ids[:prompt], "response": ids[prompt:]},
        log_probs={"full": sampled},
        trace={"source": torch.tensor([int(s) for s in source], dtype=torch.int8)},
        next={"teacher_log_probs": {"full": teacher}},
        **further,
    )
    if advantage is not None:
        made["advantage"] = torch.tensor(advantage, dtype=dtype).reshape(-1, 1)
    return made


def modified(made, coeff=0.5):
    buffer = ReplayBuffer(transform=TeacherKL(coeff))
    buffer.extend([made])
    return buffer[0]["advantage"]


@BOTH
def test_the_advantage_of_a_row_becomes_one_of_tokens(dtype, tolerance):
    # A = 2, c = 0.5: 2 - 0.5 (-1 + 3) = 1; 2 - 0.5 (-2 + 0.5) = 2.75; nothing at the prompt.
    advantage = modified(row(2.0, [9.0, -1.0, -2.0], [9.0, -3.0, -0.5], dtype=dtype))
    assert advantage.dtype is dtype
    assert advantage.shape == (3, 1)
    assert advantage.flatten().tolist() == pytest.approx([0.0, 1.0, 2.75], abs=tolerance)


def test_an_advantage_of_tokens_is_changed_in_place_of_each():
    advantage = modified(row([9.0, 1.0, 2.0], [0.0, -1.0, -1.0], [0.0, -2.0, -1.0]))
    assert advantage.flatten().tolist() == [0.0, 0.5, 2.0]


def test_tokens_of_a_tool_and_junk_there_have_no_part():
    source = [Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.SAMPLED]
    nan = math.nan
    advantage = modified(row(1.0, [nan, -1.0, nan, -1.0], [nan, -3.0, nan, -1.0], source=source))
    assert advantage.flatten().tolist() == [0.0, 0.0, 0.0, 1.0]


def test_it_stands_between_the_rule_of_credit_and_the_teacher_and_before_the_joining():
    teacher = TableActor(torch.linspace(-2.0, -0.25, 8))

    def turn(prompt, length, reward, group, traj, done):
        made = row(None, [-1.0] * length, [0.0] * length, prompt=prompt)
        del made["next"]
        made["tokens", "full"] = made["tokens", "full"] % 8
        made["masks", "all_assistant_mask"] = made["trace", "source"] == Source.SAMPLED
        made["next", "reward"] = torch.full((1, 1), reward)
        made["next", "done"] = torch.tensor([done])
        made["group_id"], made["traj_id"] = torch.tensor(group), torch.tensor(traj)
        return made

    buffer = ReplayBuffer()
    for transform in (
        JoinTurns(),
        TeacherKL(0.5),
        MCAdvantage(2, normalize="none"),
        RetrieveTeacherLogProb(teacher),
    ):
        buffer.append_transform(transform)
    rows = [
        turn(1, 3, 0.0, 0, 0, False),
        turn(4, 6, 1.0, 0, 0, True),
        turn(1, 3, 0.0, 0, 1, True),
    ]
    assert len(buffer.extend(rows)) == 2
    first, second = buffer[0], buffer[1]
    # Returns 1 and 0: advantages 0.5 and -0.5. The teacher's log-prob of id k is -2 + k / 4, so
    # 0.5 (-1 - (-2 + k / 4)) = 0.5 - k / 8 is taken off at the sampled ids 1, 2 and 4, 5.
    gap = [0.5 - k / 8 for k in range(6)]
    expected = [0.0, 0.5 - gap[1], 0.5 - gap[2], 0.0, 0.5 - gap[4], 0.5 - gap[5]]
    assert first["advantage"].flatten().tolist() == pytest.approx(expected)
    expected = [0.0, -0.5 - gap[1], -0.5 - gap[2]]
    assert second["advantage"].flatten().tolist() == pytest.approx(expected)


def test_on_a_constant_of_zero_it_is_on_policy_distillation():
    def given():
        made = make_row([5, 1, 2], 1, old=-1.0)
        made["next", "teacher_log_probs", "full"] = torch.tensor([0.0, -3.0, -0.5])
        made["next", "reward"], made["next", "done"] = torch.zeros(1, 1), torch.ones(1).bool()
        return made

    buffer = ReplayBuffer()
    buffer.append_transform(TeacherKL(1.0))
    buffer.append_transform(ConstantCredit(0.0))
    buffer.extend([given()])
    actors = [TableActor([-1.5] * 8) for _ in range(2)]
    GRPOLoss(actors[0], clip_epsilon=(0.99, 9.0))(buffer[:]).total_loss().backward()
    loss = OnPolicyDistillationLoss(actors[1])
    loss(make_rows(given())).total_loss().backward()
    assert actors[0].table.grad.any()
    torch.testing.assert_close(actors[0].table.grad, actors[1].table.grad)


@BOTH
def test_with_one_ratio_a_sequence_it_is_gspo_with_distillation(dtype, tolerance):
    # Ratio s = exp((0.2 + 0.4) / 2) = e^0.3 of the whole row, unclipped; A = 1.5 and 0.75:
    # -(e^0.3 * 1.5 + e^0.3 * 0.75) / 2.
    made = row(1.0, [0.0, -1.0, -1.0], [0.0, 0.0, -1.5], dtype=dtype, masks={"x": torch.zeros(3)})
    made["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
    buffer = ReplayBuffer(transform=TeacherKL(0.5))
    buffer.extend([made])
    model = TableActor([0.0] * 8).to(dtype)
    with torch.no_grad():
        model.table.copy_(torch.tensor([0.0, -0.8, -0.6, *[0.0] * 5], dtype=torch.float64))
    output = GSPOTokenLoss(model, clip_epsilon=0.5)(buffer[:])
    expected = -math.exp(0.3) * (1.5 + 0.75) / 2
    assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)


def test_what_is_missing_or_broken_is_an_error_that_says_what_to_do():
    with pytest.raises(DataError, match="advantage estimator"):
        modified(row(None, [0.0, -1.0], [0.0, -1.0]))
    with pytest.raises(DataError, match=r"\[1, 1\] or \[2, 1\]"):
        modified(row([1.0, 2.0, 3.0], [0.0, -1.0], [0.0, -1.0]))
    with pytest.raises(DataError, match="NaN or infinite"):
        modified(row(1.0, [0.0, -1.0], [0.0, math.nan]))
    with pytest.raises(DataError, match="RetrieveTeacherLogProb"):
        modified(row(1.0, [0.0, -1.0], [0.0, -1.0, -1.0]))
