"""What the decoding loop hands out: completions that hold what was sampled and no more."""

from __future__ import annotations

import itertools

import torch

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.record import TokenRecord, respond_records
from torchrl_llm.modules import SamplingParams
from torchrl_llm.modules.backends.decoding import StopStrings, decode

LENGTHS = [2, 20, 5]
STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


class Counting:
    """A model of rows that end after their number of tokens."""

    def __init__(self):
        self.step, self.rows = 0, torch.tensor(LENGTHS)

    def logits(self):
        ends = (self.rows == self.step + 1).long()
        return torch.nn.functional.one_hot(ends, 8).float() * 9

    def advance(self, token_ids):
        self.step += 1
        return self.logits()

    def keep(self, rows):
        self.rows = self.rows[rows]


def sampled(model=None, cancelled=()):
    model = model or Counting()
    return decode(
        model,
        model.logits(),
        [torch.zeros(1, dtype=torch.int64)] * 3,
        SamplingParams(max_new_tokens=500, temperature=0.0),
        max_tokens=torch.tensor([500, 500, 500]),
        end_ids=[1],
        stop_strings=StopStrings(None, ()),
        cancelled=cancelled,
    )


def cut_at(steps):
    """A question that is answered with yes at this step and later."""
    asked = itertools.count(1)
    return lambda: next(asked) >= steps


def test_a_cancelled_row_ends_aborted_with_its_tokens_so_far():
    model = Counting()
    completions = sampled(model, [cut_at(1), cut_at(7), cut_at(5)])
    found = [(len(c.token_ids), c.finish_reason) for c in completions]
    # The last row ends by itself in the step after which it is cancelled.
    assert found == [(1, ABORT), (7, ABORT), (5, STOP)]
    assert model.step == 6  # the first token needs none


def test_rows_that_nobody_cancels_are_waited_for():
    model = Counting()
    completions = sampled(model, [cut_at(1), cut_at(500), cut_at(1)])
    found = [(len(c.token_ids), c.finish_reason) for c in completions]
    assert found == [(1, ABORT), (20, STOP), (1, ABORT)]
    assert model.step == 19


def test_completions_of_a_batch_lie_in_one_storage_without_what_follows_their_ends():
    completions = sampled()
    assert [c.token_ids.shape[0] for c in completions] == LENGTHS
    for name, size in (("token_ids", 8), ("log_probs", 4)):
        storages = [getattr(c, name).untyped_storage() for c in completions]
        assert {s.data_ptr() for s in storages} == {storages[0].data_ptr()}
        assert storages[0].nbytes() == size * sum(LENGTHS)  # of 3 x 500 that were prepared


def test_records_of_a_batch_lie_in_one_storage_a_column():
    prompt = TokenRecord.from_prompt(torch.tensor([5, 6]), torch.tensor([0, 1]), 1)
    records = respond_records([prompt] * 3, sampled(), 0)
    for name, size in (("token_ids", 8), ("log_probs", 4)):
        storages = [getattr(record, name).untyped_storage() for record in records]
        assert {s.nbytes() for s in storages} == {size * (sum(LENGTHS) + 3 * 2)}
        assert len({s.data_ptr() for s in storages}) == 1
