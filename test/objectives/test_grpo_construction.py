from __future__ import annotations

import pytest
import torch
from objectives.rows_helper import actor, two_rows
from tensordict import TensorDict

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import GRPOLoss, GRPOLossOutput, LLMLossOutput


class TestConstructor:
    @pytest.mark.parametrize("name", ["clip_epsilom", "kl_to_ref_coef"])
    def test_defect_20_arguments_that_do_not_exist_fail(self, name):
        with pytest.raises(TypeError, match=name):
            GRPOLoss(actor(), **{name: 0.1})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"clip_epsilon": 1.5}, "clip_epsilon"),
            ({"clip_epsilon": "0.2"}, "clip_epsilon"),
            ({"clip_epsilon": (0.2, None)}, "clip_epsilon"),
            ({"clip_epsilon": (0.1, 0.2, 0.3)}, "clip_epsilon"),
            ({"aggregation": "constant"}, "constant_length"),
            ({"constant_length": 4}, "constant_length"),
            ({"reduction": "sum"}, "got 'sum': sums are aggregation='sequence_sum'"),
            ({"count_empty_rows": True}, "count_empty_rows has no effect .*='token_mean'"),
            (
                {"count_empty_rows": True, "aggregation": "sequence_mean", "reduction": "none"},
                "count_empty_rows has no effect .*='none'",
            ),
        ],
    )
    def test_settings_that_are_impossible_or_without_effect_fail(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            GRPOLoss(actor(), **settings)

    @pytest.mark.parametrize(
        "given",
        [
            {"gamma": 0.9},
            {"clip_value": True},
            {"samples_mc_entropy": 3},
            {"ref_log_prob_padding_side": "right"},
            {"ref_log_prob_padding_value": -1.0},
            {"entropy_coeff": 0.1, "entropy_bonus": False},
        ],
        ids=lambda given: next(iter(given)),
    )
    def test_what_nothing_reads_is_taken_and_said_once(self, given, told):
        loss = GRPOLoss(actor(), **given)
        assert loss.entropy_coeff == 0.0
        GRPOLoss(actor(), **given)
        assert [name for name in told if next(iter(given)) in name] == told
        assert len(told) == 1

    def test_an_actor_that_cannot_score_fails(self):
        with pytest.raises(ConfigError, match="TokenScorer"):
            GRPOLoss(torch.nn.Linear(1, 1))

    def test_the_documented_defaults(self):
        loss = GRPOLoss(actor())
        assert loss.clip_epsilon == (0.2, 0.2)
        assert loss.aggregation == "token_mean"
        assert loss.masking_strategy == "sft"
        assert loss.entropy_coeff == loss.kl_to_ref_coeff == loss.kl_to_inference_coeff == 0.0

    def test_keys_can_be_set_and_unknown_ones_fail(self):
        loss = GRPOLoss(actor())
        assert loss.tensor_keys.sample_log_prob == ("log_probs", "full")
        assert loss.tensor_keys.ref_log_probs == ("next", "ref_log_probs", "full")
        loss.set_keys(advantage="A", sample_log_prob=("lp", "all"))
        assert loss.in_keys == [("tokens", "full"), ("lp", "all"), "A"]
        rows = two_rows()
        expected = GRPOLoss(actor())(rows).loss_objective
        for row in rows.tensordicts:
            row["A"] = row.pop("advantage")
            row["lp", "all"] = row.pop(("log_probs", "full"))
        assert loss(rows).loss_objective == expected
        loss.set_keys(advantage=None)
        assert loss.tensor_keys.advantage == "advantage"
        with pytest.raises(ValueError, match="advantages is not an accepted"):
            loss.set_keys(advantages="A")

    def test_the_actor_stays_as_it_is(self):
        model = actor()
        loss = GRPOLoss(model)
        assert loss.actor_network is model
        assert [id(p) for p in loss.parameters()] == [id(model.table)]
        assert set(loss.state_dict()) == {"actor_network.table"}

    def test_the_output_is_a_tensorclass_of_named_scalars(self):
        output = GRPOLoss(actor())(two_rows())
        assert isinstance(output, GRPOLossOutput)
        assert isinstance(output, LLMLossOutput)
        assert output.batch_size == ()
        assert all(v.shape == () and v.dtype is torch.float32 for v in output.metrics().values())

    def test_nothing_is_written_into_the_rows(self):
        rows = two_rows()
        before = {*rows.tensordicts[0].keys(True, True)}
        GRPOLoss(actor())(rows)
        assert {*rows.tensordicts[0].keys(True, True)} == before


class TestWithAPolicy:
    @pytest.mark.parametrize("pad_output", [False, True])
    def test_defect_17_rows_are_ready_for_the_loss_right_after_generation(
        self, tiny_model, tokenizer, pad_output
    ):
        from torchrl_llm.data.history import History
        from torchrl_llm.modules import TransformersWrapper

        policy = TransformersWrapper(
            tiny_model,
            tokenizer=tokenizer,
            generate_kwargs={"max_new_tokens": 6, "temperature": 0.9},
            pad_output=pad_output,
        )
        chats = [[{"role": "user", "content": text}] for text in ("Hi", "The quick dog", "72")]
        rows = TensorDict(batch_size=[3])
        rows["history", "prompt"] = History.from_chats(chats)
        rows = policy(rows)
        rows["advantage"] = torch.tensor([1.0, -1.0, 0.5])[:, None, None]
        for strategy in ("sft", "rlhf", "generic"):
            output = GRPOLoss(policy, masking_strategy=strategy)(rows)
            assert output.kl_to_inference.item() == pytest.approx(0.0, abs=1e-6)
            assert output.clip_fraction.item() == 0.0
            total = output.total_loss()
        assert torch.autograd.grad(total, tiny_model.lm_head.weight)[0].abs().sum() > 0
