"""Bad rows are refused by every loss that reads them, before the actor is asked."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.every_loss import LOSSES, POLICY_LOSSES, TableCritic, full_rows, make_loss
from objectives.rows_helper import make_row, make_rows, pad

from torchrl_llm import objectives
from torchrl_llm.errors import DataError, TorchRLLLMError
from torchrl_llm.objectives import AnswerLoss, Correction

BAD = [math.nan, math.inf, -math.inf]


class Watched(TableCritic):
    """Counts how often it is asked."""

    def __init__(self, vocab=8):
        super().__init__(torch.linspace(-2.5, -1.5, vocab))
        self.asked = 0

    def token_scores(self, *args, **kwargs):
        self.asked += 1
        return super().token_scores(*args, **kwargs)


def reads(name, key):
    """Whether the defaults of a loss read a column."""
    return key in make_loss(name, Watched()).in_keys


READERS = {
    key: [name for name in LOSSES if reads(name, key)]
    for key in (
        "advantage",
        ("log_probs", "full"),
        ("value_target", "full"),
        ("next", "teacher_log_probs", "full"),
    )
}
COLUMNS = {name: [key for key, names in READERS.items() if name in names] for name in LOSSES}
# All but the one whose rows have a score each.
OF_TOKENS = [name for name in LOSSES if name != "RewardLoss"]
every_reader = pytest.mark.parametrize("name", [name for name in LOSSES if COLUMNS[name]])


def small_rows(*, without=None):
    rows = full_rows(vocab=8)
    for row in rows.tensordicts if without else ():
        del row[without]
    return rows


def refused(name, rows, message, **settings):
    actor = Watched()
    loss = make_loss(name, actor, **settings)
    with pytest.raises(DataError, match=message) as error:
        loss(rows)
    assert actor.asked == 0
    assert isinstance(error.value, TorchRLLLMError)


def test_every_policy_loss_reads_what_was_sampled_and_what_it_is_worth():
    distillation = {"OnPolicyDistillationLoss"}
    assert set(POLICY_LOSSES) <= set(READERS["log_probs", "full"])
    assert set(POLICY_LOSSES) - distillation <= set(READERS["advantage"])
    answers = {name for name in LOSSES if issubclass(getattr(objectives, name), AnswerLoss)}
    assert set(LOSSES) == {"SFTLoss", *answers}.union(*READERS.values())


@pytest.mark.parametrize("name", LOSSES)
def test_good_rows_are_not(name):
    actor = Watched()
    make_loss(name, actor)(small_rows()).total_loss().backward()
    assert actor.asked == 1
    assert actor.table.grad.isfinite().all()


@every_reader
def test_a_column_that_is_missing(name):
    advice = {
        "advantage": "advantage; .*(MCAdvantage|GAEAdvantage) must run",
        ("log_probs", "full"): r"\('log_probs', 'full'\); generate with a policy",
        ("value_target", "full"): ".*GAEAdvantage",
        ("next", "teacher_log_probs", "full"): ".*RetrieveTeacherLogProb",
    }
    for key in COLUMNS[name]:
        refused(name, small_rows(without=key), f"the rows have no {advice[key]}")


@every_reader
def test_a_column_of_another_shape(name):
    for key in COLUMNS[name]:
        rows = small_rows()
        rows.tensordicts[1][key] = torch.zeros(5, 1) if key == "advantage" else torch.zeros(2)
        message = r"one value per token: row 1 has 8 tokens and values of shape \(2,\)"
        if key == "advantage":
            message = r"must be \[B, 1, 1\] or \[B, T, 1\] with B=4, T=8, got \(.*row 1"
        refused(name, rows, message)


@every_reader
def test_a_column_that_is_not_finite_where_it_counts(name):
    for key in COLUMNS[name]:
        for bad in BAD:
            rows = small_rows()
            rows.tensordicts[2][key][-1] = bad
            refused(name, rows, r"NaN or infinite at tokens that count, in rows \[2\]")


@every_reader
def test_a_column_that_is_no_data_but_part_of_a_graph(name):
    for key in COLUMNS[name]:
        rows = small_rows()
        for row in rows.tensordicts:
            row[key] = row[key].requires_grad_()
        refused(name, rows, "must be stored data")


def test_padded_advantages_of_a_wrong_shape():
    for name in READERS["advantage"]:
        # TorchRL's users meet this one: [B, T] where [B, T, 1] is meant.
        rows = pad([make_row([5, 1, 2], 1, group=0), make_row([5, 6, 3], 1, group=0)])
        rows["group_id"] = torch.zeros(2, dtype=torch.long)
        rows["value_target"] = {"full": torch.zeros(2, 3)}
        rows["value_target"].batch_size = [2]
        rows["advantage"] = torch.zeros(2, 3)
        refused(
            name, rows, r"advantage must be \[B, 1, 1\] or \[B, T, 1\] with B=2, T=3, got \(2, 3\)"
        )


def test_a_batch_without_rows():
    for name in LOSSES:
        refused(name, small_rows()[:0], "the batch has no rows")


def test_a_mask_without_a_token():
    for name in OF_TOKENS:
        rows = small_rows()
        for row in rows.tensordicts:
            row["masks", "all_assistant_mask"][:] = False
            row["trace", "mask_reason"][:] = 5
        refused(name, rows, r"no token of (these 4 rows counts|the assistant|an answer)")
        with pytest.raises(DataError, match="no token of"):
            make_loss(name, Watched()).normalizer(rows)


def test_a_group_id_that_is_missing_where_prompts_are_averaged():
    for name in POLICY_LOSSES:
        rows = small_rows(without="group_id")
        refused(name, rows, "no group_id.*prompt_mean.*sequence_mean", aggregation="prompt_mean")


def test_log_probs_of_the_proximal_policy_or_the_reference_that_are_missing():
    for name in POLICY_LOSSES:
        for key, settings in (
            ("prox_log_probs", {"correction": Correction(type="tis")}),
            (("next", "ref_log_probs"), {"kl_to_ref_coeff": 0.1}),
        ):
            message = f"{key[-1] if isinstance(key, tuple) else key}.*RetrieveLogProb"
            refused(name, small_rows(without=key), message, **settings)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_log_probs_of_the_current_policy_that_are_not_finite(name):
    for bad in BAD:
        actor = Watched()
        with torch.no_grad():
            actor.table[small_rows()[0]["tokens", "full"][-1]] = bad
        with pytest.raises(DataError, match="its weights have diverged"):
            make_loss(name, actor)(small_rows())


def test_an_actor_that_scores_another_number_of_tokens():
    for name in OF_TOKENS:

        class Short(Watched):
            def token_scores(self, *args, **kwargs):
                scores = super().token_scores(*args, **kwargs)
                return scores._replace(log_probs=scores.log_probs[1:])

        with pytest.raises(DataError, match=r"must score the \d+ selected tokens"):
            make_loss(name, Short())(small_rows())


def test_rows_of_a_truncated_distribution_whose_support_was_not_kept():
    for name in POLICY_LOSSES:
        rows = small_rows()
        for number, row in enumerate(rows.tensordicts):
            row["tokens", "truncated_support"] = torch.tensor(number % 2 == 1)
        refused(name, rows, r"rows \[1, 3\] were sampled with top-k, top-p or min-p")
        make_loss(name, Watched())(rows[::2])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("tokens", "temperature"), torch.tensor(0.5)),
        (("tokens", "truncated_support"), torch.tensor(True)),
        (("masks", "all_attention_mask"), None),
        (("trace", "source"), None),
        (("trace", "mask_reason"), None),
        (("support", "counts"), torch.zeros(9, dtype=torch.int32)),
    ],
)
def test_a_column_that_only_some_rows_have_is_not_taken_for_missing(key, value):
    for lacking in [0, 2]:
        rows = small_rows()
        for row in rows.tensordicts:
            if value is not None:
                row[key] = value[: row["tokens", "full"].shape[0]] if value.ndim else value
            if key[0] == "support":
                row["support", "token_ids"] = torch.zeros(0, dtype=torch.int32)
        make_loss("GRPOLoss", Watched()).select(rows)
        del rows.tensordicts[lacking][key]
        refused("GRPOLoss", rows, rf"rows \[{lacking}\] have no .*{key[1]}.*and others do")


def test_a_first_token_that_counts_has_nothing_to_be_predicted_from():
    for name in OF_TOKENS:
        row = make_row([1, 2], 1)
        row["masks", "all_assistant_mask"][0] = True
        row["tokens", "prompt"] = torch.zeros(0, dtype=torch.long)
        row["trace", "source"][0] = 3
        row["trace", "mask_reason"][0] = 0
        refused(name, make_rows(row), "first token of row 0 counts")


def test_rows_without_ids():
    for name in LOSSES:
        refused(name, small_rows(without="tokens"), r"'tokens', 'full'")
