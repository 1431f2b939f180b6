"""The record of a conversation's tokens."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from torchrl_llm.data import FinishReason, Source, Support, TokenRecord
from torchrl_llm.data.record import Completion, respond_records

COLUMNS = ("token_ids", "source", "turn", "policy_version", "log_probs")


@pytest.fixture
def record():
    prompt = TokenRecord.from_prompt(torch.tensor([5, 6]), torch.tensor([0, 1]), 1)
    answered = prompt.respond(
        torch.tensor([7, 8]), torch.tensor([-0.5, -1.0]), 3, FinishReason.STOP
    )
    asked = answered.extend(torch.tensor([9]), torch.tensor([1]), 3)
    return asked.respond(torch.tensor([10]), torch.tensor([-2.0]), 4, FinishReason.LENGTH)


def test_turns_append_with_their_provenance(record):
    assert record.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert record.source.tolist() == [0, 1, 3, 3, 1, 3]
    assert record.turn.tolist() == [-1, -1, 0, 0, -1, 1]
    assert record.policy_version.tolist() == [-1, -1, 3, 3, -1, 4]
    assert record.log_probs.tolist() == [0.0, 0.0, -0.5, -1.0, 0.0, -2.0]
    assert record.num_messages == 4
    assert record.num_turns == 2
    assert record.response_start == 5
    assert record.finish_reason == FinishReason.LENGTH


def test_a_completion_that_tells_its_versions_is_believed_and_others_get_the_common_one():
    prompts = [TokenRecord.from_prompt(torch.arange(n), torch.ones(n), 1) for n in (1, 2)]
    ids, log_probs = torch.tensor([7, 8, 9]), torch.tensor([-0.5, -1.0, -1.5])
    versions = torch.tensor([3, 3, 4], dtype=torch.int32)
    completions = [
        Completion(ids, log_probs, FinishReason.STOP, versions=versions),
        Completion(ids[:2], log_probs[:2], FinishReason.STOP),
    ]
    records = respond_records(prompts, completions, 6)
    assert [each.policy_version.tolist() for each in records] == [[-1, 3, 3, 4], [-1, -1, 6, 6]]


def test_a_record_that_is_extended_is_a_prompt_again(record):
    longer = record.extend(torch.tensor([11]), torch.tensor([Source.TOOL]), 5)
    assert longer.finish_reason is None
    assert longer.response_start == 5


def test_pickling_keeps_values_and_types(record):
    twin = pickle.loads(pickle.dumps(record))
    for name in COLUMNS:
        a, b = getattr(record, name), getattr(twin, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for name in ("num_messages", "finish_reason", "response_start", "fork_cause", "earlier_turns"):
        assert getattr(record, name) == getattr(twin, name)
    assert torch.equal(copy.deepcopy(record).token_ids, record.token_ids)


def test_turns_are_counted_on_behind_a_fork_whose_cause_stays():
    nothing = torch.zeros(0, dtype=torch.int64)
    prompt = TokenRecord.from_prompt(nothing, nothing, 0, fork_cause="window", earlier_turns=3)
    one = torch.tensor([7]), torch.tensor([-0.5]), 0, FinishReason.STOP
    answered = prompt.respond(*one)
    record = pickle.loads(pickle.dumps(answered.extend(*[torch.tensor([1])] * 2, 2))).respond(*one)
    assert record.turn.tolist() == [3, -1, 4]
    assert (record.num_turns, record.fork_cause) == (5, "window")
    # what was cut off is not counted again
    assert record.cut(0, 0).num_turns == 3


def test_kept_ids_follow_the_tokens_over_turns_cuts_and_pickles():
    prompt = TokenRecord.from_prompt(torch.tensor([5, 6]), torch.tensor([0, 1]), 1)
    kept = Support(torch.tensor([7, 70, 8], dtype=torch.int32), torch.tensor([2, 1]).int())
    log_probs = torch.tensor([-0.5, 0.0])
    answered = prompt.respond(torch.tensor([7, 8]), log_probs, 3, FinishReason.STOP, kept)
    asked = answered.extend(torch.tensor([9]), torch.tensor([1]), 3)
    record = asked.respond(torch.tensor([10]), torch.tensor([-2.0]), 4, FinishReason.LENGTH)
    assert prompt.support is None
    for twin in (record, pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        assert twin.support.counts.tolist() == [0, 0, 2, 1, 0, 0]
        assert twin.support.token_ids.tolist() == [7, 70, 8]
        assert twin.support.counts.dtype == twin.support.token_ids.dtype == torch.int32
    middle = record.cut(3, 5)
    assert middle.token_ids.tolist() == [8, 9]
    assert middle.support.token_ids.tolist() == [8]
    assert middle.support.counts.tolist() == [1, 0]


def test_a_view_of_a_large_batch_pickles_alone():
    flat = torch.arange(100_000)
    view = TokenRecord.from_prompt(flat[10:12], torch.tensor([1, 1]), 1)
    assert len(pickle.dumps(view)) < 3000


def test_codes_are_pickled_by_value_in_every_python():
    # Python 3.11.2 writes getattr(class, name) for an enum, which no checkpoint may hold.
    for code in (FinishReason.LENGTH, Source.SAMPLED):
        written = pickle.dumps(code)
        assert b"getattr" not in written
        assert pickle.loads(written) is code
