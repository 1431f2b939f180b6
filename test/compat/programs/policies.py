"""Policies: what a wrapper reads and writes in each mode, how it pads, samples, scores, batches."""

from __future__ import annotations

import threading

import torch
from _shared import CHAT, OTHER, model, show, tokenizer
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.envs import SerialEnv
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import (
    ChatHistory,
    LogProbs,
    Masks,
    Text,
    Tokens,
    TransformersWrapper,
)

from torchrl_llm.assets import embedded_model_path

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def policy(mode="text", generate_kwargs=GREEDY, **options):
    return TransformersWrapper(
        model(), tokenizer=tokenizer(), input_mode=mode, generate_kwargs=generate_kwargs, **options
    )


def scorer(mode="history", **options):
    return TransformersWrapper(
        model(), tokenizer=tokenizer(), input_mode=mode, generate=False, **options
    )


def chats(cut=2):
    history = History.from_chats([CHAT[:cut], OTHER[:cut]])
    node = ChatHistory(prompt=history) if cut == 2 else ChatHistory(full=history)
    return TensorDict(history=node, batch_size=(2,))


def texts(*rows, part="prompt"):
    rows = list(rows or ("What is 12+30?", "Hello"))
    return TensorDict(text=Text(**{part: rows}, batch_size=(len(rows),)), batch_size=(len(rows),))


def padded_ids():
    ids = torch.tensor([[0, 0, 20, 21], [22, 23, 24, 25]])
    td = TensorDict(tokens=Tokens(prompt=ids, batch_size=(2,)), batch_size=(2,))
    return td.set("attention_mask", torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool())


def lengths(node, name):
    return [len(row) for row in node.get(name, as_list=True)]


# -- sampling, mode by mode ---------------------------------------------------------------------


def text_in_text_out():
    out = policy()(texts())
    show(out["text"].prompt, out["text"].response, out["text"].full)


def which_nodes_text_mode_writes():
    out = policy()(texts())
    show([key in out for key in ("text", "tokens", "masks", "log_probs", "history")])


def history_in_history_out():
    out = policy("history")(chats())
    show(out["history"].full.role, out["history"].response.role, out["text"].response)
    show(out["history"].prompt.content, out["history"].full.shape, out["history"].response.shape)


def which_nodes_history_mode_writes():
    out = policy("history")(chats())
    show([key in out for key in ("text", "tokens", "masks", "log_probs", "history")])


def the_answer_in_the_last_message():
    out = policy("history")(chats())
    show(out["history"].full[..., -1].content, out["history"].full[..., -1].role)


def whole_text_is_prompt_and_response():
    text = policy("history")(chats())["text"]
    show([f.startswith(p) for f, p in zip(text.full, text.prompt, strict=True)])


def padded_tokens_in_with_a_mask():
    out = policy("tokens", pad_output=True)(padded_ids())
    show(out["tokens"].response.shape, out["tokens"].full.shape, out["tokens"].full.dtype)
    show(out["tokens"].response)


def ragged_tokens_in():
    rows = [torch.tensor([20, 21]), torch.tensor([22, 23, 24])]
    td = lazy_stack([TensorDict(tokens=Tokens(prompt=ids)) for ids in rows])
    out = policy("tokens")(td)
    show(lengths(out["tokens"], "response"), lengths(out["tokens"], "full"))
    show(out["tokens"].get("response", as_list=True))


def ragged_tokens_as_list_nested_and_padded():
    tokens = policy()(texts())["tokens"]
    show(len(tokens.get("full", as_list=True)))
    show(tokens.get("full", as_nested_tensor=True).is_nested)
    show(tokens.get("response", as_padded_tensor=True, padding_value=-1).shape)


def tokens_of_the_prompt_and_of_all():
    tokens = policy()(texts())["tokens"]
    show(lengths(tokens, "prompt"), lengths(tokens, "response"), lengths(tokens, "full"))


def masks_of_an_answer():
    masks = policy("history")(chats())["masks"]
    all_, assistant = (
        masks.get(name, as_list=True) for name in ("all_attention_mask", "all_assistant_mask")
    )
    show([mask.dtype for mask in all_], [bool(mask.all()) for mask in all_])
    show([int(mask.sum()) for mask in assistant])


def log_probs_of_an_answer():
    out = policy()(texts())
    show([row.shape for row in out["log_probs"].get("response", as_list=True)])
    show([bool((row <= 0).all()) for row in out["log_probs"].get("response", as_list=True)])


def without_log_probs():
    out = policy(return_log_probs=False)(texts())
    show("log_probs" in out, out["text"].response)


def padded_output_in_text_mode():
    out = policy(pad_output=True)(texts())
    show(out["tokens"].prompt.shape, out["tokens"].response.shape, out["tokens"].full.shape)
    show(out["log_probs"].response.shape, out["masks"].all_attention_mask.shape)
    show(out["masks"].all_attention_mask.sum(-1), out["text"].response)


def padded_output_is_prompt_then_response():
    tokens = policy(pad_output=True)(texts())["tokens"]
    start = tokens.prompt.shape[-1]
    show(bool((tokens.full[:, start:] == tokens.response).all()))
    show(bool((tokens.full[:, :start] == tokens.prompt).all()))


def padded_output_in_history_mode():
    out = policy("history", pad_output=True)(chats())
    show(out["tokens"].response.shape, out["tokens"].full.shape, out["log_probs"].response.shape)
    show(out["history"].full.role)


# -- arguments of sampling ----------------------------------------------------------------------


def the_old_name_of_the_length():
    out = policy(generate_kwargs={"max_tokens": 3, "do_sample": False})(texts())
    show(lengths(out["tokens"], "response"))


def the_old_name_of_the_number_of_samples():
    made = policy(generate_kwargs={"max_new_tokens": 3, "n": 2, "do_sample": True})
    show(made.num_samples, made(texts()).batch_size)


def values_out_of_range():
    for wrong in ({"temperature": -1.0}, {"top_p": 1.5}, {"repetition_penalty": 0.0}):
        try:
            policy(generate_kwargs={"max_new_tokens": 2, **wrong})
            show("taken", sorted(wrong))
        except ValueError:
            show("refused", sorted(wrong))


def sampling_from_the_best_alone():
    kwargs = {"max_new_tokens": 4, "do_sample": True, "top_k": 1, "temperature": 0.7}
    show(policy(generate_kwargs=kwargs)(texts())["text"].response)


def arguments_of_transformers_itself():
    kwargs = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "logprobs": True}
    kwargs |= {"return_dict_in_generate": True, "pad_token_id": tokenizer().pad_token_id}
    show(policy(generate_kwargs=kwargs)(texts())["text"].response)


def another_end_of_text():
    first = policy()(texts("Hello"))["tokens"].get("response", as_list=True)[0][0].item()
    out = policy(generate_kwargs={**GREEDY, "eos_token_id": first})(texts("Hello"))
    show(lengths(out["tokens"], "response"))


def the_end_of_text_by_its_id():
    kwargs = {**GREEDY, "eos_token_id": tokenizer().eos_token_id}
    kwargs["pad_token_id"] = tokenizer().pad_token_id
    show(policy(generate_kwargs=kwargs)(texts())["text"].response)


def several_samples_of_each_prompt():
    out = policy(
        generate_kwargs={"max_new_tokens": 3, "do_sample": True, "temperature": 0.01}, num_samples=2
    )(texts())
    show(out.batch_size, out["text"].batch_size)
    show(out[0]["text"].prompt, out[:, 0]["text"].prompt)


def several_samples_of_histories():
    made = policy("history", {"max_new_tokens": 3, "do_sample": True}, num_samples=3)
    out = made(chats())
    show(out.batch_size, out["history"].batch_dims, out["history"][0, 2].full.role)


def several_samples_padded():
    made = policy(
        generate_kwargs={"max_new_tokens": 3, "do_sample": True}, num_samples=2, pad_output=True
    )
    tokens = made(texts())["tokens"]
    show(tokens.batch_size, tokens.prompt.shape[:2], tokens.prompt[:, 0].shape)


# -- scoring ------------------------------------------------------------------------------------


def scoring_a_history():
    out = scorer()(chats(3))
    show([key in out for key in ("text", "tokens", "masks", "log_probs", "history")])
    show(lengths(out["tokens"], "full"), lengths(out["log_probs"], "full"))


def log_probs_of_text():
    out = scorer("text")(texts("Hello world", part="full"))
    show(out["log_probs"].get("full", as_list=True), "masks" in out, "text" in out)


def log_probs_of_padded_ids():
    ids = torch.tensor([[20, 21, 22, 23], [24, 25, 26, 27]])
    td = TensorDict(tokens=Tokens(full=ids, batch_size=(2,)), batch_size=(2,))
    td.set("attention_mask", torch.ones_like(ids).bool())
    td.set(("masks", "all_attention_mask"), torch.ones_like(ids).bool())
    out = scorer("tokens", pad_output=True)(td)
    show(out["log_probs"].full.shape, out["log_probs"].full)


def the_assistant_mask_when_scoring():
    for mode, td in (("history", chats(3)), ("text", texts("Hello", part="full"))):
        masks = scorer(mode)(td)["masks"]
        show(mode, masks.get("all_assistant_mask", None) is not None)


def tokens_of_the_assistant_when_scoring():
    out = scorer(chat_template_name="qwen")(chats(3))
    ids = out["tokens"].get("full", as_list=True)[1]
    mask = out["masks"].get("all_assistant_mask", as_list=True)[1].bool()
    show(tokenizer().decode(ids[mask].tolist()))


def scoring_padded():
    out = scorer(pad_output=True)(chats(3))
    show(out["log_probs"].full.shape, out["masks"].all_attention_mask.shape)
    show(out["masks"].all_attention_mask.sum(-1), out["log_probs"].full[1, :3])


def scoring_packed():
    for pad in (True, False):
        out = scorer(pad_model_input=pad)(chats(3))
        show([round(row.sum().item(), 2) for row in out["log_probs"].get("full", as_list=True)])


def one_dictionary_for_both():
    made = scorer(generate_kwargs={"max_new_tokens": 8, "temperature": 1.0, "do_sample": True})
    show(lengths(made(chats(3))["log_probs"], "full"))


def scoring_into_a_new_one():
    for mode, td in (("history", chats(3)), ("text", texts("Hello", part="full"))):
        out = scorer(mode, inplace=False)(td)
        show([key in out for key in ("text", "tokens", "masks", "log_probs", "history")])
        show(out["text"].full)


def sampled_ids_scored_again():
    out = policy("history")(chats())
    again = scorer()(out.select(("history", "full")))
    show(lengths(out["tokens"], "full"), lengths(again["tokens"], "full"))


def sampled_text_scored_again():
    out = policy()(texts("What is 12+30?"))
    again = scorer("text")(out.select(("text", "full")))
    size = len(out["tokens"].get("response", as_list=True)[0])
    new = again["log_probs"].get("full", as_list=True)[0][-size:]
    show(new, out["log_probs"].get("response", as_list=True)[0])


# -- distributions ------------------------------------------------------------------------------


def a_distribution_over_all_tokens():
    dist = scorer(pad_output=True).get_dist(chats(3), mask_key=("masks", "all_attention_mask"))
    show(dist.logits.shape, dist.mask[0, 1:].sum(), dist.logits.log_softmax(-1)[0, 10, :4])


def log_probs_by_a_distribution():
    made, td = scorer(), chats(3)
    out = made(td.copy())
    dist = made.get_dist(td.copy(), mask_key=("masks", "all_attention_mask"))
    ids = out["tokens"].get("full", as_padded_tensor=True, padding_side="left")
    show(dist.log_prob(ids)[0, 1:5], dist.log_prob(ids)[1, -4:])
    show([row[-4:] for row in out["log_probs"].get("full", as_list=True)])


def a_distribution_padded_on_the_right():
    made, td = scorer(), chats(3)
    key = ("masks", "all_attention_mask")
    dist = made.get_dist(td, mask_key=key, padding_side="right")
    show(dist.mask[1, 1:].sum(), dist.logits[1, -1, :4], dist.logits[1, 4, :4])


def a_distribution_over_tokens_of_the_assistant():
    made = scorer(chat_template_name="qwen", pad_output=False)
    dist = made.get_dist(chats(3), mask_key=("masks", "all_assistant_mask"))
    show(dist.logits.shape, [bool(row.any()) for row in dist.mask])


# -- where it is written ------------------------------------------------------------------------


def the_input_is_written_into():
    td = texts()
    show(policy()(td) is td, "tokens" in td)


def a_new_one_is_written():
    td = texts()
    out = policy(inplace=False)(td)
    show(out is td, "tokens" in td, "tokens" in out)


def an_empty_one_is_written():
    td = texts().set("mine", torch.zeros(2))
    out = policy(inplace="empty")(td)
    show(out is td, "tokens" in td, "tokens" in out, "mine" in out)


def another_place_for_the_output():
    out = TensorDict(batch_size=(2,))
    show(policy()(texts(), tensordict_out=out) is out, "text" in out)


def keys_of_my_own():
    names = {"tokens_key": "ids", "text_key": "words", "log_probs_key": "lp", "masks_key": "which"}
    out = policy(input_key=("text", "prompt"), **names)(texts("Hello"))
    show([key in out for key in ("ids", "words", "lp", "which", "tokens")])


def an_input_key_of_my_own():
    td = TensorDict(question=["Hello"], batch_size=(1,))
    show(policy(input_key="question")(td)["text"].response)


def two_dimensions_of_rows():
    td = lazy_stack([texts("Hello", "Bye"), texts("One", "Two")])
    out = policy()(td)
    show(out.batch_size, out[1]["text"].prompt, out[1, 0]["text"].response)


def two_dimensions_by_view():
    td = TensorDict(prompt=["a", "b", "c", "d"], batch_size=(4,)).view(2, 2)
    out = policy(input_key="prompt")(td)
    show(out.batch_size, "text" in out, out.view(-1)[3]["text"].prompt)


def two_dimensions_when_scoring():
    td = lazy_stack([chats(3), chats(3)])
    out = scorer()(td)
    show(out.batch_size, lengths(out[0]["log_probs"], "full"))


def text_where_a_history_is_expected():
    td = TensorDict(batch_size=(1,)).set(("history", "prompt"), ["Hello"])
    policy("history")(td)


# -- attributes ---------------------------------------------------------------------------------


def what_a_policy_returns():
    for mode in ("history", "text", "tokens"):
        for made in (policy(mode), scorer(mode)):
            show(mode, made.return_text, made.return_tokens, made.return_masks)
            show(made.return_log_probs, made.generate, made.in_keys, made.input_key)


def names_of_the_nodes():
    made = policy()
    show(made.text_key, made.tokens_key, made.masks_key, made.log_probs_key, made.history_key)
    show(made.log_prob_keys, made.attention_mask_key)


def settings_of_a_policy():
    made = policy(chat_template_name=None)
    show(made.input_mode, made.pad_output, made.inplace, made.num_samples, made.batching)
    show(made.chat_template, made.chat_template_name, made.collector)
    show(made.generate_kwargs["max_new_tokens"], made.generate_kwargs["do_sample"])


def model_and_tokenizer_of_a_policy():
    made = policy()
    show(made.model is model(), made.tokenizer is tokenizer(), made.padding_value)


def parameters_of_a_policy():
    show(len(list(policy().parameters())) == len(list(model().parameters())))
    show(all(name.startswith("model.") for name in policy().state_dict()))


def names_of_common_arguments():
    names = ("do_sample", "max_new_tokens", "num_return_sequences", "stop_sequences", "top_p")
    show([name in TransformersWrapper.COMMON_GENERATION_PARAMS for name in names])


def a_policy_for_scoring_from_one_for_sampling():
    made = policy("history").get_new_version(generate=False)
    show(made.generate, made.input_mode, made.model is model())


def keys_of_another_version():
    made = policy("history").get_new_version(generate=False, input_key=("history", "full"))
    show(made.in_keys, made.return_log_probs, made(chats(3))["log_probs"].batch_size)


def another_version_with_other_arguments():
    made = policy().get_new_version(num_samples=2, inplace=False, pad_output=True)
    show(made.num_samples, made.inplace, made.pad_output, made.input_mode)


# -- batching -----------------------------------------------------------------------------------


def calls_of_threads_together():
    made, found = policy(batching=True, min_batch_size=2, max_batch_size=4), {}

    def ask(word):
        found[word] = made(texts(word))["text"].response

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("Hello", "Bye")]
    for each in threads:
        each.start()
    for each in threads:
        each.join(4)
    show(sorted(found.items()))


def the_state_of_batching():
    made = policy(batching=True, max_batch_size=4)
    state = made.get_batching_state()
    show({k: state[k] for k in ("batching_enabled", "min_batch_size", "max_batch_size")})
    show(state["queue_size"], state["pending_futures"], state["timeout"], made.batching)
    made.cleanup_batching(flush=True)
    show(policy().get_batching_state()["batching_enabled"])


def batching_with_wrong_sizes():
    for wrong in (
        {"batching": False, "min_batch_size": 2},
        {"min_batch_size": 4, "max_batch_size": 2},
    ):
        try:
            policy(**wrong)
            show("taken")
        except ValueError:
            show("refused")


# -- models, tokenizers and templates -----------------------------------------------------------


def a_model_and_a_tokenizer_by_their_paths():
    path = str(embedded_model_path())
    made = TransformersWrapper(path, tokenizer=path, input_mode="text", generate_kwargs=GREEDY)
    show(made(texts())["text"].response, type(made.tokenizer).__name__ != "str")


def a_model_by_its_path_alone():
    made = TransformersWrapper(
        str(embedded_model_path()), input_mode="text", generate_kwargs=GREEDY
    )
    show(made(texts())["text"].response)


def no_tokenizer_for_tokens():
    made = TransformersWrapper(model(), input_mode="tokens", generate_kwargs=GREEDY)
    rows = [TensorDict(tokens=Tokens(prompt=torch.tensor([20, 21]))) for _ in range(2)]
    show(lengths(made(lazy_stack(rows))["tokens"], "response"))


def arguments_of_the_tokenizer():
    kwargs = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    out = policy(tokenizer_kwargs=kwargs | {"add_special_tokens": False})(texts())
    show(lengths(out["tokens"], "prompt"), out["text"].response)


def a_chat_template_by_its_name():
    for name in ("qwen", "chatml_format"):
        out = policy("history", chat_template_name=name)(chats())
        show(name, out["text"].prompt[0], out["text"].response)


def a_chat_template_of_my_own():
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% generation %}{{ m['content'] }}"
        "{% endgeneration %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    show(policy("history", chat_template=template)(chats())["text"].prompt[1])


def special_tokens_left_out_of_the_text():
    kwargs = {**GREEDY, "skip_special_tokens": True}
    show(policy("history", generate_kwargs=kwargs)(chats())["text"].response)


# -- turn after turn ----------------------------------------------------------------------------


def a_second_turn():
    made = policy("history")
    first = made(chats())["history"].full
    more = History.from_chats([[{"role": "user", "content": "And 1+1?"}]] * 2)
    prompt = first.extend(more, inplace=False, dim=-1)
    out = made(TensorDict(history=ChatHistory(prompt=prompt), batch_size=(2,)))
    show(out["history"].full.role, out["text"].response)


def prompts_of_different_length():
    history = History.from_chats([CHAT[:2], [OTHER[1]]])
    out = policy("history")(TensorDict(history=ChatHistory(prompt=history), batch_size=(2,)))
    show(out["history"].full[0].role, out["history"].full[1].role)


def one_conversation_in_a_batch_of_one():
    history = History.from_chats([CHAT[:2]])
    out = policy("history")(TensorDict(history=ChatHistory(prompt=history), batch_size=(1,)))
    show(out["history"].response.shape, out["history"].response.role, out["text"].response)


def several_samples_then_scored():
    made = policy("history", {"max_new_tokens": 3, "do_sample": True}, num_samples=2)
    out = scorer()(made(chats()).select(("history", "full")).reshape(-1))
    show(out.batch_size, len(lengths(out["log_probs"], "full")))


def scored_by_threads_together():
    made, found = scorer("text", batching=True, min_batch_size=2), {}

    def ask(word):
        out = made(texts(word, part="full"))
        found[word] = lengths(out["log_probs"], "full")

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("Hello", "Bye now")]
    for each in threads:
        each.start()
    for each in threads:
        each.join(4)
    show(sorted(found.items()))


def environments_in_series():
    made = SerialEnv(2, lambda: ChatEnv(batch_size=(1,), tokenizer=tokenizer()))
    td = TensorDict(query=[["What is 1+1?"], ["What is 2+2?"]], batch_size=(2, 1))
    td = made.reset(td)
    out = made.step(policy("history")(td))
    show(out.batch_size, out["history"].full.role)


# -- containers ---------------------------------------------------------------------------------


def containers_by_name():
    show(Text(prompt="a", response="b", full="ab").full, Tokens(full=torch.ones(2)).full.shape)
    show(Masks(all_attention_mask=torch.ones(2).bool()).all_assistant_mask)
    show(LogProbs(response=torch.zeros(3)).response.shape, LogProbs().full)


def containers_know_whether_they_are_padded():
    ids = torch.ones(2, 3)
    show(Tokens(full=ids, padded=True, batch_size=(2,)).padded)
    show(Masks(all_attention_mask=ids.bool(), padded=True, batch_size=(2,)).padded)
    show(LogProbs(full=ids, padded=False, batch_size=(2,)).padded)


def a_container_set_afterwards():
    text = Text(prompt=["a", "b"], batch_size=(2,))
    text.response = ["c", "d"]
    show(text.response, text[1].response, text.full)


def sums_of_masks(td):
    return [int(row.sum()) for row in td["masks"].get("all_attention_mask", as_list=True)]


def a_mask_changed_in_a_row():
    for pad in (True, False):
        td = policy(pad_output=pad)(texts())
        for row in td.unbind(0):
            row["masks"].all_attention_mask[:2] = False
        show(sums_of_masks(td))


def a_mask_assigned_to_a_row():
    for pad in (True, False):
        td = policy(pad_output=pad)(texts())
        for row in td.unbind(0):
            row["masks"].all_attention_mask = torch.zeros_like(row["masks"].all_attention_mask)
        show(sums_of_masks(td))


def a_mask_set_by_its_key_in_a_row():
    for pad in (True, False):
        td = policy(pad_output=pad)(texts())
        row = td[1]
        row["masks", "all_attention_mask"] = torch.zeros_like(row["masks"].all_attention_mask)
        show(sums_of_masks(td))


def a_chat_history_needs_a_history():
    node = ChatHistory(prompt=History.from_chats([CHAT[:2]]))
    show(node.prompt.shape, node.full, node.batch_size)


def a_chat_history_as_text():
    node = ChatHistory(full=History.from_chats([CHAT]))
    show(node.to_text(tokenizer(), chat_template_name="qwen").full)


def a_chat_history_as_tokens():
    node = ChatHistory(full=History.from_chats([CHAT, OTHER]))
    tokens = node.to_tokens(tokenizer(), chat_template_name="qwen")
    show(lengths(tokens, "full"))


def text_as_tokens_and_back():
    tokens = Text(full=["Hello", "Hello world"], batch_size=(2,)).to_tokens(tokenizer())
    show(lengths(tokens, "full"), tokens.to_text(tokenizer()).full)


def text_as_a_history():
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    node = Text(full=[text], batch_size=(1,)).to_history(tokenizer(), chat_template_name="qwen")
    show(node.full.role, node.full.content)


def specs_of_containers():
    for each in (Text, Tokens, Masks, LogProbs, ChatHistory):
        show(each.__name__, sorted(each.default_spec((2,)).keys()))


PROGRAMS = {
    "text_of_padded_output_in_history_mode": lambda: show(
        policy("history", pad_output=True)(chats())["text"].response
    ),
    "both_names_of_the_length": lambda: policy(
        generate_kwargs={"max_tokens": 3, "max_new_tokens": 4, "do_sample": False}
    )(texts()),
    "an_unknown_argument_of_sampling": lambda: policy(
        generate_kwargs={"max_new_tokens": 3, "temprature": 0.5, "do_sample": False}
    )(texts()),
    "no_limit_of_ids": lambda: policy(generate_kwargs={"max_new_tokens": 2, "top_k": 0}),
    "arguments_of_one_call": lambda: show(
        lengths(policy()(texts(), max_new_tokens=2)["tokens"], "response")
    ),
    "beams": lambda: policy(
        generate_kwargs={"max_new_tokens": 3, "num_beams": 2, "do_sample": False}
    )(texts()),
    "several_samples_in_place": lambda: policy(num_samples=2, inplace=True),
    "log_probs_of_a_history": lambda: show(
        scorer()(chats(3))["log_probs"].get("full", as_list=True)[1]
    ),
    "padding_of_the_model_input_when_sampling": lambda: policy(pad_model_input=True),
    "no_log_probs_when_scoring": lambda: scorer(return_log_probs=False),
    "sampling_arguments_of_one_call_when_scoring": lambda: show(
        lengths(scorer()(chats(3), max_new_tokens=8)["log_probs"], "full")
    ),
    "a_distribution_without_a_mask": lambda: show(scorer().get_dist(chats(3)).logits.shape),
    "logits_alone": lambda: show("logits" in scorer()(chats(3), logits_only=True)),
    "a_distribution_while_sampling": lambda: policy("history").get_dist(chats(3)),
    "log_prob_while_sampling": lambda: policy().log_prob(texts()),
    "where_text_is_read_under_a_key_of_my_own": lambda: show(policy(text_key="words").in_keys),
    "one_row_without_a_batch": lambda: show(policy()(texts("Hello")[0])["text"].response),
    "missing_input": lambda: policy("history")(TensorDict(batch_size=(1,))),
    "a_mode_that_does_not_exist": lambda: policy("sound"),
    "whether_a_history_is_returned": lambda: show(
        [made("history").return_history for made in (policy, scorer)], policy().return_history
    ),
    "output_keys_name_the_nodes": lambda: show(sorted(policy("history").out_keys)),
    "known_ids_are_preferred": lambda: show(policy().prefer_tokens),
    "the_layout_of_a_policy": lambda: show(
        str(policy().layout), str(policy(pad_output=True).layout)
    ),
    "whether_the_input_of_the_model_is_padded": lambda: show(
        [scorer(pad_model_input=pad).pad_model_input for pad in (None, True, False)]
    ),
    "the_device_of_a_policy": lambda: show(str(policy(device="cpu").device)),
    "padding_of_the_tokenizer_on_the_right": lambda: policy(
        tokenizer_kwargs={"padding_side": "right"}
    ),
    "templates_where_no_history_is": lambda: policy("text", chat_template_name="qwen"),
    "jagged_rows": lambda: policy(layout=torch.jagged)(texts()),
    "the_fourth_argument_of_a_container": lambda: show(
        Tokens(torch.ones(1), torch.ones(2), torch.ones(3), False).full.shape
    ),
    "text_as_padded_tokens": lambda: Text(full=["Hello", "Hello world"], batch_size=(2,)).to_tokens(
        tokenizer(), padding=True
    ),
    "greedy_by_temperature": lambda: show(
        policy(generate_kwargs={"max_new_tokens": 4, "temperature": 0.0})(texts())["text"].response
    ),
    "keys_of_the_input_stay": lambda: show("mine" in policy()(texts().set("mine", torch.zeros(2)))),
}
"""Programs of one expression."""
