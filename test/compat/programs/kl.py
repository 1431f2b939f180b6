"""Divergences from a reference: where they stand, which tokens count, what the reward loses."""

from __future__ import annotations

import copy

import torch
from _rows import PROMPT, dense, ragged
from _shared import CHAT, OTHER, model, show, tokenizer
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.envs.llm import KLRewardTransform, RetrieveLogProb, as_nested_tensor, as_padded_tensor
from torchrl.envs.llm.transforms.kl import KLComputation, RetrieveKL
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory, Text


def policy(**options):
    return TransformersWrapper(
        model(), tokenizer=tokenizer(), generate=False, return_log_probs=True, **options
    )


def of_tokens(**options):
    return policy(input_mode="tokens", **options)


def chats():
    history = History.from_chats([CHAT, OTHER])
    td = TensorDict(history=TensorDict(full=history, batch_size=[2]), batch_size=[2])
    return lazy_stack(list(td.unbind(0)))


def numbers(td, *key):
    return [values.flatten() for values in td.get(key, as_list=True)]


def rows_of_two_columns(rewards=None):
    """Rows with log-probs of two policies under "next", and a reward of each token."""
    rows = []
    for length in (5, 3):
        next_ = {
            "log_probs": {"full": -torch.arange(1.0, length + 1)},
            "ref_log_probs": {"full": -1.5 * torch.arange(1.0, length + 1)},
            "reward": torch.ones(length, 1) if rewards is None else rewards.clone(),
        }
        ids = torch.arange(length)
        tokens = {"full": ids, "prompt": ids[:0], "response": ids}
        rows.append(TensorDict(tokens=tokens, next=next_))
    return lazy_stack(rows)


# -- RetrieveLogProb ----------------------------------------------------------------------------


def log_probs_of_tokens():
    key = ("ref_log_probs", "full")
    score = RetrieveLogProb(of_tokens(), log_probs_full_key=key, assistant_only=False)
    show(*numbers(score(ragged().exclude("next")), *key))


def log_probs_of_rows_with_next():
    key = ("ref_log_probs", "full")
    score = RetrieveLogProb(of_tokens(), log_probs_full_key=key, assistant_only=False)
    show(*numbers(score(ragged()), "next", *key))


def log_probs_under_a_name_of_the_model():
    key = ("mine", "full")
    score = RetrieveLogProb(
        of_tokens(log_probs_key="mine"), log_probs_full_key=key, assistant_only=False
    )
    show(*numbers(score(ragged()), "next", *key))


def log_probs_of_conversations():
    key = ("ref_log_probs", "full")
    rows = chats()
    rows = lazy_stack([r.set("next", TensorDict()) for r in rows.unbind(0)])
    score = RetrieveLogProb(policy(), log_probs_full_key=key, assistant_only=False)
    show([len(values) for values in numbers(score(rows), "next", *key)])
    show([round(values.sum().item(), 2) for values in numbers(score(rows), "next", *key)])


def log_probs_of_the_assistant():
    key = ("ref_log_probs", "full")
    rows = chats()
    rows = lazy_stack([r.set("next", TensorDict()) for r in rows.unbind(0)])
    found = numbers(RetrieveLogProb(policy(), log_probs_full_key=key)(rows), "next", *key)
    show([int((values != 0).sum()) for values in found])


def log_probs_without_gradient():
    key = ("ref_log_probs", "full")
    score = RetrieveLogProb(of_tokens(), log_probs_full_key=key, assistant_only=False, detach=True)
    with torch.no_grad():
        show(numbers(score(ragged()), "next", *key)[0].requires_grad)


def attributes_of_retrieve_log_prob():
    key = ("a", "full")
    score = RetrieveLogProb(policy(), log_probs_full_key=key, tokenizer=tokenizer())
    show(score.log_probs_full_key, score.assistant_only, score.detach, score.padding_side)
    show(score.tokenizer is tokenizer(), type(score.model).__name__)


def arguments_of_the_tokenizer():
    options = {"chat_template_name": "chatml_format"}
    score = RetrieveLogProb(policy(), tokenizer=tokenizer(), tokenizer_kwargs=options)
    show(score.tokenizer_kwargs["chat_template_name"])


# -- KLComputation ------------------------------------------------------------------------------


def divergence_of_two_columns():
    td = KLComputation(add_to_reward=False)(rows_of_two_columns())
    key = ("next", "kl_penalty")
    if ("next", "kl_penalty", "full") in td.keys(True):
        key = (*key, "full")
    show(*numbers(td, *key))


def where_the_divergence_is():
    td = KLComputation(add_to_reward=False)(rows_of_two_columns())
    show(("next", "kl_penalty", "full") in td.keys(True))


def a_reward_of_each_token_less_the_divergence():
    td = KLComputation(coeff=0.1)(rows_of_two_columns())
    reward = td.get(("next", "reward"), as_list=True)
    show([values.flatten() for values in reward])


def a_reward_of_the_response_less_the_divergence():
    td = KLComputation(coeff=0.1)(rows_of_two_columns(torch.ones(1, 1)))
    show([values.flatten() for values in td.get(("next", "reward"), as_list=True)])


def a_coefficient_of_zero():
    td = KLComputation(coeff=0.0)(rows_of_two_columns())
    show([values.flatten() for values in td.get(("next", "reward"), as_list=True)])


def a_reward_that_is_left_alone():
    td = KLComputation(coeff=0.1, add_to_reward=False)(rows_of_two_columns())
    show([values.flatten() for values in td.get(("next", "reward"), as_list=True)])


def other_columns():
    rows = rows_of_two_columns()
    rows = lazy_stack(
        [r.rename_key_(("next", "log_probs"), ("next", "mine")) for r in rows.unbind(0)]
    )
    td = KLComputation(("mine", "full"), ("ref_log_probs", "full"), coeff=0.1)(rows)
    show([values.flatten() for values in td.get(("next", "reward"), as_list=True)])


def another_name_of_the_divergence():
    td = KLComputation(kl_key="kl", add_to_reward=False)(rows_of_two_columns())
    show("kl" in td["next"].keys())


def columns_of_other_lengths():
    rows = [
        r.set(("next", "ref_log_probs", "full"), torch.zeros(2))
        for r in rows_of_two_columns().unbind(0)
    ]
    KLComputation()(lazy_stack(rows))


def a_column_that_is_not_there():
    rows = [r.exclude(("next", "ref_log_probs")) for r in rows_of_two_columns().unbind(0)]
    KLComputation()(lazy_stack(rows))


def attributes_of_a_computation():
    kl = KLComputation(coeff=0.3, padding_side="left")
    show(kl.coeff, kl.add_to_reward, kl.kl_key, kl.padding_side)
    show(kl.gen_log_probs_full_key, kl.ref_log_probs_full_key)


def keys_of_a_computation():
    show(KLComputation().in_keys, KLComputation().out_keys)
    show(KLComputation(add_to_reward=False).in_keys, KLComputation(add_to_reward=False).out_keys)


# -- RetrieveKL ---------------------------------------------------------------------------------


def pair(**options):
    return RetrieveKL(
        gen_model=of_tokens(log_probs_key="gen_log_probs"),
        ref_model=of_tokens(log_probs_key="ref_log_probs"),
        gen_log_probs_full_key=("gen_log_probs", "full"),
        ref_log_probs_full_key=("ref_log_probs", "full"),
        assistant_only=False,
        **options,
    )


def two_models_are_compared():
    td = pair(add_to_reward=False)(ragged())
    show(*numbers(td, "next", "gen_log_probs", "full"))
    show(*numbers(td, "next", "ref_log_probs", "full"))


def two_models_and_a_reward_of_each_token():
    rows = [
        r.set(("next", "reward"), torch.ones(len(r["tokens", "response"]), 1))
        for r in ragged().unbind(0)
    ]
    show(*numbers(pair(coeff=0.5)(lazy_stack(rows)), "next", "reward"))


def a_model_that_generates_as_the_reference():
    reference = TransformersWrapper(model(), tokenizer=tokenizer(), generate=True)
    RetrieveKL(of_tokens(log_probs_key="gen_log_probs"), reference)


def a_reference_from_a_factory():
    kl = RetrieveKL(
        gen_model_factory=lambda: of_tokens(log_probs_key="gen_log_probs"),
        ref_model_factory=lambda: of_tokens(log_probs_key="ref_log_probs"),
        gen_log_probs_full_key=("gen_log_probs", "full"),
        assistant_only=False,
        add_to_reward=False,
    )
    show(*numbers(kl(ragged()), "next", "ref_log_probs", "full"))


# -- recorded conversations -----------------------------------------------------------------------


def recorded(mode):
    """Two conversations as a dataset has them: no policy has written anything."""
    history = History.from_chats([CHAT, OTHER])
    if mode == "history":
        column = ChatHistory(full=history)
        next_ = TensorDict(history=column.clone(), batch_size=(2,))
        return TensorDict(history=column, next=next_, batch_size=(2,))
    options = {"tokenizer": tokenizer(), "tokenize": False, "add_generation_prompt": False}
    texts = [history[row].apply_chat_template(**options) for row in (0, 1)]
    if mode == "text":
        column = Text(full=texts, batch_size=(2,))
        return TensorDict(text=column, next=TensorDict(batch_size=(2,)), batch_size=(2,))
    ids = [torch.tensor(tokenizer()(text)["input_ids"]) for text in texts]
    return lazy_stack([TensorDict(tokens={"full": row}, next=TensorDict()) for row in ids])


def reference_of(mode):
    """A reference that differs from the policy."""
    other = copy.deepcopy(model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    options = {"input_mode": mode, "log_probs_key": "ref_log_probs"}
    return TransformersWrapper(
        other, tokenizer=tokenizer(), generate=False, return_log_probs=True, **options
    )


def told(rows):
    """Tokens, those that count, and their sum."""
    show([[len(row), int((row != 0).sum()), round(float(row.sum()), 2)] for row in rows])


def show_divergences(td):
    key = ("next", "kl_penalty")
    told(numbers(td, *key, "full") if (*key, "full") in td.keys(True) else numbers(td, *key))


def scored_again(mode, **options):
    """Both models score the rows, in one transform."""
    kl = RetrieveKL(
        gen_model=policy(input_mode=mode, log_probs_key="gen_log_probs"),
        ref_model=reference_of(mode),
        gen_log_probs_full_key=("gen_log_probs", "full"),
        ref_log_probs_full_key=("ref_log_probs", "full"),
        add_to_reward=False,
        **options,
    )
    return kl(recorded(mode))


def scored_apart(mode):
    """Both models score the rows, each in a transform of its own, and a third one compares."""
    td = recorded(mode)
    pair = {"log_probs": policy(input_mode=mode), "ref_log_probs": reference_of(mode)}
    for name, each in pair.items():
        td = RetrieveLogProb(each, log_probs_full_key=(name, "full"), assistant_only=False)(td)
    return KLComputation(add_to_reward=False)(td)


def log_probs_of_recorded_text():
    key = ("ref_log_probs", "full")
    score = RetrieveLogProb(policy(input_mode="text"), log_probs_full_key=key, assistant_only=False)
    told(numbers(score(lazy_stack(list(recorded("text").unbind(0)))), "next", *key))


def recorded_conversations_without_a_reward():
    kl = RetrieveKL(
        gen_model=policy(log_probs_key="gen_log_probs"),
        ref_model=reference_of("history"),
        gen_log_probs_full_key=("gen_log_probs", "full"),
        assistant_only=False,
    )
    show_divergences(kl(recorded("history")))


def a_reward_of_recorded_conversations_less_the_divergence():
    td = recorded("history")
    td["next", "reward"] = torch.ones(2, 1, 1)
    td = lazy_stack(list(td.unbind(0)))
    kl = RetrieveKL(
        gen_model=policy(log_probs_key="gen_log_probs"),
        ref_model=reference_of("history"),
        gen_log_probs_full_key=("gen_log_probs", "full"),
        assistant_only=False,
        coeff=0.5,
    )
    rewards = kl(td).get(("next", "reward"), as_list=True)
    # what each token of the conversation costs, however the reward is spread over them
    show([round(float((row - 1).sum()), 1) for row in rewards])


# -- KLRewardTransform --------------------------------------------------------------------------


def reward_transform(**options):
    return KLRewardTransform(of_tokens(), **options)


def attributes_of_a_reward_transform():
    kl = reward_transform(tokenizer=tokenizer())
    show(kl.add_to_reward, kl.assistant_only, kl.padding_side, kl.log_prob_full_key)
    show(
        kl.tokenizer is tokenizer(), type(kl.ref_model).__name__, kl.DEFAULT_IN_KEYS, kl.pad_output
    )


def keys_written_by_a_reward_transform():
    show(reward_transform().out_keys)
    show(reward_transform(out_keys=["penalised", "kl", "ref"]).out_keys)


# -- padding ------------------------------------------------------------------------------------


def rows_to_stack():
    a = TensorDict(x=torch.arange(3), y=torch.ones(3, 2), n=TensorDict(z=torch.arange(3.0)))
    b = TensorDict(x=torch.arange(5), y=torch.ones(5, 2), n=TensorDict(z=torch.arange(5.0)))
    return [a, b]


def rows_are_padded_on_the_left():
    td = as_padded_tensor(rows_to_stack())
    show(td.batch_size, td["x"], td["y"], td["n", "z"])


def another_dimension_is_padded():
    rows = [TensorDict(y=torch.ones(2, 1)), TensorDict(y=torch.ones(2, 3))]
    show(as_padded_tensor(rows, dim=1)["y"])


def nested_rows():
    td = as_nested_tensor(rows_to_stack())
    show(td.batch_size, td["x"].is_nested, td["x"].values(), td["n", "z"].values())


def padding_of_a_lazy_stack():
    rows = ragged()
    for side in ("left", "right"):
        show(
            rows.get(("tokens", "full"), as_padded_tensor=True, padding_side=side, padding_value=7)
        )


def padded_tokens_of_a_policy():
    td = of_tokens(pad_output=True)(dense().exclude("masks", "log_probs"))
    show(td["log_probs", "full"].shape, td["tokens", "full"][:, PROMPT:])


PROGRAMS = {
    "the_default_key_of_log_probs": lambda: show(RetrieveLogProb(policy()).log_probs_full_key),
    "the_default_key_of_a_model_with_a_name": lambda: show(
        RetrieveLogProb(policy(log_probs_key="ref_log_probs")).log_probs_full_key
    ),
    "log_probs_of_a_generating_model": lambda: RetrieveLogProb(
        TransformersWrapper(model(), tokenizer=tokenizer(), generate=True)
    ),
    "log_probs_of_the_assistant_of_tokens": lambda: RetrieveLogProb(of_tokens()),
    "keys_of_retrieve_log_prob": lambda: show(
        RetrieveLogProb(policy(), log_probs_full_key=("a", "full")).out_keys
    ),
    "keys_read_by_retrieve_log_prob": lambda: show(
        RetrieveLogProb(policy(), log_probs_full_key=("a", "full")).in_keys
    ),
    "two_models_of_one_name": lambda: RetrieveKL(of_tokens(), of_tokens(), assistant_only=False),
    "a_reference_and_a_factory": lambda: RetrieveKL(
        of_tokens(), ref_model=of_tokens(), ref_model_factory=of_tokens
    ),
    "a_divergence_of_recorded_conversations": lambda: show_divergences(
        scored_again("history", assistant_only=False)
    ),
    "a_divergence_of_recorded_text": lambda: show_divergences(
        scored_again("text", assistant_only=False)
    ),
    "a_divergence_of_recorded_tokens": lambda: show_divergences(
        scored_again("tokens", assistant_only=False)
    ),
    "a_divergence_of_the_assistant_of_recorded_conversations": lambda: show_divergences(
        scored_again("history", assistant_only=True)
    ),
    "a_divergence_of_the_assistant_of_recorded_text": lambda: scored_again(
        "text", assistant_only=True
    ),
    "a_divergence_of_the_assistant_of_recorded_tokens": lambda: scored_again(
        "tokens", assistant_only=True
    ),
    "a_computation_over_recorded_conversations": lambda: show_divergences(scored_apart("history")),
    "a_computation_over_recorded_text": lambda: show_divergences(scored_apart("text")),
    "a_computation_over_recorded_tokens": lambda: show_divergences(scored_apart("tokens")),
    "log_probs_of_the_assistant_of_recorded_text": lambda: RetrieveLogProb(
        policy(input_mode="text")
    )(recorded("text")),
    "coefficients_of_a_reward_transform": lambda: show(
        float(reward_transform(coef=0.3).coef), float(reward_transform().coef)
    ),
    "the_tokenizer_of_the_reference": lambda: show(reward_transform().tokenizer is tokenizer()),
    "keys_read_by_a_reward_transform": lambda: show(reward_transform().in_keys),
    "too_many_keys": lambda: reward_transform(in_keys=["a", "b"]),
    "a_reward_transform_without_a_reference": lambda: KLRewardTransform(),
    "a_reward_transform_of_a_generating_model": lambda: KLRewardTransform(
        TransformersWrapper(model(), tokenizer=tokenizer(), input_mode="tokens")
    ),
    "a_reward_transform_of_a_model_of_histories": lambda: KLRewardTransform(policy()),
    "rows_of_one_length": lambda: show(as_padded_tensor([rows_to_stack()[0]] * 2)["x"]),
    "another_dimension_is_stacked": lambda: show(
        as_padded_tensor(rows_to_stack(), stack_dim=1)["x"].shape
    ),
    "a_negative_dimension_is_padded": lambda: as_padded_tensor(rows_to_stack(), dim=-1),
}
"""Programs of one expression."""
