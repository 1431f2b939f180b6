from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import TableActor, make_row, make_rows, pad
from tensordict import TensorDict

from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows, write_rows
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import token_log_probs
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    LLMLossOutput,
    SFTLoss,
    SFTLossOutput,
    minor_sft_loss,
    sft_loss,
)


def two_rows(**settings):
    """Assistant tokens: ids 1 and 2 in the first row, id 3 in the second."""
    return make_rows(make_row([5, 1, 2], 1, **settings), make_row([5, 6, 3], 2, **settings))


def actor():
    return TableActor([-9.0, -1.0, -3.0, -5.0, -9.0, -9.0, -9.0, -9.0])


class TestFunctions:
    @pytest.mark.parametrize(
        ("reduction", "expected"), [("mean", 2.0), ("sum", 4.0), ("none", [1.0, 3.0])]
    )
    def test_sft_by_hand(self, reduction, expected):
        assert sft_loss(torch.tensor([-1.0, -3.0]), reduction).tolist() == expected

    def test_minor_sft_by_hand(self):
        # beta x difference = log 3: sigmoid = 3/4.
        got = minor_sft_loss(torch.tensor([math.log(3)]), torch.zeros(1), 1.0, "mean")
        assert got.item() == pytest.approx(-math.log(0.75))

    def test_minor_sft_pulls_less_the_further_a_response_is_above_the_reference(self):
        log_probs = torch.tensor([-1.0, 2.0], requires_grad=True)
        minor_sft_loss(log_probs, torch.zeros(2), 1.0, "sum").backward()
        assert log_probs.grad[0] < log_probs.grad[1] < 0

    def test_bad_arguments_are_refused(self):
        with pytest.raises(ValueError, match="reduction"):
            sft_loss(torch.zeros(1), "max")
        with pytest.raises(ValueError, match="one shape"):
            minor_sft_loss(torch.zeros(1), torch.zeros(2), 0.1, "mean")


@pytest.mark.parametrize("keys", [("tokens", "masks"), ("history",)])
def test_rollouts_of_two_dimensions_are_explained(keys):
    history = History.from_chats([[{"role": "user", "content": "a"}]] * 2)
    td = pad([*two_rows().tensordicts]).set("history", TensorDict(full=history, batch_size=[2]))
    with pytest.raises(DataError, match=r"reshape\(-1\)"):
        SFTLoss(actor())(td.select(*keys)[None])


class TestByHand:
    @pytest.mark.parametrize(
        ("normalize", "reduction", "expected"),
        [
            (True, "mean", ((1 + 3) / 2 + 5) / 2),
            (False, "mean", ((1 + 3) + 5) / 2),
            (True, "sum", (1 + 3) / 2 + 5),
            (True, "none", [2.0, 5.0]),
        ],
    )
    def test_values(self, normalize, reduction, expected):
        loss = SFTLoss(actor(), reduction=reduction, normalize_by_seq_length=normalize)
        output = loss(two_rows())
        assert output.loss_sft.tolist() == pytest.approx(expected)
        assert output.loss_kl_to_ref is None
        assert isinstance(output, SFTLossOutput)
        assert isinstance(output, LLMLossOutput)

    def test_every_token_can_count_the_same(self):
        model = actor()
        loss = SFTLoss(model, reduction="token_mean")
        # The mean of the three tokens' negative log-probs, whatever row they are in.
        log_probs = model.table.detach()[1:4]
        output = loss(two_rows())
        assert output.loss_sft.item() == pytest.approx(-log_probs.mean().item())
        output.total_loss().backward()
        torch.testing.assert_close(model.table.grad[1:4], torch.full((3,), -1 / 3))
        normalizer = loss.normalizer(two_rows())
        parts = [loss(two_rows()[b : b + 1], normalizer=normalizer).loss_sft for b in (0, 1)]
        torch.testing.assert_close(sum(parts), output.loss_sft)

    def test_gradient_reaches_the_assistants_tokens_alone(self):
        model = actor()
        SFTLoss(model)(two_rows()).total_loss().backward()
        expected = torch.zeros(8)
        expected[1] = expected[2] = -1 / 4
        expected[3] = -1 / 2
        torch.testing.assert_close(model.table.grad, expected)

    def test_divergence_from_a_reference_is_a_mean_over_tokens(self):
        rows = make_rows(
            make_row([5, 1, 2], 1, ref=[0.0, -1.0, -3.0 + math.log(2)]),
            make_row([5, 6, 3], 2, ref=[0.0, 0.0, -5.0]),
        )
        output = SFTLoss(actor(), kl_to_ref_coeff=0.5)(rows)
        # k3 of log 2 is 1 - log 2, of the two others 0.
        assert output.kl_to_ref.item() == pytest.approx((1 - math.log(2)) / 3)
        assert output.loss_kl_to_ref.item() == pytest.approx(0.5 * (1 - math.log(2)) / 3)
        total = output.loss_sft + output.loss_kl_to_ref
        torch.testing.assert_close(output.total_loss(), total)

    def test_minor_sft(self):
        output = SFTLoss(actor(), loss_function="minor_sft", beta=0.1)(two_rows(ref=-2.0))
        # Means per token: -2 and -5 against -2 and -2.
        expected = (math.log(2) - math.log(1 / (1 + math.exp(0.3)))) / 2
        assert output.loss_sft.item() == pytest.approx(expected)

    def test_a_slope_without_minor_sft_has_no_effect_and_is_said_once(self, told):
        for _ in range(2):
            output = SFTLoss(actor(), beta=7.0)(two_rows())
        assert output.loss_sft.item() == pytest.approx(3.5)
        assert len(told) == 1
        assert "beta has no effect" in told[0]

    def test_a_divergence_besides_minor_sft_has_no_effect_and_is_said_once(self, told):
        settings = {"loss_function": "minor_sft", "beta": 0.1}
        for _ in range(2):
            output = SFTLoss(actor(), kl_to_ref_coeff=0.5, **settings)(two_rows(ref=-2.0))
        plain = SFTLoss(actor(), **settings)(two_rows(ref=-2.0))
        assert output.total_loss().item() == plain.total_loss().item()
        assert len(told) == 1
        assert "kl_to_ref_coeff has no effect" in told[0]

    def test_a_trace_of_demonstrations_does_not_hide_them(self):
        rows = two_rows(reason=[1, 1, 1])
        for row in rows.tensordicts:
            row["trace", "source"][:] = 1
        assert SFTLoss(actor())(rows).loss_sft.item() == pytest.approx(3.5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_ragged_ones(side):
    rows = [make_row([5, 1, 2], 1), make_row([5, 6, 6, 3], 3)]
    expected = SFTLoss(actor())(make_rows(*rows)).loss_sft
    for junk in (0, 3):
        assert SFTLoss(actor())(pad(rows, side, junk)).loss_sft == expected


def test_micro_batches_add_up_and_equal_a_naive_loop(make_tiny_model):
    model = make_tiny_model()
    rows = [make_row([3, 9, 4, 7], 2), make_row([8, 8, 6], 1), make_row([5, 4, 3, 2, 30, 9], 1)]
    loss = SFTLoss(CausalScorer(model))
    naive = 0.0
    for row in rows:
        ids, prompt = row["tokens", "full"], len(row["tokens", "prompt"])
        log_probs = token_log_probs(model(input_ids=ids[None]).logits, ids[None])[0, prompt:]
        naive = naive - log_probs.mean() / 3
    normalizer = loss.normalizer(lazy_rows(rows))
    parts = [lazy_rows(rows[:1]), lazy_rows(rows[1:])]
    total = sum(loss(part, normalizer=normalizer).total_loss() for part in parts)
    torch.testing.assert_close(total, naive, atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    ours, theirs = torch.autograd.grad(total, parameters), torch.autograd.grad(naive, parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-3)


class TestConversations:
    CHATS = (
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "fox"}],
        [
            {"role": "user", "content": "fox"},
            {"role": "assistant", "content": "fox"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "The dog."},
        ],
    )

    def rows(self):
        history = History.from_chats([list(chat) for chat in self.CHATS])
        return TensorDict(history=TensorDict(full=history, batch_size=[2]), batch_size=[2])

    def test_conversations_are_encoded_and_end_of_turn_tokens_are_learnt(
        self, tokenizer, tiny_model
    ):
        scorer = CausalScorer(tiny_model)
        loss = SFTLoss(scorer, tokenizer=tokenizer)
        rows = loss.select(self.rows())
        learnt = [
            tokenizer.decode(ids[mask])
            for ids, mask in zip(rows.sequences, rows.select, strict=True)
        ]
        assert learnt == ["fox<|im_end|>", "fox<|im_end|>The dog.<|im_end|>"]
        loss(self.rows()).total_loss().backward()
        tiny_model.zero_grad()

    def test_masks_beside_conversations_say_what_is_learnt(self, tokenizer, tiny_model):
        loss = SFTLoss(CausalScorer(tiny_model), tokenizer=tokenizer)
        masks = loss.select(self.rows()).select
        for mask in masks:
            mask[: mask.nonzero()[-1]] = False
        rows = lazy_rows(list(self.rows().unbind(0)))
        write_rows(rows, ("masks", "all_assistant_mask"), masks)
        assert loss.select(rows).counts == [1, 1]
        write_rows(rows, ("masks", "all_assistant_mask"), [mask[:-1] for mask in masks])
        with pytest.raises(DataError, match="one value per token"):
            loss(rows)

    def test_rows_that_are_a_lazy_stack_are_encoded_alike(self, tokenizer, tiny_model):
        loss = SFTLoss(CausalScorer(tiny_model), tokenizer=tokenizer)
        expected = loss(self.rows()).loss_sft
        got = loss(lazy_rows(list(self.rows().unbind(0)))).loss_sft
        torch.testing.assert_close(got, expected)

    def test_without_a_tokenizer_the_error_says_so(self, tiny_model):
        with pytest.raises(ConfigError, match="pass tokenizer="):
            SFTLoss(CausalScorer(tiny_model))(self.rows())
        with pytest.raises(ConfigError, match="tokenizer_kwargs need a tokenizer"):
            SFTLoss(CausalScorer(tiny_model), tokenizer_kwargs={"chat_template_name": "qwen"})


class TestRefusals:
    def test_defect_17_one_row_without_assistant_tokens_is_enough(self):
        rows = two_rows()
        rows.tensordicts[1]["masks", "all_assistant_mask"][:] = False
        with pytest.raises(DataError, match=r"rows \[1\] have no token of the assistant"):
            SFTLoss(actor())(rows)

    def test_rows_with_neither_ids_nor_conversation(self):
        with pytest.raises(DataError, match="neither"):
            SFTLoss(actor())(make_rows(TensorDict(a=torch.ones(1))))

    def test_a_reference_that_is_missing(self):
        for settings in ({"kl_to_ref_coeff": 0.1}, {"loss_function": "minor_sft"}):
            with pytest.raises(DataError, match="RetrieveLogProb"):
                SFTLoss(actor(), **settings)(two_rows())

    def test_settings_that_are_impossible_or_without_effect(self):
        for settings, message in (
            ({"reduction": "token_mean", "normalize_by_seq_length": True}, "no meaning there"),
            ({"reduction": "token_mean", "loss_function": "minor_sft"}, "no meaning there"),
        ):
            with pytest.raises(ConfigError, match=message):
                SFTLoss(actor(), **settings)
        with pytest.raises(TypeError, match="beat"):
            SFTLoss(actor(), beat=0.1)

    def test_keys_can_be_set_and_unknown_ones_fail(self):
        loss = SFTLoss(actor())
        loss.set_keys(assistant_mask="mine")
        rows = two_rows()
        for row in rows.tensordicts:
            row["mine"] = row.pop(("masks", "all_assistant_mask"))
        assert loss(rows).loss_sft.item() == pytest.approx(3.5)
        with pytest.raises(ValueError, match="not an accepted"):
            loss.set_keys(masks="mine")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_of_rows_and_a_divergence_of_all_become_one_number(reduction):
    # Student at -1, reference at -1.5: one token in each row, whose loss is 1 and whose k3 with
    # d = -0.5 is e^-0.5 - 0.5 = 0.1065.
    rows = make_rows(make_row([5, 1], 1, ref=-1.5), make_row([5, 6, 3], 2, ref=-1.5))
    actor = TableActor([-1.0] * 8)
    loss = SFTLoss(actor, reduction="none", kl_to_ref_coeff=0.1)
    divergence = 0.1 * (math.exp(-0.5) - 0.5)
    output = loss(rows)
    total = getattr(output, reduction)(reduce=True)
    # TorchRL's one number has the divergence once, whatever is done to the rows.
    assert total.item() == pytest.approx((2.0 if reduction == "sum" else 1.0) + divergence)
    (gradient,) = torch.autograd.grad(total, actor.table, retain_graph=True)
    parts = getattr(output.loss_sft, reduction)() + output.loss_kl_to_ref
    torch.testing.assert_close(gradient, torch.autograd.grad(parts, actor.table)[0])
    # A total a row: each with the divergence, so that their mean is the loss of reduction="mean".
    assert loss(rows).total_loss().tolist() == pytest.approx([1.0 + divergence] * 2)
    whole = SFTLoss(actor, reduction="mean", kl_to_ref_coeff=0.1)(rows).total_loss()
    assert loss(rows).total_loss().mean().item() == pytest.approx(whole.item())
