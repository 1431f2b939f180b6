"""Conversions between the views of a batch."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_llm.data import Chat, ChatHistory, FinishReason, History, Text, TokenRecord, Tokens
from torchrl_llm.data.ragged import pad_rows, ragged_rows, read_rows
from torchrl_llm.data.views import LogProbs, Masks

ASK = [{"role": "user", "content": "Hi"}]
ANSWER = {"role": "assistant", "content": "Hello there"}


@pytest.fixture
def chats():
    prompt, full = History.from_chats([ASK, ASK]), History.from_chats([[*ASK, ANSWER]] * 2)
    return ChatHistory._from_tensordict(TensorDict({"prompt": prompt, "full": full}, [2]))


def test_history_to_text_and_back(chats, tokenizer):
    text = chats.to_text(tokenizer)
    assert text.response == ["Hello there<|im_end|>\n"] * 2
    assert [p + r for p, r in zip(text.prompt, text.response, strict=True)] == list(text.full)
    back = text.to_history(tokenizer)
    assert bool((back.full == chats.full).all())
    assert back.response.role == [["assistant"], ["assistant"]]


def test_history_to_tokens_and_back(chats, tokenizer):
    tokens = chats.to_tokens(tokenizer)
    for prompt, response, full in zip(
        *(read_rows(tokens, key) for key in ("prompt", "response", "full")), strict=True
    ):
        assert torch.equal(torch.cat([prompt, response]), full)
        assert tokenizer.decode(response) == "Hello there<|im_end|>\n"
    assert bool((tokens.to_history(tokenizer).full == chats.full).all())
    assert tokens.to_text(tokenizer).response == chats.to_text(tokenizer).response


def test_a_token_record_is_kept_rather_than_encoded_again(chats, tokenizer):
    record = TokenRecord.from_prompt(torch.tensor([7, 8]), torch.tensor([1, 0]), 1)
    full = record.respond(torch.tensor([9]), torch.tensor([-1.0]), 0, FinishReason.STOP)
    td = TensorDict(
        {
            "prompt": History.of([Chat(ASK, record)]),
            "full": History.of([Chat([*ASK, ANSWER], full)]),
        },
        [1],
    )
    tokens = ChatHistory._from_tensordict(td).to_tokens(tokenizer)
    assert read_rows(tokens, "full")[0].tolist() == [7, 8, 9]
    assert read_rows(tokens, "response")[0].tolist() == [9]


@pytest.mark.parametrize(
    ("messages", "side"),
    [([*ASK, ANSWER, *ASK], "prompt"), ([*ASK, ANSWER], "prompt"), (ASK, "full")],
)
def test_a_record_of_fewer_messages_or_of_the_other_side_is_encoded_again(
    messages, side, tokenizer
):
    record = TokenRecord.from_prompt(torch.tensor([7, 8]), torch.tensor([1, 0]), 1)
    if len(messages) == 2:
        record = record.respond(torch.tensor([9]), torch.tensor([-1.0]), 0, FinishReason.STOP)
    chats = ChatHistory(**{side: History.of([Chat(messages, record)])}, batch_size=[1])
    (ids,) = read_rows(chats.to_tokens(tokenizer), side)
    assert tokenizer.decode(ids) == getattr(chats.to_text(tokenizer), side)[0]


def test_a_full_history_that_does_not_begin_with_the_prompt_is_an_error(tokenizer):
    td = TensorDict(
        {"prompt": History.from_chats([ASK]), "full": History.from_chats([[ANSWER]])}, [1]
    )
    for convert in (ChatHistory.to_text, ChatHistory.to_tokens):
        with pytest.raises(ValueError, match="row 0"):
            convert(ChatHistory._from_tensordict(td), tokenizer)


def test_text_to_tokens_keeps_the_prompts_tokens_in_front(tokenizer):
    text = Text(prompt=["the qu", "a"], response=["ick brown", "b"], batch_size=[2])
    tokens = text.to_tokens(tokenizer)
    rows = zip(*(read_rows(tokens, key) for key in ("prompt", "response", "full")), strict=True)
    assert all(torch.equal(torch.cat([p, r]), full) for p, r, full in rows)
    assert tokens.to_text(tokenizer).full == ["the quick brown", "ab"]


def test_padded_tokens_are_refused(tokenizer):
    rows = [torch.tensor([3, 4]), torch.tensor([5])]
    assert Tokens._from_tensordict(ragged_rows({"full": rows})).to_text(tokenizer).full
    dense = Tokens(full=pad_rows(rows, 0), batch_size=[2])
    with pytest.raises(ValueError, match="ragged"):
        dense.to_text(tokenizer)


@pytest.mark.parametrize("cls", [Tokens, LogProbs, Masks])
def test_padded_says_whether_dense_columns_hold_padding(cls):
    name = "all_attention_mask" if cls is Masks else "full"
    dense = torch.ones(2, 3)
    assert cls(**{name: dense}, padded=True, batch_size=[2]).padded
    rows = cls(**{name: dense}, padded=False, batch_size=[2])
    assert not rows.padded
    assert all(torch.equal(row, dense[0]) for row in read_rows(rows, name))


def test_conversions_take_torchrls_arguments_or_say_why_not(tokenizer):
    text = Text(prompt=["a", "bb"], batch_size=[2])
    tokens = text.to_tokens(tokenizer, False, False, "pt")
    assert [len(row) for row in read_rows(tokens, "prompt")] == [1, 2]
    with pytest.raises(ValueError, match="padding must be False"):
        text.to_tokens(tokenizer, padding=True)
    with pytest.raises(ValueError, match="return_tensors must be"):
        text.to_tokens(tokenizer, return_tensors="np")
    with pytest.raises(ValueError, match="takes away what separates messages"):
        tokens.to_history(tokenizer, "chatml_format", True)
    assert list(tokens.to_text(tokenizer, True).prompt) == ["a", "bb"]


def test_a_response_alone_is_converted_and_a_spec_has_a_field_a_history(tokenizer):
    said = History.of([Chat([{"role": "assistant", "content": "yes"}])])
    tokens = ChatHistory(response=said, batch_size=[1]).to_tokens(tokenizer)
    assert "yes" in tokenizer.decode(read_rows(tokens, "response")[0])
    spec = ChatHistory.default_spec((2, -1), keys=["prompt"])
    assert (spec.shape, spec["prompt"].shape, list(spec.keys())) == ((2,), (2, -1), ["prompt"])


def test_conversions_keep_every_batch_dimension(tokenizer):
    history = History.from_chats([[{"role": "user", "content": f"q{i}"}] for i in range(4)])
    chats = ChatHistory(prompt=history, batch_size=[4])
    text, tokens = chats.to_text(tokenizer), chats.to_tokens(tokenizer)
    flat = list(text.prompt)
    for rows in (chats, tokens):
        found = lazy_stack([rows[:2], rows[2:]]).to_text(tokenizer)
        assert found.batch_size == (2, 2)  # (4,) from chats before
        assert [list(part.prompt) for part in found.unbind(0)] == [flat[:2], flat[2:]]
        assert rows[3].to_text(tokenizer).batch_size == ()
        assert rows[3].to_text(tokenizer).prompt == flat[3]
    for rows in (chats, text):
        found = lazy_stack([rows[:2], rows[2:]]).to_tokens(tokenizer)
        assert found.batch_size == (2, 2)  # (2,) from texts before
        ids = [found[i][j].prompt.tolist() for i in range(2) for j in range(2)]
        assert ids == [row.tolist() for row in read_rows(tokens, "prompt")]
    for rows in (text, tokens):
        found = lazy_stack([rows[:2], rows[2:]]).to_history(tokenizer)
        assert found.batch_size == (2, 2)
        assert found[1][0].prompt.content == ["q2"]
