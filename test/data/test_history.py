"""History: batch semantics, growing, and being a leaf of tensordicts."""

from __future__ import annotations

import copy
import pickle

import pytest
import tensordict
import torch
from tensordict import TensorDict, lazy_stack

import torchrl_llm.data.chat as chat_module
from torchrl_llm.data import Chat, ChatHistory
from torchrl_llm.data.history import ContentBase, History
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.errors import DataError, TemplateError


def message(role, content, **more):
    return {"role": role, "content": content, **more}


FIRST = [message("user", "Hi"), message("assistant", "Yo")]
SECOND = [message("user", "A"), message("assistant", "B"), message("user", "C")]


@pytest.fixture
def batch():
    return History.from_chats([FIRST, SECOND])


@pytest.fixture(params=[True, False], ids=["list_to_stack", "no_list_to_stack"])
def either_setting(request):
    with tensordict.set_list_to_stack(request.param):
        yield request.param


# -- construction ---------------------------------------------------------------------------------


def test_one_conversation_has_its_messages_and_several_have_a_batch(batch):
    assert History.from_chats(FIRST).batch_size == torch.Size([2])
    assert (batch.shape, batch.batch_size) == (torch.Size([2, -1]), torch.Size([2]))
    assert batch.role == [["user", "assistant"], ["user", "assistant", "user"]]
    assert batch.content == [["Hi", "Yo"], ["A", "B", "C"]]
    assert batch.is_complete == [[True, True], [True, True, True]]
    assert batch.tool_calls is None


def test_the_constructor_makes_a_message_a_conversation_or_a_batch(batch):
    one = History(role="user", content="Hi")
    assert (one.role, one.content, one.is_complete, one.tool_calls) == ("user", "Hi", True, None)
    talk = History(role=["user", "assistant"], content=["Hi", "Yo"])
    assert talk.batch_size == torch.Size([2])
    assert bool((talk == batch[0]).all())
    rows = History(role=batch.role, content=batch.content)
    assert bool((rows == batch).all())


def test_lists_with_a_batch_size_are_messages_that_count_as_a_conversation():
    messages = History(role=["user", "assistant"], content=["Hi", "Yo"], batch_size=(2,))
    assert messages.batch_size == torch.Size([2])
    assert messages.role == ["user", "assistant"]
    assert messages[1].content == "Yo"
    assert bool((messages == History.from_chats(FIRST)).all())


def test_stacked_messages_count_as_a_conversation():
    parts = [History(role="user", content="Hi"), History(role="assistant", content="Yo")]
    for stacked in (torch.stack(parts), lazy_stack(parts)):
        assert stacked.role == ["user", "assistant"]
        assert bool((stacked == History.from_chats(FIRST)).all())
        assert stacked.apply_chat_template(chat_template_name="dialogpt") == (
            "Hi<|endoftext|>Yo<|endoftext|>"
        )


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: History(role=["user"], content=["a", "b"]), "content has 2 values, role has 1"),
        (lambda: History(role=["user", "user"], content="a"), "content must be a list of 2"),
        (lambda: History(role=["user"], content=["a"], batch_size=[2]), "cannot have batch_size"),
        (lambda: History(content="a"), "has no role"),
        (lambda: History(role="user", content=3), "content must be a string or a list"),
        (lambda: History.from_chats([]), "at least one"),
        (lambda: History.from_chats([FIRST, ["text"]]), "chat 1, message 0 must be a mapping"),
        (lambda: History.from_chats(["text"]), "expected a list of messages"),
        (lambda: ContentBase(type="smell"), "content type"),
        (
            lambda: History(role="assistant", content="", tool_calls=[{"arguments": {}}]),
            "name and arguments",
        ),
        (
            lambda: History(
                role="assistant", content="", tool_calls=[{"name": "f", "arguments": {"x": {1}}}]
            ),
            "not JSON",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(make, error):
    with pytest.raises(DataError, match=error):
        make()


def test_messages_are_stored_in_one_form_and_the_input_stays_as_it_was():
    call = {"name": "f", "arguments": '{"x": 1}'}
    given = message("assistant", None, tool_calls=[call], is_complete=True, name=None)
    before = copy.deepcopy(given)
    stored = History.from_chats([given]).chats[0].messages[0]
    function = {"name": "f", "arguments": {"x": 1}}
    calls = [{"type": "function", "function": function}]
    assert stored == {"role": "assistant", "content": "", "tool_calls": calls}
    assert given == before


def test_multimodal_items_are_a_tensorclass_and_dicts_for_the_template():
    picture = ContentBase(type="image", url="a.png")
    parts = lazy_stack([ContentBase(type="text", text="See"), picture])
    assert (parts.type, parts[1].url, parts.shape) == (["text", "image"], "a.png", (2,))
    history = History(role=["user", "assistant"], content=[[*parts.unbind(0)], "fine"])
    stacked = torch.stack([History(role="user", content=parts), history[1]], -1)
    stored = [{"type": "text", "text": "See"}, {"type": "image", "url": "a.png"}]
    for one in (history, stacked, pickle.loads(pickle.dumps(history)), history[None][0]):
        assert one.chats[0].messages[0]["content"] == stored
        assert one[0].content.type == ["text", "image"]
        assert one.content[0][1].url == "a.png"
        assert one.content[1] == "fine"
    template = (
        "{% for m in messages if m['content'] is not string %}{% for part in m['content'] %}"
        "[{{ part['type'] }}:{{ part['text'] or part['url'] }}]{% endfor %}{% endfor %}"
    )
    text = history.apply_chat_template(chat_template=template, tokenize=False)
    assert text == "[text:See][image:a.png]"
    dicts = History(role="user", content=stored)
    assert dicts.content == stored
    both = lazy_stack([lazy_stack([picture]), lazy_stack([picture])])
    assert [c.url for c in History(role=["user"] * 2, content=both).content] == [["a.png"]] * 2


def test_both_module_paths_are_the_same_class():
    assert chat_module.History is History


# -- indexing -------------------------------------------------------------------------------------


def test_the_last_index_is_the_message(batch):
    assert batch[1].content == ["A", "B", "C"]
    assert batch[0, -1].content == "Yo"
    assert batch[1, 0].role == "user"
    assert batch[:, -1].content == ["Yo", "C"]
    assert batch[:, -1].batch_size == torch.Size([2])
    assert batch[:, :-1].content == [["Hi"], ["A", "B"]]
    assert batch[torch.tensor([False, True]), 1:].content == [["B", "C"]]
    assert batch[1, [0, 2]].content == ["A", "C"]
    assert batch[1][torch.tensor([True, False, True])].content == ["A", "C"]
    assert batch[1][-1].content == "C"
    with pytest.raises(IndexError):
        batch[0, 5]
    with pytest.raises(IndexError, match="too many indices"):
        batch[0, 0, 0]


def test_batch_indices_work_as_on_any_tensorclass(batch):
    assert batch[[1, 0]].content == [["A", "B", "C"], ["Hi", "Yo"]]
    assert batch[torch.tensor([True, False])].batch_size == torch.Size([1, 2])
    assert batch[None].shape == torch.Size([1, 2, -1])
    assert batch[..., 1].content == ["Yo", "B"]
    assert batch[:, None][1, 0, -1].content == "C"


def test_length_and_iteration_are_messages_of_a_conversation_or_rows_of_a_batch(batch):
    assert len(batch) == 2
    assert len(batch[1]) == 3
    assert [m.content for m in batch[1]] == ["A", "B", "C"]
    assert [h.content for h in batch] == batch.content


def test_equality_is_a_tensor_a_row(batch):
    other = History.from_chats([FIRST, SECOND[:2]])
    assert (batch == other).tolist() == [True, False]
    assert (batch != other).tolist() == [False, True]
    assert not bool(batch[0] == batch[1])
    assert not bool(batch == batch[0])


# -- growing --------------------------------------------------------------------------------------


def test_append_takes_one_message_a_conversation(batch):
    more = History(role=["user", "assistant"], content=["x", "y"], batch_size=[2])
    new = batch.append(more, inplace=False)
    assert new.content == [["Hi", "Yo", "x"], ["A", "B", "C", "y"]]
    assert batch.content == [["Hi", "Yo"], ["A", "B", "C"]]
    assert batch.append(new[:, -1]) is batch
    assert batch.content == [["Hi", "Yo", "x"], ["A", "B", "C", "y"]]
    batch.append(History(role=["user", "user"], content=["p", "q"]), dim=1)
    assert batch[:, -1].content == ["p", "q"]
    one = History.from_chats(FIRST).append(message("user", "z"))
    assert one.content == ["Hi", "Yo", "z"]


def test_extend_adds_messages_or_rows(batch):
    batch.extend(batch[[1, 0]], dim=-1)
    assert batch.content == [["Hi", "Yo", "A", "B", "C"], ["A", "B", "C", "Hi", "Yo"]]
    one = batch[0].extend(History.from_chats(FIRST), inplace=False)
    assert one.content == ["Hi", "Yo", "A", "B", "C", "Hi", "Yo"]
    assert batch.extend(batch, inplace=False).batch_size == torch.Size([4, 5])


def test_rows_are_added_in_place_and_apart(batch):
    assert batch.append(batch[0], inplace=False, dim=0).content == [*batch.content, ["Hi", "Yo"]]
    assert batch.append(batch[1], dim=0) is batch
    assert batch.extend(batch[:1]) is batch
    assert batch.content == [["Hi", "Yo"], ["A", "B", "C"], ["A", "B", "C"], ["Hi", "Yo"]]


def test_placeholders_are_left_out_of_the_text():
    chat = History(role=["user", "<none>"], content=["Hi", "filler"])
    text = chat.apply_chat_template(chat_template_name="dialogpt", add_generation_prompt=False)
    assert text == "Hi<|endoftext|>"


def test_shapes_that_do_not_fit_are_errors(batch):
    for call, message in (
        (lambda: batch.append(batch), "one message per conversation"),
        (lambda: batch.append(History(role="user", content="x")), "one message per conversation"),
        (lambda: batch.extend(batch[0], dim=-1), "as many dimensions"),
        (lambda: batch.extend(batch[:1], dim=-1), "equal batches"),
        (lambda: batch[None][0].extend(batch), "inplace=False"),
        (lambda: batch.append(batch, dim=0), "as many dimensions"),
        (lambda: batch.extend(batch, dim=2), "dim over batch"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_growing_keeps_the_token_record_and_never_changes_a_shared_conversation():
    record = TokenRecord.from_prompt(torch.tensor([1, 2]), torch.tensor([1, 1]), 2)
    history = History.of([Chat(FIRST, record)])
    other = history.clone()
    history.append(History(role=["user"], content=["more"], batch_size=[1]))
    assert history.chats[0].record is record
    assert other.content == [["Hi", "Yo"]]


# -- inside tensordicts ---------------------------------------------------------------------------


def test_defect_34_everything_works_whatever_list_to_stack_is(either_setting):
    batch = History.from_chats([FIRST, SECOND])
    batch.append(History(role=["user", "user"], content=["x", "y"], batch_size=[2]))
    td = TensorDict(batch_size=[2])
    td["history"] = ChatHistory(prompt=batch, batch_size=[2])
    assert td["history"].prompt.content == batch.content
    assert td["history", "prompt"][:, -1].content == ["x", "y"]
    assert td[0]["history", "prompt"].content == ["Hi", "Yo", "x"]
    assert td[torch.tensor([False, True])]["history", "prompt"][0, -1].content == "y"
    text = batch.apply_chat_template(chat_template_name="qwen", add_generation_prompt=False)
    assert bool((History.from_text(text, chat_template_name="qwen") == batch).all())
    assert tensordict.list_to_stack() is either_setting


def test_it_stacks_reshapes_copies_and_travels_inside_a_tensordict(batch):
    td = TensorDict(batch_size=[2])
    td["history", "prompt"] = batch
    assert torch.stack([td, td])["history", "prompt"][1, 0, -1].content == "Yo"
    assert torch.cat([td, td])["history", "prompt"].shape == torch.Size([4, -1])
    assert td.reshape(2, 1)["history", "prompt"][1].content == [["A", "B", "C"]]
    assert td.expand(3, 2)["history", "prompt"].chats[-1] == Chat(SECOND)
    assert td[..., 0]["history", "prompt"].content == ["Hi", "Yo"]
    lazy = lazy_stack([td[0], td[1]])
    assert lazy["history", "prompt"].content == batch.content
    lazy["history", "prompt"].append(batch[:, -1])
    assert lazy[1]["history", "prompt"][-1].content == "C"
    for same in (td.clone(), copy.deepcopy(td), pickle.loads(pickle.dumps(td))):
        assert bool((same["history", "prompt"] == batch).all())
        assert isinstance(same["history", "prompt"], History)
    assert pickle.loads(pickle.dumps(batch[0, 0])).role == "user"


def test_a_spec_makes_histories_that_an_env_can_step():
    spec = History.default_spec((3, -1), example=Chat(FIRST))
    sample = spec.rand()
    assert isinstance(sample, History)
    assert sample.batch_size == torch.Size([3, 2])
    assert spec.is_in(sample)
    assert sample.content == [["Hi", "Yo"]] * 3


def test_defect_33_a_pickled_history_is_hardly_larger_than_its_messages():
    chats = [
        [message(("user", "assistant")[k % 2], f"words of message {k} in {i}") for k in range(6)]
        for i in range(64)
    ]
    plain = len(pickle.dumps(chats))
    assert len(pickle.dumps(History.from_chats(chats))) < 1.15 * plain


def test_a_text_without_any_template_is_read_as_chatml():
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
    history = History.from_text(text)
    assert (history.content, history.is_complete) == (["Hi", "Hello"], [True, False])
    assert History.from_text([text, text]).shape == (2, 2)
    with pytest.raises(TemplateError, match="not a text of chatml_format"):
        History.from_text("Hi there")
