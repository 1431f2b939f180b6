"""Supervised losses and distillation: conversations, masks, references, reductions."""

from __future__ import annotations

import torch
from _rows import gradient_norm, masked
from _shared import CHAT, OTHER, model, read, show, tokenizer
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import DistillationLoss, SFTLoss, k3_kl_token_estimate
from torchrl.objectives.llm.sft import minor_sft_loss, sft_loss


def reader(**options):
    return TransformersWrapper(
        model(), tokenizer=tokenizer(), generate=False, return_log_probs=True, **options
    )


def taught(**more):
    """Rows with a conversation alone."""
    history = History.from_chats([CHAT, OTHER])
    td = TensorDict(history=TensorDict(full=history, batch_size=[2]), batch_size=[2], **more)
    return lazy_stack(list(td.unbind(0)))


def scored():
    """The same with ids, masks and log-probs, as a policy that scores writes them."""
    with torch.no_grad():
        rows = reader()(taught())
    return rows


def sft_of_conversations_by_shape():
    out = SFTLoss(reader(), tokenizer(), reduction="none")(taught())
    show(type(out).__name__, out.loss_sft.shape, out.loss_kl_to_ref, out.kl_to_ref)


def sft_with_a_mask_of_ones_own():
    rows = scored()
    masks = [
        m & (torch.arange(len(m)) < len(m) - 3)
        for m in rows.get(("masks", "all_assistant_mask"), as_list=True)
    ]
    rows = lazy_stack(
        [
            r.set(("masks", "all_assistant_mask"), m)
            for r, m in zip(rows.unbind(0), masks, strict=True)
        ]
    )
    for options in (
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"normalize_by_seq_length": False},
    ):
        show(SFTLoss(reader(), tokenizer(), **options)(rows).loss_sft)


def with_one_mask():
    rows = scored()
    masks = [
        torch.arange(len(m)) == len(m) - 6
        for m in rows.get(("masks", "all_assistant_mask"), as_list=True)
    ]
    return lazy_stack(
        [
            r.set(("masks", "all_assistant_mask"), m)
            for r, m in zip(rows.unbind(0), masks, strict=True)
        ]
    )


def with_reference():
    rows = []
    for r in with_one_mask().unbind(0):
        mask = r["masks", "all_assistant_mask"]
        values = (r["log_probs", "full"] - 0.25).masked_fill(~mask, 0.0)
        rows.append(r.set(("next", "ref_log_probs", "full"), values))
    return lazy_stack(rows)


def minor_sft():
    for beta in (0.1, 2.0):
        loss = SFTLoss(reader(), tokenizer(), loss_function="minor_sft", beta=beta)
        show(loss(with_reference()).loss_sft, loss.beta, loss.loss_function)


def minor_sft_with_a_divergence():
    loss = SFTLoss(reader(), tokenizer(), loss_function="minor_sft", kl_to_ref_coeff=0.1)
    show(loss.kl_to_ref_coeff, loss(with_reference()).loss_sft)


def sft_with_a_divergence():
    out = SFTLoss(reader(), tokenizer(), kl_to_ref_coeff=0.5)(with_reference())
    show(out.loss_sft, out.loss_kl_to_ref / out.kl_to_ref)


def sft_tokenizer_is_an_attribute():
    loss = SFTLoss(reader(), tokenizer())
    show(loss.tokenizer is tokenizer(), SFTLoss(reader()).tokenizer is tokenizer())


def sft_arguments_of_the_tokenizer():
    loss = SFTLoss(reader(), tokenizer(), tokenizer_kwargs={"chat_template_name": "chatml_format"})
    show(loss.tokenizer_kwargs["chat_template_name"])
    show(loss(with_one_mask()).loss_sft)


def sft_with_a_padded_encoding():
    options = {"padding": False, "return_tensors": "pt", "tokenize": True}
    show(SFTLoss(reader(), tokenizer(), tokenizer_kwargs=options)(with_one_mask()).loss_sft)


def sft_other_keys():
    rows = taught()
    rows = lazy_stack([r.rename_key_("history", "chat") for r in rows.unbind(0)])
    loss = SFTLoss(reader(input_key=("chat", "full")), tokenizer(), reduction="none")
    loss.set_keys(history=("chat", "full"))
    show(loss(rows).loss_sft.shape, loss.tensor_keys.history)


def sft_of_a_conversation_without_an_answer():
    history = History.from_chats([CHAT[:2], OTHER[:2]])
    td = TensorDict(history=TensorDict(full=history, batch_size=[2]), batch_size=[2])
    SFTLoss(reader(), tokenizer())(td)


def the_function_sft_loss():
    summed = torch.tensor([-1.0, -3.0])
    show([sft_loss(summed, how) for how in ("mean", "sum", "none")])


def the_function_minor_sft_loss():
    pair = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -2.0])
    show([minor_sft_loss(*pair, 0.7, how) for how in ("mean", "sum", "none")])


def distillation_attributes():
    loss = DistillationLoss(reader(), tokenizer())
    show(loss.reduction, loss.normalize_by_seq_length, loss.assistant_only)


def sft_of_conversations_with_a_mask_of_ones_own():
    masks = [m.clone() for m in numbers_of_masks()]
    for mask in masks:
        mask[:-6], mask[-5:] = False, False
    rows = lazy_stack([masked(r, m) for r, m in zip(taught().unbind(0), masks, strict=True)])
    rows = [
        r.set(("masks", "all_attention_mask"), torch.ones_like(m))
        for r, m in zip(rows.unbind(0), masks, strict=True)
    ]
    show(SFTLoss(reader(), tokenizer())(lazy_stack(rows)).loss_sft)


def numbers_of_masks():
    return scored().get(("masks", "all_assistant_mask"), as_list=True)


PROGRAMS = {
    "sft_of_conversations": lambda: show(SFTLoss(reader(), tokenizer())(taught()).loss_sft),
    "sft_gradient": lambda: show(
        gradient_norm(SFTLoss(reader(), tokenizer())(with_one_mask()).loss_sft) / 1000
    ),
    "minor_sft_by_default": lambda: show(
        SFTLoss(reader(), tokenizer(), loss_function="minor_sft")(with_reference()).loss_sft
    ),
    "minor_sft_without_a_reference": lambda: SFTLoss(
        reader(), tokenizer(), loss_function="minor_sft"
    )(with_one_mask()),
    "sft_divergence_by_value": lambda: show(
        SFTLoss(reader(), tokenizer(), kl_to_ref_coeff=0.5)(with_reference()).kl_to_ref
    ),
    "sft_beta_without_minor_sft": lambda: show(
        SFTLoss(reader(), tokenizer(), beta=0.3)(with_one_mask()).loss_sft
    ),
    "sft_normalize_is_an_attribute": lambda: show(
        SFTLoss(reader(), tokenizer()).normalize_by_seq_length, SFTLoss(reader()).reduction
    ),
    "sft_default_arguments_of_the_tokenizer": lambda: show(
        SFTLoss(reader(), tokenizer()).tokenizer_kwargs
    ),
    "sft_key_of_log_probs": lambda: show(SFTLoss(reader(), tokenizer()).tensor_keys.log_probs),
    "sft_unknown_reduction": lambda: SFTLoss(reader(), tokenizer(), reduction="median")(taught()),
    "sft_unknown_loss_function": lambda: SFTLoss(reader(), tokenizer(), loss_function="dpo")(
        taught()
    ),
    "sft_of_a_rollout_of_two_dimensions": lambda: show(
        SFTLoss(reader(), tokenizer())(lazy_stack([taught(), taught()])).loss_sft
    ),
    "the_function_sft_loss_with_an_unknown_reduction": lambda: sft_loss(torch.zeros(1), "median"),
    "the_function_minor_sft_loss_of_other_shapes": lambda: minor_sft_loss(
        torch.zeros(1), torch.zeros(2), 0.1, "mean"
    ),
    "the_estimate_of_the_divergence": lambda: show(
        k3_kl_token_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    ),
    "sft_keys_by_default": lambda: read(
        SFTLoss(reader(), tokenizer()).tensor_keys, "history", "ref_log_prob"
    ),
}
"""Programs of one expression."""
