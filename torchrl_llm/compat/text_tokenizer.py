"""Environment text as token ids, and a policy's token ids as text: ``Tokenizer``.

For environments whose observations and actions are strings. Chat environments do not need it:
:class:`~torchrl_llm.envs.ChatEnv` keeps ids itself, and
:class:`~torchrl_llm.envs.transforms.IncrementalTokenizer` keeps them next to conversations.

Shape legend: ``B`` the batch, ``T`` tokens of the longest row, or ``max_length``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite
from torchrl.envs import Transform
from transformers import AutoTokenizer

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import pad_rows, read_rows, write_rows
from torchrl_llm.data.specs import RaggedSpec
from torchrl_llm.errors import ConfigError, DataError, TokenizerError


class Tokenizer(Transform):
    """Converts texts to token ids, and in the inverse direction token ids to texts.

    Forward (the environment's output): the texts under ``in_keys`` become int64 ids ``[B, T]``
    under ``out_keys``, with an int64 ``"attention_mask"`` next to each. Inverse (the environment's
    input): the ids that the policy wrote under ``out_keys_inv`` become texts under ``in_keys_inv``;
    ragged ids, and padded ids with an attention mask, are first cut to their length.

    Masks are computed from lengths, so the padding id does not matter: if a tokenizer has no
    padding id, the end-of-sequence id is used.

    Args:
        in_keys: keys of texts that the environment returns.
        out_keys: keys of their ids; ``in_keys`` if not given.
        in_keys_inv: keys of texts that the environment reads.
        out_keys_inv: keys under which the policy writes their ids; ``in_keys_inv`` if not given.
        tokenizer: a Hugging Face tokenizer or a name for ``AutoTokenizer``; the environment's if
            not given.
        use_raw_nontensor: pass the stored object itself to the tokenizer instead of its strings.
        additional_tokens: tokens to add to the given tokenizer; the model needs embeddings for
            them.
        skip_special_tokens: leave special tokens out of the texts.
        add_special_tokens: let the tokenizer add its own (bos, eos) to ids.
        padding: pad the rows of a batch, on the tokenizer's side; ``False`` writes ragged rows,
            which need nested ``out_keys``.
        max_length: longer rows are cut to this length, and padded rows are padded to it.
        return_attention_mask: write the masks.
        missing_tolerance: skip missing texts.
        call_before_reset: tokenize the input of the environment's ``reset`` instead of its output.

    Raises:
        ConfigError: the keys do not match, or there is no tokenizer.
        DataError: a text is missing without ``missing_tolerance``, or a value is not a text.
        TokenizerError: padding needs an id that the tokenizer does not have.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.assets import embedded_model_path
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> tokenize = Tokenizer(["text"], ["ids"], tokenizer=tokenizer)
        >>> td = tokenize(TensorDict(text=["1 + 2", "1"], batch_size=[2]))
        >>> td["ids"].shape, td["attention_mask"].sum(1).tolist()
        (torch.Size([2, 5]), [5, 1])
    """

    @checked
    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
        *,
        tokenizer: Any = None,
        use_raw_nontensor: bool = False,
        additional_tokens: Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
        padding: bool = True,
        max_length: Annotated[int, Ge(1)] | None = None,
        return_attention_mask: bool = True,
        missing_tolerance: bool = True,
        call_before_reset: bool = False,
    ) -> None:
        in_keys, in_keys_inv = list(in_keys or ()), list(in_keys_inv or ())
        out_keys = in_keys if out_keys is None else list(out_keys)
        out_keys_inv = in_keys_inv if out_keys_inv is None else list(out_keys_inv)
        _check_keys(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if not padding and any(isinstance(key, str) for key in out_keys):
            raise ConfigError(f"padding=False writes ragged rows, so nest the out_keys {out_keys}")
        masks = [_mask_key(key) for key in out_keys]
        if return_attention_mask and len(set(masks)) < len(masks):
            raise ConfigError(
                f"the attention masks of {out_keys} would share a place: nest the keys apart"
            )
        if additional_tokens and tokenizer is None:
            raise ConfigError("additional_tokens are added to a tokenizer: pass tokenizer=...")
        super().__init__(
            in_keys=in_keys, out_keys=out_keys, in_keys_inv=in_keys_inv, out_keys_inv=out_keys_inv
        )
        if isinstance(tokenizer, str):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        if additional_tokens:
            tokenizer.add_tokens(list(additional_tokens))
        self._tokenizer = tokenizer
        self.use_raw_nontensor = use_raw_nontensor
        self.skip_special_tokens = skip_special_tokens
        self.add_special_tokens = add_special_tokens
        self.padding = padding
        self.max_length = max_length
        self.return_attention_mask = return_attention_mask
        # A separate attribute, because the base class's one raises KeyError for missing keys.
        self.tolerates_missing = missing_tolerance
        self.call_before_reset = call_before_reset

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in use."""
        if self._tokenizer is None and self.parent is not None:
            self._tokenizer = getattr(self.parent, "tokenizer", None)
        if self._tokenizer is None:
            raise ConfigError("pass tokenizer=...: the environment has none")
        return self._tokenizer

    @property
    def out_device(self) -> torch.device | None:
        """Device of the ids: the environment's device."""
        return None if self.parent is None else self.parent.device

    device = out_device

    def call_tokenizer_fn(self, value: str | list[str]) -> Any:
        """Tokenize one text or several.

        Args:
            value: the text, or ``B`` of them.

        Returns:
            Ids ``[T]`` or ``[B, T]``, and their mask if masks are written.
        """
        one = isinstance(value, str)
        td = TensorDict(batch_size=() if one else (len(value),), device=self.out_device)
        self._write_ids(td, value if one else Column.of(value), ("text", "ids"))
        ids = td.get(("text", "ids"))
        return (ids, td.get(("text", "attention_mask"))) if self.return_attention_mask else ids

    def call_tokenizer_inv_fn(self, value: Tensor) -> Any:
        """The text of ids ``[T]``, or a column with the texts of ``[B, T]``."""
        rows = value.reshape(-1, value.shape[-1]).tolist()
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=self.skip_special_tokens)
        return NonTensorData(texts[0]) if value.ndim == 1 else Column.of(texts)

    # -- text to ids ------------------------------------------------------------------------------

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = next_tensordict.get(in_key, None)
            if value is not None and not isinstance(value, Tensor):
                self._write_ids(next_tensordict, value, out_key)
            elif not self.tolerates_missing:
                raise DataError(f"there is no text under {in_key!r} to tokenize")
            elif self.return_attention_mask:
                self._complete_mask(next_tensordict, out_key)
        return next_tensordict

    def _write_ids(self, td: TensorDictBase, value: Any, out_key: NestedKey) -> None:
        size = td.batch_size
        texts = value if self.use_raw_nontensor else _texts(value, size.numel(), out_key)
        encoded = self.tokenizer(
            texts,
            add_special_tokens=self.add_special_tokens,
            truncation=self.max_length is not None,
            max_length=self.max_length,
        )["input_ids"]
        if not size and encoded and not isinstance(encoded[0], list):
            encoded = [encoded]  # a single string that was passed raw
        rows = [torch.tensor(ids, dtype=torch.int64, device=td.device) for ids in encoded]
        ones = [torch.ones_like(ids) for ids in rows]
        mask_key = _mask_key(out_key)
        if self.padding:
            self._set_dense(td, out_key, rows, self._pad_id())
            if self.return_attention_mask:
                self._set_dense(td, mask_key, ones, 0)
            return
        for key, column in ((out_key, rows), (mask_key, ones)):
            if key == mask_key and not self.return_attention_mask:
                continue
            if size:
                write_rows(td, key, column)
            else:
                td.set(key, column[0])

    def _set_dense(
        self, td: TensorDictBase, key: NestedKey, rows: list[Tensor], value: int
    ) -> None:
        side = self.tokenizer.padding_side
        dense = pad_rows(rows, value, side=side)
        missing = 0 if self.max_length is None else self.max_length - dense.shape[1]
        dense = torch.nn.functional.pad(
            dense, (missing, 0) if side == "left" else (0, missing), value=value
        )
        td.set(key, dense.reshape(*td.batch_size, dense.shape[1]))

    def _pad_id(self) -> int:
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise TokenizerError("padding needs a tokenizer with a pad or an eos token")
        return found

    @staticmethod
    def _complete_mask(td: TensorDictBase, out_key: NestedKey) -> None:
        # The ids came without text, from a dataset that is already tokenized.
        ids, mask_key = td.get(out_key, None), _mask_key(out_key)
        if isinstance(ids, Tensor) and td.get(mask_key, None) is None:
            td.set(mask_key, torch.ones_like(ids))

    @dispatch(source="in_keys", dest="out_keys")
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Tokenize the texts of rows outside an environment."""
        return self._call(tensordict)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if self.call_before_reset and tensordict is not None:
            return self._call(tensordict)
        return tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return tensordict_reset if self.call_before_reset else self._call(tensordict_reset)

    # -- ids to text ------------------------------------------------------------------------------

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            rows = self._id_rows(tensordict, out_key)
            if rows is not None:
                texts = self.tokenizer.batch_decode(
                    [ids.tolist() for ids in rows], skip_special_tokens=self.skip_special_tokens
                )
                _set_texts(tensordict, in_key, texts)
            elif not self.tolerates_missing:
                raise DataError(f"there are no ids under {out_key!r} to decode")
        return tensordict

    @staticmethod
    def _id_rows(td: TensorDictBase, key: NestedKey) -> list[Tensor] | None:
        mask_key = _mask_key(key)
        if td.batch_dims == 1:
            rows, masks = read_rows(td, key, None), read_rows(td, mask_key, None)
        else:
            ids, mask = td.get(key, None), td.get(mask_key, None)
            rows = None if ids is None else list(ids.reshape(-1, ids.shape[-1]))
            masks = None if mask is None else list(mask.reshape(-1, mask.shape[-1]))
        if rows is None or masks is None:
            return rows
        if any(ids.shape != mask.shape for ids, mask in zip(rows, masks, strict=True)):
            return rows  # the mask belongs to other ids
        return [ids[mask.bool()] for ids, mask in zip(rows, masks, strict=True)]

    # -- specs ------------------------------------------------------------------------------------

    def _spec(self, shape: Sequence[int], highest: int, device: Any) -> Bounded:
        length = -1 if self.max_length is None else self.max_length
        return Bounded(0, highest, shape=(*shape, length), dtype=torch.int64, device=device)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds ids and masks."""
        shape, device = observation_spec.shape, observation_spec.device
        for out_key in self.out_keys:
            columns = {out_key: len(self.tokenizer) - 1}
            if self.return_attention_mask:
                columns[_mask_key(out_key)] = 1
            if not self.padding:
                names = {key[-1]: torch.int64 for key in columns}
                observation_spec[out_key[:-1]] = RaggedSpec(names, shape=shape)
                continue
            for key, highest in columns.items():
                observation_spec[key] = self._spec(shape, highest, device)
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Replaces the texts that the environment reads by ids.

        Raises:
            ConfigError: the environment reads no such text.
        """
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            nodes = (input_spec["full_state_spec"], input_spec["full_action_spec"])
            spec = next((n for n in nodes if n is not None and in_key in n.keys(True, True)), None)
            if spec is None:
                raise ConfigError(f"the environment reads nothing under {in_key!r}")
            if out_key != in_key:
                del spec[in_key]
            spec[out_key] = self._spec(spec.shape, len(self.tokenizer) - 1, spec.device)
        return input_spec


def _check_keys(in_keys: list, out_keys: list, in_keys_inv: list, out_keys_inv: list) -> None:
    if not in_keys and not in_keys_inv:
        raise ConfigError("pass in_keys (texts to ids), in_keys_inv (ids to texts), or both")
    for here, there, names in (
        (in_keys, out_keys, "in_keys and out_keys"),
        (in_keys_inv, out_keys_inv, "in_keys_inv and out_keys_inv"),
    ):
        if len(here) != len(there):
            raise ConfigError(f"{names} must be as many, got {here} and {there}")


def _mask_key(key: NestedKey) -> NestedKey:
    return "attention_mask" if isinstance(key, str) else (*key[:-1], "attention_mask")


def _texts(value: Any, count: int, key: NestedKey) -> list[str]:
    """One string per row, rows in order."""
    data = value.tolist() if is_non_tensor(value) else value
    texts = _flat(data)
    if len(texts) == 1 and count != 1:
        texts = texts * count  # one object for all rows
    wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
    if wrong or len(texts) != count:
        got = f"a {wrong[0]}" if wrong else f"{len(texts)} of them"
        raise DataError(f"{key!r} is made of {count} strings, got {got}")
    return texts


def _flat(data: Any) -> list[Any]:
    return [x for part in data for x in _flat(part)] if isinstance(data, list) else [data]


def _set_texts(td: TensorDictBase, key: NestedKey, texts: list[str]) -> None:
    if not td.batch_dims:
        td.set(key, texts[0])
    elif td.batch_dims == 1:
        td.set(key, Column.of(texts))
    else:
        nested: list[Any] = texts
        for size in reversed(td.batch_size[1:]):
            nested = [nested[i : i + size] for i in range(0, len(nested), size)]
        td.set(key, NonTensorStack.from_list(nested))
