"""Typed views of the columns of a batch: tokens, log-probs, masks, text, chats, trace.

Each class is a view: ``Tokens._from_tensordict(node)`` wraps the stored node, ragged (a lazy stack
of rows) or dense (padded), without a copy. Ragged columns are read as lists, ``tokens.get("full",
as_list=True)`` or :func:`torchrl_llm.data.ragged.read_rows`; dense columns are read by attribute,
``tokens.full``.

Shape legend: ``B`` rows, ``T`` tokens of prompt and response, ``P`` prompt, ``R`` response;
``T``, ``P`` and ``R`` differ from row to row.

``to_tokens``, ``to_text`` and ``to_history`` are defined in
:mod:`torchrl_llm.compat.mixins.conversions`.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict
from torch import Tensor
from torchrl.data import Composite, NonTensor, Unbounded

from torchrl_llm.compat.mixins import conversions
from torchrl_llm.data.column import Column, mapped_with_its_rows, set_as_column
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows, ragged_rows, read_rows
from torchrl_llm.data.token_facts import node_dtypes

__all__ = ["ChatHistory", "LogProbs", "Masks", "Text", "TokenSupport", "TokenTrace", "Tokens"]


class _View:
    """Mixin of the token-aligned containers, because tensorclasses do not inherit."""

    _dtypes: dict[str, torch.dtype]

    @property
    def padded(self) -> bool:
        """Whether the rows are dense (padded to one length) rather than ragged."""
        node = self._tensordict
        if not isinstance(node, LazyStackedTensorDict):
            return True
        # Policies write padded masks as rows, so that assignments to a row change the batch.
        rows = read_rows(node, "all_attention_mask", None) if node.batch_dims == 1 else None
        return rows is not None and len({*map(len, rows)}) == 1 and not all(r.all() for r in rows)

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Return the spec of the container, with one dynamic dimension for the tokens.

        Args:
            shape: batch dimensions followed by the dynamic token dimension, ``(*B, -1)``.
            keys: the fields to declare; all token-aligned fields by default.
        """
        shape = torch.Size(shape)
        names = list(cls._dtypes) if keys is None else keys
        leaves = {name: Unbounded(shape=shape, dtype=cls._dtypes[name]) for name in names}
        return Composite(leaves, shape=shape[:-1], data_cls=cls)


class Tokens(conversions.TokensConversions, TensorClass["nocast"], _View):
    """Token ids of a batch of rows.

    Attributes:
        prompt: int64 ``[B, P]``; padded on the left when dense.
        response: int64 ``[B, R]``; padded on the right when dense.
        full: int64 ``[B, T]``, prompt and response without a gap. When dense, the padded prompt and
            response are concatenated, so that ``full[:, P:]`` is the response.
        finish_reason: int8 ``[B]``, codes of :class:`~torchrl_llm.data.enums.FinishReason`.
        temperature: float32 ``[B]``, sampling temperature of the response (1.0 for greedy).
        truncated_support: bool ``[B]``, whether top-k, top-p or min-p truncated the distribution
            without storing the kept ids (see :class:`TokenSupport`). Ratios of such rows are not
            defined.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> node = ragged_rows({"full": [torch.tensor([1, 2]), torch.tensor([3])]})
        >>> Tokens._from_tensordict(node).padded
        False
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    finish_reason: Tensor | None = None
    temperature: Tensor | None = None
    truncated_support: Tensor | None = None


class LogProbs(TensorClass["nocast"], _View):
    """Log-probs of tokens in nats, log p(x_t | x_<t), aligned with :class:`Tokens`.

    Attributes:
        prompt: float32 ``[B, P]``.
        response: float32 ``[B, R]``.
        full: float32 ``[B, T]``; 0.0 at index 0 and at tokens that were neither sampled nor scored.
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None


class Masks(TensorClass["nocast"], _View):
    """Masks aligned with ``tokens.full``.

    Attributes:
        all_attention_mask: bool ``[B, T]``, true at every token, false at padding.
        all_assistant_mask: bool ``[B, T]``, true at the tokens of the assistant's turns, including
            their end-of-turn tokens.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None


class TokenTrace(TensorClass["nocast"], _View):
    """Origin of each token of ``tokens.full``.

    Attributes:
        source: int8 ``[B, T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        turn: int16 ``[B, T]``, turn of the model that sampled the token, else -1.
        policy_version: int32 ``[B, T]``, version of the weights that sampled the token, else -1.
        mask_reason: int8 ``[B, T]``, codes of :class:`~torchrl_llm.data.enums.MaskReason`.
    """

    source: Tensor | None = None
    turn: Tensor | None = None
    policy_version: Tensor | None = None
    mask_reason: Tensor | None = None


class TokenSupport(TensorClass["nocast"], _View):
    """The ids that top-k, top-p or min-p kept for each token, if recorded.

    A ratio is defined only on these ids; losses and scoring policies read them. The counts are
    aligned with ``tokens.full``. The ids of all tokens are concatenated, ``S = counts.sum()``.

    Attributes:
        token_ids: int32 ``[B, S]``; padded on the right when dense (the counts give the number of
            real ids).
        counts: int32 ``[B, T]``; 0 at tokens that were not sampled or not truncated.
    """

    token_ids: Tensor | None = None
    counts: Tensor | None = None


class Text(conversions.TextConversions, TensorClass["nocast"]):
    """The decoded texts, one string per row.

    Attributes:
        prompt: the prompt with its template's special tokens.
        response: the response as sampled.
        full: prompt and response, without a gap.
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Return the spec of the container; strings do not have the last dimension of ``shape``."""
        shape = torch.Size(shape)[:-1]
        names = ["prompt", "response", "full"] if keys is None else keys
        leaves = {name: NonTensor(shape=shape, example_data="a string") for name in names}
        return Composite(leaves, shape=shape, data_cls=cls)


class ChatHistory(conversions.ChatConversions, TensorClass["nocast"]):
    """The conversations of a batch, each field a :class:`~torchrl_llm.data.history.History`.

    Attributes:
        prompt: the conversation that the model answers.
        response: the one message of the answer.
        full: prompt and response together.
    """

    prompt: Any = None
    response: Any = None
    full: Any = None

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Return the spec of the container; each field is a :meth:`History.default_spec`.

        Args:
            shape: as in TorchRL: the batch dimensions, and one dimension that is dropped. Messages
                have one more dimension.
            keys: the fields to declare; all by default.
        """
        shape = tuple(shape)
        names = ["prompt", "response", "full"] if keys is None else keys
        leaves = {name: History.default_spec(shape=(*shape, -1)) for name in names}
        return Composite(leaves, shape=shape[:-1], data_cls=cls, step_mdp_static=True)


class _Made:
    """Reading and construction of views for conversions."""

    history = History

    @staticmethod
    def columns(view: Any) -> dict[str, list[Any]]:
        """Return the filled columns of a view by name, each as a list of rows."""
        if isinstance(view, Tokens):
            found = {name: read_rows(view, name, None) for name in ("prompt", "response", "full")}
            return {name: rows for name, rows in found.items() if rows is not None}
        found = {name: view._tensordict.get(name, None) for name in ("prompt", "response", "full")}
        return {
            name: value.chats if isinstance(value, History) else value.tolist()
            for name, value in found.items()
            if value is not None
        }

    @staticmethod
    def text(columns: dict[str, list[str]]) -> Text:
        """Text view of columns of strings."""
        size = torch.Size([len(next(iter(columns.values())))])
        source = {name: Column.of(values) for name, values in columns.items()}
        return Text._from_tensordict(TensorDict._new_unsafe(source=source, batch_size=size))

    @staticmethod
    def tokens(columns: dict[str, list[Tensor]]) -> Tokens:
        """Ragged tokens view of columns of rows."""
        return Tokens._from_tensordict(ragged_rows(columns))

    @staticmethod
    def chats(histories: dict[str, History]) -> ChatHistory:
        """Chat view of histories."""
        size = next(iter(histories.values()))._tensordict.batch_size
        return ChatHistory._from_tensordict(TensorDict(histories, batch_size=size))


def _empty_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Implement ``empty``: the result is ragged, because there is no dense data yet.

    TorchRL's ``step_mdp`` fills the result with a policy's answers, which may be padded, and with
    an environment's next prompts, which are ragged.
    """
    node = self._tensordict.empty(*args, **kwargs)
    if not isinstance(node, LazyStackedTensorDict) and node.batch_dims == 1 and len(node):
        node = lazy_rows(list(node.unbind(0)))
    return type(self)._from_tensordict(node)


def _stack_dim(self: Any) -> int:
    """Return the dimension to unbind when these rows are stacked with ragged rows."""
    return getattr(self._tensordict, "stack_dim", 0)


def _with_padded(init: Any) -> Any:
    """Make a constructor with ``padded``, which the form of the rows determines.

    ``padded=False`` with dense columns converts them to ragged rows of one length.
    """

    @wraps(init)
    def construct(self: Any, *args: Any, padded: bool | None = None, **columns: Any) -> None:
        init(self, *args, **columns)
        if padded is False and self.padded and self._tensordict.batch_dims:
            self.__dict__["_tensordict"] = _rows_of(self._tensordict)
        elif padded and not self.padded:
            raise ValueError(
                f"padded=True with ragged rows in {type(self).__name__}: pad them with "
                "torchrl_llm.data.ragged.pad_rows, or omit padded"
            )

    shown = inspect.signature(init)
    batch = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flag = inspect.Parameter("padded", inspect.Parameter.KEYWORD_ONLY, default=None)
    construct.__signature__ = shown.replace(parameters=[*batch, flag])
    return construct


def _rows_of(td: Any) -> Any:
    return lazy_rows([_rows_of(part) for part in td.unbind(0)]) if td.batch_dims else td


for _container in (Tokens, Text, ChatHistory):
    _container._made = _Made
# The tensorclass decorator overwrites methods, so these are assigned after it.
Text._set_str = set_as_column
Text._memmap_ = mapped_with_its_rows(Text._memmap_)
for _container in (Tokens, LogProbs, Masks):
    _container.__init__ = _with_padded(_container.__init__)
for _container in (Tokens, LogProbs, TokenTrace):
    _container.empty = _empty_rows
    _container.stack_dim = property(_stack_dim)

for _container, _node in (
    (Tokens, "tokens"),
    (LogProbs, "log_probs"),
    (Masks, "masks"),
    (TokenTrace, "trace"),
):
    _container._dtypes = node_dtypes(_node)
TokenSupport._dtypes = dict.fromkeys(("token_ids", "counts"), torch.int32)
