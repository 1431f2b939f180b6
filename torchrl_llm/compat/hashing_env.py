"""Token-by-token environment with a hash of each prefix, for tree search over texts.

One step is one token. Equal prefixes have equal hashes, so a tree of texts
(:class:`torchrl.data.MCTSForest`) only needs the hashes for its nodes.

:class:`~torchrl_llm.envs.ChatEnv` is the environment for conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Categorical, Composite, NonTensor, SipHash, Unbounded
from torchrl.envs import EnvBase

from torchrl_llm.data.column import Column
from torchrl_llm.errors import ConfigError

_HASH_KEY = "hashing"


class LLMHashingEnv(EnvBase):
    """Appends one token per step, and identifies each prefix by its hash.

    Reset reads the ids of a prompt, int64 ``[T]`` or ``[B, T]``, and writes ``"hashing"``, int64
    ``[1]`` or ``[B, 1]``. Step reads ``"action"``, int64 ``[1]`` or ``[B, 1]``, and writes the
    extended ids and ``hash(hash of the prefix, token)``. The cost of this hash does not grow with
    the text, but the hash of a prompt differs from the hash of the same ids reached token by token.

    There is no reward, and episodes do not end.

    Args:
        vocab_size: number of ids; the tokenizer's if not given.
        hashing_module: maps int64 ``[B, T]`` to int64 ``[B]``; :class:`torchrl.data.SipHash` if not
            given.
        observation_key: key of the ids.
        text_output: also write the text of the ids.
        tokenizer: with ``decode`` and ``batch_decode``; :meth:`make_tensordict` also calls it.
        text_key: key of the text; ``None`` means ``"text"``.

    Raises:
        ConfigError: both ``vocab_size`` and tokenizer are missing, text is requested without a
            tokenizer, or a reset has no prompt.

    Example:
        >>> env = LLMHashingEnv(vocab_size=8, text_output=False)
        >>> td = env.reset(TensorDict(observation=torch.tensor([[1, 2], [1, 2]]), batch_size=[2]))
        >>> td = env.step(td.set("action", torch.tensor([[3], [4]])))["next"]
        >>> td["observation"].tolist(), bool(td["hashing"][0] == td["hashing"][1])
        ([[1, 2, 3], [1, 2, 4]], False)
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[Tensor], Tensor] | None = None,
        observation_key: NestedKey = "observation",
        text_output: bool = True,
        tokenizer: Any = None,
        text_key: NestedKey | None = "text",
    ) -> None:
        super().__init__()
        self._batch_locked = False
        if vocab_size is None and tokenizer is None:
            raise ConfigError("pass vocab_size, or a tokenizer that knows it")
        if text_output and tokenizer is None:
            raise ConfigError("text_output=True needs a tokenizer; pass text_output=False")
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.observation_key = observation_key
        self.text_key: NestedKey = "text" if text_key is None else text_key
        self.text_output = text_output
        self._hash = SipHash() if hashing_module is None else hashing_module
        self._tokenizer = tokenizer
        observation: dict[NestedKey, Any] = {
            observation_key: Categorical(n=self.vocab_size, shape=(-1,)),
            _HASH_KEY: Unbounded(shape=(1,), dtype=torch.int64),
        }
        if text_output:
            observation[self.text_key] = NonTensor(shape=(), example_data="a text")
        self.observation_spec = Composite(observation)
        self.action_spec = Categorical(n=self.vocab_size, shape=(1,))
        # There is no reward: the key is left out, because a zero would look like a reward.
        self.reward_spec = Composite()

    def make_tensordict(self, input: str | Sequence[str]) -> TensorDictBase:
        """Start from texts.

        Args:
            input: a text, or several texts with equal numbers of tokens.

        Returns:
            The result of a reset, batch size ``[]`` or ``[B]``.

        Raises:
            ConfigError: there is no tokenizer, or the texts have different lengths.
        """
        if self._tokenizer is None:
            raise ConfigError("make_tensordict needs a tokenizer")
        encoded = self._tokenizer(input if isinstance(input, str) else list(input))
        ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
        try:
            ids = torch.as_tensor(ids)
        except ValueError as error:
            lengths = sorted({len(row) for row in ids})
            raise ConfigError(
                f"the texts must have one length in tokens, got {lengths}; pad them, or start one "
                "at a time"
            ) from error
        batch_size = [] if isinstance(input, str) else [len(input)]
        return self.reset(TensorDict({self.observation_key: ids}, batch_size=batch_size))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        ids = None if tensordict is None else tensordict.get(self.observation_key, None)
        if ids is None or not ids.shape[-1:].numel():
            raise ConfigError(
                f"{type(self).__name__}.reset needs the ids of a prompt, at least one: pass "
                f"TensorDict({{{self.observation_key!r}: ids}}, batch_size=...)"
            )
        return self._written(tensordict, ids, ids)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        token = tensordict.get("action")
        ids = torch.cat([tensordict.get(self.observation_key), token], -1)
        return self._written(tensordict, ids, torch.cat([tensordict.get(_HASH_KEY), token], -1))

    def _written(self, td: TensorDictBase, ids: Tensor, hashed: Tensor) -> TensorDictBase:
        out = td.empty()
        out.set(self.observation_key, ids)
        flat = hashed.reshape(-1, hashed.shape[-1])
        out.set(_HASH_KEY, self._hash(flat).reshape(*hashed.shape[:-1], 1))
        if self.text_output and ids.ndim > 1:
            texts = self._tokenizer.batch_decode(ids.reshape(-1, ids.shape[-1]))
            out.set(self.text_key, Column.of(texts))
        elif self.text_output:
            out.set(self.text_key, NonTensorData(self._tokenizer.decode(ids)))
        for name in ("done", "terminated"):
            out.set(name, torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=td.device))
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here."""
