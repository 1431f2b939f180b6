"""Chat environments: what reset and step give, and the transforms that are appended to them."""

from __future__ import annotations

import torch
from _shared import CHAT, OTHER, model, read, show, tokenizer
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.utils.data import DataLoader
from torchrl.data.llm import History
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.llm import (
    AddThinkingPrompt,
    ChatEnv,
    CountdownEnv,
    DataLoadingPrimer,
    DatasetChatEnv,
    GSM8KEnv,
    GSM8KRewardParser,
    IFEvalData,
    LLMEnv,
    LLMHashingEnv,
    as_nested_tensor,
    as_padded_tensor,
)
from torchrl.envs.llm.transforms import (
    IncrementalTokenizer,
    PolicyVersion,
    TemplateTransform,
    Tokenizer,
)
from torchrl.modules.llm.policies import ChatHistory, Text, TransformersWrapper

ROWS = [
    {"query": "What is 2+3?", "answer": "so it is #### 5"},
    {"query": "What is 4+4?", "answer": "so it is #### 8"},
    {"query": "What is 9-2?", "answer": "so it is #### 7"},
]


def queries(*texts):
    return TensorDict(query=list(texts), batch_size=(len(texts),))


def said(*texts):
    return History.from_chats([[{"role": "assistant", "content": text}] for text in texts])


def answered(td, *texts):
    """The rows with a reply in them, as a policy in history mode writes it."""
    response = said(*texts)
    td["history"].response = response
    td["history"].full = td["history"].prompt.extend(response, inplace=False, dim=-1)
    return td


def loader(batch_size=1, rows=ROWS):
    return DataLoader([dict(row) for row in rows], batch_size=batch_size, shuffle=False)


# -- reset and step -------------------------------------------------------------------------------


def reset_in_history_mode():
    td = ChatEnv(batch_size=(2,)).reset(queries("One?", "Two?"))
    prompt = td["history"].prompt
    show(td.batch_size, prompt.shape, prompt.role, prompt.content, td["query"])


def reset_with_one_query_for_all():
    td = ChatEnv(batch_size=(2,)).reset(TensorDict(query="Same?", batch_size=(2,)))
    show(td["history"].prompt.content)


def reset_with_a_system_prompt():
    env = ChatEnv(batch_size=(1,), system_prompt="Be brief.", system_role="developer")
    prompt = env.reset(queries("One?"))["history"].prompt
    show(prompt.shape, prompt.role, prompt.content)


def reset_with_a_data_key():
    env = ChatEnv(batch_size=(1,), data_key="question")
    td = env.reset(TensorDict(question=["One?"], batch_size=(1,)))
    show(env.data_key, td["history"].prompt.content, td["question"])


def reset_with_conversations():
    env = ChatEnv(batch_size=(2,), system_prompt="Be brief.")
    chats = History.from_chats([CHAT[1:2], OTHER[1:2]])
    prompt = env.reset(TensorDict(query=chats, batch_size=(2,)))["history"].prompt
    show(prompt.shape, prompt.role, prompt.content)


def reset_keeps_the_columns_that_it_is_given():
    env = ChatEnv(batch_size=(2,))
    given = TensorDict(query=["One?", "Two?"], answer=["1", "2"], level=torch.tensor([3, 4]))
    td = env.reset(given.auto_batch_size_(1))
    show(td["query"], td["answer"], td["level"])


def reset_in_text_mode():
    env = ChatEnv(
        batch_size=(1,), input_mode="text", tokenizer=tokenizer(), system_prompt="Be brief."
    )
    td = env.reset(queries("One?"))
    show(td["text"].prompt, td["query"])


def reset_in_text_mode_with_a_template():
    env = ChatEnv(
        input_mode="text",
        tokenizer=tokenizer(),
        template_kwargs={"chat_template_name": "chatml_format"},
    )
    show(env.reset(queries("One?"))["text"].prompt)


def reset_in_tokens_mode():
    env = ChatEnv(batch_size=(1,), input_mode="tokens", tokenizer=tokenizer())
    td = env.reset(queries("One?"))
    show(tokenizer().decode(td.get(("tokens", "prompt"), as_list=True)[0].tolist()))


def step_in_history_mode():
    env = ChatEnv(batch_size=(2,))
    td = env.step(answered(env.reset(queries("One?", "Two?")), "1", "2"))
    prompt = td["next", "history"].prompt
    show(prompt.shape, prompt.role, prompt.content, td["next", "done"], td["next", "terminated"])


def step_in_text_mode():
    env = ChatEnv(input_mode="text", tokenizer=tokenizer())
    td = env.reset(queries("One?"))
    td["text"].full = [td["text"].prompt[0] + "1<|im_end|>"]
    show(env.step(td)["next", "text"].prompt)


def step_in_tokens_mode():
    env = ChatEnv(input_mode="tokens", tokenizer=tokenizer())
    td = env.reset(queries("One?"))
    ids = td.get(("tokens", "prompt"), as_list=True)[0]
    td["tokens"].full = torch.cat([ids, torch.tensor(tokenizer().encode("1"))]).unsqueeze(0)
    after = env.step(td).get(("next", "tokens", "prompt"), as_list=True)[0]
    show(tokenizer().decode(after.tolist()))


def a_step_returns_the_reply_next_to_the_new_prompt():
    env = ChatEnv()
    td = env.step(answered(env.reset(queries("One?")), "1"))
    show(td["history"].full.content, td["history"].response.content)
    show(td["next", "history"].response, td["next", "history"].full)


def two_turns():
    env = ChatEnv(batch_size=(1,))
    _, td = env.step_and_maybe_reset(answered(env.reset(queries("One?")), "1"))
    td["history"].prompt = td["history"].prompt.extend(
        History.from_chats([[{"role": "user", "content": "Sure?"}]]), inplace=False, dim=-1
    )
    td = env.step(answered(td, "Yes"))
    show(td["next", "history"].prompt.role, td["next", "history"].prompt.content)


def the_reply_as_one_message_of_the_batch():
    env = ChatEnv()
    td = env.reset(queries("One?"))
    reply = History(role="assistant", content="1").view(1, 1)
    td["history"].full = td["history"].prompt.extend(reply, dim=-1)
    show(env.step(td)["next", "history"].prompt[0, -1].content)


def the_reply_as_a_new_chat_history():
    env = ChatEnv()
    td = env.reset(queries("One?"))
    full = td["history"].prompt.extend(said("1"), inplace=False, dim=-1)
    td["history"] = ChatHistory(full=full, batch_size=(1,))
    show(env.step(td)["next", "history"].prompt.content)


def specs_of_the_keys():
    for mode in ("history", "text"):
        env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=tokenizer())
        show(mode in {key[0] for key in env.observation_keys})
        show(mode in {key[0] for key in env.action_keys}, env.reward_keys)


def attributes_of_a_chat_env():
    env = ChatEnv(system_prompt="Be brief.", tokenizer=tokenizer(), template_kwargs={"tools": None})
    show(env.input_mode, env.system_prompt, env.system_role, env.user_role, env.policy_role)
    show(env.data_key, env.text_key, env.response_key, env.template_kwargs)
    show(env.tokenizer is tokenizer())


def a_rollout_of_a_written_policy():
    env = DatasetChatEnv.from_dataloader(loader(), batch_size=(1,))
    td = env.rollout(2, lambda td: answered(td, "I do not know"))
    show(td.batch_size, [row.content for row in td["history"].full.unbind(1)])
    show(td["next", "history"].prompt[..., -1].content)


def a_rollout_of_a_module():
    def reply(history):
        full = history.prompt.extend(said("5"), inplace=False, dim=-1)
        return ChatHistory(prompt=history.prompt, full=full)

    env = DatasetChatEnv.from_dataloader(loader(), batch_size=(1,))
    policy = TensorDictModule(reply, in_keys=["history"], out_keys=["history"])
    td = env.rollout(1, policy)
    show(td.batch_size, td["next", "history"].prompt.content)


def a_rollout_ends_with_a_step_counter():
    env = DatasetChatEnv.from_dataloader(loader(), batch_size=(1,))
    env = env.append_transform(StepCounter(max_steps=2))
    td = env.rollout(5, lambda td: answered(td, "I do not know"))
    show(td.batch_size, td["next", "step_count"], td["next", "truncated"])


# -- data -----------------------------------------------------------------------------------------


def rows_of_a_data_loader():
    env = ChatEnv(batch_size=(2,)).append_transform(DataLoadingPrimer(loader(), batch_size=(2,)))
    for _ in range(2):
        td = env.reset()
        show(td["history"].prompt.content, td["query"], td["answer"])


def rows_of_a_loader_with_batches():
    env = ChatEnv(batch_size=(3,)).append_transform(DataLoadingPrimer(dataloader=loader(3)))
    show(env.reset()["query"], env.reset()["query"])


def rows_that_repeat():
    env = ChatEnv(batch_size=(1,))
    env = env.append_transform(DataLoadingPrimer(dataloader=loader(), repeats=2))
    show([env.reset()["query"] for _ in range(5)])


def rows_that_repeat_in_one_batch():
    env = ChatEnv(batch_size=(2,))
    primer = DataLoadingPrimer(dataloader=loader(), repeats=2, group_repeats=True)
    env = env.append_transform(primer)
    show([env.reset()["query"] for _ in range(2)], primer.repeats)


def rows_of_a_factory():
    env = ChatEnv(batch_size=(1,))
    env = env.append_transform(DataLoadingPrimer(dataloader_factory=loader))
    show(env.reset()["query"])


def the_data_started_over():
    env = ChatEnv(batch_size=(1,))
    primer = DataLoadingPrimer(dataloader=loader())
    env = env.append_transform(primer)
    before = env.reset()["query"]
    primer.reset_dataloader()
    show(before, env.reset()["query"])


def a_loader_without_batch_size():
    primer = DataLoadingPrimer([{"query": ["One?"], "answer": ["1"]}], batch_size=(1,))
    env = ChatEnv().append_transform(primer)
    show(env.reset()["query"], env.reset()["answer"])


class Rows:
    """A loader of one's own."""

    def __init__(self, batch_size, elements):
        self.batch_size, self.elements = batch_size, elements

    def __iter__(self):
        return iter(self.elements)


COLUMNS = [
    {"query": ["a", "b"], "number": torch.tensor([1, 2])},
    {"query": ["c"], "number": torch.tensor([3])},
]


def rows_of_a_list_of_batches():
    for batches in (COLUMNS, tuple(COLUMNS), [{"query": ["a", "b"], "tag": ["x", "y"]}]):
        env = ChatEnv.from_dataloader(batches, batch_size=(2,))
        for _ in range(2):
            td = env.reset()
            show(td["history"].prompt, list(td.get("number", [])), list(td.get("tag", [])))


def repeated_rows_of_a_list_of_batches():
    env = ChatEnv(batch_size=(2,)).append_transform(DataLoadingPrimer(COLUMNS, repeats=2))
    show([env.reset()["history"].prompt.content for _ in range(3)])


def a_loader_of_ones_own():
    elements = [{"query": [f"a{n}", f"b{n}"], "answer": ["1", "2"]} for n in range(3)]
    env = ChatEnv(batch_size=(2,)).append_transform(DataLoadingPrimer(Rows(2, elements)))
    show([env.reset()["query"] for _ in range(4)])


def single_rows_of_different_length():
    elements = [{"query": f"q{n}", "ids": torch.arange(n + 1)} for n in range(3)]
    primer = DataLoadingPrimer(Rows(0, elements), batch_size=(2,), stack_method="as_padded_tensor")
    show(ChatEnv(batch_size=(2,)).append_transform(primer).reset()["ids"])


def single_rows_of_strings():
    rows = [{"query": "abc", "answer": "xyz"}]
    env = ChatEnv().append_transform(DataLoadingPrimer(rows, batch_size=(1,)))
    show(env.reset()["query"], env.reset()["answer"])


def rows_that_begin_anew_one_by_one():
    env = DatasetChatEnv.from_dataloader(loader(3), batch_size=(2,))
    env = env.append_transform(GSM8KRewardParser())
    _, td = env.step_and_maybe_reset(answered(env.reset(), "<answer>5</answer>", "no"))
    show(td["query"], [row.prompt.content for row in td["history"].unbind(0)], td["done"])


def attributes_of_a_primer():
    data = loader(2)
    primer = DataLoadingPrimer(data, repeats=2, stack_method="as_padded_tensor")
    show(primer.repeats, primer.dataloader is data, primer.dataloader_factory, primer.batch_size)
    show(primer.stack_method is as_padded_tensor)
    show(
        {"query", "answer"} <= {*primer.data_keys}, {"query", "answer"} <= {*primer.primers.keys()}
    )


def an_env_from_a_data_loader():
    env = ChatEnv.from_dataloader(loader(), batch_size=(1,), system_prompt="Be brief.", repeats=2)
    td = env.reset()
    show(type(env).__name__, td.batch_size, td["history"].prompt.content, td["answer"])
    env.reset_dataloader()
    show(env.reset()["query"])


def an_env_from_a_data_loader_in_text_mode():
    env = DatasetChatEnv.from_dataloader(
        loader(), batch_size=(1,), input_mode="text", tokenizer=tokenizer()
    )
    show(env.reset()["text"].prompt)


def an_env_from_a_data_loader_alone():
    env = DatasetChatEnv.from_dataloader(loader())
    show(env.batch_size, env.reset()["history"].prompt.content)


def a_task_from_a_data_loader():
    env = GSM8KEnv.from_dataloader(loader(), batch_size=(1,))
    td = env.reset()
    show(td["history"].prompt.role, td["query"], td["answer"])
    td = env.step(answered(td, "<answer>5</answer>"))
    show(td.get(("next", "reward"), None), td["next", "done"])


def numbers_to_count_down():
    env = CountdownEnv(num_envs=2, seed=0, num_count=3, max_number=20, max_target=50)
    td = env.reset()
    show(td.batch_size, td["history"].prompt.role)
    show(
        [sorted(part.split("=")[0].strip() for part in row.split(", ")[:2]) for row in td["answer"]]
    )


def a_task_whose_answer_is_cut():
    env = CountdownEnv(num_envs=1, seed=0, tokenizer=tokenizer())
    short = {"max_new_tokens": 2, "do_sample": False}
    policy = TransformersWrapper(
        model(), tokenizer=tokenizer(), input_mode="history", generate_kwargs=short
    )
    td = env.step(policy(env.reset()))["next"]
    show(td["reward"].shape, td["reward"].flatten(), td["done"].flatten())


def padded_rows():
    rows = [
        TensorDict(a=torch.arange(2) + 1, b=torch.ones(1)),
        TensorDict(a=torch.arange(3) + 1, b=torch.ones(2)),
    ]
    td = as_padded_tensor(rows)
    show(td.batch_size, td["a"], td["b"])


def nested_rows():
    rows = [TensorDict(a=torch.arange(2)), TensorDict(a=torch.arange(3))]
    td = as_nested_tensor(rows)
    show(td.batch_size, td["a"])


# -- batches, devices, workers --------------------------------------------------------------------


def a_batch_of_two_dimensions():
    env = ChatEnv(batch_size=(2, 2))
    td = env.reset(TensorDict(query=[["a", "b"], ["c", "d"]], batch_size=(2, 2)))
    show(td["history"].prompt.content)


def rows_on_a_device():
    env = ChatEnv(batch_size=(1,), device="cpu")
    td = env.reset(queries("One?").to("cpu"))
    show(str(env.device), str(td.device), td["history"].prompt.content)


def environments_in_a_row():
    env = SerialEnv(2, lambda: ChatEnv(batch_size=(1,), system_prompt="Be brief."))
    td = env.reset(TensorDict(query=[["One?"], ["Two?"]], batch_size=(2, 1)))
    show(td.batch_size, [row["history"].prompt.content for row in td.unbind(0)])


def a_step_without_a_reply():
    env = ChatEnv()
    env.step(env.reset(queries("One?")))


def a_reset_of_an_env_that_was_stepped():
    env = ChatEnv()
    env.step(answered(env.reset(queries("One?")), "1"))
    show(env.reset(queries("Two?"))["history"].prompt.content)


# -- the older environments -----------------------------------------------------------------------


def texts_of_the_older_environment():
    env = LLMEnv(from_text=True, batch_size=(2,))
    td = env.reset(TensorDict({env.str_key: ["a", "b"]}, batch_size=(2,)))
    td[env.action_key] = ["1", "2"]
    show(td[env.str_key], env.step(td)["next", env.str_key])


def ids_of_the_older_environment():
    env = LLMEnv(from_text=False, batch_size=(2,), eos_token_id=0, has_attention=False)
    ids = torch.arange(4).view(2, 2) + 1
    td = env.reset(TensorDict({env.token_key: ids}, batch_size=(2,)))
    td[env.action_key] = torch.full((2, 1), 7)
    show(env.step(td)["next", env.token_key])


def a_tree_of_texts():
    env = LLMHashingEnv(vocab_size=10, observation_key="observation", text_output=False)
    td = env.reset(TensorDict(observation=torch.tensor([1, 2]), batch_size=[]))
    td["action"] = torch.tensor([3])
    after = env.step(td)["next"]
    show(sorted(key for key in after.keys() if "hash" in key), after["observation"])


# -- transforms -----------------------------------------------------------------------------------


def ids_next_to_the_history():
    env = TransformedEnv(ChatEnv(), IncrementalTokenizer(tokenizer()))
    td = env.reset(queries("One?"))
    show(tokenizer().decode(td.get(("tokens", "prompt"), as_list=True)[0].tolist()))


def ids_after_a_step():
    env = ChatEnv(with_tokenizer=True, tokenizer=tokenizer())
    td = env.step(answered(env.reset(queries("One?")), "1"))
    ids = td.get(("next", "tokens", "prompt"), as_list=True)[0]
    show(isinstance(env, TransformedEnv), tokenizer().decode(ids.tolist()))


def ids_by_the_class_method():
    env = ChatEnv.with_tokenizer(tokenizer(), system_prompt="Be brief.", batch_size=(1,))
    td = env.reset(queries("One?"))
    show(tokenizer().decode(td.get(("tokens", "prompt"), as_list=True)[0].tolist()))


def ids_without_a_generation_prompt():
    env = ChatEnv().append_transform(IncrementalTokenizer(tokenizer(), add_generation_prompt=False))
    td = env.reset(queries("One?"))
    show(tokenizer().decode(td.get(("tokens", "prompt"), as_list=True)[0].tolist()))


def ids_under_other_keys():
    env = ChatEnv().append_transform(
        IncrementalTokenizer(tokenizer(), tokens_key=("ids", "prompt"))
    )
    td = env.reset(queries("One?"))
    show(tokenizer().decode(td.get(("ids", "prompt"), as_list=True)[0].tolist()))


def attributes_of_an_incremental_tokenizer():
    transform = IncrementalTokenizer(tokenizer(), chat_template_name="qwen")
    show(transform.tokenizer is tokenizer(), transform.history_key, transform.tokens_key)
    show(transform.chat_template_name, transform.chat_template, transform.add_generation_prompt)


def thinking_again_in_the_same_turn():
    env = ChatEnv().append_transform(AddThinkingPrompt(lambda td: True, "Wait, once more."))
    td = env.step(answered(env.reset(queries("2+2?")), "Easy. <answer>5</answer>"))
    prompt = td["next", "history"].prompt
    show(prompt.shape, prompt.role, prompt.content)


def thinking_again_without_an_answer():
    env = ChatEnv().append_transform(AddThinkingPrompt(lambda td: True, "Wait, once more."))
    td = env.step(answered(env.reset(queries("2+2?")), "It is five."))
    show(td["next", "history"].prompt.content)


def thinking_again_after_two_answers():
    env = ChatEnv().append_transform(AddThinkingPrompt(lambda td: True, "Wait."))
    reply = "<answer>5</answer> or <answer>6</answer> so"
    td = env.step(answered(env.reset(queries("2+2?")), reply))
    show(td["next", "history"].prompt.content)


def thinking_again_as_a_message_of_the_user():
    transform = AddThinkingPrompt(
        cond=lambda td: True, prompt="Sure?", role="user", edit_last_turn=False
    )
    env = ChatEnv().append_transform(transform)
    td = env.step(answered(env.reset(queries("2+2?")), "<answer>5</answer>"))
    show(td["next", "history"].prompt.role, td["next", "history"].prompt.content)


def thinking_again_as_a_message_of_the_model():
    env = ChatEnv().append_transform(
        AddThinkingPrompt(lambda td: True, "Let me see.", edit_last_turn=False)
    )
    td = env.step(answered(env.reset(queries("2+2?")), "<answer>5</answer>"))
    show(td["next", "history"].prompt.role, td["next", "history"].prompt.content)


def thinking_again_where_a_condition_holds():
    cond = lambda td: "5" in td["history"].prompt[..., -1].content  # noqa: E731
    env = ChatEnv(batch_size=(2,)).append_transform(
        AddThinkingPrompt(cond, "Sure?", role="user", edit_last_turn=False)
    )
    td = env.step(answered(env.reset(queries("2+2?", "1+1?")), "5", "2"))
    show([row.prompt.content for row in td["next", "history"].unbind(0)])


def thinking_again_with_the_default_prompts():
    for role in ("user", "assistant"):
        transform = AddThinkingPrompt(lambda td: True, role=role, edit_last_turn=False)
        prompts = (
            transform.DEFAULT_PROMPTS_EG if role == "assistant" else transform.DEFAULT_PROMPTS_COG
        )
        show(transform.prompt == prompts[0], transform.egocentric, transform.random_prompt)
        show(transform.role, transform.edit_last_turn, transform.zero_reward, transform.undo_done)


def versions_of_the_policy():
    version = PolicyVersion(version_type="int")
    env = ChatEnv(batch_size=(2,)).append_transform(version)
    first = env.reset(queries("One?", "Two?"))["policy_version"]
    version.increment_version()
    td = env.step(answered(env.reset(queries("One?", "Two?")), "1", "2"))
    show(first, td["policy_version"], td["next", "policy_version"], version.version)
    show(len(version.version_history), version.version_history[-1].old_version)


def versions_that_are_set():
    version = PolicyVersion(int)
    version.version = 7
    env = ChatEnv().append_transform(version)
    show(env.reset(queries("One?"))["policy_version"], version.version_type)


def versions_by_name():
    version = PolicyVersion("uuid")
    before = version.version
    version.increment_version()
    td = ChatEnv().append_transform(version).reset(queries("One?"))
    show(len(before), before != version.version, list(td["policy_version"]) == [version.version])


def text_to_ids_and_back():
    transform = Tokenizer(["text"], ["ids"], tokenizer=tokenizer())
    td = transform(TensorDict(text=["1+2", "1"], batch_size=(2,)))
    show(td["ids"].shape, td["attention_mask"].sum(-1))
    ids, mask = transform.call_tokenizer_fn("1+2")
    show(ids.shape, mask, transform.call_tokenizer_inv_fn(ids).data)


def ids_of_one_length():
    transform = Tokenizer(["text"], ["ids"], tokenizer=tokenizer(), max_length=6)
    td = transform(TensorDict(text=["1+2", "1"], batch_size=(2,)))
    show(td["ids"].shape, td["attention_mask"].sum(-1))


def attributes_of_a_tokenizer_transform():
    transform = Tokenizer(["text"], ["ids"], tokenizer=tokenizer())
    show(transform.tokenizer is tokenizer(), transform.padding, transform.max_length)
    show(transform.return_attention_mask, transform.skip_special_tokens, transform.out_device)
    show(transform.add_special_tokens, transform.call_before_reset)


def a_template_as_a_transform():
    transform = TemplateTransform(tokenizer())
    show(
        transform.in_keys, transform.out_keys, transform.chat_template == tokenizer().chat_template
    )


def rows_of_ifeval():
    data = IFEvalData(
        key=torch.tensor(3),
        instruction_id_list=["punctuation:no_comma"],
        kwargs=[{}],
        query="Say hi",
        batch_size=(),
    )
    show(data.key, data.query, data.response, data.reward, data.tokens, data.logits)


def texts_of_a_rollout():
    env = ChatEnv(input_mode="text", tokenizer=tokenizer())
    td = env.reset(queries("One?"))
    td["text"] = Text(full=[td["text"].prompt[0] + "1"], batch_size=(1,))
    show(env.step(td)["next", "text"].prompt)


PROGRAMS = {
    "reset_without_a_query": lambda: ChatEnv().reset(),
    "reset_with_another_key": lambda: ChatEnv().reset(TensorDict(text=["One?"], batch_size=(1,))),
    "flags_of_the_end": lambda: show(ChatEnv().done_keys),
    "batch_sizes": lambda: show(
        ChatEnv().batch_size, ChatEnv(batch_size=[3]).batch_size, ChatEnv(batch_size=2).batch_size
    ),
    "a_batch_without_dimension": lambda: ChatEnv(batch_size=()),
    "a_loader_and_a_factory": lambda: DataLoadingPrimer(loader(), dataloader_factory=loader),
    "an_unknown_stack_method": lambda: DataLoadingPrimer(loader(), stack_method="as_rows"),
    "the_seed_of_an_env": lambda: show(ChatEnv().set_seed(3) is not None),
    "with_tokenizer_without_one": lambda: ChatEnv(with_tokenizer=True),
    "thinking_again_edits_no_turn_of_the_user": lambda: AddThinkingPrompt(
        lambda td: True, role="user"
    ),
    "an_unknown_kind_of_version": lambda: PolicyVersion("date"),
    "reset_with_a_user_role": lambda: show(
        ChatEnv(batch_size=(1,), user_role="human").reset(queries("One?"))["history"].prompt.role
    ),
    "the_transform_of_an_env_over_data": lambda: show(
        DatasetChatEnv.from_dataloader(loader(), batch_size=(1,), repeats=2).transform.repeats
    ),
    "a_given_prompt_and_a_point_of_view": lambda: read(
        AddThinkingPrompt(lambda td: True, "Sure?", egocentric=True), "prompt", "egocentric"
    ),
}
"""Programs of one expression."""
