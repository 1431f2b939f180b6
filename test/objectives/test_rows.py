"""Reading rows: every layout gives the same tokens."""

from __future__ import annotations

import pytest
import torch
from objectives.rows_helper import make_row, make_rows, pad
from tensordict import TensorDict

from torchrl_llm.data.ragged import write_rows
from torchrl_llm.errors import DataError
from torchrl_llm.objectives.loss_rows import RowKeys, read_token_rows

KEYS = RowKeys()


def rows():
    return [make_row([5, 1, 2, 2], 2), make_row([6, 3], 1), make_row([4, 4, 4, 1, 1], 3)]


def as_mixed(rows):
    """As an environment holds them: a dense root and lazy nodes."""
    td = TensorDict(batch_size=[len(rows)])
    for key in rows[0].keys(True, True):
        if isinstance(key, tuple):
            write_rows(td, key, [row[key] for row in rows])
    td["advantage"] = torch.stack([row["advantage"] for row in rows])
    return td


LAYOUTS = {
    "lazy": lambda rows: make_rows(*rows),
    "mixed": as_mixed,
    "dense right": lambda rows: pad(rows, "right", junk=2),
    "dense left": lambda rows: pad(rows, "left", junk=5),
    "lazy rows that were padded": lambda rows: make_rows(*pad(rows, "right", junk=2).unbind(0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_every_layout_gives_the_same_tokens(layout, strategy):
    got = read_token_rows(LAYOUTS[layout](rows()), KEYS, strategy)
    assert [x.tolist() for x in got.sequences] == [[5, 1, 2, 2], [6, 3], [4, 4, 4, 1, 1]]
    assert [x.int().tolist() for x in got.select] == [[0, 0, 1, 1], [0, 1], [0, 0, 0, 1, 1]]
    assert got.counts == [2, 1, 2]
    assert got.row.tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "mixed"])
def test_columns_and_advantages_come_at_the_tokens_that_count(layout):
    given = rows()
    for i, row in enumerate(given):
        length = len(row["tokens", "full"])
        row["log_probs", "full"] = -torch.arange(length) - 10.0 * i
        row["advantage"] = torch.arange(length)[:, None] + 0.5
    td = LAYOUTS[layout](given)
    got = read_token_rows(td, KEYS, "sft")
    column = got.column(td, ("log_probs", "full"), "")
    assert column.tolist() == [-2.0, -3.0, -11.0, -23.0, -24.0]
    assert got.advantage(td, "advantage").tolist() == [2.5, 3.5, 1.5, 3.5, 4.5]


def test_values_go_back_to_their_places():
    td = pad(rows(), "left", junk=5)
    got = read_token_rows(td, KEYS, "sft")
    expected = [[0, 0, 0, 1, 2], [0, 0, 0, 0, 3], [0, 0, 0, 4, 5]]
    assert got.scatter(torch.arange(1.0, 6.0)).tolist() == expected


def test_padded_prompts_fall_back_on_the_last_turn_of_the_trace():
    # Ids 1 and 3 were sampled in turns 0 and 1; the last prompt is the first four tokens.
    row = make_row([5, 1, 6, 6, 3], 4)
    row["trace", "source"] = torch.tensor([1, 3, 0, 0, 3], dtype=torch.int8)
    row["trace", "turn"] = torch.tensor([-1, 0, -1, -1, 1], dtype=torch.int16)
    row["trace", "mask_reason"] = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int8)
    other = make_row([7, 7, 7, 7, 7, 2], 5)
    got = read_token_rows(pad([row, other]), KEYS, "sft")
    assert got.select[0].int().tolist() == [0, 0, 0, 0, 1]
    assert got.select[1].int().tolist() == [0, 0, 0, 0, 0, 1]


def test_temperatures_are_a_number_only_when_all_are_one():
    td = make_rows(make_row([5, 1], 1, temperature=1.0), make_row([5, 1], 1, temperature=0.5))
    got = read_token_rows(td, KEYS, "sft")
    assert got.temperature(td, KEYS.temperature).tolist() == [1.0, 0.5]
    assert read_token_rows(td[:1], KEYS, "sft").temperature(td[:1], KEYS.temperature) == 1.0
    assert got.temperature(td, ("tokens", "nothing")) == 1.0


def test_a_mask_of_another_length_is_refused():
    td = make_rows(*rows())
    td.tensordicts[1]["masks", "all_assistant_mask"] = torch.ones(5, dtype=torch.bool)
    with pytest.raises(DataError, match=r"all_assistant_mask.*row 1 has 2 tokens"):
        read_token_rows(td, KEYS, "rlhf")
