"""Losses: what they give, how they average, which tokens count, and what they refuse."""

from __future__ import annotations

import torch
from _rows import PROMPT, dense, gradient_norm, ragged, row
from _shared import model, read, show, tokenizer
from tensordict import lazy_stack
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import DAPO, CISPOLoss, GRPOLoss


def actor(**options):
    options = {"input_mode": "tokens", "generate": False, "return_log_probs": True} | options
    return TransformersWrapper(model(), tokenizer=tokenizer(), **options)


def what_kind_of_thing_a_loss_gives():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged())
    show(type(out).__name__, out.loss_objective.ndim, out.loss_objective.requires_grad)


def metrics_have_no_gradient():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged())
    show([getattr(out, name).requires_grad for name in ("clip_fraction", "kl_approx", "ESS")])


def bounds_of_the_clip_are_attributes():
    loss = GRPOLoss(actor(), clip_epsilon=(0.1, 0.3))
    show(float(loss.clip_epsilon_low), float(loss.clip_epsilon_high))


def terms_by_default():
    out = GRPOLoss(actor())(ragged())
    show(sorted(key for key in out.keys() if key.startswith("loss_")))


def terms_without_an_entropy_bonus():
    out = GRPOLoss(actor(), entropy_bonus=False)(ragged())
    show(sorted(key for key in out.keys() if key.startswith("loss_")), out.loss_entropy)


def an_entropy_bonus():
    out = GRPOLoss(actor(), entropy_bonus=True, entropy_coeff=0.1)(ragged())
    show(out.loss_entropy, out.loss_objective)


def divergence_from_a_reference_where_every_token_counts():
    rows = dense()
    show_loss = GRPOLoss(actor(), kl_to_ref_coeff=0.5, masking_strategy="generic")(rows)
    show(show_loss.loss_kl_to_ref / show_loss.kl_to_ref)


def divergence_from_the_sampler():
    out = GRPOLoss(actor(), kl_to_inference_coeff=0.5)(ragged())
    show(out.loss_kl_to_inference, out.kl_to_inference)


def a_reference_that_is_not_there():
    rows = lazy_stack([row([11, 12, 13, 14, 15], 1.0).exclude("next") for _ in range(2)])
    GRPOLoss(actor(), kl_to_ref_coeff=0.5)(rows)


def aggregation_none():
    out = GRPOLoss(actor(), aggregation="none", entropy_bonus=False)(dense())
    show(out.loss_objective.squeeze(-1))


def aggregation_prompt_mean_of_rows_of_one_prompt():
    rows = [
        row(ids, a, group_id=torch.tensor(3))
        for ids, a in (([11, 12, 13, 14, 15, 16], 1.0), ([21, 22, 23, 24], 2.0))
    ]
    show(GRPOLoss(actor(), aggregation="prompt_mean")(lazy_stack(rows)).loss_objective)


def aggregation_prompt_mean_of_rows_of_many_prompts():
    rows = [
        row(ids, a, group_id=torch.tensor(g))
        for g, (ids, a) in enumerate((([11, 12, 13, 14, 15, 16], 1.0), ([21, 22, 23, 24], 2.0)))
    ]
    show(GRPOLoss(actor(), aggregation="prompt_mean")(lazy_stack(rows)).loss_objective)


def reduction_mean():
    loss = GRPOLoss(actor(), reduction="mean")
    show(loss.reduction, loss(ragged()).loss_objective)


def the_sum_of_terms_by_name():
    out = GRPOLoss(actor(), entropy_bonus=True, entropy_coeff=0.1)(ragged())
    terms = [value for key, value in out.items() if key.startswith("loss_") and value is not None]
    show(sum(terms), gradient_norm(sum(terms)))


def an_output_as_a_dictionary():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged()).to_dict()
    show(sorted(key for key in out if out[key] is not None and key.startswith("loss_")))


def an_output_without_gradient():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged()).detach()
    show(out.loss_objective.requires_grad, type(out).__name__)


def the_mask_of_the_assistant():
    rows = ragged()
    masks = [torch.tensor([0, 0, 0, 1, 0, 1, 1]).bool(), torch.tensor([0, 0, 0, 0, 1]).bool()]
    rows = lazy_stack(
        [
            r.set(("masks", "all_assistant_mask"), m)
            for r, m in zip(rows.unbind(0), masks, strict=True)
        ]
    )
    show(GRPOLoss(actor(), masking_strategy="rlhf")(rows).loss_objective)


def an_advantage_of_each_token():
    rows = dense()
    rows["advantage"] = torch.arange(14.0).view(2, 7, 1) - 5
    show(GRPOLoss(actor())(rows).loss_objective)


def an_advantage_of_each_token_of_ragged_rows():
    rows = [row([11, 12, 13, 14, 15, 16], 1.0), row([21, 22, 23, 24], 1.0)]
    rows = [
        r.set("advantage", torch.arange(1.0, 1 + len(r["tokens", "full"]))[:, None]) for r in rows
    ]
    show(GRPOLoss(actor())(lazy_stack(rows)).loss_objective)


def other_keys():
    rows = dense()
    rows["mine"] = rows.pop("advantage")
    rows["old"] = rows["log_probs", "full"]
    loss = GRPOLoss(actor())
    loss.set_keys(advantage="mine", sample_log_prob="old")
    show(loss(rows).loss_objective, loss.tensor_keys.advantage)


def the_key_of_the_reference():
    rows = dense()
    rows["ref", "full"] = rows.pop(("next", "ref_log_probs", "full"))
    loss = GRPOLoss(actor(), kl_to_ref_coeff=0.1)
    loss.set_keys(ref_log_probs=("ref", "full"))
    show(loss.tensor_keys.ref_log_probs, loss(rows).loss_objective)


def keys_that_are_given():
    wanted = {"loss_objective", "clip_fraction", "ESS", "kl_approx", "entropy", "loss_entropy"}
    wanted |= {"loss_kl_to_ref", "kl_to_ref", "loss_kl_to_inference", "kl_to_inference"}
    show(wanted <= set(GRPOLoss(actor(), entropy_bonus=True).out_keys))


def log_probs_of_the_response_alone():
    rows = [
        r.set(("log_probs", "full"), r["log_probs", "full"][PROMPT:]) for r in ragged().unbind(0)
    ]
    GRPOLoss(actor())(lazy_stack(rows))


def log_probs_that_need_gradients():
    rows = dense()
    rows["log_probs", "full"] = rows["log_probs", "full"].requires_grad_()
    GRPOLoss(actor())(rows)


def padding_of_the_reference():
    loss = GRPOLoss(
        actor(),
        ref_log_prob_padding_side="left",
        ref_log_prob_padding_value=0.0,
        kl_to_ref_coeff=0.1,
    )
    show(loss.ref_log_prob_padding_side, loss.ref_log_prob_padding_value)
    show(loss(ragged()).loss_objective)


def a_generating_policy_as_the_actor():
    policy = actor(generate=True, generate_kwargs={"max_new_tokens": 2})
    show(GRPOLoss(policy)(ragged()).loss_objective)


def an_actor_of_histories():
    rows = ragged()
    GRPOLoss(actor(input_mode="history"))(rows)


def zeroing_the_gradients():
    loss = GRPOLoss(actor())
    loss(ragged()).loss_objective.backward()
    loss.zero_grad()
    show(all(p.grad is None for p in model().parameters()))


def dapo_with_bounds():
    out = DAPO(actor(), clip_epsilon=(0.2, 0.28))(ragged())
    show(type(out).__name__, out.loss_objective)


def cispo_with_bounds_on_policy():
    loss = CISPOLoss(actor(), clip_epsilon=(0.2, 0.28))
    show(type(loss(ragged(0.0))).__name__, gradient_norm(loss(ragged(0.0)).loss_objective))


def cispo_bounds_by_default():
    loss = CISPOLoss(actor())
    show(float(loss.clip_epsilon_low), float(loss.clip_epsilon_high))


PROGRAMS = {
    "the_objective_of_ragged_rows": lambda: show(
        GRPOLoss(actor(), clip_epsilon=0.2)(ragged()).loss_objective
    ),
    "the_objective_of_dense_rows": lambda: show(
        GRPOLoss(actor(pad_output=True))(dense()).loss_objective
    ),
    "the_objective_on_policy": lambda: show(GRPOLoss(actor())(ragged(0.0)).loss_objective),
    "the_gradient_of_the_objective": lambda: show(
        gradient_norm(GRPOLoss(actor())(ragged()).loss_objective)
    ),
    "an_asymmetric_clip": lambda: show(
        GRPOLoss(actor(), clip_epsilon=(0.05, 0.4))(ragged()).loss_objective
    ),
    "a_clip_range_that_is_no_range": lambda: GRPOLoss(actor(), clip_epsilon=(1.5, 0.3)),
    "a_negative_clip": lambda: GRPOLoss(actor(), clip_epsilon=-0.1),
    "the_share_of_clipped_tokens": lambda: show(GRPOLoss(actor())(ragged()).clip_fraction),
    "the_divergence_from_the_sampler_as_a_metric": lambda: show(
        GRPOLoss(actor())(ragged()).kl_approx
    ),
    "the_effective_sample_size": lambda: show(GRPOLoss(actor())(ragged()).ESS),
    "an_entropy_coefficient_alone": lambda: show(
        GRPOLoss(actor(), entropy_coeff=0.1)(ragged()).loss_entropy
    ),
    "the_entropy_as_a_metric": lambda: show(
        GRPOLoss(actor(), entropy_bonus=True)(ragged()).entropy
    ),
    "a_trust_region_of_tokens": lambda: show(
        GRPOLoss(actor(), kl_mask_threshold=0.1)(ragged()).loss_objective
    ),
    "a_wide_trust_region": lambda: show(
        GRPOLoss(actor(), kl_mask_threshold=100.0)(ragged()).loss_objective
    ),
    "aggregation_token_mean": lambda: show(
        GRPOLoss(actor(), aggregation="token_mean")(ragged()).loss_objective
    ),
    "aggregation_none_has_a_last_dimension": lambda: show(
        GRPOLoss(actor(), aggregation="none")(dense()).loss_objective.shape
    ),
    "aggregation_prompt_mean": lambda: show(
        GRPOLoss(actor(), aggregation="prompt_mean")(ragged()).loss_objective
    ),
    "an_unknown_aggregation": lambda: GRPOLoss(actor(), aggregation="median")(ragged()),
    "reduction_none": lambda: show(
        GRPOLoss(actor(), reduction="none", entropy_bonus=False)(dense()).loss_objective.sum()
    ),
    "reduction_sum": lambda: show(GRPOLoss(actor(), reduction="sum")(ragged()).loss_objective),
    "reduction_by_default": lambda: show(
        GRPOLoss(actor()).reduction, GRPOLoss(actor()).aggregation
    ),
    "the_mask_of_responses": lambda: show(
        GRPOLoss(actor(), masking_strategy="sft")(ragged()).loss_objective
    ),
    "the_mask_of_every_token": lambda: show(
        GRPOLoss(actor(), masking_strategy="generic")(ragged()).loss_objective
    ),
    "an_unknown_key": lambda: GRPOLoss(actor()).set_keys(advantages="mine"),
    "keys_that_are_read_in_order": lambda: show(GRPOLoss(actor()).in_keys),
    "keys_that_are_given_in_order": lambda: show(GRPOLoss(actor()).out_keys),
    "a_loss_without_advantages": lambda: GRPOLoss(actor())(ragged().exclude("advantage")),
    "a_loss_without_tokens": lambda: GRPOLoss(actor())(ragged().exclude("tokens")),
    "a_loss_without_log_probs_of_the_sampler": lambda: GRPOLoss(actor())(
        ragged().exclude("log_probs")
    ),
    "a_rollout_of_two_dimensions": lambda: GRPOLoss(actor())(lazy_stack([ragged(), ragged()])),
    "samples_for_an_entropy_without_a_formula": lambda: show(
        GRPOLoss(actor(), samples_mc_entropy=3).samples_mc_entropy
    ),
    "a_mistyped_argument": lambda: show(
        GRPOLoss(actor(), clip_epsilom=0.1)(ragged()).loss_objective
    ),
    "a_loss_without_an_actor": lambda: show(GRPOLoss().actor_network),
    "buffers_of_a_loss": lambda: show(
        [name for name in GRPOLoss(actor()).state_dict() if "clip" in name]
    ),
    "dapo_by_default": lambda: show(DAPO(actor())(ragged()).loss_objective),
    "dapo_is_a_grpo": lambda: show(isinstance(DAPO(actor()), GRPOLoss)),
    "cispo_is_a_grpo": lambda: show(isinstance(CISPOLoss(actor()), GRPOLoss)),
    "cispo_value": lambda: show(CISPOLoss(actor(), clip_epsilon=0.2)(ragged()).loss_objective),
    "cispo_gradient_of_clipped_tokens": lambda: show(
        gradient_norm(CISPOLoss(actor(), clip_epsilon=0.2)(ragged(3.0)).loss_objective)
    ),
    "settings_of_the_entropy_are_attributes": lambda: read(
        GRPOLoss(actor(), entropy_bonus=True, entropy_coeff=0.3), "entropy_bonus", "entropy_coeff"
    ),
    "divergence_from_a_reference": lambda: read(
        GRPOLoss(actor(), kl_to_ref_coeff=0.5)(ragged()), "loss_kl_to_ref", "kl_to_ref"
    ),
    "no_divergence_without_a_coefficient": lambda: read(
        GRPOLoss(actor())(ragged()), "loss_kl_to_ref", "kl_to_ref", "loss_kl_to_inference"
    ),
    "aggregation_none_of_ragged_rows": lambda: read(
        GRPOLoss(actor(), aggregation="none", entropy_bonus=False)(ragged()), "loss_objective"
    ),
    "the_recipes_backward": lambda: show(
        gradient_norm(GRPOLoss(actor(), entropy_bonus=True)(ragged()).mean(reduce=True))
    ),
    "the_sum_of_an_output": lambda: show(
        gradient_norm(GRPOLoss(actor(), entropy_bonus=True)(ragged()).sum(reduce=True))
    ),
    "an_unknown_masking_strategy": lambda: read(
        GRPOLoss(actor(), masking_strategy="all"), "masking_strategy"
    ),
    "keys_by_default": lambda: read(
        GRPOLoss(actor()).tensor_keys, "advantage", "action", "sample_log_prob", "ref_log_probs"
    ),
    "keys_that_are_read": lambda: show(
        ({("tokens", "full"), ("log_probs", "full"), "advantage"}) <= set(GRPOLoss(actor()).in_keys)
    ),
    "a_device": lambda: show(
        GRPOLoss(actor(), device=torch.device("cpu"))(ragged()).loss_objective
    ),
    "arguments_that_nothing_reads": lambda: show(
        GRPOLoss(actor(), gamma=0.9, clip_value=True, samples_mc_entropy=3)(ragged()).loss_objective
    ),
    "parameters_of_a_loss": lambda: show(
        len(list(GRPOLoss(actor()).parameters())) == len(list(model().parameters()))
    ),
}
"""Programs of one expression."""
