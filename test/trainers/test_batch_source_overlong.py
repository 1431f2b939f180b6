"""Rows that are too long on their way into a step: cut, counted, and what is left is trained."""

import pytest
import torch
from collectors.collecting import make_env, make_policy
from objectives.every_loss import POLICY_LOSSES, full_rows, make_actor, make_loss
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement
from trainers.test_batch_source import row, source, totals
from trainers.test_batch_source_credit import RULES, _batches
from trainers.test_batch_source_staleness import Collector
from trainers.test_batch_source_staleness import build as stale_source
from trainers.test_batch_source_staleness import row as aged_row

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import MaskReason, Source
from torchrl_llm.data.overlong import LengthRule
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import OverlongError
from torchrl_llm.objectives import MCAdvantage
from torchrl_llm.trainers import BatchSource, micro_batches, rollout_metrics
from torchrl_llm.trainers.batch_source import trained_rows

CUT = LengthRule(max_seq_len=4, on_overlong="truncate")
DROP = LengthRule(max_seq_len=4, on_overlong="drop")


def kept_rows(buffer):
    return row_list(buffer.storage.get(torch.arange(len(buffer)))) if len(buffer) else []


def test_what_is_cut_is_truncated_in_the_ledger_and_what_is_left_is_trained():
    # Two tokens of prompt and 3, 1, 5, 2 sampled: 5, 3, 7 and 4 tokens in all.
    batch = [row(1, length=3), row(0, length=1), row(1, 1, length=5), row(0, 1, length=2)]
    buffer, batch_source = source([batch], 4, length=CUT)
    collected = batch_source.fill()
    assert totals(batch_source) == {"generated": 11, "trained": 2 + 1 + 2 + 2, "truncated": 1 + 3}
    assert batch_source.overlong == {"train/overlong_rows": 2, "train/tokens_overlong": 4}
    assert [len(r["tokens", "full"]) for r in kept_rows(buffer)] == [4, 3, 4, 4]
    assert rollout_metrics(collected)["train/response_length"] == 11 / 4  # what the policy said
    reasons = torch.cat(read_rows(collected, ("trace", "mask_reason")))
    assert int((reasons == MaskReason.OVERLONG).sum()) == 4


def test_a_row_of_which_nothing_is_left_is_not_trained_and_counts_in_its_group():
    batch = [row(1, length=3), row(0, length=1)]
    buffer, batch_source = source(
        [batch], 2, length=LengthRule(max_seq_len=2, on_overlong="truncate")
    )
    batch_source.fill()
    assert totals(batch_source) == {"generated": 4, "truncated": 4}
    assert trained_rows(lazy_rows(kept_rows(buffer))) is None
    # (1 - 0.5) / 0.7071: neither reward is forgotten.
    assert kept_rows(buffer)[0]["advantage"].item() == pytest.approx(0.7071, abs=1e-4)


def test_what_is_dropped_leaves_the_baseline_and_is_counted_under_its_own_name():
    batch = [row(1, length=3), row(1, length=1), row(0, length=1), row(0, length=2)]
    buffer, batch_source = source([batch], 4, group=4, length=DROP)
    collected = batch_source.fill()
    assert totals(batch_source) == {"generated": 7, "trained": 4, "truncated": 3}
    assert batch_source.overlong == {"train/overlong_rows": 1, "train/tokens_overlong": 3}
    # Of 1, 0, 0 the mean is 1/3 and the sample deviation 0.5774.
    advantages = [r["advantage"].item() for r in kept_rows(buffer)]
    assert advantages == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-3)
    assert rollout_metrics(collected)["train/reward"] == 0.5
    assert rollout_metrics(collected)["train/invalid"] == 0


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        ("keep", {"generated": 4, "trained": 3, "truncated": 1}),
        ("mask", {"generated": 4, "trained": 1, "truncated": 3}),
        # Of two one is left, which is no group.
        ("drop", {"generated": 4, "truncated": 3, "invalid": 1}),
    ],
)
def test_the_filter_of_truncated_responses_sees_the_cut(truncated, expected):
    batch = [row(1, length=3), row(0, length=1)]
    _, batch_source = source([batch], 2, length=CUT, truncated=truncated)
    batch_source.fill()
    assert totals(batch_source) == expected


def test_an_error_is_raised_before_anything_of_the_batch_is_written():
    buffer, batch_source = source([[row(1), row(0)]], 2, length=LengthRule(max_seq_len=4))
    with pytest.raises(OverlongError, match="row 0 of the batch, group_id=0 has 5 tokens"):
        batch_source.fill()
    assert len(buffer) == 0


def test_groups_that_wait_are_carried_without_what_was_cut_off():
    _, batch_source = source([[row(0), row(1), row(1, 1)], [row(0, 1)]], 4, length=CUT)
    batch_source.fill()
    assert totals(batch_source) == {"generated": 9, "trained": 4, "truncated": 3, "pending": 2}
    batch_source.fill()
    assert totals(batch_source) == {"generated": 3, "trained": 4, "truncated": 1}
    assert batch_source.overlong == {"train/overlong_rows": 1, "train/tokens_overlong": 1}


@pytest.mark.parametrize("rule", [CUT, DROP], ids=["truncate", "drop"])
@pytest.mark.parametrize("on_stale", ["drop", "mask", "wait"])
def test_rows_that_are_old_and_too_long_are_counted_once(rule, on_stale):
    batches = [[aged_row(1, 0, 0, 1, 2), aged_row(0, 0, 2)], [aged_row(1, 1, 2), aged_row(0, 1, 2)]]
    collector, _, batch_source = stale_source(batches, 2, on_stale=on_stale, length=rule)
    assert isinstance(collector, Collector)
    collector.policy_version = 2
    batch_source.fill()  # raises when the ledger does not close
    spent = batch_source.ledger.totals
    if rule is DROP:
        assert spent["truncated"] == spent["generated"]
    else:
        # The third token of the first row, young enough, is cut off; the two before are too old.
        assert spent["truncated"] == spent["generated"] / 3
        assert spent["stale"] == 2


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
@pytest.mark.parametrize("on_overlong", ["truncate", "drop"])
@pytest.mark.parametrize("credit", RULES.values(), ids=RULES)
def test_the_ledger_closes_under_every_rule_of_credit(credit, on_overlong, truncated):
    credit = credit()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    buffer.append_transform(JoinTurns())
    buffer.append_transform(credit)
    batch_source = BatchSource(
        _batches(6),
        buffer,
        credit=credit,
        num_rows=8,
        truncated=truncated,
        max_resamples=1,
        length=LengthRule(max_seq_len=5, on_overlong=on_overlong),
    )
    for _ in range(3):
        batch_source.fill()
        assert (
            batch_source.ledger.totals["truncated"]
            >= batch_source.overlong["train/tokens_overlong"]
            > 0
        )
        assert all(len(kept["tokens", "full"]) <= 5 for kept in kept_rows(buffer))


@pytest.mark.parametrize("on_overlong", ["truncate", "drop"])
@pytest.mark.parametrize("limit", [20, 60, 500])
def test_turns_with_a_tool_are_cut_where_the_joined_row_is_too_long(tokenizer, limit, on_overlong):
    env = make_env(6, 3, tool="42", repeats=2, group_repeats=True)
    collector = LLMCollector(
        env,
        policy=make_policy(tokenizer),
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    credit = MCAdvantage(grpo_size=2)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(6), sampler=SamplerWithoutReplacement(), batch_size=6
    )
    buffer.append_transform(credit)
    buffer.append_transform(JoinTurns())
    batch_source = BatchSource(
        collector,
        buffer,
        credit=credit,
        num_rows=6,
        length=LengthRule(max_seq_len=limit, on_overlong=on_overlong),
    )
    collected = row_list(batch_source.fill())
    whole = {int(r["traj_id"]): r for r in collected}  # the last turn holds the conversation
    kept, trained = kept_rows(buffer), 0
    for joined in kept:
        full = whole[int(joined["traj_id"])]
        size = min(limit, len(full["tokens", "full"]))
        assert torch.equal(joined["tokens", "full"], full["tokens", "full"][:size])
        assert torch.equal(joined["trace", "source"], full["trace", "source"][:size])
        assert torch.equal(joined["log_probs", "full"], full["log_probs", "full"][:size])
        trained += int((joined["trace", "source"] == Source.SAMPLED).sum())
    spent = batch_source.ledger.totals
    assert spent["trained"] == trained
    assert spent["generated"] == trained + spent["truncated"]
    too_long = sum(len(full["tokens", "full"]) > limit for full in whole.values())
    assert batch_source.overlong["train/overlong_rows"] == too_long
    assert len(kept) == (6 if on_overlong == "truncate" else 6 - too_long)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_cut_row_is_trained_as_a_whole_one_whose_end_does_not_count(make_tiny_model, name):
    rows = row_list(full_rows(shapes=((2, 3), (2, 9), (3, 1), (3, 7))))
    fitted = LengthRule(max_seq_len=6, on_overlong="truncate").fit(rows)
    assert fitted.overlong == 2
    model = make_tiny_model().eval()
    actor = make_actor(model)
    loss = make_loss(name, actor)

    def gradients(batch, layout):
        model.zero_grad()
        batch = lazy_rows(batch)
        normalizer = loss.normalizer(batch)
        actor.layout = layout
        for part in micro_batches(batch, budget=16, layout=layout):
            loss(part, normalizer=normalizer).total_loss().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradients(fitted.marked, "padded")
    assert expected.abs().max() > 0
    for layout in ("padded", "bucketed", "packed", "shared"):
        torch.testing.assert_close(gradients(fitted.kept, layout), expected, rtol=1e-4, atol=1e-6)
    whole = gradients(rows, "padded")
    assert not torch.allclose(whole, expected, rtol=1e-2, atol=1e-6)
