"""Text or tokens that grow by the policy's output: TorchRL's older environment.

It has no messages, no template and no record of sampled tokens, and is kept for existing scripts.
Use :class:`~torchrl_llm.envs.ChatEnv` in new ones.

Shape legend: ``B`` rows, ``T`` tokens so far, ``A`` tokens of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm.compat.text_tokenizer import Tokenizer
from torchrl_llm.data.column import Column
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.envs.transforms.dataloading import DataLoadingPrimer
from torchrl_llm.errors import ConfigError, DataError

_TEXT, _TEXT_ACTION = "text", "text_response"
_TOKENS, _TOKENS_ACTION = "tokens", "tokens_response"


class LLMEnv(EnvBase):
    """Appends each action to the observation: strings by default, else token ids.

    Reset reads the observation (from a data loader, see :meth:`from_dataloader`), step reads the
    observation and the action and writes the extended observation. Token ids are dense ``[B, T]``
    or nested tensors.

    Args:
        token_key: key of observations as ids; ``"tokens"`` if not given.
        str_key: key of observations as text; ``"text"`` if not given.
        attention_key: key of the attention mask of the ids; ``"attention_mask"`` if not given.
        action_key: key of the policy's output; ``"text_response"``, or ``"tokens_response"`` for
            ids.
        reward_key: key of the zeros of ``assign_reward``.
        from_text: observations and actions are strings.
        device: device of the tensors.
        vocab_size: upper bound of the ids.
        assign_reward: write a zero reward for each token of the action, float32 ``[B, A]``.
        assign_done: write ``("tokens_data", "done")`` and ``("tokens_data", "terminated")`` for
            each token of the action, bool ``[B, A]``.
        batch_size: ``B``, or ``(B,)``; ``()`` is one row without a batch.
        has_attention: keep the attention mask, if the observation has one.
        eos_token_id: an action with this id ends its row. With text, the ids are read from
            ``"tokens_response"``. Without it, rows never end.

    Raises:
        ConfigError: an argument is invalid, or a reset has no observation.

    Example:
        >>> from tensordict import TensorDict
        >>> env = LLMEnv(batch_size=2)
        >>> td = env.reset(TensorDict(text=["Hello", "Good"], batch_size=[2]))
        >>> td["text_response"] = Column.of([" world", " bye"])
        >>> list(env.step(td)["next", "text"])
        ['Hello world', 'Good bye']
    """

    def __init__(
        self,
        *,
        token_key: NestedKey | None = None,
        str_key: NestedKey | None = None,
        attention_key: NestedKey | None = None,
        action_key: NestedKey | None = None,
        reward_key: NestedKey = "reward",
        from_text: bool = True,
        device: torch.device | None = None,
        vocab_size: int | None = None,
        assign_reward: bool = False,
        assign_done: bool = False,
        batch_size: int | tuple[int, ...] | torch.Size | None = None,
        has_attention: bool = True,
        eos_token_id: int | None = None,
    ) -> None:
        size = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size or ())
        if len(size) > 1:
            raise ConfigError(f"batch_size must be () or (B,), got {size}")
        if from_text and (assign_reward or assign_done):
            raise ConfigError(
                "assign_reward and assign_done write one value per token, so they need "
                "from_text=False"
            )
        super().__init__(device=device, batch_size=torch.Size(size))
        self.from_text = from_text
        self.token_key: NestedKey = _TOKENS if token_key is None else token_key
        self.str_key: NestedKey = _TEXT if str_key is None else str_key
        self.attention_key: NestedKey = "attention_mask" if attention_key is None else attention_key
        if action_key is None:
            action_key = _TEXT_ACTION if from_text else _TOKENS_ACTION
        self.written_key: NestedKey = action_key
        self.rewarded_key = reward_key
        self.vocab_size = vocab_size
        self.assign_reward = assign_reward
        self.assign_done = assign_done
        self.has_attention = has_attention
        self.eos_token_id = eos_token_id
        self._make_specs()

    @property
    def observed_key(self) -> NestedKey:
        """The key of the observation."""
        return self.str_key if self.from_text else self.token_key

    def _make_specs(self) -> None:
        size, device = self.batch_size, self.device

        def composite(leaves: dict[NestedKey, TensorSpec]) -> Composite:
            return Composite(leaves, shape=size, device=device)

        leaf = self._text_spec if self.from_text else self._token_spec
        self.full_observation_spec = composite({self.observed_key: leaf()})
        self.full_state_spec = self.full_observation_spec.clone()
        self.full_action_spec = composite({self.written_key: leaf()})
        reward = {self.rewarded_key: Unbounded(shape=(*size, -1), device=device)}
        self.full_reward_spec = composite(reward if self.assign_reward else {})
        done: dict[NestedKey, TensorSpec] = {}
        for name in ("done", "terminated"):
            done[name] = Unbounded(shape=(*size, 1), dtype=torch.bool, device=device)
            if self.assign_done:
                done["tokens_data", name] = Unbounded(
                    shape=(*size, -1), dtype=torch.bool, device=device
                )
        self.full_done_spec = composite(done)

    def _text_spec(self) -> TensorSpec:
        if self.batch_size:
            return ColumnSpec((*self.batch_size, -1), example_data="a text")
        return NonTensor(shape=(), example_data="a text")

    def _token_spec(self) -> TensorSpec:
        shape, device = (*self.batch_size, -1), self.device
        if self.vocab_size is None:
            return Unbounded(shape=shape, dtype=torch.int64, device=device)
        high = self.vocab_size
        return Bounded(low=0, high=high, shape=shape, dtype=torch.int64, device=device)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        tokenizer: Any = None,
        batch_size: int | tuple[int, ...] | torch.Size | None = None,
        primers: Composite | None = None,
        stack_method: Callable[[list[TensorDictBase]], TensorDictBase] | None = None,
        repeats: int | None = None,
        group_repeats: bool = True,
        **kwargs: Any,
    ) -> TransformedEnv:
        """An environment whose resets draw from a data loader.

        Args:
            dataloader: see :class:`~torchrl_llm.envs.transforms.DataLoadingPrimer`; its rows
                contain the observation.
            tokenizer: append a :class:`~torchrl_llm.envs.transforms.Tokenizer`, which writes the
                ids of texts and reads actions as ids; only with ``from_text``.
            batch_size: ``B`` or ``(B,)``; the loader's batch size if not given, or 1 if it has
                none.
            primers: specs of the columns, taken from the first row if not given.
            stack_method: how tensors of the rows are stacked.
            repeats: number of rows per row of the data.
            group_repeats: multiply the batch by ``repeats``, so that all repeats of a row start in
                the same reset.
            kwargs: arguments of :class:`LLMEnv`.

        Raises:
            ConfigError: an argument is invalid.
        """
        if tokenizer is not None and not kwargs.get("from_text", True):
            raise ConfigError("a tokenizer reads texts, so it needs from_text=True")
        given = batch_size or getattr(dataloader, "batch_size", None) or 1
        size = given if isinstance(given, int) else torch.Size(given).numel()
        group_repeats = group_repeats and repeats is not None
        if group_repeats:
            size *= repeats
        base_env = cls(batch_size=size, **kwargs)
        primer = DataLoadingPrimer(
            dataloader,
            primers=primers,
            stack_method=stack_method,
            repeats=repeats,
            group_repeats=group_repeats,
            device=base_env.device,
        )
        env = TransformedEnv(base_env)
        if tokenizer is not None:
            tokenize = Tokenizer(
                [base_env.str_key],
                [base_env.token_key],
                [base_env.written_key],
                [_TOKENS_ACTION],
                tokenizer=tokenizer,
            )
            env = env.append_transform(tokenize)
        return env.append_transform(primer)

    # Reset and step

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        key = self.observed_key
        observation = None if tensordict is None else tensordict.get(key, None)
        if observation is None:
            raise ConfigError(
                f"{type(self).__name__}.reset needs {key!r}: pass it in a tensordict, or build the "
                "environment by from_dataloader so that it starts by itself"
            )
        out = tensordict.exclude("_reset")
        shape = self.batch_size
        for name in ("done", "terminated"):
            out.set(name, torch.zeros((*shape, 1), dtype=torch.bool, device=self.device))
            if self.assign_done:
                empty = torch.zeros((*shape, 1), dtype=torch.bool, device=self.device)
                out.set(("tokens_data", name), empty)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = tensordict.empty()
        stepped = tensordict.get("_step", None)
        keep = None if stepped is None else ~stepped.reshape(*self.batch_size, -1).any(-1)
        if self.from_text:
            out.set(self.str_key, self._longer_text(tensordict, keep))
        else:
            self._write_longer_ids(tensordict, out, keep)
        self._write_ends(tensordict, out, keep)
        return out

    def _longer_text(self, td: TensorDictBase, keep: Tensor | None) -> Any:
        columns = [td.get(self.str_key), td.get(self.written_key, None)]
        if columns[1] is None:
            raise DataError(f"the policy did not write {self.written_key!r}")
        if not self.batch_size:
            return NonTensorData(_joined(columns[0].data, columns[1].data))
        kept = [False] * self.batch_size[0] if keep is None else keep.tolist()
        rows = zip(columns[0].tolist(), columns[1].tolist(), kept, strict=True)
        return Column.of(text if stays else _joined(text, more) for text, more, stays in rows)

    def _write_longer_ids(
        self, td: TensorDictBase, out: TensorDictBase, keep: Tensor | None
    ) -> None:
        ids, action = td.get(self.token_key), td.get(self.written_key, None)
        if not isinstance(action, Tensor):
            got = "nothing" if action is None else type(action).__name__
            raise DataError(f"{self.written_key!r} must be token ids, got {got}")
        if keep is not None and bool(keep.any()):
            raise ConfigError(
                "rows of token ids all grow together: with from_text=False every row is stepped"
            )
        if ids.is_nested:
            rows = zip(ids.unbind(0), action.unbind(0), strict=True)
            longer = [torch.cat(pair, -1) for pair in rows]
            out.set(self.token_key, torch.nested.as_nested_tensor(longer, layout=ids.layout))
            return
        out.set(self.token_key, torch.cat([ids, action], -1))
        mask = td.get(self.attention_key, None) if self.has_attention else None
        if mask is not None:
            out.set(self.attention_key, torch.cat([mask, mask.new_ones(action.shape)], -1))

    def _write_ends(self, td: TensorDictBase, out: TensorDictBase, keep: Tensor | None) -> None:
        shape = (*self.batch_size, 1)
        ends = torch.zeros(shape, dtype=torch.bool, device=self.device)
        action = td.get(_TOKENS_ACTION if self.from_text else self.written_key, None)
        if self.eos_token_id is not None:
            if action is None:
                raise DataError(f"eos_token_id is looked for in {_TOKENS_ACTION!r}: there is none")
            if action.is_nested:
                action = torch.nested.to_padded_tensor(action, padding=-1)
            ends = (action == self.eos_token_id).any(-1, keepdim=True)
        if keep is not None:
            ends = torch.where(keep.unsqueeze(-1), td.get("done"), ends)
        for name in ("done", "terminated"):
            out.set(name, ends.clone())
            if self.assign_done:
                at = torch.zeros_like(action, dtype=torch.bool)
                eos = self.eos_token_id
                out.set(("tokens_data", name), at if eos is None else action == eos)
        if self.assign_reward:
            out.set(self.rewarded_key, torch.zeros_like(action, dtype=torch.float32))

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here; a dataset is seeded by its loader."""


def _joined(text: Any, more: Any) -> str:
    if not isinstance(text, str) or not isinstance(more, str):
        raise DataError(
            "with from_text=True observation and action are strings, got "
            f"{type(text).__name__} and {type(more).__name__}"
        )
    return text + more
