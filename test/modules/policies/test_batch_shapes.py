"""A policy writes into a batch of any shape what it writes into the same rows in one dimension."""

from __future__ import annotations

import pytest
import torch
from modules.policies.rows_helper import USER, fake_tokens, history_td, tokens_td
from tensordict import TensorDict, lazy_stack

from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.modules.policies.row_blocks import chat_rows, flat_blocks, tensor_rows

SHAPES = {
    "view": lambda td: td.view(2, 2),
    "reshape": lambda td: td.reshape(2, 1, 2),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "unsqueeze behind": lambda td: td.unsqueeze(-1),
    "lazy stack": lambda td: lazy_stack([td[:2], td[2:]]),
    "stack of equal rows": lambda td: torch.stack([td[::3], td[::3]], 1),
    "permuted": lambda td: td.view(2, 2).permute(1, 0),
    "slice of a view": lambda td: td.view(2, 2)[:, 1:],
}


def four_rows():
    return tokens_td([5], [6, 7], [8, 9, 10], [11], group_id=torch.arange(4))


def rows_of(td, *key):
    return [row.tolist() for row in tensor_rows(flat_blocks(td), key)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inplace", [True, "empty", False])
def test_answers_reach_a_batch_of_any_shape(shape, inplace):
    policy = fake_tokens([21, 22], inplace=inplace)
    given = SHAPES[shape](four_rows())
    out = policy(given)
    assert (out is given) == (inplace is True)
    assert out.batch_size == given.batch_size
    asked = rows_of(given, "tokens", "prompt")
    assert rows_of(out, "tokens", "full") == [[*row, 21, 22, 2] for row in asked]
    assert rows_of(out, "log_probs", "full") == rows_of(
        fake_tokens([21, 22])(tokens_td(*asked)), "log_probs", "full"
    )
    if inplace is True:
        assert rows_of(out, "group_id") == rows_of(given, "group_id")


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_join_the_columns_that_a_batch_of_any_shape_has(shape):
    policy = fake_tokens(generate=False, input_key=("tokens", "prompt"))
    given = SHAPES[shape](four_rows())
    asked = rows_of(given, "tokens", "prompt")
    out = policy(given)
    assert rows_of(out, "tokens", "prompt") == rows_of(out, "tokens", "full") == asked
    flat = policy(tokens_td(*asked))
    assert rows_of(out, "log_probs", "full") == rows_of(flat, "log_probs", "full")


def test_the_parts_of_a_lazy_stack_over_another_dimension_are_written_themselves():
    parts = [tokens_td([5], [6, 7]), tokens_td([8, 9, 10], [11])]
    fake_tokens([21])(lazy_stack(parts, 1))
    assert rows_of(parts[0], "tokens", "full") == [[5, 21, 2], [6, 7, 21, 2]]
    assert rows_of(parts[1], "tokens", "full") == [[8, 9, 10, 21, 2], [11, 21, 2]]


def test_a_real_model_answers_and_scores_conversations_in_two_dimensions(tokenizer, tiny_model):
    options = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 3, "temperature": 0}}
    policy = TransformersWrapper(tiny_model, **options)
    flat = policy(history_td(*([{**USER, "content": text}] for text in ("a", "bb", "ccc", "d"))))
    td = history_td(*([{**USER, "content": text}] for text in ("a", "bb", "ccc", "d"))).view(2, 2)
    policy(td)
    assert rows_of(td, "tokens", "full") == rows_of(flat, "tokens", "full")
    chats, expected = (chat_rows(flat_blocks(x), ("history", "full")) for x in (td, flat))
    assert [list(chat) for chat in chats] == [list(chat) for chat in expected]
    score = policy.get_new_version(generate=False, log_probs_key="scored")
    for row, (new, old) in enumerate(
        zip(rows_of(score(td), "scored", "full"), rows_of(flat, "log_probs", "full"), strict=True)
    ):
        start = len(rows_of(flat, "tokens", "prompt")[row])
        torch.testing.assert_close(torch.tensor(new[start:]), torch.tensor(old[start:]))


def test_padded_columns_are_dense_in_two_dimensions():
    td = four_rows().view(2, 2)
    fake_tokens([21], pad_output=True)(td)
    assert isinstance(td, TensorDict)
    assert td["tokens"].full.shape == (2, 2, 5)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_scores_of_padded_rows_join_what_stands_next_to_them(shape):
    ids = torch.tensor([[3, 4, 5], [6, 7, 0]]).view(*shape, 3)
    node = TensorDict(full=ids, weight=torch.ones(shape), batch_size=shape)
    td = TensorDict(tokens=node, attention_mask=ids != 0, batch_size=shape)
    fake_tokens(generate=False)(td)
    assert rows_of(td, "tokens", "full") == [[3, 4, 5], [6, 7]]
    assert rows_of(td, "tokens", "weight") == [1.0, 1.0]
    assert [len(row) for row in rows_of(td, "log_probs", "full")] == [3, 2]


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("shape", ["flat", "view", "lazy stack"])
def test_masks_that_are_edited_row_by_row_are_edited(shape, pad_output):
    td = {"flat": lambda td: td, **SHAPES}[shape](four_rows())
    fake_tokens([21], pad_output=pad_output)(td)
    for row in (row for block in flat_blocks(td) for row in block.unbind(0)):
        row["masks"].all_assistant_mask = torch.zeros_like(row["masks"].all_assistant_mask)
        row["masks", "all_attention_mask"].fill_(False)
    for kind in ("assistant", "attention"):
        assert not any(sum(row) for row in rows_of(td, "masks", f"all_{kind}_mask"))
