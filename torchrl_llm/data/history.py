"""Conversations with a batch: build, index, extend, render with a template, read back.

A :class:`History` looks like a tensor of messages, ``[*B, M]``: the batch of the conversations and
then their messages, whose number differs from row to row. It is stored as one immutable
:class:`~torchrl_llm.data.column.Chat` a conversation, so its ``batch_size`` is ``[*B]``; the index
of a message comes last, ``history[0, -1]``.

Next: :mod:`torchrl_llm.data.text.templates` finds templates,
:mod:`torchrl_llm.data.text.whole_chats` renders and reads back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, NonTensor

from torchrl_llm.data import column as cells
from torchrl_llm.data.column import Chat, Column, Message
from torchrl_llm.data.messages import ContentBase  # noqa: F401
from torchrl_llm.data.ragged import pad_rows, ragged_rows
from torchrl_llm.data.text.templates import (  # noqa: F401
    add_chat_template,
    remove_chat_template,
    resolve_template,
)
from torchrl_llm.data.text.whole_chats import EncodedChat, encode_chats, read_text, render_chats
from torchrl_llm.errors import ConfigError, DataError, TokenizerError


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """What ``apply_chat_template`` was asked to return.

    Args:
        tokenize: ids rather than text; ``None``: when anything below asks for ids.
        padding: ``False``, ``True`` or ``"longest"``, ``"max_length"``.
        truncation: cut rows to ``max_length``.
        max_length: tokens; the tokenizer's ``model_max_length`` by default.
        return_tensors: ``"pt"`` or ``None``.
        return_dict: ``None`` and ``True``: a TensorDict; ``False``: the ids alone.
        assistant_mask: with the assistant mask.

    Raises:
        ConfigError: a setting is unknown, or would have no effect.
    """

    tokenize: bool | None = None
    padding: bool | Literal["longest", "max_length"] = False
    truncation: bool = False
    max_length: int | None = None
    return_tensors: Literal["pt"] | None = None
    return_dict: bool | None = None
    assistant_mask: bool = False

    def __post_init__(self) -> None:
        if self.padding not in (False, True, "longest", "max_length", "do_not_pad"):
            raise ConfigError(
                f"padding must be a bool, 'longest' or 'max_length', got {self.padding!r}"
            )
        if self.return_tensors not in (None, "pt"):
            raise ConfigError(f"return_tensors must be 'pt' or None, got {self.return_tensors!r}")
        if self.max_length is not None and not (self.truncation or self.padding == "max_length"):
            raise ConfigError("max_length has no effect without truncation or padding='max_length'")
        if self.assistant_mask and self.return_dict is False:
            raise ConfigError("return_assistant_tokens_mask needs return_dict=True")
        if self.tokenize is False and (self.assistant_mask or self.return_tensors is not None):
            raise ConfigError("tokenize=False gives text, which has no mask and no tensors")
        if not self.ids and (self.padded or self.truncation):
            raise ConfigError("padding and truncation act on ids: pass tokenize=True")

    @property
    def ids(self) -> bool:
        """Whether ids are wanted rather than text."""
        if self.tokenize is not None:
            return self.tokenize
        return self.assistant_mask or self.return_tensors is not None or bool(self.return_dict)

    @property
    def padded(self) -> bool:
        """Whether rows are made equally long."""
        return self.padding not in (False, "do_not_pad")

    def finish(self, rows: Sequence[EncodedChat], tokenizer: Any, batched: bool) -> Any:
        """Encoded conversations in the wanted form.

        Args:
            rows: one a conversation.
            tokenizer: gives padding id and side, truncation side, and the default maximum.
            batched: whether there is a batch dimension (else there is one row).

        Raises:
            ConfigError: no maximum length is known where one is needed.
            TokenizerError: the tokenizer has neither a padding nor an end-of-sequence token.
        """
        if self.truncation:
            rows = [self._cut(row, tokenizer) for row in rows]
        columns = {
            "input_ids": [row.token_ids for row in rows],
            "attention_mask": [torch.ones_like(row.token_ids, dtype=torch.bool) for row in rows],
        }
        if self.assistant_mask:
            columns["assistant_masks"] = [row.assistant for row in rows]
        if self.padded:
            return self._padded(columns, tokenizer, batched)
        if self.return_dict is not False:
            return (
                ragged_rows(columns)
                if batched
                else TensorDict({k: c[0] for k, c in columns.items()})
            )
        ids = columns["input_ids"]
        ids = ids if self.return_tensors else [row.tolist() for row in ids]
        return ids if batched else ids[0]

    def _length(self, tokenizer: Any) -> int:
        length = self.max_length or tokenizer.model_max_length
        if length is None or length > 10**9:  # transformers' way of saying "unknown"
            raise ConfigError("pass max_length: the tokenizer does not say its maximum")
        return int(length)

    def _cut(self, row: EncodedChat, tokenizer: Any) -> EncodedChat:
        length = self._length(tokenizer)
        kept = slice(-length, None) if tokenizer.truncation_side == "left" else slice(length)
        mask = None if row.assistant is None else row.assistant[kept]
        return EncodedChat(row.token_ids[kept], mask)

    def _padded(
        self, columns: dict[str, list[Tensor]], tokenizer: Any, batched: bool
    ) -> TensorDictBase | Tensor | list:
        pad = tokenizer.pad_token_id
        pad = tokenizer.eos_token_id if pad is None else pad  # masks come from lengths, never ids
        if pad is None:
            raise TokenizerError("padding needs a tokenizer with a pad or an eos token")
        target = self._length(tokenizer) if self.padding == "max_length" else 0
        dense = {}
        for name, rows in columns.items():
            value = pad if name == "input_ids" else 0
            whole = pad_rows(rows, value, side=tokenizer.padding_side)
            missing = max(0, target - whole.shape[1])
            sides = (missing, 0) if tokenizer.padding_side == "left" else (0, missing)
            dense[name] = torch.nn.functional.pad(whole, sides, value=value)
        if not batched:
            dense = {name: value[0] for name, value in dense.items()}
        if self.return_dict is not False:
            size = [len(columns["input_ids"])] if batched else []
            return TensorDict(dense, batch_size=size)
        return dense["input_ids"] if self.return_tensors else dense["input_ids"].tolist()


class History(TensorClass["nocast"]):
    """Conversations, one per row.

    ``History(role=..., content=...)`` makes one message, or with lists one conversation, or with
    nested lists a batch of them; :meth:`from_chats` takes message dicts and :meth:`of` chats.
    Messages are read by ``role``, ``content``, ``is_complete``, ``tool_calls`` and
    ``tool_responses``: one value for a message, a list for a conversation, nested for a batch.

    An index addresses the batch first and then the message: ``h[0]`` is a conversation and
    ``h[0, -1]`` its last message, ``h[:, -1]`` the last message of each, ``h[:, :-1]`` all but
    that. ``...`` stands for the batch only. ``==`` compares row by row: a bool tensor ``[*B]``.

    Args:
        role: who speaks; ``"system"``, ``"user"``, ``"assistant"``, ``"tool"`` or any other name.
        content: a string, a :class:`ContentBase`, or a list of content items.
        is_complete: whether the message was ended, by its end-of-turn token for instance.
        tool_calls: ``{"name", "arguments"}`` mappings, with or without the ``"function"`` level.
        tool_responses: results that a message of role tool carries next to its content.
        tool_call_id: which call a tool message answers.
        name: name of the speaker or tool.
        reasoning_content: reasoning, for templates that write it apart from the content.
        batch_size: ``[n]`` for lists of ``n`` values makes a batch of single messages of them,
            which counts as a conversation wherever one is expected.

    Attributes:
        messages: the stored cells; read :attr:`chats` instead.

    Raises:
        DataError: lists of different lengths, or a message without a role.

    Example:
        >>> h = History.from_chats([[{"role": "user", "content": "Hi"}]])
        >>> h.append(History(role=["assistant"], content=["Hello!"], batch_size=[1])).role
        [['user', 'assistant']]
        >>> h[0, -1].content, h.batch_size
        ('Hello!', torch.Size([1]))
    """

    messages: Any = None

    @classmethod
    def of(cls, chats: Iterable[Chat]) -> History:
        """A batch of conversations, batch size ``[B]``; their token records are kept."""
        return cls._from_tensordict(cells.row_node(Column.of(chats)))

    @classmethod
    def from_chats(
        cls, chats: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]]
    ) -> History:
        """Conversations from message dicts.

        Args:
            chats: a list of messages (batch size ``[]``) or a list of such lists (``[B]``).

        Raises:
            DataError: a message has no role, or a content of the wrong form.

        Example:
            >>> History.from_chats([{"role": "user", "content": "Hi"}]).content
            ['Hi']
        """
        chats = list(chats)
        if not chats:
            raise DataError("from_chats needs at least one conversation")
        if isinstance(chats[0], Mapping):
            return _single(cells.chat_of(chats, "message"))
        return cls.of(
            [cells.chat_of(chat, f"chat {row}, message") for row, chat in enumerate(chats)]
        )

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Any = None,
        *,
        strict: bool = False,
    ) -> History:
        r"""Read rendered text back into messages, to the character.

        The template is chosen as for :meth:`apply_chat_template`. A last turn without its end mark
        gets ``is_complete=False``; a trailing generation prompt adds no message; tool calls leave
        the content. What a model sampled is better read from its token ids.

        Args:
            text: one text (result: batch size ``[]``) or several (``[B]``).
            chat_template_name: name of the template that wrote the text.
            chat_template: its Jinja text.
            tokenizer: its tokenizer; names the end-of-sequence token of families that use it.
            strict: raise on text that can be read in two ways.

        Raises:
            TemplateError: the template has no inverse parser, or the text is not of this template.
            AmbiguousTextError: ``strict``, and the text can be read in two ways.

        Example:
            >>> text = "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nHel"
            >>> h = History.from_text(text, chat_template_name="chatml_format")
            >>> h.content, h.is_complete
            (['Hi ', 'Hel'], [True, False])
        """
        spec = resolve_template(tokenizer, chat_template, chat_template_name)
        if isinstance(text, str):
            return _single(read_text(text, spec, tokenizer, strict=strict))
        return cls.of([read_text(one, spec, tokenizer, strict=strict) for one in text])

    @classmethod
    def default_spec(cls, shape: Any = (-1,), example: Chat | None = None) -> Composite:
        """Spec of a history.

        Args:
            shape: the batch and one dynamic dimension for the messages, ``(*B, -1)``.
            example: a conversation that ``rand`` and ``zero`` return; it must be one that an
                environment can step. A greeting by default.
        """
        shape = torch.Size(shape)[:-1]
        if example is None:
            example = Chat([{"role": "user", "content": "Hello"}])
        leaf = NonTensor(shape=shape, example_data=example)
        return Composite(messages=leaf, shape=shape, data_cls=cls)

    # -- reading ----------------------------------------------------------------------------------

    @property
    def chats(self) -> list[Chat]:
        """The conversations, batch dimensions flattened in row-major order."""
        return cells.flattened(cells.cells_of(self._tensordict), self._tensordict.batch_dims)

    @property
    def role(self) -> Any:
        """Who speaks in each message."""
        return _field(self, "role")

    @property
    def content(self) -> Any:
        """The content of each message."""
        return _field(self, "content")

    @property
    def is_complete(self) -> Any:
        """Whether each message was ended."""
        return _field(self, "is_complete", True)

    @property
    def tool_calls(self) -> Any:
        """The tool calls of each message, ``None`` for a message without any."""
        return _field(self, "tool_calls")

    @property
    def tool_responses(self) -> Any:
        """The tool responses of each message, ``None`` for a message without any."""
        return _field(self, "tool_responses")

    # -- growing ----------------------------------------------------------------------------------

    def append(
        self, history: History | Mapping[str, Any], *, inplace: bool = True, dim: int = -1
    ) -> History:
        """Add one message to each conversation.

        Args:
            history: one message for a conversation, ``[B]`` messages for ``[B]`` conversations (a
                conversation of ``B`` messages counts as these), or a message dict.
            inplace: change this history (by giving it a new column) and return it.
            dim: the message dimension, counted over batch and messages.

        Raises:
            ValueError: the number of messages is not that of the conversations.

        Example:
            >>> h = History(role=["user"], content=["Hi"])
            >>> h.append(History(role="assistant", content="Hello")).content
            ['Hi', 'Hello']
        """
        batch, chats = cells.conversations(self._tensordict)
        if _axis(dim, len(batch) + 1) != len(batch):
            raise ValueError(f"append adds messages, dimension {len(batch)} or -1; got dim={dim}")
        if isinstance(history, Mapping):
            history = _single(Message.of(history))
        added = cells.single_messages(history._tensordict)
        if added is None or len(added) != len(chats):
            raise ValueError(
                f"append needs one message a conversation, shape {list(batch)}, got a history of "
                f"shape {_shape(history)}; use extend for several"
            )
        return _grown(self, batch, [a + b for a, b in zip(chats, added, strict=True)], inplace)

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Add the messages, or the rows, of another history with as many dimensions.

        Args:
            history: what to add.
            inplace: change this history and return it; only along the messages.
            dim: dimension over batch and messages: 0 is the messages of one conversation, or the
                rows of a batch; -1 is always the messages.

        Raises:
            ValueError: the shapes do not fit, or rows are to be added in place.

        Example:
            >>> h = History(role=["user"], content=["Hi"])
            >>> h.extend(History(role=["assistant", "user"], content=["Hello", "Bye"])).role
            ['user', 'assistant', 'user']
        """
        batch, chats = cells.conversations(self._tensordict)
        other_batch, other = cells.conversations(history._tensordict)
        axis = _axis(dim, len(batch) + 1)
        if len(batch) != len(other_batch):
            raise ValueError(
                f"extend needs histories with as many dimensions, got {_shape(self)} and "
                f"{_shape(history)}; use append for one message"
            )
        if axis < len(batch):
            if inplace:
                raise ValueError(
                    "adding rows changes the batch size: pass inplace=False, or dim=-1 to add "
                    "messages to each conversation"
                )
            return torch.cat([self, history], axis)
        if batch != other_batch:
            raise ValueError(f"extend needs equal batches, got {list(batch)}, {list(other_batch)}")
        return _grown(self, batch, [a + b for a, b in zip(chats, other, strict=True)], inplace)

    # -- templates --------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        *,
        tokenizer: Any = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        padding: bool | Literal["longest", "max_length"] = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Literal["pt"] | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        tools: Sequence[Any] | None = None,
        strict: bool = True,
        **template_variables: Any,
    ) -> Any:
        r"""Render the conversations with a chat template, and tokenize them if asked.

        The template is the first of: ``chat_template``, ``chat_template_name``, one registered by
        :func:`add_chat_template` for the model, the tokenizer's own, the built-in one of the
        model's family, ChatML. A last assistant message with ``is_complete=False`` is left open.
        In token ids, special-token strings inside contents are plain characters.

        Args:
            tokenizer: needed for ids; for text, only where neither text nor name is given.
            add_generation_prompt: end with the header of the model's turn.
            chat_template: a Jinja text.
            chat_template_name: name of a template.
            continue_final_message: end with the content of the last message, its turn left open.
            tokenize: ids instead of text; by default when a mask, tensors or a dict are asked for.
            padding: pad the rows to one length on the tokenizer's side.
            truncation: cut rows to ``max_length`` (the tokenizer's by default) on its side.
            max_length: tokens, for truncation and ``padding="max_length"``.
            return_tensors: ``"pt"`` for tensors where ``return_dict=False``.
            return_dict: a TensorDict with ``input_ids`` (int64), ``attention_mask`` (bool) and
                ``assistant_masks`` (bool), each ``[T]``; default when ids are asked for.
            return_assistant_tokens_mask: also the mask of the assistant's words, their end-of-turn
                tokens included, whether or not the template has ``{% generation %}``.
            tools: JSON schemas or documented functions.
            strict: refuse contents that read back as other messages (built-in families).
            **template_variables: variables of the template, such as ``enable_thinking``; a name
                that the template does not use is an error.

        Returns:
            Text: a string, for a batch a list. Ids with ``return_dict``: a TensorDict, for a batch
            a lazy stack of rows, or a dense ``[B, T]`` TensorDict when padded. Without: lists of
            ids, or tensors.

        Raises:
            TemplateError: no template; a message that it refuses or cannot express; an unknown
                argument.
            TokenizerError: ids without a fast tokenizer.

        Example:
            >>> h = History(role=["user", "assistant"], content=["Hi", "Hello"])
            >>> h.apply_chat_template(chat_template_name="falcon", add_generation_prompt=False)
            'User: Hi\n\nAssistant: Hello<|endoftext|>\n\n'
        """
        options = TokenizeOptions(
            tokenize=tokenize,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            return_dict=return_dict,
            assistant_mask=return_assistant_tokens_mask,
        )
        spec = resolve_template(tokenizer, chat_template, chat_template_name)
        batch, chats = cells.conversations(self._tensordict)
        how = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "variables": template_variables,
            "strict": strict,
        }
        if not options.ids:
            return cells.nested(render_chats(chats, spec, tokenizer, **how), batch)
        if tokenizer is None:
            raise TokenizerError("token ids need a tokenizer; for text pass tokenize=False")
        if len(batch) > 1:
            raise DataError(f"ids need at most one batch dimension, got batch size {list(batch)}")
        encoded = encode_chats(chats, spec, tokenizer, assistant_mask=options.assistant_mask, **how)
        return options.finish(encoded, tokenizer, bool(batch))


# -- what a history is made of --------------------------------------------------------------------

_generated_init = History.__init__
_generated_getitem = History.__getitem__
_generated_len = History.__len__


def _init(
    self: History,
    role: Any = None,
    content: Any = None,
    is_complete: Any = True,
    tool_calls: Any = None,
    tool_responses: Any = None,
    *,
    tool_call_id: Any = None,
    name: Any = None,
    reasoning_content: Any = None,
    messages: Any = None,
    batch_size: Any = None,
    device: Any = None,
) -> None:
    if messages is not None:
        _generated_init(self, messages=messages, batch_size=batch_size, device=device)
        return
    fields = {
        "role": role,
        "content": content,
        "is_complete": is_complete,
        "tool_calls": tool_calls,
        "tool_responses": tool_responses,
        "tool_call_id": tool_call_id,
        "name": name,
        "reasoning_content": reasoning_content,
    }
    given = {key: value for key, value in fields.items() if value is not None}
    batch = (batch_size,) if isinstance(batch_size, int) else batch_size
    node = cells.build_node(given, None if batch is None else tuple(batch))
    _generated_init(self, batch_size=node.batch_size, device=device)
    object.__setattr__(self, "_tensordict", node)
    object.__setattr__(self, "_non_tensordict", {})


def _single(cell: Chat) -> History:
    return History._from_tensordict(cells.cell_node(cell))


def _field(history: History, key: str, default: Any = None) -> Any:
    stored = cells.cells_of(history._tensordict)
    return cells.read_messages(stored, lambda message: message.get(key, default))


def _shape(history: History) -> list[Any]:
    return cells.virtual_shape(history._tensordict)


def _rebuilt(batch: tuple[int, ...], chats: list[Chat]) -> History:
    if not batch:
        return _single(chats[0])
    rows = History.of(chats)
    return rows if len(batch) == 1 else rows.reshape(batch)


def _grown(history: History, batch: tuple[int, ...], chats: list[Chat], inplace: bool) -> History:
    new = _rebuilt(batch, chats)
    if not inplace:
        return new
    if tuple(history.batch_size) != batch:  # single messages that count as one conversation
        object.__setattr__(history, "_tensordict", new._tensordict)
    else:
        history._tensordict.set("messages", new._tensordict.get("messages"))
    return history


def _axis(dim: int, count: int) -> int:
    if not -count <= dim < count:
        raise ValueError(f"dim over batch and messages must be in [{-count}, {count}), got {dim}")
    return dim % count


def _getitem(self: History, index: Any) -> History:
    parts = index if isinstance(index, tuple) else (index,)
    dims = self._tensordict.batch_dims
    if any(part is None or part is Ellipsis or isinstance(part, bool) for part in parts):
        return _generated_getitem(self, index)
    used = sum(part.ndim if _is_mask(part) else 1 for part in parts)
    if used <= dims or cells.is_message(cells.cells_of(self._tensordict)):
        return _generated_getitem(self, index)
    if used > dims + 1 or (_is_mask(parts[-1]) and parts[-1].ndim != 1):
        raise IndexError(f"too many indices for {dims} batch dimensions and messages: {index!r}")
    rows = _generated_getitem(self, parts[:-1]) if parts[:-1] else self
    picked = cells.pick_messages(cells.cells_of(rows._tensordict), parts[-1])
    return _rebuilt(tuple(rows.batch_size), cells.flattened(picked, rows.batch_dims))


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _equal(self: History, other: object) -> Any:
    if not isinstance(other, History):
        return NotImplemented
    batch, chats = cells.conversations(self._tensordict)
    other_batch, others = cells.conversations(other._tensordict)
    if batch != other_batch:
        return torch.tensor(False)
    same = [a == b for a, b in zip(chats, others, strict=True)]
    return torch.tensor(same, dtype=torch.bool).reshape(batch)


def _different(self: History, other: object) -> Any:
    same = _equal(self, other)
    return same if same is NotImplemented else ~same


def _length(self: History) -> int:
    if self._tensordict.batch_dims:
        return _generated_len(self)
    stored = cells.cells_of(self._tensordict)
    return _generated_len(self) if cells.is_message(stored) else len(stored)


def _iterate(self: History) -> Iterator[History]:
    return (self[index] for index in range(_length(self)))


# The tensorclass decorator writes its own operators into the class, so ours follow it.
History.__init__ = _init
History.__getitem__ = _getitem
History.__eq__ = _equal
History.__ne__ = _different
History.__len__ = _length
History.__iter__ = _iterate
History._set_str = cells.set_as_column
