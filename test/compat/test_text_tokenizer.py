"""Tokenizer: texts to ids with masks from lengths, and ids to texts."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.transforms import Tokenizer
from torchrl_llm.errors import ConfigError, DataError, TokenizerError

TEXTS = ["Hello, how are you?", "", "é🙂"]


class Echo(EnvBase):
    """Says back what it is told."""

    def __init__(self, size=3):
        super().__init__(batch_size=(size,))
        text = ColumnSpec((size, -1), example_data="x")
        self.observation_spec = Composite(text=text, shape=(size,))
        self.action_spec = Composite(said=text.clone(), shape=(size,))
        self.reward_spec = Unbounded(shape=(size, 1))
        self.done_spec = Binary(n=1, shape=(size, 1), dtype=torch.bool)

    def _reset(self, tensordict, **kwargs):
        done = torch.zeros(self.batch_size[0], 1, dtype=torch.bool)
        texts = Column.of(TEXTS[: self.batch_size[0]])
        if tensordict is not None and "given" in tensordict:
            self.given = tensordict["given"]
        return TensorDict({"text": texts, "done": done}, batch_size=self.batch_size)

    def _step(self, tensordict):
        done = torch.zeros(self.batch_size[0], 1, dtype=torch.bool)
        said = Column.of(tensordict.get("said").tolist())
        reward = torch.zeros(self.batch_size[0], 1)
        return TensorDict(
            {"text": said, "done": done, "reward": reward}, batch_size=self.batch_size
        )

    def _set_seed(self, seed):
        pass


def rows(**columns):
    return TensorDict({k: Column.of(v) for k, v in columns.items()}, batch_size=[3])


def test_ids_are_the_tokenizers_and_the_mask_tells_their_lengths(tokenizer):
    td = Tokenizer(["text"], ["ids"], tokenizer=tokenizer)(rows(text=TEXTS))
    for text, ids, mask in zip(TEXTS, td["ids"], td["attention_mask"], strict=True):
        assert ids[mask.bool()].tolist() == tokenizer(text)["input_ids"]
    assert td["ids"].dtype == td["attention_mask"].dtype == torch.int64


def test_it_agrees_with_torchrl_where_nothing_is_cut(tokenizer):
    llm = pytest.importorskip("torchrl.envs.llm.transforms.tokenizer")
    keys = (["text"], ["ids"])
    theirs = llm.Tokenizer(*keys, tokenizer=copy.deepcopy(tokenizer))(rows(text=TEXTS))
    ours = Tokenizer(*keys, tokenizer=tokenizer)(rows(text=TEXTS))
    for key in ("ids", "attention_mask"):
        assert torch.equal(ours[key], theirs[key])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_on_the_tokenizers_side_and_may_be_the_end_of_sequence(side, make_tokenizer):
    tokenizer = make_tokenizer(pad=None)
    tokenizer.padding_side = side
    td = Tokenizer(["text"], ["ids"], tokenizer=tokenizer)(rows(text=["a", "ab<|im_end|>", "abc"]))
    assert td["attention_mask"].sum(1).tolist() == [1, 3, 3]
    padded = td["ids"][0][~td["attention_mask"][0].bool()]
    assert set(padded.tolist()) == {tokenizer.eos_token_id}
    assert bool(td["attention_mask"][0, 0]) == (side == "right")


def test_a_tokenizer_without_any_id_to_pad_with_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(pad=None, eos=None)
    with pytest.raises(TokenizerError, match="pad"):
        Tokenizer(["text"], ["ids"], tokenizer=tokenizer)(rows(text=TEXTS))


def test_max_length_cuts_and_fills(tokenizer):
    td = Tokenizer(["text"], ["ids"], tokenizer=tokenizer, max_length=4)(rows(text=TEXTS))
    assert td["ids"].shape == (3, 4)
    assert td["ids"][0].tolist() == tokenizer(TEXTS[0])["input_ids"][:4]
    assert td["attention_mask"].sum(1).tolist()[:2] == [4, 0]


def test_without_padding_rows_are_ragged(tokenizer):
    make = Tokenizer(["text"], [("tokens", "prompt")], tokenizer=tokenizer, padding=False)
    td = make(rows(text=TEXTS))
    ids = read_rows(td, ("tokens", "prompt"))
    assert [row.tolist() for row in ids] == [tokenizer(text)["input_ids"] for text in TEXTS]
    masks = read_rows(td, ("tokens", "attention_mask"))
    assert all(mask.all() and mask.shape == row.shape for mask, row in zip(masks, ids, strict=True))


def test_one_text_without_a_batch_and_many_dimensions_keep_their_shape(tokenizer):
    make = Tokenizer(["text"], ["ids"], ["back"], ["ids"], tokenizer=tokenizer)
    one = make(TensorDict(text="abc"))
    assert one["ids"].tolist() == tokenizer("abc")["input_ids"]
    assert make.inv(one)["back"] == "abc"
    two = TensorDict(batch_size=[2, 2])
    two["text"] = [["a", "bc"], ["def", ""]]
    assert make(two)["ids"].shape == (2, 2, 3)
    assert make.inv(two).get("back").tolist() == [["a", "bc"], ["def", ""]]


def test_the_way_back_cuts_padding_and_leaves_special_tokens_out(tokenizer):
    make = Tokenizer(in_keys_inv=["text"], out_keys_inv=["ids"], tokenizer=tokenizer)
    ids = torch.tensor([[5, 6, 2, 9], [7, 9, 9, 9], [8, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    td = TensorDict(ids=ids, attention_mask=mask, batch_size=[3])
    assert make.inv(td)["text"] == [tokenizer.decode([5, 6]), *map(tokenizer.decode, [[7], [8]])]
    keep = Tokenizer(
        in_keys_inv=["text"], out_keys_inv=["ids"], tokenizer=tokenizer, skip_special_tokens=False
    )
    assert keep.inv(td)["text"][0] == tokenizer.decode([5, 6, 2])
    ragged = TensorDict(
        tokens=ragged_rows({"full": [torch.tensor([5]), torch.tensor([6, 7])]}), batch_size=[2]
    )
    back = Tokenizer(in_keys_inv=["text"], out_keys_inv=[("tokens", "full")], tokenizer=tokenizer)
    assert back.inv(ragged)["text"] == [tokenizer.decode([5]), tokenizer.decode([6, 7])]


@pytest.mark.parametrize("max_length", [None, 6])
def test_a_text_environment_is_played_with_ids(max_length, tokenizer):
    transform = Tokenizer(
        ["text"], ["ids"], ["said"], ["action_ids"], tokenizer=tokenizer, max_length=max_length
    )
    env = TransformedEnv(Echo(), transform)
    check_env_specs(env)
    td = env.reset()
    td["action_ids"] = torch.tensor([tokenizer("abc")["input_ids"]] * 3)
    assert env.step(td)["next", "text"] == ["abc"] * 3


def test_before_the_reset_what_the_environment_is_given_is_tokenized(tokenizer):
    transform = Tokenizer(["text"], ["given"], tokenizer=tokenizer, call_before_reset=True)
    env = Echo()
    # what reset may be given is what the specs name
    env.state_spec = Composite(text=env.observation_spec["text"].clone(), shape=(3,))
    env = TransformedEnv(env, transform)
    env.reset(rows(text=["a", "b", "c"]))
    assert env.base_env.given.tolist() == [tokenizer(t)["input_ids"] for t in "abc"]


def test_ids_without_text_get_their_mask_and_a_missing_text_can_be_an_error(tokenizer):
    td = TensorDict(ids=torch.ones(3, 2, dtype=torch.int64), batch_size=[3])
    keys = (["text"], ["ids"])
    assert Tokenizer(*keys, tokenizer=tokenizer)(td.copy())["attention_mask"].all()
    with pytest.raises(DataError, match="no text under 'text'"):
        Tokenizer(*keys, tokenizer=tokenizer, missing_tolerance=False)(td)
    with pytest.raises(DataError, match="no ids under 'gone'"):
        Tokenizer(
            in_keys_inv=["t"], out_keys_inv=["gone"], tokenizer=tokenizer, missing_tolerance=False
        ).inv(td)


def test_additional_tokens_are_single_ids(make_tokenizer):
    tokenizer = make_tokenizer()
    make = Tokenizer(["text"], ["ids"], tokenizer=tokenizer, additional_tokens=["<tool>"])
    assert make(TensorDict(text="<tool>"))["ids"].tolist() == [len(tokenizer) - 1]


def test_the_raw_object_reaches_the_tokenizer():
    class Own:
        padding_side, pad_token_id, eos_token_id = "right", 0, None

        def __call__(self, value, **options):
            self.seen = type(value)
            return {"input_ids": [[1]] * len(value)}

    own = Own()
    Tokenizer(["text"], ["ids"], tokenizer=own, use_raw_nontensor=True)(rows(text=TEXTS))
    assert own.seen is Column


@pytest.mark.parametrize("value", [["a", 1, "b"], [None, "a", "b"]])
def test_what_is_no_text_is_named(value, tokenizer):
    with pytest.raises(DataError, match="3 strings, got a"):
        Tokenizer(["text"], ["ids"], tokenizer=tokenizer)(rows(text=value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "in_keys"),
        ({"in_keys": ["a"], "out_keys": ["b", "c"]}, "as many"),
        ({"in_keys_inv": ["a"], "out_keys_inv": []}, "as many"),
        ({"in_keys": ["a", "b"]}, "share a place"),
        ({"in_keys": ["a"], "padding": False}, "nest"),
        ({"in_keys": ["a"], "additional_tokens": ["x"]}, "pass tokenizer"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer(**arguments)


def test_without_a_tokenizer_the_environments_is_used_or_missed(tokenizer):
    env = Echo()
    env.tokenizer = tokenizer
    transformed = TransformedEnv(env, Tokenizer(["text"], ["ids"]))
    assert transformed.reset()["ids"].shape[0] == 3
    with pytest.raises(ConfigError, match="pass tokenizer"):
        Tokenizer(["text"], ["ids"])(rows(text=TEXTS))


def test_a_key_that_the_environment_does_not_read_is_refused(tokenizer):
    env = TransformedEnv(Echo(), Tokenizer(in_keys_inv=["nowhere"], tokenizer=tokenizer))
    with pytest.raises(ConfigError, match="reads nothing under 'nowhere'"):
        _ = env.action_spec
