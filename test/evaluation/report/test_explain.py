"""explain: one row in a terminal, of every kind of rows that people hold."""

import pytest
import torch
from evaluation.report.pages import HOSTILE, make_row, make_rows
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import LazyStackStorage

from torchrl_llm.data.enums import MaskReason
from torchrl_llm.data.ragged import lazy_rows, pad_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.rollout_store import RolloutStore, RolloutWriter
from torchrl_llm.errors import DataError
from torchrl_llm.evaluation.report import explain
from torchrl_llm.evaluation.report.row_facts import RowFacts


@pytest.fixture
def told(capsys, monkeypatch):
    """What explain prints, in lines."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(rows, i, **options):
        explain(rows, i, **options)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return run


def test_a_row_is_told_with_each_sampled_token_and_why_some_are_masked(told, tokenizer):
    row = make_row(tokenizer, "1 + 2?", "3 a", step=4, group=7, trajectory=31, reward=0.75)
    start = row["tokens", "prompt"].shape[0]
    row["log_probs", "full"][start:] = torch.tensor(
        [-0.5, -2.0, -4.0, 0.0][: len(row["log_probs", "full"]) - start]
    )
    row["trace", "mask_reason"][-1] = int(MaskReason.OFF_SUPPORT)
    row["prox_log_probs"] = {"full": row["log_probs", "full"] + torch.log(torch.tensor(1.25))}
    lines = told([row], 0, tokenizer=tokenizer)
    count = len(row["tokens", "full"]) - start
    total = len(row["tokens", "full"])
    assert lines[0] == (f"row 0, step 4: {total} tokens, {count} sampled, {count - 1} trained")
    assert lines[1:6] == [
        "reward:   0.750",
        "finish:   stop",
        "prompt:   1 + 2?",
        "response: 3 a",
        "masked:   1, outside what sampling could choose from",
    ]
    table = lines[7:]
    assert table[0].split() == [
        *("#", "id", "source", "turn", "version", "log-prob", "advantage", "ratio", "masked"),
        "token",
    ]
    assert table[1].split() == [f"0-{start - 1}", "prompt", "1", "+", "2?"]
    assert table[2].split()[2:] == ["sampled", "0", "4", "-0.500", "0.250", "1.250", "3"]
    assert table[-1].split()[2:6] == ["sampled", "0", "4", table[-1].split()[5]]
    assert table[-1].endswith("1.250 off support <|im_end|>")  # no advantage: it is not trained
    assert len(told([row], 0, tokenizer=tokenizer, every_token=True)) == 8 + total


def test_rows_of_a_stack_a_store_a_slice_and_a_buffer_are_told_alike(told, tokenizer, tmp_path):
    rows = make_rows(tokenizer, 3, words=3)
    writer = RolloutWriter(tmp_path)
    writer.append(1, rows)
    expected = told(rows, 2, tokenizer=tokenizer)
    stack = lazy_rows(rows)
    assert isinstance(stack, LazyStackedTensorDict)
    buffer = ReplayBuffer(storage=LazyStackStorage(3))
    buffer.extend(lazy_rows([row.clone() for row in rows]))
    for kind in (stack, stack[1:], RolloutStore(tmp_path), buffer):
        i = 1 if len(kind) == 2 else 2
        assert told(kind, i, tokenizer=tokenizer)[1:] == expected[1:]


def test_padding_is_no_token_even_where_the_pad_is_the_end(told, tokenizer):
    ids = [torch.tensor([5, 6, 2]), torch.tensor([5, 6, 7, 8, 2])]
    rows = TensorDict(
        tokens={"full": pad_rows(ids, 2)},
        masks={
            "all_attention_mask": pad_rows([torch.ones(3), torch.ones(5)], 0).bool(),
            "all_assistant_mask": pad_rows([torch.tensor([0, 0, 1]), torch.ones(5)], 0).bool(),
        },
        advantage=torch.tensor([[[1.0]], [[2.0]]]),
        batch_size=[2],
    )
    assert told(rows, 0, tokenizer=tokenizer)[0] == "row 0: 3 tokens, 1 sampled, 1 trained"
    facts = RowFacts.of(rows[0])
    assert facts.token_ids.tolist() == [5, 6, 2]
    assert facts.advantage[2] == 1.0


def test_advantages_of_tokens_belong_to_them(tokenizer):
    row = make_row(tokenizer, "a", "b c")
    count = row["tokens", "full"].shape[0]
    row["advantage"] = torch.arange(count, dtype=torch.float32).view(1, count, 1)[0]
    facts = RowFacts.of(row)
    assert (
        facts.advantage[facts.sampled].tolist() == list(range(count))[-int(facts.sampled.sum()) :]
    )


def test_a_row_without_a_valid_reward_says_why(told, tokenizer):
    row = make_row(tokenizer, "a", "b", reward=float("nan"), mask=int(MaskReason.INVALID))
    for name, text in {"type": "ZeroDivisionError", "message": "by\nzero", "place": ""}.items():
        row["next", "error", name] = text
    lines = told([row], 0)
    assert not any(line.startswith("reward:") for line in lines)
    assert r"error:    ZeroDivisionError: by\nzero" in lines
    assert any(line.endswith("its row has no valid reward") for line in lines)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_model_wrote_moves_the_cursor(told, tokenizer, text):
    for line in told([make_row(tokenizer, text, text)], 0, tokenizer=tokenizer, every_token=True):
        assert line.isprintable() or not line


def test_what_is_no_row_is_refused_with_what_there_is(tokenizer):
    rows = lazy_rows(make_rows(tokenizer, 2, words=2))
    with pytest.raises(DataError, match=r"without batch dimension, got torch.Size\(\[2\]\)"):
        explain([rows], 0)
    with pytest.raises(DataError, match=r"token ids \[T\] at .* it has \['x'\]"):
        explain([TensorDict(x=torch.ones(1))], 0)
    with pytest.raises(IndexError):
        explain(rows, 2)
    short = rows[0].clone()
    short["log_probs", "full"] = torch.zeros(2)
    with pytest.raises(DataError, match=r"'log_probs', 'full'\) has 2 values, and the row has"):
        explain([short], 0)
