"""Losses: what they give, how they average, which tokens count, and what they refuse."""

from __future__ import annotations

import torch
from _shared import CHAT, OTHER, model, show, tokenizer
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import (
    DAPO,
    CISPOLoss,
    DistillationLoss,
    GRPOLoss,
    MCAdvantage,
    MCAdvantageSelector,
    SFTLoss,
    k3_kl_token_estimate,
)
from torchrl.objectives.llm.sft import minor_sft_loss, sft_loss

PROMPT = 3
# how far the sampler's log-prob is below the model's: the last two are outside of any clip range
SHIFTS = [0.0, 0.1, -0.1, 0.3, 0.5, -0.9, 0.05]


def actor(**options):
    options = {"input_mode": "tokens", "generate": False, "return_log_probs": True} | options
    return TransformersWrapper(model(), tokenizer=tokenizer(), **options)


def log_probs(ids):
    with torch.no_grad():
        logits = model()(ids[None]).logits[0, :-1].float()
    found = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])


def row(ids, advantage, shift=1.0, **more):
    """A row as a policy writes it, whose sampler differed from the model."""
    ids = torch.tensor(ids)
    current = log_probs(ids)
    assistant = torch.arange(len(ids)) >= PROMPT
    return TensorDict(
        tokens={"full": ids, "prompt": ids[:PROMPT], "response": ids[PROMPT:]},
        masks={"all_attention_mask": torch.ones_like(assistant), "all_assistant_mask": assistant},
        log_probs={"full": current - shift * torch.tensor(SHIFTS)[: len(ids)]},
        advantage=torch.full((1, 1), advantage),
        next={"ref_log_probs": {"full": current - 0.2}},
        **more,
    )


def masked(rows, mask):
    return rows.set(("masks", "all_assistant_mask"), mask)


def ragged(shift=1.0):
    return lazy_stack(
        [row([11, 12, 13, 14, 15, 16, 17], 1.0, shift), row([21, 22, 23, 24, 25], -2.0, shift)]
    )


def dense(shift=1.0):
    rows = [
        row([11, 12, 13, 14, 15, 16, 17], 1.0, shift),
        row([21, 22, 23, 24, 25, 26, 27], -2.0, shift),
    ]
    return torch.stack(rows)


def gradient_norm(loss):
    model().zero_grad()
    loss.backward()
    squares = [p.grad.square().sum() for p in model().parameters() if p.grad is not None]
    model().zero_grad()
    return torch.stack(squares).sum().sqrt()


def the_objective_of_ragged_rows():
    show(GRPOLoss(actor(), clip_epsilon=0.2)(ragged()).loss_objective)


def the_objective_of_dense_rows():
    show(GRPOLoss(actor(pad_output=True))(dense()).loss_objective)


def the_objective_on_policy():
    show(GRPOLoss(actor())(ragged(0.0)).loss_objective)


def the_gradient_of_the_objective():
    show(gradient_norm(GRPOLoss(actor())(ragged()).loss_objective))


def what_kind_of_thing_a_loss_gives():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged())
    show(type(out).__name__, out.loss_objective.ndim, out.loss_objective.requires_grad)


def metrics_have_no_gradient():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged())
    show([getattr(out, name).requires_grad for name in ("clip_fraction", "kl_approx", "ESS")])


def an_asymmetric_clip():
    show(GRPOLoss(actor(), clip_epsilon=(0.05, 0.4))(ragged()).loss_objective)


def bounds_of_the_clip_are_attributes():
    loss = GRPOLoss(actor(), clip_epsilon=(0.1, 0.3))
    show(float(loss.clip_epsilon_low), float(loss.clip_epsilon_high))


def a_clip_range_that_is_no_range():
    GRPOLoss(actor(), clip_epsilon=(1.5, 0.3))


def a_negative_clip():
    GRPOLoss(actor(), clip_epsilon=-0.1)


def the_share_of_clipped_tokens():
    show(GRPOLoss(actor())(ragged()).clip_fraction)


def the_divergence_from_the_sampler_as_a_metric():
    show(GRPOLoss(actor())(ragged()).kl_approx)


def the_effective_sample_size():
    show(GRPOLoss(actor())(ragged()).ESS)


def terms_by_default():
    out = GRPOLoss(actor())(ragged())
    show(sorted(key for key in out.keys() if key.startswith("loss_")))


def terms_without_an_entropy_bonus():
    out = GRPOLoss(actor(), entropy_bonus=False)(ragged())
    show(sorted(key for key in out.keys() if key.startswith("loss_")), out.loss_entropy)


def an_entropy_bonus():
    out = GRPOLoss(actor(), entropy_bonus=True, entropy_coeff=0.1)(ragged())
    show(out.loss_entropy, out.loss_objective)


def an_entropy_coefficient_alone():
    show(GRPOLoss(actor(), entropy_coeff=0.1)(ragged()).loss_entropy)


def the_entropy_as_a_metric():
    show(GRPOLoss(actor(), entropy_bonus=True)(ragged()).entropy)


def settings_of_the_entropy_are_attributes():
    loss = GRPOLoss(actor(), entropy_bonus=True, entropy_coeff=0.3)
    show(loss.entropy_bonus, loss.entropy_coeff)


def divergence_from_a_reference_where_every_token_counts():
    rows = dense()
    show_loss = GRPOLoss(actor(), kl_to_ref_coeff=0.5, masking_strategy="generic")(rows)
    show(show_loss.loss_kl_to_ref / show_loss.kl_to_ref)


def divergence_from_a_reference():
    out = GRPOLoss(actor(), kl_to_ref_coeff=0.5)(ragged())
    show(out.loss_kl_to_ref, out.kl_to_ref)


def divergence_from_the_sampler():
    out = GRPOLoss(actor(), kl_to_inference_coeff=0.5)(ragged())
    show(out.loss_kl_to_inference, out.kl_to_inference)


def no_divergence_without_a_coefficient():
    out = GRPOLoss(actor())(ragged())
    show(out.loss_kl_to_ref, out.kl_to_ref, out.loss_kl_to_inference)


def a_reference_that_is_not_there():
    rows = lazy_stack([row([11, 12, 13, 14, 15], 1.0).exclude("next") for _ in range(2)])
    GRPOLoss(actor(), kl_to_ref_coeff=0.5)(rows)


def a_trust_region_of_tokens():
    show(GRPOLoss(actor(), kl_mask_threshold=0.1)(ragged()).loss_objective)


def a_wide_trust_region():
    show(GRPOLoss(actor(), kl_mask_threshold=100.0)(ragged()).loss_objective)


def aggregation_token_mean():
    show(GRPOLoss(actor(), aggregation="token_mean")(ragged()).loss_objective)


def aggregation_none():
    out = GRPOLoss(actor(), aggregation="none", entropy_bonus=False)(dense())
    show(out.loss_objective.squeeze(-1))


def aggregation_none_of_ragged_rows():
    out = GRPOLoss(actor(), aggregation="none", entropy_bonus=False)(ragged())
    show(out.loss_objective)


def aggregation_none_has_a_last_dimension():
    show(GRPOLoss(actor(), aggregation="none")(dense()).loss_objective.shape)


def aggregation_prompt_mean():
    show(GRPOLoss(actor(), aggregation="prompt_mean")(ragged()).loss_objective)


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


def an_unknown_aggregation():
    GRPOLoss(actor(), aggregation="median")(ragged())


def reduction_mean():
    loss = GRPOLoss(actor(), reduction="mean")
    show(loss.reduction, loss(ragged()).loss_objective)


def reduction_none():
    show(GRPOLoss(actor(), reduction="none", entropy_bonus=False)(dense()).loss_objective.sum())


def reduction_sum():
    show(GRPOLoss(actor(), reduction="sum")(ragged()).loss_objective)


def reduction_by_default():
    show(GRPOLoss(actor()).reduction, GRPOLoss(actor()).aggregation)


def the_recipes_backward():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged())
    show(gradient_norm(out.mean(reduce=True)))


def the_sum_of_an_output():
    out = GRPOLoss(actor(), entropy_bonus=True)(ragged())
    show(gradient_norm(out.sum(reduce=True)))


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


def the_mask_of_responses():
    show(GRPOLoss(actor(), masking_strategy="sft")(ragged()).loss_objective)


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


def the_mask_of_every_token():
    show(GRPOLoss(actor(), masking_strategy="generic")(ragged()).loss_objective)


def an_unknown_masking_strategy():
    loss = GRPOLoss(actor(), masking_strategy="all")
    show(loss.masking_strategy)


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


def an_unknown_key():
    GRPOLoss(actor()).set_keys(advantages="mine")


def keys_by_default():
    keys = GRPOLoss(actor()).tensor_keys
    show(keys.advantage, keys.action, keys.sample_log_prob, keys.ref_log_probs)


def keys_that_are_read():
    wanted = {("tokens", "full"), ("log_probs", "full"), "advantage"}
    show(wanted <= set(GRPOLoss(actor()).in_keys))


def keys_that_are_read_in_order():
    show(GRPOLoss(actor()).in_keys)


def keys_that_are_given():
    wanted = {"loss_objective", "clip_fraction", "ESS", "kl_approx", "entropy", "loss_entropy"}
    wanted |= {"loss_kl_to_ref", "kl_to_ref", "loss_kl_to_inference", "kl_to_inference"}
    show(wanted <= set(GRPOLoss(actor(), entropy_bonus=True).out_keys))


def keys_that_are_given_in_order():
    show(GRPOLoss(actor()).out_keys)


def a_loss_without_advantages():
    GRPOLoss(actor())(ragged().exclude("advantage"))


def a_loss_without_tokens():
    GRPOLoss(actor())(ragged().exclude("tokens"))


def a_loss_without_log_probs_of_the_sampler():
    GRPOLoss(actor())(ragged().exclude("log_probs"))


def log_probs_of_the_response_alone():
    rows = [
        r.set(("log_probs", "full"), r["log_probs", "full"][PROMPT:]) for r in ragged().unbind(0)
    ]
    GRPOLoss(actor())(lazy_stack(rows))


def log_probs_that_need_gradients():
    rows = dense()
    rows["log_probs", "full"] = rows["log_probs", "full"].requires_grad_()
    GRPOLoss(actor())(rows)


def a_rollout_of_two_dimensions():
    GRPOLoss(actor())(lazy_stack([ragged(), ragged()]))


def a_device():
    loss = GRPOLoss(actor(), device=torch.device("cpu"))
    show(loss(ragged()).loss_objective)


def arguments_that_nothing_reads():
    loss = GRPOLoss(actor(), gamma=0.9, clip_value=True, samples_mc_entropy=3)
    show(loss(ragged()).loss_objective)


def samples_for_an_entropy_without_a_formula():
    show(GRPOLoss(actor(), samples_mc_entropy=3).samples_mc_entropy)


def padding_of_the_reference():
    loss = GRPOLoss(
        actor(),
        ref_log_prob_padding_side="left",
        ref_log_prob_padding_value=0.0,
        kl_to_ref_coeff=0.1,
    )
    show(loss.ref_log_prob_padding_side, loss.ref_log_prob_padding_value)
    show(loss(ragged()).loss_objective)


def a_mistyped_argument():
    show(GRPOLoss(actor(), clip_epsilom=0.1)(ragged()).loss_objective)


def a_loss_without_an_actor():
    show(GRPOLoss().actor_network)


def a_generating_policy_as_the_actor():
    policy = actor(generate=True, generate_kwargs={"max_new_tokens": 2})
    show(GRPOLoss(policy)(ragged()).loss_objective)


def an_actor_of_histories():
    rows = ragged()
    GRPOLoss(actor(input_mode="history"))(rows)


def parameters_of_a_loss():
    loss = GRPOLoss(actor())
    show(len(list(loss.parameters())) == len(list(model().parameters())))


def buffers_of_a_loss():
    show([name for name in GRPOLoss(actor()).state_dict() if "clip" in name])


def zeroing_the_gradients():
    loss = GRPOLoss(actor())
    loss(ragged()).loss_objective.backward()
    loss.zero_grad()
    show(all(p.grad is None for p in model().parameters()))


def dapo_with_bounds():
    out = DAPO(actor(), clip_epsilon=(0.2, 0.28))(ragged())
    show(type(out).__name__, out.loss_objective)


def dapo_by_default():
    show(DAPO(actor())(ragged()).loss_objective)


def dapo_is_a_grpo():
    show(isinstance(DAPO(actor()), GRPOLoss))


def cispo_is_a_grpo():
    show(isinstance(CISPOLoss(actor()), GRPOLoss))


def cispo_with_bounds_on_policy():
    loss = CISPOLoss(actor(), clip_epsilon=(0.2, 0.28))
    show(type(loss(ragged(0.0))).__name__, gradient_norm(loss(ragged(0.0)).loss_objective))


def cispo_value():
    show(CISPOLoss(actor(), clip_epsilon=0.2)(ragged()).loss_objective)


def cispo_gradient_of_clipped_tokens():
    show(gradient_norm(CISPOLoss(actor(), clip_epsilon=0.2)(ragged(3.0)).loss_objective))


def cispo_bounds_by_default():
    loss = CISPOLoss(actor())
    show(float(loss.clip_epsilon_low), float(loss.clip_epsilon_high))


# -- supervised ---------------------------------------------------------------------------------


def reader(**options):
    return actor(input_mode="history", **options)


def taught(**more):
    """Rows with a conversation alone."""
    history = History.from_chats([CHAT, OTHER])
    td = TensorDict(history=TensorDict(full=history, batch_size=[2]), batch_size=[2], **more)
    return lazy_stack(list(td.unbind(0)))


def scored():
    """The same with ids, masks and log-probs, as a policy that scores writes them."""
    with torch.no_grad():
        return reader()(taught())


def sft_of_conversations():
    show(SFTLoss(reader(), tokenizer())(taught()).loss_sft)


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


def sft_gradient():
    show(gradient_norm(SFTLoss(reader(), tokenizer())(with_one_mask()).loss_sft) / 1000)


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


def minor_sft_by_default():
    show(SFTLoss(reader(), tokenizer(), loss_function="minor_sft")(with_reference()).loss_sft)


def minor_sft_with_a_divergence():
    loss = SFTLoss(reader(), tokenizer(), loss_function="minor_sft", kl_to_ref_coeff=0.1)
    show(loss.kl_to_ref_coeff, loss(with_reference()).loss_sft)


def minor_sft_without_a_reference():
    SFTLoss(reader(), tokenizer(), loss_function="minor_sft")(with_one_mask())


def sft_with_a_divergence():
    out = SFTLoss(reader(), tokenizer(), kl_to_ref_coeff=0.5)(with_reference())
    show(out.loss_sft, out.loss_kl_to_ref / out.kl_to_ref)


def sft_divergence_by_value():
    show(SFTLoss(reader(), tokenizer(), kl_to_ref_coeff=0.5)(with_reference()).kl_to_ref)


def sft_beta_without_minor_sft():
    show(SFTLoss(reader(), tokenizer(), beta=0.3)(with_one_mask()).loss_sft)


def sft_normalize_is_an_attribute():
    show(SFTLoss(reader(), tokenizer()).normalize_by_seq_length, SFTLoss(reader()).reduction)


def sft_tokenizer_is_an_attribute():
    loss = SFTLoss(reader(), tokenizer())
    show(loss.tokenizer is tokenizer(), SFTLoss(reader()).tokenizer is tokenizer())


def sft_arguments_of_the_tokenizer():
    loss = SFTLoss(reader(), tokenizer(), tokenizer_kwargs={"chat_template_name": "chatml_format"})
    show(loss.tokenizer_kwargs["chat_template_name"])
    show(loss(with_one_mask()).loss_sft)


def sft_default_arguments_of_the_tokenizer():
    show(SFTLoss(reader(), tokenizer()).tokenizer_kwargs)


def sft_with_a_padded_encoding():
    options = {"padding": False, "return_tensors": "pt", "tokenize": True}
    show(SFTLoss(reader(), tokenizer(), tokenizer_kwargs=options)(with_one_mask()).loss_sft)


def sft_other_keys():
    rows = taught()
    rows = lazy_stack([r.rename_key_("history", "chat") for r in rows.unbind(0)])
    loss = SFTLoss(reader(input_key=("chat", "full")), tokenizer(), reduction="none")
    loss.set_keys(history=("chat", "full"))
    show(loss(rows).loss_sft.shape, loss.tensor_keys.history)


def sft_keys_by_default():
    keys = SFTLoss(reader(), tokenizer()).tensor_keys
    show(keys.history, keys.ref_log_prob)


def sft_key_of_log_probs():
    show(SFTLoss(reader(), tokenizer()).tensor_keys.log_probs)


def sft_unknown_reduction():
    SFTLoss(reader(), tokenizer(), reduction="median")(taught())


def sft_unknown_loss_function():
    SFTLoss(reader(), tokenizer(), loss_function="dpo")(taught())


def sft_of_a_conversation_without_an_answer():
    history = History.from_chats([CHAT[:2], OTHER[:2]])
    td = TensorDict(history=TensorDict(full=history, batch_size=[2]), batch_size=[2])
    SFTLoss(reader(), tokenizer())(td)


def sft_of_a_rollout_of_two_dimensions():
    show(SFTLoss(reader(), tokenizer())(lazy_stack([taught(), taught()])).loss_sft)


def the_function_sft_loss():
    summed = torch.tensor([-1.0, -3.0])
    show([sft_loss(summed, how) for how in ("mean", "sum", "none")])


def the_function_minor_sft_loss():
    pair = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -2.0])
    show([minor_sft_loss(*pair, 0.7, how) for how in ("mean", "sum", "none")])


def the_function_sft_loss_with_an_unknown_reduction():
    sft_loss(torch.zeros(1), "median")


def the_function_minor_sft_loss_of_other_shapes():
    minor_sft_loss(torch.zeros(1), torch.zeros(2), 0.1, "mean")


# -- distillation -------------------------------------------------------------------------------


def the_estimate_of_the_divergence():
    show(k3_kl_token_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])))


def distillation_attributes():
    loss = DistillationLoss(reader(), tokenizer())
    show(loss.reduction, loss.normalize_by_seq_length, loss.assistant_only)


# -- advantages ---------------------------------------------------------------------------------


def turns(group, *rewards):
    """A trajectory of one row per reward."""
    done = torch.arange(len(rewards)) == len(rewards) - 1
    next_ = {"reward": torch.tensor(rewards)[:, None], "done": done[:, None]}
    return TensorDict(
        query=lazy_stack([TensorDict()] * len(rewards))
        if group is None
        else [group] * len(rewards),
        group=torch.full((len(rewards),), len(str(group))),
        next=TensorDict(next_, [len(rewards)]),
        batch_size=[len(rewards)],
    )


def advantages_wait_for_a_group():
    show(MCAdvantage(2).inv(turns("a", 1.0)))


def advantages_of_a_group():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0))
    show(estimator.inv(turns("a", 1.0))["advantage"].flatten())


def advantages_of_turns_by_default():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0, 1.0))
    show(estimator.inv(turns("a", 1.0, 3.0))["advantage"].flatten())


def advantages_of_turns_by_themselves():
    estimator = MCAdvantage(2, trajectory_return=None)
    estimator.inv(turns("a", 0.0, 1.0))
    show(estimator.inv(turns("a", 1.0, 3.0))["advantage"].flatten())


def advantages_of_whole_trajectories():
    for how in ("sum", "max", "mean"):
        estimator = MCAdvantage(2, trajectory_return=how)
        estimator.inv(turns("a", 0.0, 1.0))
        show(estimator.inv(turns("a", 1.0, 3.0))["advantage"].flatten())


def advantages_by_another_key():
    estimator = MCAdvantage(2, "group", advantage_key="adv")
    estimator.inv(turns("a", 0.0))
    show(estimator.inv(turns("b", 1.0))["adv"].flatten(), estimator.prompt_key)


def advantages_of_several_groups_at_once():
    estimator = MCAdvantage(2)
    out = estimator.inv(
        torch.cat([turns("a", 0.0), turns("b", 2.0), turns("a", 1.0), turns("b", 4.0)])
    )
    show(out.shape, out["advantage"].flatten())


def advantages_in_a_buffer():
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2), batch_size=2)
    buffer.extend(turns("a", 0.0))
    show(len(buffer))
    buffer.extend(turns("a", 1.0))
    show(len(buffer), buffer[:]["advantage"].flatten())


def a_trajectory_that_is_not_done():
    rows = turns("a", 0.0, 1.0)
    rows["next", "done"] = torch.zeros(2, 1).bool()
    MCAdvantage(2).inv(rows)


def groups_outside_of_the_bounds_are_dropped():
    estimator = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    show(estimator.inv(turns("a", 0.0)), estimator.inv(turns("a", 0.0)))
    show(estimator.inv(turns("a", 0.0)), estimator.inv(turns("a", 1.0)).shape)


def bounds_without_returns_of_trajectories():
    MCAdvantage(2, keep_return_bounds=(0.1, 0.9), trajectory_return=None)


def bounds_that_do_not_increase():
    MCAdvantage(2, keep_return_bounds=(0.9, 0.1), trajectory_return="sum")


def candidates_are_chosen():
    estimator = MCAdvantage(
        2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9), candidate_group_size=3
    )
    show(estimator.inv(turns("a", 0.0)), estimator.inv(turns("a", 0.0)))
    show(sorted(estimator.inv(turns("a", 1.0))["advantage"].flatten().tolist()))


def counts_of_groups():
    estimator = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    for reward in (0.0, 1.0, 0.0, 0.0, 1.0):
        estimator.inv(turns("a", reward))
    names = "completed_groups written_groups dropped_groups queued_groups queued_trajectories"
    show({name: estimator.get_stats()[name] for name in names.split()})


def counts_are_attributes():
    estimator = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    for reward in (0.0, 1.0, 0.0, 0.0, 1.0):
        estimator.inv(turns("a", reward))
    show(estimator.completed_groups, estimator.written_groups, estimator.dropped_groups)
    show(estimator.queued_groups, estimator.queued_trajectories, estimator.completed_trajectories)


def every_count():
    estimator = MCAdvantage(2, trajectory_return="sum")
    for reward in (0.0, 1.0, 0.5):
        estimator.inv(turns("a", reward))
    show({name: float(value) for name, value in estimator.get_stats().items()})


def counting_from_zero():
    estimator = MCAdvantage(2)
    for reward in (0.0, 1.0):
        estimator.inv(turns("a", reward))
    estimator.reset_stats()
    show(estimator.get_stats()["completed_groups"])


def groups_that_never_fill_are_given_up():
    estimator = MCAdvantage(2)
    estimator.inv(turns("a", 0.0))
    estimator.clear_queues()
    show(estimator.get_stats()["queued_groups"], estimator.inv(turns("a", 1.0)))


def attributes_of_advantages():
    estimator = MCAdvantage(3, advantage_key="adv", verbose=True, trajectory_return="sum")
    show(estimator.grpo_size, estimator.advantage_key, estimator.rewards_key, estimator.done_key)
    show(estimator.verbose, estimator.keep_return_bounds, estimator.trajectory_return)


def keys_of_advantages():
    estimator = MCAdvantage(3, "query")
    show(estimator.in_keys, estimator.out_keys, estimator.prompt_key)


def the_group_key_by_default():
    show(MCAdvantage(3).prompt_key)


def candidates_by_default():
    show(MCAdvantage(3).candidate_group_size, MCAdvantage(3).candidate_selection_min_size)


def a_group_of_one():
    MCAdvantage(1, trajectory_return="sum")


def the_selector():
    candidates = TensorDict({"return": torch.tensor([0.0, 0.0, 0.0, 1.0])}, [4])
    for how in ("first", "uniform", "balanced"):
        selector = MCAdvantageSelector(how)
        show(selector.select(candidates, group_size=2))
        show(selector.select(candidates, group_size=2, keep_return_bounds=(0.1, 0.9)))


def the_selector_by_default():
    selector = MCAdvantageSelector()
    show(selector.strategy, selector.max_combinations, selector.in_keys)


def the_selector_with_too_few():
    candidates = TensorDict({"return": torch.tensor([0.0])}, [1])
    MCAdvantageSelector().select(candidates, group_size=2)


def an_unknown_selection():
    MCAdvantageSelector("best")
