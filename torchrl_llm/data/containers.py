"""Typed views over the columns of a batch: tokens, log-probs, masks, text, chats, trace.

Each class is a view: ``Tokens._from_tensordict(node)`` wraps the node that is stored, ragged (a
lazy stack of rows) or dense (padded), and copies nothing. Ragged columns are read as lists,
``tokens.get("full", as_list=True)`` or :func:`torchrl_llm.data.ragged.read_rows`; a dense one by
attribute, ``tokens.full``.

Shape legend: ``B`` rows, ``T`` tokens of prompt and response, ``P`` prompt, ``R`` response;
``T``, ``P`` and ``R`` differ from row to row.

``to_tokens``, ``to_text`` and ``to_history`` convert one view into another, for datasets and for
people; inside a rollout the token record of a conversation is kept instead.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, lazy_stack
from torch import Tensor
from torchrl.data import Composite, NonTensor, Unbounded

from torchrl_llm.data.column import Chat, Column, mapped_with_its_rows, set_as_column
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows, ragged_rows, read_rows
from torchrl_llm.data.token_facts import node_dtypes

__all__ = ["ChatHistory", "LogProbs", "Masks", "Text", "TokenSupport", "TokenTrace", "Tokens"]


def _row_by_row(convert: Any) -> Any:
    """A conversion of rows ``[B]``, for any number of batch dimensions."""

    @wraps(convert)
    def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.batch_size and _is_one_row(self):
            return convert(lazy_stack([self]), *args, **kwargs)[0]
        if len(self.batch_size) < 2:
            return convert(self, *args, **kwargs)
        return lazy_stack([converted(part, *args, **kwargs) for part in self.unbind(0)])

    return converted


def _is_one_row(rows: Any) -> bool:
    """Whether a container without batch dimensions holds one row; its fields may be batches."""
    values = (getattr(rows, name) for name in ("prompt", "response", "full"))
    value = next((value for value in values if value is not None), None)
    return isinstance(value, str) or len(getattr(value, "shape", ())) == 1


class _View:
    """What the token-aligned containers share; a mixin, because tensorclasses do not inherit."""

    _dtypes: dict[str, torch.dtype]

    @property
    def padded(self) -> bool:
        """Whether the rows are dense (padded to one length) rather than ragged."""
        node = self._tensordict
        if not isinstance(node, LazyStackedTensorDict):
            return True
        # Policies write padded masks as rows, so that what is assigned to a row reaches the batch.
        rows = read_rows(node, "all_attention_mask", None) if node.batch_dims == 1 else None
        return rows is not None and len({*map(len, rows)}) == 1 and not all(r.all() for r in rows)

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Spec of the container with one dynamic dimension for the tokens.

        Args:
            shape: batch dimensions followed by the dynamic token dimension, ``(*B, -1)``.
            keys: the fields to declare; all token-aligned ones by default.
        """
        shape = torch.Size(shape)
        names = list(cls._dtypes) if keys is None else keys
        leaves = {name: Unbounded(shape=shape, dtype=cls._dtypes[name]) for name in names}
        return Composite(leaves, shape=shape[:-1], data_cls=cls)


class Tokens(TensorClass["nocast"], _View):
    """Token ids of a batch of rows.

    Attributes:
        prompt: int64 ``[B, P]``; padded on the left when dense.
        response: int64 ``[B, R]``; padded on the right when dense.
        full: int64 ``[B, T]``, prompt and response without a gap; when dense the two side by side,
            ``full[:, P:]`` is the response.
        finish_reason: int8 ``[B]``, codes of :class:`~torchrl_llm.data.enums.FinishReason`.
        temperature: float32 ``[B]``, temperature that the response was sampled at (1.0 for greedy).
        truncated_support: bool ``[B]``, whether top-k, top-p or min-p cut the distribution and the
            kept ids were not stored (see :class:`TokenSupport`); ratios of such rows are not
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

    @_row_by_row
    def to_text(self, tokenizer: Any, skip_special_tokens: bool = False) -> Text:
        """Decode every row.

        Args:
            tokenizer: a Hugging Face tokenizer.
            skip_special_tokens: leave special tokens out of the text.

        Raises:
            ValueError: the rows are padded, which a text cannot show.
        """
        if self.padded:
            raise ValueError("padded tokens cannot be converted; pass ragged rows")
        columns = {}
        for name in ("prompt", "response", "full"):
            rows = read_rows(self, name, None)
            if rows is not None:
                columns[name] = tokenizer.batch_decode(
                    [row.tolist() for row in rows],
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=False,
                )
        return Text._from_tensordict(_columns_node(columns))

    @_row_by_row
    def to_history(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        skip_special_tokens: bool = False,
        *,
        chat_template: str | None = None,
    ) -> ChatHistory:
        """Decode every row and read the text back into messages; see :meth:`Text.to_history`.

        Args:
            tokenizer: a Hugging Face tokenizer.
            chat_template_name: name of the template that wrote the text.
            skip_special_tokens: must stay off: they are what separates the messages.
            chat_template: its Jinja text.

        Raises:
            ValueError: special tokens are to be left out.
        """
        if skip_special_tokens:
            raise ValueError(
                "skip_special_tokens=True takes away what separates messages, got it in "
                "to_history; leave it out, or use to_text(..., skip_special_tokens=True)"
            )
        return self.to_text(tokenizer).to_history(tokenizer, chat_template_name, chat_template)


class LogProbs(TensorClass["nocast"], _View):
    """Log-probs of tokens in nats, log p(x_t | x_<t), aligned with :class:`Tokens`.

    Attributes:
        prompt: float32 ``[B, P]``.
        response: float32 ``[B, R]``.
        full: float32 ``[B, T]``; 0.0 at index 0 and wherever nothing was sampled or scored.
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None


class Masks(TensorClass["nocast"], _View):
    """Masks aligned with ``tokens.full``.

    Attributes:
        all_attention_mask: bool ``[B, T]``, true at every token, false at padding.
        all_assistant_mask: bool ``[B, T]``, true at the tokens of the assistant's turns, their
            end-of-turn tokens included.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None


class TokenTrace(TensorClass["nocast"], _View):
    """Where each token of ``tokens.full`` came from.

    Attributes:
        source: int8 ``[B, T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        turn: int16 ``[B, T]``, turn of the model that sampled the token, else -1.
        policy_version: int32 ``[B, T]``, weights that sampled the token, else -1.
        mask_reason: int8 ``[B, T]``, codes of :class:`~torchrl_llm.data.enums.MaskReason`.
    """

    source: Tensor | None = None
    turn: Tensor | None = None
    policy_version: Tensor | None = None
    mask_reason: Tensor | None = None


class TokenSupport(TensorClass["nocast"], _View):
    """The ids that top-k, top-p or min-p kept for each token, where they were recorded.

    A ratio is defined on these ids only; losses and policies that score read them. The counts are
    aligned with ``tokens.full``, the ids are not: those of one token follow those of the one
    before, ``S = counts.sum()``.

    Attributes:
        token_ids: int32 ``[B, S]``; padded on the right when dense, the counts say how many are
            real.
        counts: int32 ``[B, T]``; 0 where nothing was sampled, or nothing was cut.
    """

    token_ids: Tensor | None = None
    counts: Tensor | None = None


class Text(TensorClass["nocast"]):
    """The decoded view of a row, a string each.

    Attributes:
        prompt: the prompt with its template's special tokens.
        response: the response as sampled.
        full: both, without a gap.
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Spec of the container; ``shape`` ends with a dimension that strings do not have."""
        shape = torch.Size(shape)[:-1]
        names = ["prompt", "response", "full"] if keys is None else keys
        leaves = {name: NonTensor(shape=shape, example_data="a string") for name in names}
        return Composite(leaves, shape=shape, data_cls=cls)

    @_row_by_row
    def to_tokens(
        self,
        tokenizer: Any,
        padding: bool = False,
        truncation: bool = False,
        return_tensors: str | None = "pt",
    ) -> Tokens:
        """Encode every row; what spells a special token becomes one, nothing is added.

        Args:
            tokenizer: a Hugging Face tokenizer.
            padding: must stay off, as in TorchRL: rows are ragged.
            truncation: cut rows at the tokenizer's ``model_max_length``.
            return_tensors: ``"pt"`` or ``None``, which give the same.

        Returns:
            Ragged tokens. Prompt and response are encoded apart, so that the response's tokens
            follow the prompt's, and ``full`` is both.

        Raises:
            ValueError: for padding, or tensors that are not torch's.
        """
        if padding:
            raise ValueError(
                "padding must be False, got True: rows are ragged; pad them with "
                "torchrl_llm.data.ragged.pad_rows"
            )
        if return_tensors not in ("pt", None):
            raise ValueError(f'return_tensors must be "pt" or None, got {return_tensors!r}')
        texts = _read_columns(self)
        options = {"add_special_tokens": False, "truncation": truncation}
        ids = {
            name: [
                torch.tensor(row, dtype=torch.int64)
                for row in tokenizer(column, **options)["input_ids"]
            ]
            for name, column in texts.items()
        }
        if "prompt" in ids and "response" in ids:
            pairs = zip(ids["prompt"], ids["response"], strict=True)
            ids["full"] = [torch.cat(pair) for pair in pairs]
        return Tokens._from_tensordict(ragged_rows(ids))

    @_row_by_row
    def to_history(
        self,
        tokenizer: Any = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> ChatHistory:
        """Read every row's text back into messages.

        Args:
            tokenizer: finds the template, as for :meth:`History.from_text`.
            chat_template_name: name of the template that wrote the text.
            chat_template: its Jinja text.

        Returns:
            Histories of prompt and full; the response is what full has behind the prompt.

        Raises:
            TemplateError: a text is not one of this template.
        """
        texts = _read_columns(self)
        if "full" not in texts and "response" in texts:
            pairs = zip(texts["prompt"], texts["response"], strict=True)
            texts["full"] = [prompt + response for prompt, response in pairs]
        read = {
            name: History.from_text(texts[name], chat_template_name, chat_template, tokenizer)
            for name in ("prompt", "full")
            if name in texts
        }
        if len(read) == 2:
            rows = zip(read["prompt"].chats, read["full"].chats, strict=True)
            read["response"] = History.of([full[len(prompt) :] for prompt, full in rows])
        size = next(iter(read.values()))._tensordict.batch_size
        return ChatHistory._from_tensordict(TensorDict(read, batch_size=size))


class ChatHistory(TensorClass["nocast"]):
    """The conversations of a batch, each field a :class:`~torchrl_llm.data.history.History`.

    Attributes:
        prompt: the conversation that the model answers.
        response: the one message that it answered.
        full: both.
    """

    prompt: Any = None
    response: Any = None
    full: Any = None

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Spec of the container, each field a :meth:`History.default_spec`.

        Args:
            shape: as in TorchRL, batch dimensions and one that is dropped: messages have one more.
            keys: the fields to declare; all by default.
        """
        shape = tuple(shape)
        names = ["prompt", "response", "full"] if keys is None else keys
        leaves = {name: History.default_spec(shape=(*shape, -1)) for name in names}
        return Composite(leaves, shape=shape[:-1], data_cls=cls, step_mdp_static=True)

    @_row_by_row
    def to_text(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Text:
        """Render every row with a chat template.

        Args:
            tokenizer: a Hugging Face tokenizer.
            chat_template_name: name of the template; see ``History.apply_chat_template``.
            chat_template: its Jinja text.

        Returns:
            Prompt (with its generation prompt), full, and the response: full behind the prompt.

        Raises:
            ValueError: the text of a prompt is not how the full text begins.
        """
        named = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        columns = {}
        for name, history in _histories(self).items():
            columns[name] = History.of(history.chats).apply_chat_template(
                tokenizer=tokenizer, tokenize=False, add_generation_prompt=name == "prompt", **named
            )
        if len(columns) == 2:
            columns["response"] = _behind(columns["prompt"], columns["full"])
        return Text._from_tensordict(_columns_node(columns))

    @_row_by_row
    def to_tokens(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Tokens:
        """Token ids of every row: those of its token record where it has one, else encoded.

        Args:
            tokenizer: a fast Hugging Face tokenizer.
            chat_template_name: name of the template; see ``History.apply_chat_template``.
            chat_template: its Jinja text.

        Returns:
            Ragged prompt (with its generation prompt), full, and the response: full behind it.

        Raises:
            ValueError: the ids of a prompt are not how the full ids begin.
        """
        named = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        columns = {
            name: _ids(history.chats, tokenizer, name == "prompt", named)
            for name, history in _histories(self).items()
        }
        if len(columns) == 2:
            columns["response"] = _behind(columns["prompt"], columns["full"])
        return Tokens._from_tensordict(ragged_rows(columns))


def _columns_node(columns: dict[str, list]) -> TensorDict:
    size = torch.Size([len(next(iter(columns.values())))])
    source = {name: Column.of(values) for name, values in columns.items()}
    return TensorDict._new_unsafe(source=source, batch_size=size)


def _read_columns(text: Text) -> dict[str, list[str]]:
    found = {name: text._tensordict.get(name, None) for name in ("prompt", "response", "full")}
    lists = {name: value.tolist() for name, value in found.items() if value is not None}
    if not lists:
        raise ValueError("there is no text to convert")
    return lists


def _histories(chat: ChatHistory) -> dict[str, History]:
    found = {name: chat._tensordict.get(name, None) for name in ("prompt", "full", "response")}
    found = {name: value for name, value in found.items() if value is not None}
    if not found:
        raise ValueError("there is no history to convert")
    if len(found) > 1:
        found.pop("response", None)  # what full has behind the prompt
    return found


def _ids(chats: list[Chat], tokenizer: Any, prompt: bool, named: dict[str, Any]) -> list[Tensor]:
    rows = [_held(chat, prompt) for chat in chats]
    missing = [index for index, row in enumerate(rows) if row is None]
    if missing:
        encoded = History.of([chats[index] for index in missing]).apply_chat_template(
            tokenizer=tokenizer,
            return_tensors="pt",
            return_dict=False,
            add_generation_prompt=prompt,
            **named,
        )
        for index, row in zip(missing, encoded, strict=True):
            rows[index] = row
    return rows


def _held(chat: Chat, prompt: bool) -> Tensor | None:
    """Ids that a conversation carries, if they are all of it and of the wanted kind."""
    record = chat.record
    if record is None or record.num_messages != len(chat):
        return None
    return record.token_ids if (record.finish_reason is None) == prompt else None


def _behind(prompts: list[Any], fulls: list[Any]) -> list[Any]:
    rest = []
    for row, (prompt, full) in enumerate(zip(prompts, fulls, strict=True)):
        begins = full[: len(prompt)]
        same = begins == prompt if isinstance(full, str) else torch.equal(begins, prompt)
        if not same:
            raise ValueError(
                f"row {row}: the full conversation does not begin with the prompt (a template that "
                "rewrites history, or other messages), so there is no response to cut out"
            )
        rest.append(full[len(prompt) :])
    return rest


def _empty_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``empty`` of the token-aligned containers: ragged, for there is nothing that is dense.

    TorchRL's ``step_mdp`` fills it with the answers of a policy, which may be padded, and with the
    next prompts of an environment, which are ragged.
    """
    node = self._tensordict.empty(*args, **kwargs)
    if not isinstance(node, LazyStackedTensorDict) and node.batch_dims == 1 and len(node):
        node = lazy_rows(list(node.unbind(0)))
    return type(self)._from_tensordict(node)


def _stack_dim(self: Any) -> int:
    """The dimension to unbind when these rows are stacked with ragged ones."""
    return getattr(self._tensordict, "stack_dim", 0)


def _with_padded(init: Any) -> Any:
    """A constructor that takes ``padded``, which is no column here: the form of the rows tells it.

    ``padded=False`` with dense columns makes them ragged rows of one length.
    """

    @wraps(init)
    def construct(self: Any, *args: Any, padded: bool | None = None, **columns: Any) -> None:
        init(self, *args, **columns)
        if padded is False and self.padded and self._tensordict.batch_dims:
            self.__dict__["_tensordict"] = _rows_of(self._tensordict)
        elif padded and not self.padded:
            raise ValueError(
                f"padded=True with ragged rows in {type(self).__name__}: pad them with "
                "torchrl_llm.data.ragged.pad_rows, or leave padded out"
            )

    shown = inspect.signature(init)
    batch = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flag = inspect.Parameter("padded", inspect.Parameter.KEYWORD_ONLY, default=None)
    construct.__signature__ = shown.replace(parameters=[*batch, flag])
    return construct


def _rows_of(td: Any) -> Any:
    return lazy_rows([_rows_of(part) for part in td.unbind(0)]) if td.batch_dims else td


# The tensorclass decorator writes its own methods into the class, so ours follow it.
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
