"""History: what a batch of conversations is, and how it is read, cut, joined and changed."""

from __future__ import annotations

import torch
from _shared import CHAT, OTHER, show
from tensordict import lazy_stack
from torchrl.data.llm import ContentBase, History


def one():
    return History.from_chats(CHAT)


def two():
    return History.from_chats([CHAT, OTHER])


def ragged():
    return History.from_chats([CHAT, OTHER[:2]])


def a_conversation_has_one_dimension():
    show(one().batch_size, one().shape, one().ndim, len(one()), one().numel())


def a_batch_has_two_dimensions():
    show(two().batch_size, two().shape[-1], two().ndim, len(two()), two().numel())


def a_ragged_batch_ends_in_minus_one():
    show(ragged().batch_size, ragged().ndim, len(ragged()))


def fields_of_a_conversation_are_lists():
    show(one().role, one().content, one().is_complete)


def fields_of_a_batch_are_lists_of_lists():
    show(two().role, two().content)


def fields_of_a_ragged_batch():
    show(ragged().role, ragged().content)


def the_last_message_of_each_row():
    last = two()[..., -1]
    show(last.batch_size, last.role, last.content)


def the_last_message_of_one_conversation():
    last = one()[..., -1]
    show(last.batch_size, last.role, last.content)


def the_last_message_of_a_row():
    last = two()[0][..., -1]
    show(last.batch_size, last.role, last.content)


def the_last_message_by_a_plain_index():
    last = one()[-1]
    show(last.batch_size, last.role, last.content)


def the_last_row_by_a_plain_index():
    row = two()[-1]
    show(row.batch_size, row.role, row.content)


def the_last_message_of_a_ragged_batch():
    last = ragged()[..., -1]
    show(last.batch_size, last.role, last.content)


def all_but_the_last_message():
    cut = two()[..., :-1]
    show(cut.batch_size, cut.role, cut.content)


def a_row_and_a_message():
    show(two()[0, 1].content, two()[1, -1].content)


def a_slice_of_messages_of_all_rows():
    show(two()[:, 1:].content, two()[:, -1].content)


def a_slice_of_messages_of_one_conversation():
    show(one()[1:].content, one()[:2].batch_size)


def rows_by_a_list():
    show(two()[[1, 0]].content)


def rows_by_a_tensor():
    show(two()[torch.tensor([1, 0])].content)


def rows_by_a_mask():
    show(two()[torch.tensor([False, True])].content)


def messages_by_a_mask_of_both_dimensions():
    mask = torch.tensor([[True, False, False], [False, False, True]])
    cut = two()[mask]
    show(cut.batch_size, cut.content)


def unbind_of_rows():
    show(*[row.content for row in two().unbind(0)])


def unbind_of_messages():
    show(*[part.content for part in two().unbind(-1)])


def unbind_of_one_conversation():
    show(*[message.content for message in one().unbind(0)])


def iteration_over_rows():
    show(*[row.content for row in two()])


def iteration_over_messages():
    show(*[message.role for message in one()])


def cat_of_messages():
    joined = torch.cat([two(), two()[..., 1:2]], -1)
    show(joined.batch_size, joined.content)


def cat_of_rows():
    joined = torch.cat([two(), two()[:1]], 0)
    show(joined.batch_size, joined.content)


def stack_of_messages():
    messages = [History(role="user", content="a"), History(role="assistant", content="b")]
    chat = torch.stack(messages, -1)
    show(chat.batch_size, chat.role, chat.content)


def stack_of_conversations():
    batch = torch.stack([one(), one()])
    show(batch.batch_size, batch.content)


def lazy_stack_of_messages():
    messages = [History(role="user", content="a"), History(role="assistant", content="b")]
    chat = lazy_stack(messages)
    show(chat.batch_size, chat.role, chat.content)


def lazy_stack_of_ragged_conversations():
    batch = lazy_stack([one(), one()[:2]])
    show(batch.batch_size, batch.content)


def split_of_messages():
    parts = two().split(2, -1)
    show(*[part.batch_size for part in parts], *[part.content for part in parts])


def chunk_of_messages():
    show(*[part.content for part in two().chunk(3, -1)])


def split_of_rows():
    show(*[part.content for part in two().split(1, 0)])


def flatten_of_a_batch():
    flat = two().flatten(0, 1)
    show(flat.batch_size, flat.content)


def transpose_of_a_batch():
    turned = two().transpose(0, 1)
    show(turned.batch_size, turned.content)


def reshape_of_a_batch():
    flat = two().reshape(-1)
    show(flat.batch_size, flat.content)


def unsqueeze_of_a_batch():
    more = two().unsqueeze(0)
    show(more.batch_size, more.content)


def squeeze_of_a_batch():
    less = two()[:1].squeeze(0)
    show(less.batch_size, less.content)


def view_of_rows():
    four = torch.cat([two(), two()], 0).view(2, 2, 3)
    show(four.batch_size, four.content)


def expand_of_a_conversation():
    more = one().expand(2, 3)
    show(more.batch_size, more.content)


def equality_by_message():
    other = one()
    show(one() == other)


def equality_of_a_changed_batch():
    show((two() == two()).all())


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


def append_of_a_string():
    one().append("hi")


def extend_of_a_conversation():
    chat = one()
    chat.extend(History.from_chats(OTHER[1:]))
    show(chat.batch_size, chat.content)


def extend_out_of_place():
    longer = one().extend(History.from_chats(OTHER[1:]), inplace=False)
    show(longer.batch_size, longer.content)


def extend_of_a_batch_along_messages():
    longer = two().extend(two()[..., 1:], inplace=False, dim=-1)
    show(longer.batch_size, longer.content)


def assignment_of_a_content():
    message = History(role="user", content="a")
    message.content = "b"
    show(message.content)


def assignment_of_a_row():
    chat = two()
    chat[0] = chat[1]
    show(chat.content)


def tool_calls_of_plain_messages():
    show(one().tool_calls, one().tool_responses)


def tool_calls_are_none_for_a_message():
    show(History(role="user", content="a").tool_calls is not None)


def chats_of_nested_lists():
    deep = History.from_chats([[CHAT, OTHER], [OTHER, CHAT]])
    show(deep.batch_size, deep.content)


def the_default_spec():
    spec = History.default_spec()
    show(spec.shape, sorted(map(str, spec.keys())))


def to_tensordict_and_back():
    chat = History.from_tensordict(one().to_tensordict())
    show(chat.batch_size, chat.content)


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


def content_parts_of_a_message():
    part = ContentBase(type="text", text="hello")
    show(part.type, part.text, part.batch_size)


def content_parts_stack():
    parts = lazy_stack([ContentBase(type="text", text="a"), ContentBase(type="text", text="b")])
    show(parts.batch_size, parts.text)
