"""Tokenized datasets: ids, masks and prompt ends, the copy on disk, batches."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor

from torchrl_llm.compat.reward_data import pre_tokenization_hook
from torchrl_llm.data import (
    PairwiseDataset,
    PromptData,
    PromptTensorDictTokenizer,
    TensorDictTokenizer,
    TokenizedDatasetLoader,
    create_infinite_iterator,
    get_dataloader,
)
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import ConfigError, DataError, TokenizerError

TEXTS = ["Hello, how are you?", "12 + 34", ""]


# -- samples


def test_ids_are_the_tokenizers_and_the_mask_tells_their_lengths(tokenizer):
    td = TensorDictTokenizer(tokenizer, 40)({"text": TEXTS})
    assert td["input_ids"].shape == (3, 40)
    for text, ids, mask in zip(TEXTS, td["input_ids"], td["attention_mask"], strict=True):
        assert ids[mask.bool()].tolist() == tokenizer(text)["input_ids"]


def test_padding_may_be_the_end_of_sequence_and_its_real_ones_count(make_tokenizer):
    tokenizer = make_tokenizer(pad=None)
    td = TensorDictTokenizer(tokenizer, 4)({"text": ["a<|im_end|>", "ab"]})
    assert td["attention_mask"].sum(1).tolist() == [2, 2]
    assert td["input_ids"][0, 1:].tolist() == [tokenizer.eos_token_id] * 3
    with pytest.raises(TokenizerError, match="pad"):
        TensorDictTokenizer(make_tokenizer(pad=None, eos=None), 4)({"text": ["a"]})


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_cut_and_padded_on_the_tokenizers_sides(side, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = tokenizer.truncation_side = side
    td = TensorDictTokenizer(tokenizer, 3)({"text": ["abcde", "a"]})
    ids = tokenizer("abcde")["input_ids"]
    assert td["input_ids"][0].tolist() == (ids[-3:] if side == "left" else ids[:3])
    assert td["attention_mask"][1].tolist() == ([0, 0, 1] if side == "left" else [1, 0, 0])


def test_a_single_text_has_no_batch_and_unpadded_rows_are_ragged(tokenizer):
    one = TensorDictTokenizer(tokenizer, 5)({"text": "ab"})
    assert one.batch_size == ()
    assert one["input_ids"].shape == (5,)
    ragged = TensorDictTokenizer(tokenizer, 5, padding=False)({"text": TEXTS})
    assert [len(ids) for ids in read_rows(ragged, "input_ids")] == [5, 5, 0]
    longest = TensorDictTokenizer(tokenizer, 50, padding="longest")({"text": ["a", "abc"]})
    assert longest["input_ids"].shape == (2, 3)
    lists = TensorDictTokenizer(tokenizer, 2, return_tensordict=False)({"text": ["a"]})
    assert lists["attention_mask"] == [[1, 0]]


@pytest.mark.parametrize("padding", [False, "longest"])
def test_an_empty_text_has_no_tokens_and_still_whole_numbers(tokenizer, padding):
    td = TensorDictTokenizer(tokenizer, 5, padding=padding)({"text": ["", "1+2"]})
    assert [row["input_ids"].dtype for row in td] == [torch.int64] * 2
    assert [int(row["attention_mask"].sum()) for row in td] == [0, 3]
    empty = TensorDictTokenizer(tokenizer, 5, padding="longest")({"text": [""]})
    assert empty["input_ids"].dtype == torch.int64


def test_bad_samples_and_settings_are_named(tokenizer):
    process = TensorDictTokenizer(tokenizer, 5)
    with pytest.raises(DataError, match="lacks 'text'; it has \\['words'\\]"):
        process({"words": ["a"]})
    with pytest.raises(DataError, match="strings, got int"):
        process({"text": ["a", 3]})
    with pytest.raises(DataError, match="strings, got NoneType"):
        process({"text": None})
    with pytest.raises(DataError, match="strings, got none at all"):
        process({"text": []})
    for options in ({"padding": "half"}, {"return_tensordict": False, "device": "cpu"}):
        with pytest.raises(ConfigError):
            TensorDictTokenizer(tokenizer, 5, **options)
    with pytest.raises(ConfigError):
        TensorDictTokenizer(tokenizer, 0)


# -- prompts and labels

_WORDS = st.text(alphabet="ab 1+=\né", max_size=8)


@settings(deadline=None, max_examples=50)
@given(_WORDS, _WORDS)
def test_the_prompt_ends_where_its_last_whole_token_ends(prompt, label):
    tokenizer = _tokenizer()
    td = PromptTensorDictTokenizer(tokenizer, 30)({"prompt": [prompt], "label": [label]})
    ids = td["input_ids"][0][td["attention_mask"][0].bool()]
    size = int(td["prompt_rindex"][0]) + 1
    assert tokenizer.decode(ids) == prompt + label
    assert prompt.startswith(tokenizer.decode(ids[:size]).rstrip("\ufffd"))
    # one more token would reach into the label
    longer = tokenizer(prompt + label, return_offsets_mapping=True)["offset_mapping"]
    assert size == len(ids) or longer[size][1] > len(prompt)
    assert bool(td["valid_sample"][0]) == (0 < size < len(ids))


@pytest.fixture(scope="module", autouse=True)
def _shared(make_tokenizer):
    global _tokenizer
    made = make_tokenizer()
    _tokenizer = lambda: made  # noqa: E731


def test_rows_that_do_not_fit_are_invalid_and_their_prompt_ends_inside(tokenizer):
    sample = {"prompt": ["abc", "abcdef", "abc"], "label": ["d", "g", ""]}
    td = PromptTensorDictTokenizer(tokenizer, 4)(sample)
    assert td["valid_sample"].tolist() == [True, False, False]
    assert td["prompt_rindex"].tolist() == [2, 3, 2]
    assert td["input_ids"].shape == (3, 4)


def test_prompts_are_padded_on_the_right_whatever_the_tokenizer_says(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    td = PromptTensorDictTokenizer(tokenizer, 4)({"prompt": "a", "label": "b"})
    assert td["attention_mask"].tolist() == [1, 1, 0, 0]
    assert td["prompt_rindex"].item() == 0


def test_a_prompt_needs_its_label_and_a_fast_tokenizer(tokenizer):
    process = PromptTensorDictTokenizer(tokenizer, 4)
    with pytest.raises(DataError, match="label"):
        process({"prompt": ["a"]})
    with pytest.raises(DataError, match="one label"):
        process({"prompt": ["a", "b"], "label": ["c"]})
    with pytest.raises(TokenizerError, match="fast"):
        PromptTensorDictTokenizer(object(), 4)


def test_masking_the_label_leaves_the_whole_prompt():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    data = PromptData(ids, torch.ones_like(ids), torch.tensor([0, 2]), batch_size=[2])
    masked = data.mask_label(pad_token_id=1)
    assert masked.input_ids.tolist() == [[5, 1, 1, 1], [5, 6, 7, 1]]
    assert masked.attention_mask.sum(1).tolist() == [1, 3]
    assert masked.batch_size == (2,)


# -- pairs

PAIRS = [
    {"prompt": "p", "chosen": "a b c d e", "rejected": "v w x y z"},
    {"prompt": "q", "chosen": "a b c d e", "rejected": "a b c d e"},
    {"prompt": "r", "chosen": "too short", "rejected": "v w x y z"},
    {"prompt": "s", "chosen": "1 2 3 4 5", "rejected": "6 7 8 9 0"},
]


def test_pairs_that_teach_nothing_are_left_out_and_the_rest_stay_side_by_side():
    texts = [row["text"] for row in pre_tokenization_hook(PAIRS)]
    assert texts == ["p\na b c d e", "s\n1 2 3 4 5", "p\nv w x y z", "s\n6 7 8 9 0"]
    with pytest.raises(DataError, match="row 1 lacks the column 'chosen'"):
        pre_tokenization_hook([PAIRS[0], {"prompt": "p"}])
    with pytest.raises(DataError, match="row 0: the answers must be strings, got None"):
        pre_tokenization_hook([{"prompt": "p", "chosen": None, "rejected": "a b c d e"}])


def test_chosen_and_rejected_answer_the_same_prompt(tokenizer, tmp_path):
    data = PairwiseDataset.from_dataset("train", PAIRS, 20, tmp_path, tokenizer=tokenizer)
    assert data.batch_size == (2,)
    for row, prompt in enumerate("ps"):
        for side in (data.chosen_data, data.rejected_data):
            ids = side.input_ids[row][side.attention_mask[row].bool()]
            assert tokenizer.decode(ids)[0] == prompt
    assert data[:1].chosen_data.input_ids.shape == (1, 20)


# -- the copy on disk

ROWS = [{"prompt": f"{n} + {n} =", "label": f" {2 * n}"} for n in range(10)]


def loader_of(source, folder, tokenizer, **options):
    options = {"split": "train", "max_length": 12, **options}
    return TokenizedDatasetLoader(
        dataset_name=source,
        tokenizer_fn=PromptTensorDictTokenizer,
        root_dir=folder,
        tokenizer=tokenizer,
        **options,
    )


def test_data_is_tokenized_once_and_mapped_from_then_on(tokenizer, tmp_path, monkeypatch):
    first = loader_of(ROWS, tmp_path, tokenizer).load()
    assert isinstance(first["input_ids"], MemoryMappedTensor)
    monkeypatch.setattr(TokenizedDatasetLoader, "_tokenized", lambda self: 1 / 0)
    again = loader_of(list(ROWS), tmp_path, tokenizer).load()
    assert torch.equal(again["input_ids"], first["input_ids"])
    assert "valid_sample" not in again.keys()


def test_other_content_never_finds_an_old_copy(tokenizer, make_tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    base = loader_of(path, tmp_path, tokenizer).folder
    other_tokenizer = make_tokenizer(extra=("<tool>",))
    others = [
        loader_of(path, tmp_path, tokenizer, max_length=13).folder,
        loader_of(path, tmp_path, tokenizer, split="valid").folder,
        loader_of(path, tmp_path, tokenizer, split="valid", valid_size=3).folder,
        loader_of(path, tmp_path, tokenizer, pre_tokenization_hook=lambda r: r).folder,
        loader_of(path, tmp_path, tokenizer, pre_tokenization_hook=lambda r: r[1:]).folder,
        loader_of(path, tmp_path, other_tokenizer).folder,
        loader_of(ROWS, tmp_path, tokenizer).folder,
    ]
    path.write_text("\n".join(json.dumps(row) for row in ROWS[:5]))
    others.append(loader_of(path, tmp_path, tokenizer).folder)
    assert len({base, *others}) == 9
    assert len(loader_of(path, tmp_path, tokenizer).load()) == 5


def test_what_was_not_written_to_its_end_is_not_there(tokenizer, tmp_path, monkeypatch):
    from tensordict import TensorDict

    loader = loader_of(ROWS, tmp_path, tokenizer)
    memmap = TensorDict.memmap

    def dies(self, prefix, **options):
        memmap(self[:2], prefix, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TensorDict, "memmap", dies)
        with pytest.raises(KeyboardInterrupt):
            loader.load()
    assert list(tmp_path.rglob("*.memmap")) == []
    assert len(loader.load()) == 10


def test_a_copy_that_another_process_made_in_the_meantime_is_taken(tokenizer, tmp_path):
    loader = loader_of(ROWS, tmp_path, tokenizer)
    data = loader._tokenized()
    loader._store(data, loader.folder)
    loader._store(data, loader.folder)
    assert len(loader.load()) == 10
    assert not list(tmp_path.rglob(".making-*"))


def test_threads_make_the_same_data(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_llm.compat.tokenized_dataset._ROWS_AT_A_TIME", 3)
    one = loader_of(ROWS, tmp_path / "a", tokenizer).load()
    many = loader_of(ROWS, tmp_path / "b", tokenizer, num_workers=3).load()
    assert (one == many).all()


def test_rows_that_do_not_fit_are_left_out_and_none_left_is_an_error(tokenizer, tmp_path):
    rows = [*ROWS, {"prompt": "x" * 20, "label": "y"}]
    assert len(loader_of(rows, tmp_path, tokenizer).load()) == 10
    with pytest.raises(DataError, match="no row"):
        loader_of(rows[-1:], tmp_path, tokenizer).load()
    with pytest.raises(DataError, match="row 1 lacks the column 'label'"):
        loader_of([ROWS[0], {"prompt": "x"}], tmp_path, tokenizer).load()


def test_a_validation_split_is_cut(tokenizer, tmp_path):
    for size, expected in ((4, 4), (40, 10)):
        loader = loader_of(ROWS, tmp_path, tokenizer, split="valid1", valid_size=size)
        assert len(loader.load()) == expected


def test_a_data_set_saved_by_datasets_is_read(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "saved"
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(saved))
    data = loader_of(saved, tmp_path, tokenizer, from_disk=True).load()
    assert torch.equal(data["input_ids"], loader_of(ROWS, tmp_path, tokenizer).load()["input_ids"])
    for source, split in ((saved, "test"), (tmp_path / "nothing", "train")):
        with pytest.raises(DataError, match="cannot read the split"):
            loader_of(source, tmp_path, tokenizer, from_disk=True, split=split).load()


def test_a_tokenizer_is_given_once(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="pass tokenizer, or"):
        loader_of(ROWS, tmp_path, tokenizer, tokenizer_model_name="gpt2")


# -- batches


def batches_of(tokenizer, folder, batch_size=3, **options):
    options = {"infinite": False, "seed": 0, **options}
    return get_dataloader(
        batch_size,
        12,
        PromptData,
        "cpu",
        ROWS,
        root_dir=folder,
        tokenizer=tokenizer,
        **options,
    )


def _rows(batches):
    return [tuple(ids) for batch in batches for ids in batch.input_ids.tolist()]


def test_a_pass_hands_out_each_row_once_and_drops_the_rest(tokenizer, tmp_path):
    batches = batches_of(tokenizer, tmp_path)
    first, second = _rows(batches), _rows(batches)
    assert len(batches) == 3
    assert len(set(first)) == 9
    assert first != second
    assert _rows(batches_of(tokenizer, tmp_path)) == first
    assert _rows(batches_of(tokenizer, tmp_path, seed=1)) != first


def test_reading_ahead_changes_nothing(tokenizer, tmp_path):
    ahead = batches_of(tokenizer, tmp_path, prefetch=2)
    assert _rows(ahead) == _rows(batches_of(tokenizer, tmp_path))


def test_batches_go_on_for_ever_and_are_plain_tensors(tokenizer, tmp_path):
    batches = batches_of(tokenizer, tmp_path, infinite=True)
    seen = [next(batches) for _ in range(7)]
    assert all(isinstance(batch, PromptData) for batch in seen)
    assert not isinstance(seen[0].input_ids, MemoryMappedTensor)
    assert torch.equal(seen[0].labels, seen[0].input_ids)


def test_less_than_a_batch_is_an_error_and_not_an_endless_wait(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="prefetch must not be negative, got -1"):
        batches_of(tokenizer, tmp_path, prefetch=-1)
    with pytest.raises(DataError, match="10 rows make no batch of 11"):
        batches_of(tokenizer, tmp_path, batch_size=11)
    used_up = create_infinite_iterator(iter([1]))
    assert next(used_up) == 1
    with pytest.raises(DataError, match="nothing"):
        next(used_up)
