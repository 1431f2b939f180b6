"""What a new loss has to write, and what it gets."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import TableActor, double, make_row, make_rows

from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.errors import DataError
from torchrl_llm.functional import Normalizer, k1, k2, k3, reinforce
from torchrl_llm.objectives import Correction, GRPOLoss, check_invariance
from torchrl_llm.objectives.policy_loss import PolicyGradientLoss, PolicyLossOutput, Surrogate


class ReinforceLoss(PolicyGradientLoss):
    def surrogate(self, tokens):
        loss = reinforce(tokens.log_probs, tokens.advantage)
        return Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))


def test_a_new_loss_is_a_surrogate():
    model = TableActor([-9.0, -1.0, -2.0])
    rows = make_rows(make_row([0, 1], 1, advantage=3.0), make_row([0, 2], 1, advantage=-1.0))
    output = ReinforceLoss(model)(rows)
    assert isinstance(output, PolicyLossOutput)
    assert output.loss_objective.item() == pytest.approx((3 * 1 + -1 * 2) / 2)
    output.total_loss().backward()
    assert model.table.grad.tolist() == pytest.approx([0.0, -1.5, 0.5])


def test_the_base_cannot_be_used_without_one():
    with pytest.raises(TypeError, match="surrogate"):
        PolicyGradientLoss(TableActor([0.0]))


class Spy(ReinforceLoss):
    def surrogate(self, tokens):
        self.seen = tokens
        return super().surrogate(tokens)


def test_a_surrogate_sees_which_row_each_token_belongs_to():
    loss = Spy(TableActor([-1.0] * 8))
    loss(make_rows(make_row([5, 1, 2], 1), make_row([5, 3], 1)))
    assert loss.seen.row.tolist() == [0, 0, 1]
    assert loss.seen.num_rows == 2
    assert loss.seen.log_ratio.requires_grad


def test_outputs_of_micro_batches_can_be_added():
    loss = ReinforceLoss(TableActor([-1.0, -1.0, -2.0]))
    rows = [make_row([0, 1, 1], 1), make_row([0, 2], 1)]
    whole = loss(make_rows(*rows))
    normalizer = loss.normalizer(make_rows(*rows))
    first, second = (loss(make_rows(row), normalizer=normalizer) for row in rows)
    total = first + second
    metrics = total.metrics()
    for name, value in whole.metrics().items():
        torch.testing.assert_close(metrics[name], value)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_line_of_torchrls_recipes_is_the_loss_and_not_diluted_by_metrics(reduction):
    gradients = []
    for backward in (
        lambda out: out.total_loss(),
        lambda out: getattr(out, reduction)(reduce=True),
    ):
        model = TableActor([-9.0, -1.0, -2.0])
        loss = ReinforceLoss(model, entropy_coeff=0.1)
        output = loss(make_rows(make_row([0, 1], 1, advantage=3.0), make_row([0, 2], 1)))
        backward(output).backward()
        gradients.append(model.table.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert getattr(output, reduction)().entropy == output.entropy  # of each field, as before
    per_token = ReinforceLoss(TableActor([-1.0] * 3), aggregation="none")(
        make_rows(make_row([0, 1], 1, advantage=3.0), make_row([0, 2], 1, advantage=1.0))
    )
    expected = getattr(per_token.loss_objective, reduction)()
    assert getattr(per_token, reduction)(reduce=True) == expected


def test_training_mode_and_gradients_can_be_off():
    with torch.no_grad():
        output = ReinforceLoss(TableActor([-1.0] * 4))(make_rows(make_row([0, 1], 1)))
    assert not output.loss_objective.requires_grad


class TestHooks:
    def test_a_loss_asks_the_one_forward_for_more_and_adds_terms(self):
        class Output(PolicyLossOutput):
            loss_value: torch.Tensor | None = None
            mean_value: torch.Tensor | None = None

        class WithValues(ReinforceLoss):
            output_type = Output

            def extras(self, tensordict, rows):
                return ScoreExtras(values=True)

            def further_terms(self, tensordict, rows, tokens, scores, reduce, share):
                return {"loss_value": reduce(scores.values), "mean_value": 2 * share}

        class Critic(TableActor):
            def token_scores(self, *args, extras=None, **kwargs):
                assert extras == ScoreExtras(values=True)
                scores = super().token_scores(*args, **kwargs)
                return scores._replace(values=scores.log_probs * 0 + 3.0)

        rows = make_rows(make_row([0, 1, 1], 1), make_row([0, 2], 1))
        output = WithValues(Critic([-1.0] * 4), aggregation="sequence_sum")(rows)
        assert output.loss_value.item() == pytest.approx(3.0 * 3 / 2)
        assert output.mean_value == pytest.approx(2 / 3)
        torch.testing.assert_close(output.total_loss(), output.loss_objective + output.loss_value)

    def test_the_three_steps_are_the_forward(self):
        loss = ReinforceLoss(TableActor([-1.0] * 4))
        td = make_rows(make_row([0, 1, 1], 1), make_row([0, 2], 1))
        rows = loss.read(td)
        scores = loss.score(td, rows)
        assert loss.from_scores(td, rows, scores).loss_objective == loss(td).loss_objective

    def test_a_surrogate_knows_the_sampler_beside_the_proximal_policy(self):
        loss = Spy(TableActor([-1.0] * 2), correction=Correction(type="tis"))
        loss(make_rows(make_row([0, 1], 1, old=-2.0, prox=-1.5)))
        assert loss.seen.sample_log_probs.item() == -2.0
        assert loss.seen.log_ratio.item() == pytest.approx(0.5)


class TestRowsWithoutTrainedTokens:
    """Losses 3 and 1 in the first row, 5 in the second; nothing counts in the third."""

    def rows(self):
        return make_rows(
            make_row([0, 1, 2], 1, advantage=[0.0, 3.0, 1.0], group=7),
            make_row([0, 2], 1, advantage=5.0, group=9),
            make_row([0, 1, 2], 1, advantage=4.0, reason=[1, 5, 5], group=8),
        )

    def loss(self, aggregation, **settings):
        if aggregation == "constant":
            settings["constant_length"] = 10
        return ReinforceLoss(TableActor([-1.0] * 3), aggregation=aggregation, **settings)

    @pytest.mark.parametrize(
        ("aggregation", "without", "counted"),
        [
            # Of two rows, and of three as in TRL ("grpo", "sapo") and Ludic (length_normalize).
            ("sequence_mean", (2 + 5) / 2, (2 + 5) / 3),
            # Ludic's sum over a row's tokens.
            ("sequence_sum", (4 + 5) / 2, (4 + 5) / 3),
            # TRL's "dr_grpo".
            ("constant", (4 + 5) / 20, (4 + 5) / 30),
            ("prompt_mean", (2 + 5) / 2, (2 + 5) / 3),
        ],
    )
    def test_they_count_as_sequences_where_asked_for(self, aggregation, without, counted):
        rows = self.rows()
        assert self.loss(aggregation)(rows).loss_objective.item() == pytest.approx(without)
        loss = self.loss(aggregation, count_empty_rows=True)
        output = loss(rows)
        assert output.loss_objective.item() == pytest.approx(counted)
        output.total_loss().backward()
        # Tokens of the row itself have no gradient: those of ids 1 and 2 are of the others.
        plain = self.loss(aggregation)
        plain(rows).total_loss().backward()
        torch.testing.assert_close(
            loss.actor_network.table.grad, plain.actor_network.table.grad * counted / without
        )

    @pytest.mark.parametrize("aggregation", ["sequence_mean", "constant", "prompt_mean"])
    def test_micro_batches_add_up(self, aggregation):
        loss = self.loss(aggregation, count_empty_rows=True)
        assert loss.normalizer(self.rows())[:2] == (3, 3)
        check_invariance(loss, self.rows())

    def test_metrics_are_means_over_tokens_either_way(self):
        for counted in (False, True):
            output = self.loss("sequence_mean", count_empty_rows=counted)(self.rows())
            assert output.entropy.item() == pytest.approx(0.5)

    def test_a_batch_without_any_trained_token_is_still_refused(self):
        with pytest.raises(DataError, match="no token of these 1 rows counts"):
            self.loss("sequence_mean", count_empty_rows=True)(self.rows()[2:])


class TestPromptMean:
    def rows(self):
        """Losses 3 and 1, 1 for one prompt, 5 for another: (3 + 1 + 1) / 3 and 5."""
        return make_rows(
            make_row([0, 1], 1, advantage=3.0, group=7),
            make_row([0, 2], 1, advantage=5.0, group=9),
            make_row([0, 1, 1], 1, advantage=1.0, group=7),
        )

    def test_each_prompt_counts_the_same_and_in_it_each_token(self):
        model = TableActor([-9.0, -1.0, -1.0])
        loss = ReinforceLoss(model, aggregation="prompt_mean")
        output = loss(self.rows())
        assert output.loss_objective.item() == pytest.approx((5 / 3 + 5) / 2)
        output.total_loss().backward()
        torch.testing.assert_close(model.table.grad, torch.tensor([0.0, -5 / 6, -5 / 2]))

    def test_a_prompt_may_be_cut_by_micro_batches(self):
        loss = ReinforceLoss(TableActor([-9.0, -1.0, -1.0]), aggregation="prompt_mean")
        rows = self.rows()
        normalizer = loss.normalizer(rows)
        assert normalizer.group_tokens == {7: 3, 9: 1}
        parts = [loss(rows[b : b + 1], normalizer=normalizer).loss_objective for b in range(3)]
        assert sum(parts).item() == pytest.approx((5 / 3 + 5) / 2)

    def test_a_normalizer_of_other_rows_is_refused(self):
        loss = ReinforceLoss(TableActor([-9.0, -1.0, -1.0]), aggregation="prompt_mean")
        for normalizer in (loss.normalizer(self.rows()[1:2]), Normalizer(4, 3)):
            with pytest.raises(DataError, match=r"does not count the prompt groups \[7"):
                loss(self.rows(), normalizer=normalizer)

    def test_without_group_ids_the_error_names_torchrls_meaning(self):
        rows = make_rows(make_row([0, 1], 1))
        loss = ReinforceLoss(TableActor([-1.0] * 2), aggregation="prompt_mean")
        for call in (loss, loss.normalizer):
            with pytest.raises(DataError, match=r"no group_id.*sequence_mean"):
                call(rows)
        with pytest.raises(DataError, match="one integer per row"):
            loss(make_rows(make_row([0, 1], 1, group=0.5)))


class TestDivergences:
    @pytest.mark.parametrize(
        ("name", "value", "slope"),
        # log(ref / current) = -log 2: k1 = log 2, k2 = log(2)^2 / 2, k3 = 1/2 - 1 + log 2, and
        # their slopes in the current log-prob: 1, log 2, 1 - 1/2.
        [
            ("k1", math.log(2), 1.0),
            ("k2", math.log(2) ** 2 / 2, math.log(2)),
            ("k3", 0.5 - 1 + math.log(2), 0.5),
            # At ratio one the value of k3 and the slope of k2.
            ("weighted_k3", 0.5 - 1 + math.log(2), math.log(2)),
        ],
    )
    def test_estimators_by_hand(self, name, value, slope):
        model = TableActor([-9.0, -1.0])
        td = make_rows(make_row([0, 1], 1, advantage=0.0, ref=-1.0 - math.log(2)))
        output = ReinforceLoss(model, kl_to_ref_coeff=0.5, kl_estimator=name)(td)
        assert output.kl_to_ref.item() == pytest.approx(value, rel=1e-5)
        assert output.loss_kl_to_ref.item() == pytest.approx(0.5 * value, rel=1e-5)
        output.total_loss().backward()
        assert model.table.grad[1].item() == pytest.approx(0.5 * slope, rel=1e-5)

    @pytest.mark.parametrize("proximal", ["stored", "current"])
    def test_weighted_k3_weighs_by_the_sampler_under_a_correction_too(self, proximal):
        # Current -1, sampler -1 - log 3, proximal -1.5, reference -1 - log 2: the sampler drew the
        # token, so its weight is 3, whatever the ratio's denominator.
        td = make_rows(
            make_row(
                [0, 1], 1, advantage=0.0, old=-1 - math.log(3), prox=-1.5, ref=-1 - math.log(2)
            )
        )
        model = TableActor([-9.0, -1.0])
        loss = ReinforceLoss(
            model,
            kl_to_ref_coeff=1.0,
            kl_estimator="weighted_k3",
            correction=Correction(type="none", proximal=proximal),
        )
        output = loss(td)
        assert output.kl_to_ref.item() == pytest.approx(3 * (math.log(2) - 0.5), rel=1e-5)
        output.total_loss().backward()
        assert model.table.grad[1].item() == pytest.approx(3 * math.log(2), rel=1e-5)

    def test_only_k2_points_to_the_reference_when_it_is_differentiated(self):
        # The true gradient of KL(p || q) over three ids, against its mean over samples of p.
        logits = torch.tensor([0.2, -0.5, 1.0], dtype=torch.double, requires_grad=True)
        q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double).log()
        log_p = logits.log_softmax(0)
        true = torch.autograd.grad((log_p.exp() * (log_p - q)).sum(), logits)[0]
        means = {}
        for name, estimate in (("k1", k1), ("k2", k2), ("k3", k3)):
            log_p = logits.log_softmax(0)
            loss = (log_p.exp().detach() * estimate(q - log_p)).sum()
            means[name] = torch.autograd.grad(loss, logits)[0]
        torch.testing.assert_close(means["k1"], torch.zeros(3).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close(means["k2"], true, atol=1e-12, rtol=0)
        # That of k3 is the gradient of the other direction, KL(q || p): p - q.
        torch.testing.assert_close(means["k3"], log_p.exp() - q.exp(), atol=1e-12, rtol=0)

    def test_k1_as_a_loss_is_warned_of(self, monkeypatch):
        said = []
        monkeypatch.setattr("torchrl_llm.objectives.policy_loss.logger.warning", said.append)
        ReinforceLoss(TableActor([0.0]), kl_to_ref_coeff=0.1, kl_estimator="k2")
        assert said == []
        ReinforceLoss(TableActor([0.0]), kl_to_ref_coeff=0.1, kl_estimator="k1")
        assert "mean zero" in said[0]


class TestPrecision:
    """Ragged rows, a one-token response, a masked row, junk: a loop, to 1e-10 in float64."""

    AGGREGATIONS = ("token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant")

    def rows(self):
        torch.manual_seed(5)
        rows = []
        for b, ids in enumerate(([0, 1, 2, 3], [0, 4], [0, 0, 5, 1, 2], [0, 3, 3])):
            columns = {n: torch.randn(len(ids)) * 0.3 - 1 for n in ("old", "prox", "ref")}
            prompt = 2 if b == 2 else 1
            for value in columns.values():
                value[:prompt] = math.nan
            reason = [1, 5, 5] if b == 3 else None
            advantage = torch.randn(()).item()
            row = make_row(ids, prompt, advantage=advantage, group=b // 2, reason=reason, **columns)
            rows.append(row)
        return make_rows(*rows)

    def naive(self, table, rows, aggregation):
        rows = [row for row in rows.tensordicts if 5 not in row["trace", "mask_reason"]]
        spans = [range(len(row["tokens", "prompt"]), len(row["tokens", "full"])) for row in rows]
        groups = [row["group_id"].item() for row in rows]
        total = 0.0
        for row, span, group in zip(rows, spans, groups, strict=True):
            in_group = sum(len(s) for s, g in zip(spans, groups, strict=True) if g == group)
            divisor = {
                "token_mean": sum(map(len, spans)),
                "prompt_mean": in_group * len(set(groups)),
                "sequence_mean": len(span) * len(rows),
                "sequence_sum": len(rows),
                "constant": len(rows) * 7,
            }[aggregation]
            for t in span:
                current = table[row["tokens", "full"][t]]
                old, prox = row["log_probs", "full"][t], row["prox_log_probs", "full"][t]
                ratio, adv = (current - prox).exp(), row["advantage"].squeeze()
                weight = (prox - old).exp().clamp(max=1.1)
                gain = torch.minimum(ratio * adv, ratio.clamp(0.9, 1.3) * adv) * weight
                ref = row["next", "ref_log_probs", "full"][t] - current
                total = total + (0.2 * (ref.exp() - 1 - ref) - gain) / divisor
        return total

    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    @pytest.mark.parametrize(("dtype", "tolerance"), [("double", 1e-10), ("float", 1e-5)])
    def test_value_and_gradient_of_a_loop(self, aggregation, dtype, tolerance):
        rows = double(self.rows())
        table = torch.linspace(-1.6, -0.6, 6, dtype=torch.double, requires_grad=True)
        expected = self.naive(table, rows, aggregation)
        expected.backward()
        model = TableActor(table.detach())
        model.table.data = table.detach().to(getattr(torch, dtype))
        loss = GRPOLoss(
            model,
            clip_epsilon=(0.1, 0.3),
            aggregation=aggregation,
            constant_length=7 if aggregation == "constant" else None,
            correction=Correction(type="tis", bounds=(0.0, 1.1)),
            kl_to_ref_coeff=0.2,
        )
        total = loss(rows if dtype == "double" else self.rows()).total_loss()
        total.backward()
        assert total.dtype == getattr(torch, dtype)
        assert total.item() == pytest.approx(expected.item(), abs=tolerance)
        torch.testing.assert_close(
            model.table.grad.double(), table.grad, atol=tolerance, rtol=tolerance
        )
