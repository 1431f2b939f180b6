from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import LOG2, TableActor, actor, make_row, make_rows, two_rows
from tensordict import TensorDict

from torchrl_llm.data.scoring import HeadStates, ScoreExtras, Support
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import ValueHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    CISPOLoss,
    CompositeLoss,
    CompositeNormalizer,
    DistillationLoss,
    GRPOLoss,
    GSPOLoss,
    PPOLoss,
    SFTLoss,
)
from torchrl_llm.trainers.metrics import LossMeter


class Counting(TableActor):
    """Counts its forwards."""

    calls = 0

    def token_scores(self, *args, **kwargs):
        self.calls += 1
        return super().token_scores(*args, **kwargs)


def counting():
    model = Counting(actor().table.detach())
    return model


def gradient(loss, rows, **settings):
    model = loss.actor_network
    model.zero_grad(set_to_none=True)
    loss(rows, **settings).total_loss().backward()
    return model.table.grad.clone()


class TestValues:
    def test_a_weighted_sum_from_one_forward(self):
        model = counting()
        loss = CompositeLoss({"policy": (1.0, GRPOLoss(model)), "more": (-0.5, CISPOLoss(model))})
        output = loss(two_rows())
        assert model.calls == 1
        # GRPO: -(1 + 1.2 - 1.6) / 3. CISPO: weights 1, 1.2, 0.5 and log-probs -1, -1 + log 2,
        # -1 - log 2 with advantages 1, 1, -2.
        first = -(1 + 1.2 - 1.6) / 3
        second = -(-1 + 1.2 * (-1 + LOG2) - (-1 - LOG2)) / 3
        assert output.total_loss().item() == pytest.approx(first - 0.5 * second)
        metrics = output.metrics()
        assert metrics["loss_policy"].item() == pytest.approx(first)
        assert metrics["loss_more"].item() == pytest.approx(-0.5 * second)
        # Under its name a term is as if it were alone.
        assert metrics["more/loss_objective"].item() == pytest.approx(second)
        assert metrics["policy/clip_fraction"].item() == pytest.approx(2 / 3)
        assert metrics["policy/ESS"] == GRPOLoss(model)(two_rows()).ESS
        assert not any(value.requires_grad for value in metrics.values())

    def test_the_gradient_is_the_weighted_sum_of_the_terms(self):
        model = actor()
        terms = {"a": (0.3, GRPOLoss(model, kl_to_ref_coeff=0.1)), "b": (2.0, GSPOLoss(model))}
        rows = two_rows(ref=-2.0)
        expected = sum(weight * gradient(loss, rows) for weight, loss in terms.values())
        torch.testing.assert_close(gradient(CompositeLoss(terms), rows), expected)

    def test_terms_may_select_different_tokens(self):
        # Two turns: "sft" counts the last one, "rlhf" both, SFT's mask what the trace excludes too.
        row = make_row([5, 1, 6, 6, 3], 4, trace=False)
        row["masks"]["all_assistant_mask"] = torch.tensor([0, 1, 0, 0, 1]).bool()
        rows = make_rows(row, make_row([5, 2, 2], 1, trace=False, advantage=-1.0))
        model = counting()
        terms = {
            "last": (1.0, GRPOLoss(model)),
            "all": (1.0, GRPOLoss(model, masking_strategy="rlhf", aggregation="sequence_sum")),
            "imitate": (0.1, SFTLoss(model)),
        }
        loss = CompositeLoss(terms)
        expected = sum(weight * gradient(term, rows) for weight, term in terms.values())
        model.calls = 0
        torch.testing.assert_close(gradient(loss, rows), expected)
        assert model.calls == 1
        selected = [mask.tolist() for mask in model.seen["select"]]
        assert selected == [[False, True, False, False, True], [False, True, True]]
        assert loss.normalizer(rows).terms["last"].num_tokens == 3
        assert loss.normalizer(rows).terms["all"].num_tokens == 4

    def test_micro_batches_add_up(self):
        model = actor()
        rows = make_rows(*two_rows().tensordicts, make_row([5, 1, 2, 3, 3], 2, advantage=0.7))
        loss = CompositeLoss(
            {"a": (1.0, GRPOLoss(model)), "b": (0.5, SFTLoss(model, reduction="token_mean"))}
        )
        normalizer = loss.normalizer(rows)
        whole, meter = loss(rows), LossMeter()
        expected = gradient(loss, rows)
        parts = [rows[:1], rows[1:]]
        pieces = [gradient(loss, part, normalizer=normalizer) for part in parts]
        torch.testing.assert_close(sum(pieces), expected)
        for part in parts:
            meter.add(loss(part, normalizer=normalizer))
        meter.close()
        measured = meter.metrics()
        for name, value in whole.metrics().items():
            assert measured[f"train/{name}"] == pytest.approx(value.item(), abs=1e-6), name
        both = CompositeNormalizer.plus(*(loss.normalizer(part) for part in parts))
        assert both == normalizer

    def test_weights_may_be_changed_between_steps(self):
        model = actor()
        loss = CompositeLoss({"a": (1.0, GRPOLoss(model)), "b": (1.0, CISPOLoss(model))})
        loss.weights["b"] = 0.0
        torch.testing.assert_close(
            gradient(loss, two_rows()), gradient(loss.losses["a"], two_rows())
        )

    def test_with_a_model(self, make_tiny_model):
        model = CausalScorer(make_tiny_model())
        loss = CompositeLoss(
            {
                "policy": (1.0, GRPOLoss(model, masking_strategy="rlhf")),
                "sft": (0.1, SFTLoss(model)),
            }
        )
        total = loss(two_rows()).total_loss()
        alone = [term(two_rows()).total_loss() for term in loss.losses.values()]
        torch.testing.assert_close(total, alone[0] + 0.1 * alone[1])
        assert {*loss.state_dict()} == {f"actor_network.{key}" for key in model.state_dict()}


class TestTermsWithMoreThanAnActor:
    def rows(self):
        rows = two_rows()
        for row in rows.tensordicts:
            ones = torch.ones(row["tokens", "full"].shape)
            row["value_target"] = TensorDict(full=ones)
            row["next"] = TensorDict(teacher_log_probs=TensorDict(full=-ones))
        return rows

    @pytest.mark.parametrize("own_critic", [False, True])
    def test_a_critic_and_a_teacher(self, own_critic, make_tiny_model):
        head = ValueHead(64)
        with torch.no_grad():
            head.linear.weight.fill_(0.01)
        heads = {} if own_critic else {"value_head": head}
        model = CausalScorer(make_tiny_model(), **heads)
        critic = CausalScorer(make_tiny_model(), value_head=head) if own_critic else None
        terms = {
            "ppo": (1.0, PPOLoss(model, critic)),
            "teacher": (0.5, DistillationLoss(model)),
        }
        loss = CompositeLoss(terms)
        parameters = [*loss.parameters()]
        alone = [
            torch.autograd.grad(term(self.rows()).total_loss(), parameters, allow_unused=True)
            for _, term in terms.values()
        ]
        together = torch.autograd.grad(
            loss(self.rows()).total_loss(), parameters, allow_unused=True
        )
        for both, first, second in zip(together, *alone, strict=True):
            parts = [w * g for w, g in ((1.0, first), (0.5, second)) if g is not None]
            torch.testing.assert_close(both, sum(parts) if parts else None, rtol=1e-3, atol=1e-4)
        # The critic is trained with the rest, and the actor is in the state once.
        assert any(parameter is head.linear.weight for parameter in parameters)
        modules = {id(p) for m in (model, critic) if m is not None for p in m.parameters()}
        assert {id(p) for p in parameters} == modules
        assert len(loss.state_dict()) == sum(
            len(m.state_dict()) for m in (model, critic) if m is not None
        )


class Asking(GRPOLoss):
    """Asks for more than log-probs and keeps what it gets."""

    asked = None
    got = None

    def extras(self, tensordict, rows):
        return self.asked and self.asked(len(rows.row))

    def from_scores(self, tensordict, rows, scores, **settings):
        self.got = scores
        return super().from_scores(tensordict, rows, scores, **settings)


class Answering(TableActor):
    """Gives values: the id of each token; keeps what it was asked for."""

    def token_scores(self, sequences, select, *, extras=None, **settings):
        self.extras = extras
        scores = super().token_scores(sequences, select, **settings)
        if extras is None or not extras.values:
            return scores
        ids = torch.cat([s[m] for s, m in zip(sequences, select, strict=True)])
        return scores._replace(values=ids.float())


class TestExtras:
    def terms(self, first=None, second=None, **strategies):
        model = Answering(actor().table.detach())
        losses = [
            Asking(model, masking_strategy=strategies.get(name, "rlhf")) for name in ("a", "b")
        ]
        losses[0].asked, losses[1].asked = first, second
        return model, losses, CompositeLoss({"a": (1.0, losses[0]), "b": (1.0, losses[1])})

    def rows(self):
        row = make_row([5, 1, 6, 6, 3], 4, trace=False)
        row["masks"]["all_assistant_mask"] = torch.tensor([0, 1, 0, 0, 1]).bool()
        return make_rows(row)

    def test_none_is_asked_for_when_no_term_asks(self):
        model, _, loss = self.terms()
        loss(self.rows())
        assert model.extras is None

    def test_values_reach_each_term_at_its_tokens(self):
        _, (first, second), loss = self.terms(
            lambda n: ScoreExtras(values=True), lambda n: ScoreExtras(values=True), b="sft"
        )
        loss(self.rows())
        assert first.got.values.tolist() == [1.0, 3.0]
        assert second.got.values.tolist() == [3.0]

    def test_a_teacher_keeps_its_tokens_in_the_union(self):
        states = HeadStates(torch.zeros(1, 2), torch.zeros(8, 2))
        model, _, loss = self.terms(
            None, lambda n: ScoreExtras(teachers=(states,), divergence="forward"), b="sft"
        )
        loss(self.rows())
        # The union is ids 1 and 3; the teacher's term has the last.
        assert model.extras.teacher_index.tolist() == [-1, 0]
        assert model.extras.divergence == "forward"
        two = ScoreExtras(teachers=(states,))
        _, _, loss = self.terms(lambda n: two, lambda n: two)
        with pytest.raises(ConfigError, match="terms a, b each ask"):
            loss(self.rows())

    def test_supports_must_agree_where_terms_overlap(self):
        def support(n):
            return ScoreExtras(support=Support(torch.tensor([1, 2] * n), torch.full((n,), 2)))

        model, _, loss = self.terms(support, support, b="sft")
        loss(self.rows())
        assert model.extras.support.counts.tolist() == [2, 2]
        _, _, loss = self.terms(support, None, b="sft")
        with pytest.raises(DataError, match="different supports"):
            loss(self.rows())


class TestErrors:
    @pytest.mark.parametrize(
        ("terms", "message"),
        [
            ({}, "needs terms"),
            ({"a": GRPOLoss(actor())}, "must be \\(weight, loss\\)"),
            ({"a": (math.inf, GRPOLoss(actor()))}, "finite number"),
            ({"a": ("1", GRPOLoss(actor()))}, "finite number"),
            ({"a": (1.0, torch.nn.Linear(1, 1))}, "must be a loss over rows of tokens"),
            ({"loss_a": (1.0, GRPOLoss(actor()))}, "does not begin with 'loss'"),
            ({"a/b": (1.0, GRPOLoss(actor()))}, "identifier"),
            ({"a": (1.0, GRPOLoss(actor(), aggregation="none"))}, "not averaged"),
            ({"a": (1.0, SFTLoss(actor(), reduction="none"))}, "not averaged"),
            ({"a": (1.0, GRPOLoss(actor())), "b": (1.0, GRPOLoss(actor()))}, "one actor"),
            ({"a": (1.0, CompositeLoss({"b": (1.0, GRPOLoss(actor()))}))}, "no composite"),
        ],
    )
    def test_terms_that_cannot_be_added_are_refused(self, terms, message):
        with pytest.raises(ConfigError, match=message):
            CompositeLoss(terms)

    def test_bare_parameters_of_a_term_are_refused(self):
        loss = GRPOLoss(actor())
        loss.scale = torch.nn.Parameter(torch.ones(()))
        with pytest.raises(ConfigError, match="parameters that are in no module"):
            CompositeLoss({"a": (1.0, loss)})

    def test_keys_belong_to_the_terms(self):
        loss = CompositeLoss({"a": (1.0, GRPOLoss(actor()))})
        with pytest.raises(ConfigError, match="keys of the terms"):
            loss.set_keys(advantage="A")
        assert loss.in_keys == [("tokens", "full"), ("log_probs", "full"), "advantage"]

    def test_the_normalizer_of_one_term_is_none_of_the_composite(self):
        model = actor()
        loss = CompositeLoss({"a": (1.0, GRPOLoss(model)), "b": (1.0, SFTLoss(model))})
        strange = CompositeNormalizer({"a": loss.normalizer(two_rows()).terms["a"]})
        for normalizer in (strange, strange.terms["a"]):
            with pytest.raises(DataError, match=r"loss\.normalizer\(\.\.\.\) of the whole batch"):
                loss(two_rows(), normalizer=normalizer)

    def test_terms_that_read_other_ids_are_refused(self):
        model = actor()
        other = GRPOLoss(model)
        other.set_keys(action=("tokens", "response"), sample_log_prob=("log_probs", "response"))
        rows = two_rows()
        for row in rows.tensordicts:
            row["log_probs", "response"] = row["log_probs", "full"]
        with pytest.raises(DataError):
            CompositeLoss({"a": (1.0, GRPOLoss(model)), "b": (1.0, other)})(rows)
