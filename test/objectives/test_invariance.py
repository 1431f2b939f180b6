"""The laws hold for every loss we ship, and the check finds losses that break them."""

from __future__ import annotations

import pytest
import torch
from objectives.every_loss import (
    LOSSES,
    POLICY_LOSSES,
    TableCritic,
    full_rows,
    make_actor,
    make_loss,
)
from objectives.rows_helper import Reinforce, TableActor, make_row, make_rows, pad
from tensordict import TensorDict

from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.scoring import TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import Correction, GRPOLoss, SFTLoss, check_invariance
from torchrl_llm.objectives.policy_loss import Surrogate

LAWS = {"layouts", "naive", "micro-batches", "order", "junk"}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_holds_the_laws(make_tiny_model, name):
    # A value head, and a teacher's states, are out of reach of the model's own logits. In double
    # precision the bound does not depend on the machine's order of sums.
    report = check_invariance(make_loss(name, make_actor(make_tiny_model().double())), full_rows())
    assert set(report.deviations) | {"naive"} == LAWS
    assert set(report.skipped) <= {"naive"}
    assert max(report.deviations.values()) < 1e-5


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_under_other_averages_and_with_every_term_too(name):
    for aggregation in ["prompt_mean", "sequence_mean"]:
        torch.manual_seed(0)
        loss = make_loss(
            name,
            TableCritic(-2.0 - torch.rand(8)),
            aggregation=aggregation,
            correction=Correction(type="mis", level="sequence", bounds=(0.1, 9.0)),
            kl_to_ref_coeff=0.1,
            entropy_coeff=0.1,
        )
        check_invariance(loss, full_rows(seed=1, vocab=8))


def test_padded_rows_are_checked_as_they_are(make_tiny_model):
    rows = pad([*full_rows().tensordicts], junk=3)
    report = check_invariance(GRPOLoss(CausalScorer(make_tiny_model())), rows)
    assert set(report.deviations) == LAWS


@pytest.mark.parametrize("pad_output", [False, True])
def test_a_policy_is_checked_with_the_rows_that_it_wrote(make_tiny_model, tokenizer, pad_output):
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 6, "temperature": 0.9},
        pad_output=pad_output,
    )
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Hi", "The quick dog", "72")]
    rows = TensorDict(batch_size=[4])
    rows["history", "prompt"] = History.from_chats(chats)
    rows = policy(rows)
    rows["advantage"] = torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None, None]
    report = check_invariance(GRPOLoss(policy), rows)
    assert set(report.deviations) == LAWS


def test_nothing_is_left_changed(make_tiny_model):
    actor = make_actor(make_tiny_model())
    actor.layout = "bucketed"
    loss = GRPOLoss(actor).train()
    actor.model.eval()
    rows = full_rows()
    before = [column.clone() for column in read_rows(rows, ("log_probs", "full"))]
    check_invariance(loss, rows)
    assert (loss.training, actor.training, actor.model.training) == (True, True, False)
    assert actor.layout == "bucketed"
    assert loss.actor_network is actor
    assert all(p.grad is None for p in loss.parameters())
    for column, value in zip(read_rows(rows, ("log_probs", "full")), before, strict=True):
        assert torch.equal(column, value)


def test_what_cannot_be_tried_is_said():
    rows = make_rows(make_row([5, 1, 2], 1), make_row([5, 3], 1))
    for row in rows.tensordicts:
        del row["log_probs"]
    report = check_invariance(SFTLoss(TableActor([-1.0] * 8)), rows)
    assert set(report.deviations) == {"micro-batches", "order"}
    assert set(report.skipped) == {"layouts", "naive", "junk"}
    assert "naive           not tried: the actor has no naive_scorer" in str(report)


class MeanOverTheMicroBatch(Reinforce):
    def from_scores(self, tensordict, rows, scores, *, normalizer=None):
        return super().from_scores(tensordict, rows, scores)


class ReadsMaskedPositions(Reinforce):
    def from_scores(self, tensordict, rows, scores, *, normalizer=None):
        output = super().from_scores(tensordict, rows, scores, normalizer=normalizer)
        sampled = torch.cat(read_rows(tensordict, ("log_probs", "full"))).nan_to_num()
        output.loss_objective = output.loss_objective + 0.01 * sampled.sum()
        return output


class ComparesMaskedPositions(Reinforce):
    """Equal junk in both columns would cancel, and NaN is taken for zero."""

    def from_scores(self, tensordict, rows, scores, *, normalizer=None):
        output = super().from_scores(tensordict, rows, scores, normalizer=normalizer)
        sampled, proximal = (
            torch.cat(read_rows(tensordict, (key, "full"))).nan_to_num()
            for key in ("log_probs", "prox_log_probs")
        )
        far = ((sampled - proximal).abs() > 3).float().sum()
        output.loss_objective = output.loss_objective + 0.01 * far
        return output


class RefusesWhatItNeedNotRead(Reinforce):
    def check(self, tensordict, rows):
        if not torch.cat(read_rows(tensordict, ("log_probs", "full"))).isfinite().all():
            raise DataError("log-probs are NaN")


class WeighsRowsByTheirPlace(Reinforce):
    def surrogate(self, tokens):
        loss, clipped = super().surrogate(tokens)
        return Surrogate(loss * (1 + tokens.row), clipped)


class AveragesAMetricWrongly(Reinforce):
    def from_scores(self, tensordict, rows, scores, *, normalizer=None):
        output = super().from_scores(tensordict, rows, scores, normalizer=normalizer)
        output.kl_approx = tensordict["advantage"].mean()
        return output


class GradientOfAnother(Reinforce):
    """The value is right and the gradient is that of the whole row's mean."""

    def surrogate(self, tokens):
        loss, clipped = super().surrogate(tokens)
        wrong = loss * tokens.num_rows
        return Surrogate(wrong + (loss - wrong).detach(), clipped)


@pytest.mark.parametrize(
    ("loss", "law", "message"),
    [
        (MeanOverTheMicroBatch, "micro-batches", "divide by the normalizer"),
        (ReadsMaskedPositions, "junk", r"with numbers in \('log_probs', 'full'\) where"),
        (ComparesMaskedPositions, "junk", "total_loss|loss_objective"),
        (RefusesWhatItNeedNotRead, "junk", r"NaN in \('log_probs', 'full'\) .*is refused"),
        (WeighsRowsByTheirPlace, "micro-batches", "the gradient deviates"),
        (AveragesAMetricWrongly, "micro-batches", "kl_approx deviates"),
        (GradientOfAnother, "micro-batches", "the gradient deviates"),
    ],
)
def test_broken_losses_are_found(loss, law, message):
    rows = make_rows(
        make_row([5, 1, 2], 1, advantage=1.5, old=[7.0, -1.0, -1.0], prox=[0.0, -1.0, -1.0]),
        make_row([5, 6, 3], 2, advantage=-0.5, prox=-1.0),
        make_row([5, 4], 1, advantage=2.0, prox=-1.0),
    )
    check_invariance(Reinforce(TableActor(torch.linspace(-2, -1, 8))), rows)
    with pytest.raises(DataError, match=f"^{loss.__name__} breaks the law '{law}'.*{message}"):
        check_invariance(loss(TableActor(torch.linspace(-2, -1, 8))), rows)


class OrderMatters(TableActor):
    """Forgets the first row's second token when there are three rows."""

    def token_scores(self, sequences, select, **options):
        scores = super().token_scores(sequences, select, **options)
        factor = torch.ones_like(scores.log_probs)
        if len(sequences) == 3:
            factor[0] = 0.5
        return scores._replace(log_probs=scores.log_probs * factor)


class LooksBeyondItsRow(TableActor):
    layouts = ("padded", "packed")
    layout = "padded"

    def token_scores(self, sequences, select, **options):
        scores = super().token_scores(sequences, select, **options)
        if self.layout == "padded":
            return scores
        return scores._replace(log_probs=scores.log_probs + 1e-3 * scores.log_probs.sum())


class WrongHead(TableActor):
    def naive_scorer(self):
        twin = TableActor(self.table.detach())
        twin.table = self.table
        twin.token_scores = lambda *a, **o: TokenScores(
            *(x * 1.01 for x in TableActor.token_scores(twin, *a, **o)[:2])
        )
        return twin


@pytest.mark.parametrize(
    ("actor", "law"),
    [(OrderMatters, "micro-batches"), (LooksBeyondItsRow, "layouts"), (WrongHead, "naive")],
)
def test_broken_actors_are_found(actor, law):
    rows = make_rows(*(make_row([5, i, 7 - i], 1, advantage=i - 1.0) for i in (1, 2, 3)))
    blamed = f"not Reinforce but its actor, {actor.__name__}, breaks the law '{law}'"
    with pytest.raises(DataError, match=blamed):
        check_invariance(Reinforce(actor(torch.linspace(-2, -1, 8))), rows)


def test_what_cannot_be_checked_is_refused():
    rows = make_rows(make_row([5, 1, 2], 1), make_row([5, 3], 1))
    with pytest.raises(ConfigError, match="at least two rows"):
        check_invariance(Reinforce(TableActor([-1.0] * 8)), rows[:1])
    # Whatever is wrong with a loss, its gradient stays zero where all advantages are.
    idle = make_rows(make_row([5, 1], 1, advantage=0.0), make_row([5, 3], 1, advantage=0.0))
    with pytest.raises(ConfigError, match=r"no gradient.*advantages"):
        check_invariance(Reinforce(TableActor([-1.0] * 8)), idle)
    with pytest.raises(ConfigError, match="not averaged"):
        check_invariance(Reinforce(TableActor([-1.0] * 8), aggregation="none"), rows)
