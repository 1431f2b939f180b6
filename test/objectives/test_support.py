"""Losses on the support that truncated sampling left: ratios of an unchanged policy are one."""

from __future__ import annotations

import math

import pytest
import torch
from collectors.collecting import make_env
from modules.policies.rows_helper import tokens_td
from objectives.rows_helper import make_row, make_rows, pad
from tensordict import TensorDict

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.scoring import Support
from torchrl_llm.envs.transforms import RetrieveLogProb
from torchrl_llm.errors import DataError
from torchrl_llm.modules import FakeWrapper, TransformersWrapper
from torchrl_llm.objectives import GRPOLoss, check_invariance
from torchrl_llm.objectives.loss_rows import RowKeys, read_support, read_token_rows

TRUNCATIONS = [
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6},
    {"temperature": 1.7},
]


def keep(row, counts, ids):
    columns = {"counts": torch.tensor(counts).int(), "token_ids": torch.tensor(ids).int()}
    return row.set("support", TensorDict(columns))


def two_rows():
    """Prompt of 1, of 2 tokens; kept ids of all that was sampled but the token 6."""
    return [
        keep(make_row([5, 1, 6], 1), [0, 2, 0], [1, 3]),
        keep(make_row([5, 6, 3, 2], 2, advantage=-2.0), [0, 0, 1, 3], [3, 7, 2, 4]),
    ]


def sampled_rows(policy, **td):
    out = policy(tokens_td([5, 6, 7], [8], [9, 10], [5, 6, 7]))
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5]).reshape(4, 1, 1)
    return out.set("advantage", advantage)


@pytest.fixture(params=["transformers", "fake"])
def make_policy(request, tiny_model):
    def make(**sampling):
        torch.manual_seed(0)
        kwargs = {"max_new_tokens": 6, "ignore_eos": True, **sampling}
        options = {"input_mode": "tokens", "generate_kwargs": kwargs}
        if request.param == "fake":
            return FakeWrapper(vocab_size=40, eos_token_ids=(2,), **options)
        return TransformersWrapper(tiny_model, **options)

    return make


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_the_ratio_of_an_unchanged_policy_is_one(make_policy, truncation):
    policy = make_policy(**truncation, record_support=True)
    rows = sampled_rows(policy)
    output = GRPOLoss(policy)(rows)
    # k3 is zero only where every single ratio is one; the objective is then minus the mean
    # advantage: rows of 6 tokens each, (1 - 1 + 0.5 - 0.5) / 4 = 0.
    assert output.kl_to_inference.item() == pytest.approx(0.0, abs=1e-9)
    assert output.kl_approx.item() == pytest.approx(0.0, abs=1e-6)
    assert output.loss_objective.item() == pytest.approx(0.0, abs=1e-5)
    assert output.ESS.item() == pytest.approx(1.0, abs=1e-5)
    output.total_loss().backward()
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    assert any(grad.abs().max() > 0 for grad in grads)


def test_without_the_recorded_support_the_rows_are_refused_and_the_ratio_would_be_off(make_policy):
    policy = make_policy(top_k=4, record_support=True)
    rows = sampled_rows(policy)
    plain = rows.exclude("support")
    assert GRPOLoss(policy)(plain).kl_approx.item() > 0.1
    rows = sampled_rows(make_policy(top_k=4))
    with pytest.raises(DataError, match="record_support"):
        GRPOLoss(policy)(rows)


def test_padded_rows_and_rows_of_a_buffer_give_the_same_loss(make_policy):
    policy = make_policy(top_p=0.8, record_support=True)
    ragged = sampled_rows(policy)
    with torch.no_grad():
        wanted = GRPOLoss(policy)(ragged)
        dense = sampled_rows(
            make_policy(top_p=0.8, record_support=True).get_new_version(pad_output=True)
        )
        found = [GRPOLoss(policy)(dense)]
        buffer = ReplayBuffer()
        buffer.append_transform(JoinTurns())
        members = [
            row.set("traj_id", torch.tensor(i)).set(
                "next", TensorDict(done=torch.tensor([True]), reward=torch.zeros(1, 1))
            )
            for i, row in enumerate(lazy_rows(list(ragged.clone().unbind(0))).unbind(0))
        ]
        buffer.extend(lazy_rows(members))
        found.append(GRPOLoss(policy)(buffer[:]))
    for output in found:
        torch.testing.assert_close(output.kl_to_inference, wanted.kl_to_inference)
        torch.testing.assert_close(output.loss_objective, wanted.loss_objective)


def test_layouts_the_naive_head_splits_order_and_junk_do_not_matter(tiny_model):
    torch.manual_seed(0)
    kwargs = {"max_new_tokens": 5, "top_p": 0.8, "record_support": True}
    policy = TransformersWrapper(tiny_model, input_mode="tokens", generate_kwargs=kwargs)
    report = check_invariance(GRPOLoss(policy), sampled_rows(policy))
    assert report.deviations.keys() >= {"layouts", "naive", "micro-batches", "order", "junk"}


def test_turns_from_a_collector_are_trained_on_what_each_turn_could_sample(tiny_model, tokenizer):
    kwargs = {"max_new_tokens": 6, "top_k": 5, "temperature": 0.8, "record_support": True}
    policy = TransformersWrapper(tiny_model, tokenizer=tokenizer, generate_kwargs=kwargs)
    collector = LLMCollector(
        make_env(4, tool="the tool says 7", repeats=2),
        policy=policy,
        yield_completed_trajectories=True,
        dialog_turns_per_batch=12,
        total_dialog_turns=12,
    )
    buffer = ReplayBuffer(transform=JoinTurns())
    for batch in collector:
        buffer.extend(batch)
    rows = buffer[:]
    assert max(row["num_turns"].item() for row in rows.unbind(0)) > 1
    rows["advantage"] = torch.ones(len(rows), 1, 1)
    with torch.no_grad():
        output = GRPOLoss(policy)(rows)
    assert output.kl_to_inference.item() == pytest.approx(0.0, abs=1e-9)
    assert output.loss_objective.item() == pytest.approx(-1.0, abs=1e-5)


def test_an_identical_reference_has_no_divergence_on_the_support(make_policy):
    policy = make_policy(top_k=3, record_support=True)
    rows = RetrieveLogProb(policy.get_new_version(generate=False))(sampled_rows(policy))
    with torch.no_grad():
        output = GRPOLoss(policy, kl_to_ref_coeff=0.1)(rows)
    assert output.kl_to_ref.item() == pytest.approx(0.0, abs=1e-9)


def test_the_gradient_is_that_of_the_restricted_softmax():
    # One token, ids 1 and 3 kept of 8: the loss of a fresh row with advantage 1 is -exp(0) and its
    # gradient with respect to the logits -(1[v = 1] - p_v) on the kept ids, 0 elsewhere.
    policy = FakeWrapper(vocab_size=8, eos_token_ids=(2,), input_mode="tokens")
    head, embedding = policy.model.head, policy.model.embedding
    logits = (embedding[5] @ head.T).detach()[[1, 3]]
    p = logits.softmax(0)
    row = keep(make_row([5, 1], 1, old=math.log(p[0])), [0, 2], [1, 3])
    GRPOLoss(policy)(make_rows(row)).total_loss().backward()
    wanted = torch.zeros_like(head)
    wanted[1], wanted[3] = -(1 - p[0]) * embedding[5], p[1] * embedding[5]
    torch.testing.assert_close(head.grad, wanted.detach())


def test_the_support_is_that_of_the_tokens_that_count_in_order():
    td = make_rows(*two_rows())
    rows = read_token_rows(td, RowKeys(), "sft")
    support = read_support(td, rows, "support")
    assert support.counts.tolist() == [2, 0, 1, 3]
    assert support.token_ids.tolist() == [1, 3, 3, 7, 2, 4]


def test_padding_changes_nothing():
    members = two_rows()
    td = pad(members, junk=9)
    counts = [row["support", "counts"] for row in members]
    ids = [row["support", "token_ids"] for row in members]
    td["support"] = TensorDict(
        {
            "counts": torch.stack([torch.cat([counts[0], counts[0][:1]]), counts[1]]),
            "token_ids": torch.stack([torch.cat([ids[0], torch.full((2,), 77).int()]), ids[1]]),
        },
        [2],
    )
    rows = read_token_rows(td, RowKeys(), "rlhf")
    support = read_support(td, rows, "support")
    assert support.counts.tolist() == [2, 0, 1, 3]
    assert support.token_ids.tolist() == [1, 3, 3, 7, 2, 4]


def test_rows_in_which_nothing_was_cut_are_scored_as_ever():
    td = make_rows(keep(make_row([5, 1], 1), [0, 0], []))
    assert read_support(td, read_token_rows(td, RowKeys(), "sft"), "support") is None
    td = make_rows(make_row([5, 1], 1))
    assert read_support(td, read_token_rows(td, RowKeys(), "sft"), "support") is None


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([0, 2], [3, 4], "rows \\[0\\] are none of the ids"),
        ([0, 3], [1, 4], "counts 3 kept ids and stores 2"),
        ([2], [1, 4], "one value per token"),
    ],
)
def test_kept_ids_that_do_not_belong_to_the_tokens_are_refused(counts, ids, message):
    td = make_rows(keep(make_row([5, 1], 1), counts, ids))
    rows = read_token_rows(td, RowKeys(), "sft")
    with pytest.raises(DataError, match=message):
        read_support(td, rows, "support")


def test_supports_of_rows_leave_padding_out():
    ids, counts = [torch.tensor([4, 5, 0, 0])], [torch.tensor([0, 2, 0])]
    support = Support.of_rows(ids, counts, [torch.tensor([False, True, False])])
    assert support.token_ids.tolist() == [4, 5]
    assert support.counts.tolist() == [2]
    assert read_rows(make_rows(*two_rows()), ("support", "counts"))[0].tolist() == [0, 2, 0]
