"""History: what a batch of conversations is, and how it is read, cut, joined and changed."""

from __future__ import annotations

import torch
from _shared import CHAT, OTHER, read, show, tokenizer
from tensordict import lazy_stack
from torchrl.data.llm import ContentBase, History


def one():
    return History.from_chats(CHAT)


def two():
    return History.from_chats([CHAT, OTHER])


def ragged():
    return History.from_chats([CHAT, OTHER[:2]])


def messages_by_a_mask_of_both_dimensions():
    mask = torch.tensor([[True, False, False], [False, False, True]])
    cut = two()[mask]
    show(cut.batch_size, cut.content)


def stack_of_messages():
    messages = [History(role="user", content="a"), History(role="assistant", content="b")]
    chat = torch.stack(messages, -1)
    show(chat.batch_size, chat.role, chat.content)


def lazy_stack_of_messages():
    messages = [History(role="user", content="a"), History(role="assistant", content="b")]
    chat = lazy_stack(messages)
    show(chat.batch_size, chat.role, chat.content)


def split_of_messages():
    parts = two().split(2, -1)
    show(*[part.batch_size for part in parts], *[part.content for part in parts])


def a_message_has_no_dimension():
    message = History(role="user", content="hello")
    show(message.batch_size, message.ndim, message.role, message.content, message.is_complete)


def a_history_of_lists():
    chat = History(role=["user", "assistant"], content=["a", "b"], batch_size=2)
    show(chat.batch_size, chat.role, chat.content)


def append_in_place():
    chat = one()
    back = chat.append(History(role="user", content="more"))
    show(chat.batch_size, chat.content, back.batch_size)


def append_out_of_place():
    chat = one()
    longer = chat.append(History(role="user", content="more"), inplace=False)
    show(chat.batch_size, longer.batch_size, longer.content)


def append_to_a_batch_along_messages():
    chat = two()
    more = History(role=["user", "user"], content=["x", "y"], batch_size=2)
    longer = chat.append(more, inplace=False, dim=-1)
    show(longer.batch_size, longer.content)


def append_to_rows_of_an_unbind():
    chat = two()
    for row in chat.unbind(0):
        row.append(History(role="user", content="more"))
    show(chat.content)


def append_to_a_row_by_index():
    chat = two()
    chat[0].append(History(role="user", content="more"))
    show(chat.content)


def extend_of_a_conversation():
    chat = one()
    chat.extend(History.from_chats(OTHER[1:]))
    show(chat.batch_size, chat.content)


def assignment_of_a_content():
    message = History(role="user", content="a")
    message.content = "b"
    show(message.content)


def assignment_of_a_row():
    chat = two()
    chat[0] = chat[1]
    show(chat.content)


def the_default_spec():
    spec = History.default_spec()
    show(spec.shape, sorted(map(str, spec.keys())))


def clone_is_apart():
    chat = one()
    copy = chat.clone()
    copy.append(History(role="user", content="more"))
    show(chat.batch_size, copy.batch_size)


def in_a_tensordict():
    from tensordict import TensorDict

    td = TensorDict(history=two(), batch_size=2)
    show(td[0]["history"].content, td[1:]["history"].batch_size)


def in_a_tensordict_through_unbind():
    from tensordict import TensorDict

    td = TensorDict(history=two(), batch_size=2)
    show(*[row["history"].content for row in td.unbind(0)])


def content_parts_stack():
    parts = lazy_stack([ContentBase(type="text", text="a"), ContentBase(type="text", text="b")])
    show(parts.batch_size, parts.text)


def content_parts_of_different_kinds():
    parts = lazy_stack([ContentBase(type="text", text="a"), ContentBase(type="image", url="u")])
    show(parts.batch_size, parts.type, parts[0].text, parts[1].url, parts.text, parts.size)


def content_parts_in_a_message():
    parts = lazy_stack([ContentBase(type="text", text="a"), ContentBase(type="text", text="b")])
    message = History(role="user", content=parts)
    show(message.batch_size, message.role, message.content.text, message.content[0].type)


def content_parts_with_a_batch_size():
    part = ContentBase(type="file", data="ab", size=2, mime_type="text/plain", name="n")
    part = part.clone().expand(2)
    show(part.batch_size, part.data, part.size, part.mime_type, part.name)


def content_parts_of_a_function_call():
    part = ContentBase(type="function_call", function_name="f", function_args={"a": 1})
    show(part.function_name, part.function_args, part.url, sorted(part.keys()))


def content_parts_changed():
    part = ContentBase(type="text", text="a")
    part.text = "b"
    show(part.text, part.clone().text, sorted(part.to_dict().items()))


def content_parts_in_a_template():
    template = (
        "{% for m in messages %}{% generation %}{% for part in m['content'] %}"
        "[{{ part['type'] }}:{{ part['text'] }}]{% endfor %}{% endgeneration %}{% endfor %}"
    )
    parts = lazy_stack([ContentBase(type="text", text="a"), ContentBase(type="text", text="b")])
    chat = lazy_stack([History(role="user", content=parts)])
    show(
        chat.apply_chat_template(
            tokenizer=tokenizer(), chat_template=template, add_generation_prompt=False
        )
    )


def content_parts_as_dicts():
    chat = History.from_chats([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    show(chat.content, chat[0].content)


def lazy_stack_of_messages_of_a_batch():
    messages = [two()[..., 0], two()[..., 1]]
    chats = lazy_stack(messages, -1)
    show(chats.batch_size, chats.content)


def rows_where_something_holds():
    keep = torch.tensor([True, False])
    show(two()[keep].batch_size, two()[~keep].content)


def messages_by_their_role():
    users = torch.tensor([role == "user" for role in one().role])
    show(one()[users].batch_size, one()[users].content)


def messages_by_a_mask_of_columns():
    mask = torch.tensor([True, False, True])
    show(two()[:, mask].batch_size, two()[:, mask].content, two()[..., mask].content)


def nested_lists_of_a_batch():
    chats = History(
        role=[["user", "assistant"], ["user", "assistant"]],
        content=[["a", "b"], ["c", "d"]],
        batch_size=(2, 2),
    )
    show(chats.batch_size, chats.role, chats[1].content, chats[..., -1].content)


def an_assignment_by_index_of_a_row_of_another_length():
    chat = ragged()
    chat[1] = one()
    show(chat.content)


def an_assignment_by_a_mask_of_rows():
    chat = two()
    chat[torch.tensor([False, True])] = chat[:1]
    show(chat.content)


def an_assignment_of_the_last_message():
    chat = two()
    chat[..., -1] = chat[..., 0]
    show(chat.content)


def an_assignment_of_one_message():
    chat = one()
    chat[1] = History(role="user", content="new")
    show(chat.content)


def an_assignment_of_a_role():
    chat = two()
    chat.role = [["user"] * 3, ["user"] * 3]
    show(chat.role)


def a_set_of_a_field():
    message = History(role="user", content="a")
    message.set("content", "b")
    show(message.content)


def an_update_of_a_field():
    message = History(role="user", content="a")
    message.update(History(role="assistant", content="b"))
    show(message.role, message.content)


def to_dict_of_a_conversation():
    made = one().to_dict()
    show(made["role"], made["content"])


def to_tensordict_of_a_conversation():
    made = one().to_tensordict()
    show(made.batch_size, sorted(made.keys()), made["role"])


def nested_keys_in_a_tensordict():
    from tensordict import TensorDict

    td = TensorDict(history=two(), batch_size=2)
    show(td["history", "role"], td.get(("history", "content")))


def a_batch_of_a_tensordict_from_its_batch_size():
    from tensordict import TensorDict

    td = TensorDict(history=two(), batch_size=two().batch_size)
    show(td.batch_size, td[..., -1]["history"].content)


def equality_of_a_different_batch():
    same = two() == two()[torch.tensor([1, 0])]
    show(same.all(), same.any())


def copies_by_copy_and_deepcopy():
    import copy

    chat = one()
    for made in (copy.copy(chat), copy.deepcopy(chat), chat.clone(False)):
        show(made.batch_size, made.content)


def a_pickle_of_a_batch():
    import pickle

    show(pickle.loads(pickle.dumps(two())))


def is_complete_of_an_open_answer():
    chat = History(role=["user", "assistant"], content=["a", "b"], is_complete=[True, False])
    show(chat.is_complete)


def a_placeholder_message_is_left_out():
    chat = lazy_stack(
        [History(role="user", content="a"), History(role="<none>", content="nothing")]
    )
    show(
        chat.apply_chat_template(
            tokenizer=tokenizer(), chat_template_name="chatml_format", add_generation_prompt=False
        )
    )


def append_to_a_message():
    message = History(role="user", content="a")
    message.append(History(role="assistant", content="b"))
    show(message.content)


def append_of_a_conversation():
    chat = one()
    chat.append(one())
    show(chat.content)


def append_to_a_batch_in_place():
    chat = two()
    chat.append(two()[..., 0])
    show(chat.batch_size, chat.content)


def extend_of_a_batch_by_rows_in_place():
    batch = two()
    batch.extend(two()[:1])
    show(batch.batch_size, batch.content)


def chats_with_tool_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    chat = History.from_chats([{"role": "assistant", "content": "", "tool_calls": [call]}])
    show(chat.tool_calls, chat[0].tool_calls)


PROGRAMS = {
    "a_conversation_has_one_dimension": lambda: show(
        one().batch_size, one().shape, one().ndim, len(one()), one().numel()
    ),
    "a_batch_has_two_dimensions": lambda: show(
        two().batch_size, two().shape[-1], two().ndim, len(two()), two().numel()
    ),
    "a_ragged_batch_ends_in_minus_one": lambda: show(
        ragged().batch_size, ragged().ndim, len(ragged())
    ),
    "fields_of_a_conversation_are_lists": lambda: show(
        one().role, one().content, one().is_complete
    ),
    "fields_of_a_batch_are_lists_of_lists": lambda: show(two().role, two().content),
    "fields_of_a_ragged_batch": lambda: show(ragged().role, ragged().content),
    "a_row_and_a_message": lambda: show(two()[0, 1].content, two()[1, -1].content),
    "a_slice_of_messages_of_all_rows": lambda: show(two()[:, 1:].content, two()[:, -1].content),
    "a_slice_of_messages_of_one_conversation": lambda: show(
        one()[1:].content, one()[:2].batch_size
    ),
    "rows_by_a_list": lambda: show(two()[[1, 0]].content),
    "rows_by_a_tensor": lambda: show(two()[torch.tensor([1, 0])].content),
    "rows_by_a_mask": lambda: show(two()[torch.tensor([False, True])].content),
    "unbind_of_rows": lambda: show(*[row.content for row in two().unbind(0)]),
    "unbind_of_messages": lambda: show(*[part.content for part in two().unbind(-1)]),
    "unbind_of_one_conversation": lambda: show(*[message.content for message in one().unbind(0)]),
    "iteration_over_rows": lambda: show(*[row.content for row in two()]),
    "iteration_over_messages": lambda: show(*[message.role for message in one()]),
    "chunk_of_messages": lambda: show(*[part.content for part in two().chunk(3, -1)]),
    "split_of_rows": lambda: show(*[part.content for part in two().split(1, 0)]),
    "equality_of_a_changed_batch": lambda: show((two() == two()).all()),
    "append_of_a_string": lambda: one().append("hi"),
    "tool_calls_of_plain_messages": lambda: show(one().tool_calls, one().tool_responses),
    "tool_calls_are_none_for_a_message": lambda: show(
        History(role="user", content="a").tool_calls is not None
    ),
    "messages_of_a_ragged_batch_by_index": lambda: show(
        ragged()[..., 0].content, ragged()[:, 1].content, ragged()[0, 2].content
    ),
    "ragged_rows_through_unbind": lambda: show(
        *[row.batch_size for row in ragged().unbind(0)], *[len(row) for row in ragged()]
    ),
    "ragged_all_but_the_last_message": lambda: show(
        *[row.content for row in ragged()[..., :-1].unbind(0)]
    ),
    "numel_of_a_message_and_of_batches": lambda: show(
        two()[0, 0].numel(), two()[..., 0].numel(), two()[..., :2].numel(), two()[:0].numel()
    ),
    "size_by_dimension": lambda: show(
        two().size(0), two().size(-1), two().size(), two().dim(), two().batch_dims
    ),
    "torch_functions_of_shape": lambda: show(
        torch.unsqueeze(two(), 1).shape,
        torch.squeeze(two()[:1], 0).shape,
        torch.permute(two(), (1, 0)).shape,
        torch.flatten(two(), 0, 1).shape,
        torch.reshape(two(), (3, 2)).content,
    ),
    "transposes_by_their_names": lambda: show(
        two().permute(1, 0).content, two().transpose(-1, -2).content
    ),
    "split_of_sizes": lambda: show(*[part.content for part in two().split([1, 2], -1)]),
    "split_of_a_conversation": lambda: show(
        *[part.content for part in one().split(2)], *[p.batch_size for p in one().chunk(2)]
    ),
    "repeat_of_a_batch": lambda: show(
        two().repeat(2, 1).content, two().repeat_interleave(2, dim=0).content
    ),
    "a_get_of_a_field": lambda: show(one().get("role"), two().get("content"), two()[0].get("role")),
    "a_get_of_what_is_not_there": lambda: show(one().get("colour", "none")),
    "keys_of_a_conversation": lambda: show(sorted(one().keys())),
    "keys_of_a_message": lambda: show(sorted(History(role="user", content="a").keys())),
    "values_by_key": lambda: show(
        sorted((key, value) for key, value in History(role="u", content="a").to_dict().items())
    ),
    "iteration_over_a_batch_and_its_messages": lambda: show(
        [[message.content for message in row] for row in two()]
    ),
    "length_of_everything": lambda: show(
        len(one()), len(two()), len(two()[0]), len(two()[..., -1]), len(ragged()[1])
    ),
    "length_of_a_message": lambda: show(len(History(role="user", content="a"))),
    "inequality_by_message": lambda: show((one() != History.from_chats(OTHER)).any()),
    "equality_of_two_fields": lambda: show((one() == History.from_chats(OTHER)).content),
    "equality_in_an_if": lambda: show(bool((one() == one()).all())),
    "membership_of_a_field": lambda: show("role" in one().keys(), "colour" in one().keys()),
    "a_device": lambda: show(one().device, two().to("cpu").content),
    "the_zero_of_a_spec": lambda: show(History.default_spec().zero().batch_size),
    "the_shape_of_a_spec": lambda: show(History.default_spec((4, -1)).shape),
    "extend_of_a_message": lambda: one().extend(History(role="user", content="a")),
    "chats_of_an_empty_list": lambda: History.from_chats([]),
    "contiguous_and_densified": lambda: show(two().contiguous().content),
    "the_last_message_of_each_row": lambda: read(two()[..., -1], "batch_size", "role", "content"),
    "the_last_message_of_one_conversation": lambda: read(
        one()[..., -1], "batch_size", "role", "content"
    ),
    "the_last_message_of_a_row": lambda: read(two()[0][..., -1], "batch_size", "role", "content"),
    "the_last_message_by_a_plain_index": lambda: read(one()[-1], "batch_size", "role", "content"),
    "the_last_row_by_a_plain_index": lambda: read(two()[-1], "batch_size", "role", "content"),
    "the_last_message_of_a_ragged_batch": lambda: read(
        ragged()[..., -1], "batch_size", "role", "content"
    ),
    "all_but_the_last_message": lambda: read(two()[..., :-1], "batch_size", "role", "content"),
    "cat_of_messages": lambda: read(
        torch.cat([two(), two()[..., 1:2]], -1), "batch_size", "content"
    ),
    "cat_of_rows": lambda: read(torch.cat([two(), two()[:1]], 0), "batch_size", "content"),
    "stack_of_conversations": lambda: read(torch.stack([one(), one()]), "batch_size", "content"),
    "lazy_stack_of_ragged_conversations": lambda: read(
        lazy_stack([one(), one()[:2]]), "batch_size", "content"
    ),
    "flatten_of_a_batch": lambda: read(two().flatten(0, 1), "batch_size", "content"),
    "transpose_of_a_batch": lambda: read(two().transpose(0, 1), "batch_size", "content"),
    "reshape_of_a_batch": lambda: read(two().reshape(-1), "batch_size", "content"),
    "unsqueeze_of_a_batch": lambda: read(two().unsqueeze(0), "batch_size", "content"),
    "squeeze_of_a_batch": lambda: read(two()[:1].squeeze(0), "batch_size", "content"),
    "view_of_rows": lambda: read(
        torch.cat([two(), two()], 0).view(2, 2, 3), "batch_size", "content"
    ),
    "expand_of_a_conversation": lambda: read(one().expand(2, 3), "batch_size", "content"),
    "equality_by_message": lambda: show(one() == one()),
    "extend_out_of_place": lambda: read(
        one().extend(History.from_chats(OTHER[1:]), inplace=False), "batch_size", "content"
    ),
    "extend_of_a_batch_along_messages": lambda: read(
        two().extend(two()[..., 1:], inplace=False, dim=-1), "batch_size", "content"
    ),
    "chats_of_nested_lists": lambda: read(
        History.from_chats([[CHAT, OTHER], [OTHER, CHAT]]), "batch_size", "content"
    ),
    "to_tensordict_and_back": lambda: read(
        History.from_tensordict(one().to_tensordict()), "batch_size", "content"
    ),
    "content_parts_of_a_message": lambda: read(
        ContentBase(type="text", text="hello"), "type", "text", "batch_size"
    ),
    "stack_of_conversations_behind_the_messages": lambda: read(
        torch.stack([one(), one()], -1), "batch_size", "content"
    ),
    "lazy_stack_of_conversations_behind_the_messages": lambda: read(
        lazy_stack([one(), one()], -1), "batch_size", "content"
    ),
    "gather_of_messages": lambda: show(two().gather(-1, torch.tensor([[2, 0], [1, 1]])).content),
    "a_list_without_a_batch_size": lambda: read(
        History(role=["user", "assistant"], content=["a", "b"]), "role", "content"
    ),
    "a_replacement_of_a_field": lambda: read(
        History(role="user", content="a").replace(content="b"), "role", "content"
    ),
    "append_of_one_row": lambda: read(
        two().append(one(), inplace=False, dim=0), "batch_size", "content"
    ),
    "extend_of_a_batch_by_rows": lambda: read(
        two().extend(two(), inplace=False), "batch_size", "content"
    ),
    "where_of_two_batches": lambda: read(
        torch.where(torch.tensor([True, False]), two(), two()[torch.tensor([1, 0])]), "content"
    ),
    "unflatten_of_rows": lambda: read(
        torch.cat([two(), two()], 0).unflatten(0, (2, 2)), "batch_size", "content"
    ),
    "expand_of_a_message": lambda: read(
        History(role="user", content="a").expand(2), "batch_size", "content"
    ),
}
"""Programs of one expression."""
