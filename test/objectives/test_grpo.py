from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import LOG2, TableActor, actor, make_row, make_rows, pad, two_rows

from torchrl_llm.data.enums import MaskReason
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.errors import DataError
from torchrl_llm.functional import Normalizer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import GRPOLoss, check_invariance


class TestByHand:
    def test_objective_metrics_and_gradient(self):
        model = actor()
        output = GRPOLoss(model)(two_rows())
        # Gains: 1 x 1; min(2, 1.2) x 1; min(0.5 x -2, 0.8 x -2) = -1.6. Token mean of three.
        assert output.loss_objective.item() == pytest.approx(-(1 + 1.2 - 1.6) / 3)
        assert output.clip_fraction.item() == pytest.approx(2 / 3)
        # Sampled minus current: 0, -log 2, +log 2.
        assert output.kl_approx.item() == pytest.approx(0.0, abs=1e-6)
        assert output.entropy.item() == pytest.approx(0.5)
        # Weights 1, 2, 1/2: (3.5)^2 / (3 x 5.25).
        assert output.ESS.item() == pytest.approx(3.5**2 / (3 * 5.25))
        # k3 of sampled / current ratios 1, 1/2, 2: 0, 1/2 - 1 + log 2, 2 - 1 - log 2.
        assert output.kl_to_inference.item() == pytest.approx(0.5 / 3)
        output.total_loss().backward()
        # Only id 1 is inside the bounds: -A / 3.
        expected = torch.zeros(8)
        expected[1] = -1 / 3
        torch.testing.assert_close(model.table.grad, expected)

    @pytest.mark.parametrize(
        ("aggregation", "expected"),
        [
            ("token_mean", -(1 + 1.2 - 1.6) / 3),
            ("sequence_mean", -((1 + 1.2) / 2 - 1.6) / 2),
            ("sequence_sum", -((1 + 1.2) - 1.6) / 2),
            ("constant", -((1 + 1.2) - 1.6) / (2 * 4)),
        ],
    )
    def test_aggregations(self, aggregation, expected):
        length = 4 if aggregation == "constant" else None
        loss = GRPOLoss(actor(), aggregation=aggregation, constant_length=length)
        assert loss(two_rows()).loss_objective.item() == pytest.approx(expected)

    @pytest.mark.parametrize("settings", [{"aggregation": "none"}, {"reduction": "none"}])
    def test_no_aggregation_gives_each_token_at_its_place(self, settings):
        output = GRPOLoss(actor(), **settings)(two_rows())
        expected = torch.tensor([[0.0, -1.0, -1.2], [0.0, 0.0, 1.6]])
        torch.testing.assert_close(output.loss_objective.detach().squeeze(-1), expected)

    def test_bounds_may_differ_and_may_be_changed(self):
        loss = GRPOLoss(actor(), clip_epsilon=(0.4, 0.5))
        # min(2, 1.5) = 1.5 and min(0.5 x -2, 0.6 x -2) = -1.2.
        assert loss(two_rows()).loss_objective.item() == pytest.approx(-(1 + 1.5 - 1.2) / 3)
        loss.clip_epsilon = 0.2
        assert loss.clip_epsilon == (0.2, 0.2)
        assert loss(two_rows()).loss_objective.item() == pytest.approx(-(1 + 1.2 - 1.6) / 3)

    def test_a_cap_on_the_ratio_cuts_the_gradient_for_both_signs(self):
        # Ratios 1, 2, 1/2 and, for a negative advantage, 4.
        table = torch.full((8,), -9.0)
        table[1:5] = -1 + LOG2 * torch.tensor([0.0, 1.0, -1.0, 2.0])
        rows = [make_row([5, 1, 2, 3], 1, advantage=1.0), make_row([5, 4], 1, advantage=-1.0)]
        model = TableActor(table)
        output = GRPOLoss(model, clip_epsilon=(0.2, 9.0), ratio_cap=1.5)(make_rows(*rows))
        # min(r, 1.5) A: 1, 1.5 (capped, not clipped), min(0.5, 0.8) = 0.5, and -1.5 instead of -4.
        assert output.loss_objective.item() == pytest.approx(-(1 + 1.5 + 0.5 - 1.5) / 4)
        assert output.clip_fraction.item() == pytest.approx(2 / 4)
        output.total_loss().backward()
        gradient = model.table.grad[1:5]
        torch.testing.assert_close(gradient, torch.tensor([-1 / 4, 0.0, -0.5 / 4, 0.0]))

    def test_divergence_from_a_reference(self):
        model = actor()
        output = GRPOLoss(model, kl_to_ref_coeff=0.1)(two_rows(ref=-1.0))
        # ref - current: 0, -log 2, log 2; k3 as above.
        assert output.kl_to_ref.item() == pytest.approx(0.5 / 3)
        assert output.loss_kl_to_ref.item() == pytest.approx(0.05 / 3)
        assert not output.kl_to_ref.requires_grad
        objective = output.loss_objective.item()
        assert output.total_loss().item() == pytest.approx(objective + 0.05 / 3)
        output.loss_kl_to_ref.backward()
        # d k3 / d current = 1 - exp(ref - current).
        torch.testing.assert_close(model.table.grad[1:4], 0.1 / 3 * torch.tensor([0.0, 0.5, -1.0]))

    def test_divergence_from_the_sampler_enters_the_loss_when_asked_for(self):
        output = GRPOLoss(actor(), kl_to_inference_coeff=0.3)(two_rows())
        assert output.loss_kl_to_inference.item() == pytest.approx(0.3 * 0.5 / 3)

    def test_the_entropy_is_a_metric_unless_a_bonus_is_asked_for(self):
        assert GRPOLoss(actor())(two_rows()).loss_entropy is None
        assert GRPOLoss(actor(), entropy_bonus=False)(two_rows()).loss_entropy is None
        by_default = GRPOLoss(actor(), entropy_bonus=True)(two_rows())
        assert by_default.loss_entropy.item() == pytest.approx(-0.01 * 0.5)
        asked = GRPOLoss(actor(), entropy_coeff=0.2)(two_rows())
        assert asked.loss_entropy.item() == pytest.approx(-0.2 * 0.5)

    def test_tokens_far_from_the_sampler_can_be_dropped(self):
        # log(2)^2 / 2 = 0.24: with a threshold of 0.2 only id 1 remains; three tokens still count.
        model = actor()
        output = GRPOLoss(model, kl_mask_threshold=0.2)(two_rows())
        assert output.loss_objective.item() == pytest.approx(-1 / 3)
        output = GRPOLoss(model, kl_mask_threshold=0.3)(two_rows())
        assert output.loss_objective.item() == pytest.approx(-(1 + 1.2 - 1.6) / 3)

    def test_defect_06_a_divergence_is_a_mean_over_tokens_that_count(self):
        # 10 of 100 tokens count; each has k3 = 2 - 1 - log 2.
        rows = make_rows(make_row([5] * 90 + [1] * 10, 90, ref=-1.0 + LOG2))
        output = GRPOLoss(actor(), kl_to_ref_coeff=1.0)(rows)
        assert output.kl_to_ref.item() == pytest.approx(1 - LOG2, rel=1e-5)
        assert output.loss_kl_to_ref.item() == pytest.approx(1 - LOG2, rel=1e-5)

    def test_per_token_advantages_meet_their_tokens(self):
        rows = make_rows(
            make_row([5, 1, 1], 1, advantage=[0.0, 3.0, 1.0]),
            make_row([5, 1, 1, 1], 1, advantage=[7.0, 0.0, 0.0, -1.0]),
        )
        output = GRPOLoss(actor(), aggregation="none")(rows)
        # Ragged rows are padded on the left, as TorchRL pads them.
        expected = torch.tensor([[0.0, 0.0, -3.0, -1.0], [0.0, 0.0, 0.0, 1.0]])[..., None]
        torch.testing.assert_close(output.loss_objective.detach(), expected)

    @pytest.mark.parametrize(
        ("layout", "last"), [("ragged", (9, 9)), ("right", (5, 9)), ("left", (9, 9))]
    )
    def test_defect_07_a_reward_on_the_last_token_reaches_it_in_every_row(self, layout, last):
        rows = [
            make_row([5, 1, 1, 1, 1, 1], 1, advantage=[0.0] * 5 + [1.0]),
            make_row([5] + [1] * 9, 1, advantage=[0.0] * 9 + [1.0]),
        ]
        td = make_rows(*rows) if layout == "ragged" else pad(rows, layout)
        loss = GRPOLoss(actor(), aggregation="none")(td).loss_objective.detach()
        expected = torch.zeros(2, 10)
        expected[0, last[0]] = expected[1, last[1]] = -1.0
        torch.testing.assert_close(loss.squeeze(-1), expected)

    def test_defect_08_only_loss_terms_are_summed(self):
        output = GRPOLoss(actor(), kl_to_ref_coeff=0.1, entropy_coeff=0.2)(two_rows(ref=-2.0))
        terms = output.loss_objective + output.loss_entropy + output.loss_kl_to_ref
        torch.testing.assert_close(output.total_loss(), terms)
        metrics = {k for k in output.metrics() if not k.startswith("loss_")}
        assert metrics == {
            *("clip_fraction", "kl_approx", "ESS", "entropy", "kl_to_ref", "kl_to_inference")
        }
        assert not any(v.requires_grad for v in output.metrics().values())


class TestMasks:
    def test_strategies(self):
        # Two turns: the last prompt is the first four tokens, ids 1 and 3 were sampled.
        row = make_row([5, 1, 6, 6, 3], 4, trace=False)
        row["masks"]["all_assistant_mask"] = torch.tensor([0, 1, 0, 0, 1]).bool()
        model = actor(t5=-1.0, t6=-1.0)
        for strategy, expected in (
            ("sft", [0, 0, 0, 0, 1]),
            ("rlhf", [0, 1, 0, 0, 1]),
            ("generic", [0, 1, 1, 1, 1]),
        ):
            GRPOLoss(model, masking_strategy=strategy)(make_rows(row))
            assert model.seen["select"][0].int().tolist() == expected

    def test_a_trace_leaves_sampled_and_trained_tokens_only(self):
        off = int(MaskReason.STALE)
        row = make_row([5, 1, 2, 3], 1, reason=[1, 0, off, 0])
        row["trace", "source"][3] = 4  # forced
        model = actor()
        GRPOLoss(model, masking_strategy="generic")(make_rows(row))
        assert model.seen["select"][0].int().tolist() == [0, 1, 0, 0]

    def test_the_end_of_turn_token_counts_like_any_sampled_one(self):
        model = actor()
        GRPOLoss(model)(make_rows(make_row([2, 1, 2], 1)))
        assert model.seen["select"][0].int().tolist() == [0, 1, 1]

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
    def test_padded_rows_equal_ragged_ones_whatever_the_padding_holds(self, side, strategy):
        rows = [make_row([5, 1, 2], 1, advantage=1.0), make_row([5, 6, 6, 3], 3, advantage=-2.0)]
        loss = GRPOLoss(actor(), masking_strategy=strategy)
        expected = loss(make_rows(*rows)).metrics()
        for junk in (0, 2, 7):
            got = loss(pad(rows, side, junk)).metrics()
            assert {k: v.item() for k, v in got.items()} == pytest.approx(
                {k: v.item() for k, v in expected.items()}
            )


class TestInvariance:
    def rows(self):
        torch.manual_seed(2)
        rows = []
        for prompt, response in ((2, 3), (1, 6), (3, 1), (2, 4)):
            ids = torch.randint(3, 290, (prompt + response,)).tolist()
            old = torch.randn(len(ids)) * 0.3 - 5.0
            row = make_row(ids, prompt, advantage=torch.randn(()), old=old, ref=old - 0.2)
            rows.append(row)
        return rows

    SETTINGS = (
        {"aggregation": "token_mean"},
        {"aggregation": "sequence_mean", "kl_to_ref_coeff": 0.1},
        {"aggregation": "sequence_sum", "entropy_coeff": 0.1},
        {"aggregation": "constant", "constant_length": 5, "kl_to_inference_coeff": 0.2},
    )

    def run(self, model, settings, rows):
        model.zero_grad()
        output = GRPOLoss(CausalScorer(model, chunk_size=512), **settings)(lazy_rows(rows))
        output.total_loss().backward()
        return output.metrics(), torch.cat([p.grad.flatten() for p in model.parameters()])

    @pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["aggregation"])
    def test_splits_orders_and_rows_that_do_not_count_change_nothing(
        self, make_tiny_model, settings
    ):
        model, rows = make_tiny_model().double(), self.rows()
        dropped = make_row([4, 5, 6], 1, advantage=math.nan, ref=0.0, reason=[1, 5, 5])
        loss = GRPOLoss(CausalScorer(model, chunk_size=512), **settings)
        for batch in (lazy_rows(rows), lazy_rows([*rows, dropped])):
            assert loss.normalizer(batch) == Normalizer(num_tokens=14, num_sequences=4)
            check_invariance(loss, batch)
        torch.testing.assert_close(
            self.run(model, settings, rows), self.run(model, settings, [*rows, dropped])
        )

    def test_it_equals_a_naive_loop_over_full_logits(self, make_tiny_model):
        model, rows = make_tiny_model(), self.rows()
        _, gradient = self.run(model, {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.2}, rows)
        model.zero_grad()
        total, count = 0.0, 0
        for row in rows:
            ids, prompt = row["tokens", "full"], len(row["tokens", "prompt"])
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            for t in range(prompt, len(ids)):
                current = log_p[t - 1, ids[t]]
                ratio = (current - row["log_probs", "full"][t]).exp()
                adv = row["advantage"].squeeze()
                gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
                diff = row["next", "ref_log_probs", "full"][t] - current
                entropy = -(log_p[t - 1].exp() * log_p[t - 1]).sum()
                total = total - gain + 0.1 * (diff.exp() - 1 - diff) - 0.2 * entropy
                count += 1
        (total / count).backward()
        naive = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(gradient, naive, atol=2e-5, rtol=1e-3)


class TestTemperature:
    def test_defect_12_rows_are_scored_at_the_temperature_they_were_sampled_at(self, tiny_model):
        from torchrl_llm.functional import token_log_probs

        rows = []
        for ids, temperature in (([3, 9, 8, 7], 0.5), ([4, 4, 6], 1.0), ([9, 1, 2], 1.7)):
            logits = tiny_model(input_ids=torch.tensor([ids])).logits
            old = token_log_probs(logits, torch.tensor([ids]), temperature=temperature)[0]
            rows.append(make_row(ids, 1, old=old.detach(), temperature=temperature))
        output = GRPOLoss(CausalScorer(tiny_model))(make_rows(*rows))
        assert output.kl_to_inference.item() == pytest.approx(0.0, abs=1e-6)
        assert output.ESS.item() == pytest.approx(1.0, abs=1e-4)

    def test_rows_at_one_are_scored_with_a_plain_number(self):
        model = actor()
        GRPOLoss(model)(two_rows(temperature=1.0))
        assert model.seen["temperature"] == 1.0


class TestRefusals:
    def refused(self, rows, message, **settings):
        with pytest.raises(DataError, match=message):
            GRPOLoss(actor(), **settings)(rows)

    @pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1)])
    def test_both_shapes_of_an_advantage_a_row_are_taken(self, shape):
        rows = two_rows()
        expected = GRPOLoss(actor())(rows).loss_objective
        values = torch.tensor([1.0, -2.0]).reshape(shape)
        for row, value in zip(rows.tensordicts, values, strict=True):
            row["advantage"] = value
        assert GRPOLoss(actor())(rows).loss_objective == expected

    def test_rows_with_more_than_one_batch_dimension(self):
        self.refused(pad([*two_rows().tensordicts])[None], "one batch dimension")

    def test_padded_rows_without_a_mask(self):
        dense = pad([*two_rows().tensordicts])
        del dense["masks"]
        self.refused(dense, "padding is never inferred")

    def test_padded_prompts_without_a_trace(self):
        rows = [make_row([5, 1, 2], 1, trace=False), make_row([5, 6, 3], 2, trace=False)]
        self.refused(pad(rows), "is padded.*rlhf")

    def test_no_mask_for_the_strategy(self):
        rows = two_rows()
        for row in rows.tensordicts:
            del row["masks"]
        self.refused(rows, "all_assistant_mask", masking_strategy="rlhf")
