"""Conversations with a batch: build, index, extend, render with a template, read back.

A :class:`History` looks like a tensor of messages: a message has shape ``[]``, a conversation
``[T]``, a batch ``[*B, T]``, or ``[*B, -1]`` where the number of messages differs. It is stored as
one immutable :class:`~torchrl_llm.data.column.Chat` a conversation, in a node of ``batch_size``
``[*B]``.

Next: :mod:`torchrl_llm.data.text.templates` finds templates,
:mod:`torchrl_llm.data.text.whole_chats` renders and reads back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorClass
from tensordict._torch_func import _stack as tensordict_stack
from tensordict.utils import _shape as tensordict_shape
from torch import Tensor
from torchrl.data import Composite, NonTensor

from torchrl_llm.data import column as cells
from torchrl_llm.data import message_grid as grids
from torchrl_llm.data.column import Chat, Column, Message
from torchrl_llm.data.content import ContentBase, as_written  # noqa: F401
from torchrl_llm.data.message_fields import (
    FIELDS,
    MessageFields,
    asked_inside,
    fixed,
    read_fields,
)
from torchrl_llm.data.text.templates import (  # noqa: F401
    DEFAULT_TEMPLATE,
    add_chat_template,
    remove_chat_template,
    resolve_template,
)
from torchrl_llm.data.text.whole_chats import encode_chats, read_text, render_chats
from torchrl_llm.data.tokenize_options import TokenizeOptions
from torchrl_llm.errors import DataError, TokenizerError


class History(MessageFields, TensorClass["nocast"]):
    """Conversations, one per row.

    ``History(role=..., content=...)`` makes one message, or with lists one conversation, or with
    nested lists a batch of them; :meth:`from_chats` takes message dicts and :meth:`of` chats.
    Messages are read by ``role``, ``content``, ``is_complete``, ``tool_calls`` and
    ``tool_responses``: one value for a message, a list for a conversation, nested for a batch.

    Shape, indices and the functions of torch are over batch and messages, which come last:
    ``h[0]`` is a conversation, ``h[..., -1]`` the last message of each and ``h[..., :-1]`` all but
    that, ``torch.cat([h, g], -1)`` joins messages and ``h.unbind(-1)`` takes them apart. ``shape``
    ends with -1 where the number of messages differs; what would need equally many then raises.
    ``batch_size`` is the same. ``==`` compares message by message, or row by row where their number
    differs.

    A conversation never changes: a message, a slice and a mask are copies. ``append`` and
    ``extend`` on a row (``h[0]``, ``h.unbind(0)``, ``for row in h``) grow it in its batch too.

    Args:
        role: who speaks; ``"system"``, ``"user"``, ``"assistant"``, ``"tool"`` or any other name.
        content: a string, a :class:`ContentBase` (one item or a stack ``[N]``), or a list of
            content items, which may be dicts.
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
        >>> h[..., -1].content, h.shape
        (['Hello!'], torch.Size([1, 2]))
    """

    messages: Any = None

    @classmethod
    def of(cls, chats: Iterable[Chat]) -> History:
        """A batch of conversations, batch size ``[B]``; their token records are kept."""
        return cls._from_tensordict(cells.row_node(Column.of(chats)))

    @classmethod
    def from_chats(cls, chats: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]) -> History:
        """Conversations from message dicts.

        Args:
            chats: a list of messages (shape ``[T]``), a list of such lists (``[B, T]``), or lists
                of these, equally long (``[*B, T]``).

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
        if isinstance(chats[0], (list, tuple)) and chats[0] and isinstance(chats[0][0], list):
            return _stack([cls.from_chats(rows) for rows in chats])
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
            chat_template_name: name of the template that wrote the text; ChatML without any.
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
        spec = resolve_template(tokenizer, chat_template, chat_template_name, DEFAULT_TEMPLATE)
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
        """The content of each message (a string, a list of dicts, or :class:`ContentBase`)."""
        stored = cells.cells_of(self._tensordict)
        return cells.read_messages(stored, lambda message: as_written(message["content"]))

    @property
    def is_complete(self) -> Any:
        """Whether each message was ended."""
        return _field(self, "is_complete", True)

    @property
    def tool_calls(self) -> Any:
        """The tool calls of each message; ``None`` where no message has any."""
        return _found(_field(self, "tool_calls"))

    @property
    def tool_responses(self) -> Any:
        """The tool responses of each message; ``None`` where no message has any."""
        return _found(_field(self, "tool_responses"))

    # -- growing ----------------------------------------------------------------------------------

    def append(
        self, history: History | Mapping[str, Any], *, inplace: bool = True, dim: int = -1
    ) -> History:
        """Add one message to each conversation, or with ``dim=0`` one conversation to a batch.

        Args:
            history: one message for a conversation, ``[B]`` messages for ``[B]`` conversations (a
                conversation of ``B`` messages counts as these), or a message dict.
            inplace: change this history (by giving it a new column) and return it.
            dim: the dimension over batch and messages along which it is added.

        Raises:
            ValueError: the number of messages is not that of the conversations.

        Example:
            >>> h = History(role=["user"], content=["Hi"])
            >>> h.append(History(role="assistant", content="Hello")).content
            ['Hi', 'Hello']
        """
        batch, chats = cells.conversations(self._tensordict)
        if isinstance(history, Mapping):
            history = _single(Message.of(history))
        _require_history("append", history)
        axis = grids.axis(dim, len(batch) + 1)
        if axis < len(batch):
            return self.extend(history.unsqueeze(axis), inplace=inplace, dim=axis)
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
            inplace: change this history and return it.
            dim: dimension over batch and messages: 0 is the messages of one conversation, or the
                rows of a batch; -1 is always the messages.

        Raises:
            ValueError: the shapes do not fit, or rows are added to a row of another batch.

        Example:
            >>> h = History(role=["user"], content=["Hi"])
            >>> h.extend(History(role=["assistant", "user"], content=["Hello", "Bye"])).role
            ['user', 'assistant', 'user']
        """
        batch, chats = cells.conversations(self._tensordict)
        _require_history("extend", history)
        other_batch, other = cells.conversations(history._tensordict)
        axis = grids.axis(dim, len(batch) + 1)
        if len(batch) != len(other_batch):
            raise ValueError(
                f"extend needs histories with as many dimensions, got {_shape(self)} and "
                f"{_shape(history)}; use append for one message"
            )
        if axis < len(batch):
            grown = torch.cat([self, history], axis)
            if not inplace:
                return grown
            if "_link" in self.__dict__:
                raise ValueError("rows cannot be added to a part of a batch; pass inplace=False")
            object.__setattr__(self, "_tensordict", grown._tensordict)
            return self
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
        model's family, ChatML. Messages of role ``"<none>"`` are left out. A last assistant message
        with ``is_complete=False`` is left open. In token ids, special-token strings inside contents
        are plain characters.

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
        chats = [cells.without_placeholders(chat) for chat in chats]
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
_generated_from = History._from_tensordict
_generated_getitem = History.__getitem__
_generated_len = History.__len__
_generated_setitem = History.__setitem__
_generated_unbind = History.unbind
_generated_squeeze = History.squeeze
_generated_torch_function = History.__torch_function__


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
    node = cells.row_node(Column.of(chats))
    return History._from_tensordict(node if len(batch) == 1 else node.reshape(batch))


def _grown(history: History, batch: tuple[int, ...], chats: list[Chat], inplace: bool) -> History:
    new = _rebuilt(batch, chats)
    if not inplace:
        return new
    link = history.__dict__.get("_link")
    if link is not None:
        link.write(cells.flattened(cells.cells_of(history._tensordict), len(batch)), chats)
    if tuple(history._tensordict.batch_size) != batch:  # messages that count as one conversation
        object.__setattr__(history, "_tensordict", new._tensordict)
    else:
        history._tensordict.set("messages", new._tensordict.get("messages"))
    return history


def _fixed(name: str) -> Any:
    def refuse(self: History, value: Any) -> None:
        raise fixed(name, value)

    return refuse


def _found(values: Any) -> Any:
    pending = [values]
    while pending:
        value = pending.pop()
        if value is None:
            continue
        if not isinstance(value, list) or (value and isinstance(value[0], Mapping)):
            return values
        pending += value
    return None


def _require_history(name: str, value: Any) -> None:
    if not isinstance(value, History):
        raise DataError(
            f"{name} takes a History{' or a message dict' if name == 'append' else ''}, got "
            f'{type(value).__name__} {value!r:.60}; write History(role="user", content=...)'
        )


def _getitem(self: History, index: Any) -> History:
    node = self._tensordict
    dims = node.batch_dims
    if type(index) is int and dims:
        return _linked(self, _generated_getitem(self, index), index)
    if isinstance(index, (bool, str)) or not grids.is_grid(node):
        return _generated_getitem(self, index)
    parts = grids.expanded(index, dims + 1)
    if any(isinstance(part, (bool, str)) for part in parts):
        return _generated_getitem(self, index)
    parts = [torch.as_tensor(p) if hasattr(p, "__array_interface__") else p for p in parts]
    used = sum(grids.consumed(part) for part in parts)
    if used > dims + 1:
        raise IndexError(f"too many indices for {dims} batch dimensions and messages: {index!r}")
    if used <= dims:
        return _generated_getitem(self, tuple(parts))
    last, before = parts[-1], tuple(parts[:-1])
    if isinstance(last, slice) and last == slice(None):
        return _generated_getitem(self, before) if before else _view(self)
    lists = grids.is_list(last) and any(grids.is_list(part) for part in before)
    if last is None or grids.consumed(last) != 1 or lists or getattr(last, "ndim", 1) > 1:
        return _placed(self, tuple(parts), last is None)
    if isinstance(last, Tensor) and not last.ndim:
        last = int(last)
    rows = _generated_getitem(self, before) if before else self
    kept = rows._tensordict
    stored = cells.cells_of(kept)
    grids.check_mask(last, cells.flattened(stored, kept.batch_dims))
    picked = cells.pick_messages(stored, last)
    return _rebuilt(tuple(kept.batch_size), cells.flattened(picked, kept.batch_dims))


def _placed(self: History, index: tuple, conversations: bool) -> History:
    how = grids.rearranged if conversations else grids.picked
    if not conversations and -1 in grids.grid_shape(self._tensordict):
        rows, places = index if len(index) == 2 else (None, None)
        pairs = grids.is_list(rows) and grids.is_list(places)
        if not pairs or any(grids.consumed(p) != 1 or torch.as_tensor(p).ndim != 1 for p in index):
            raise grids.ragged_error(f"the index {index!r:.60}")
        whole = _generated_getitem(self, rows)
        chosen = torch.as_tensor(places)
        chosen = (chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).tolist()
        if len(chosen) != len(whole):
            raise IndexError(f"{len(whole)} rows and {len(chosen)} messages cannot be paired")
        pairs = zip(whole.chats, chosen, strict=True)
        return History.of([Message._of((chat.messages[at],), None) for chat, at in pairs])
    return _rebuilt(*how(self._tensordict, lambda places: places[index], "this index"))


def _linked(self: History, row: History, index: int) -> History:
    node = self._tensordict
    count = node.batch_size[0]
    below = node.batch_size[1:].numel()
    start = index % count * below
    row.__dict__["_link"] = grids.RowLink(node, list(range(start, start + below)))
    return row


def _view(self: History) -> History:
    return History._from_tensordict(self._tensordict)


def _setitem(self: History, index: Any, value: Any) -> None:
    node = self._tensordict
    if isinstance(value, History) and grids.is_grid(node):
        parts = grids.expanded(index, node.batch_dims + 1)
        used = sum(grids.consumed(part) for part in parts)
        if used == node.batch_dims + 1 and parts[-1] == slice(None):
            parts, used = parts[:-1], used - 1
        if used > node.batch_dims or not parts:
            raise DataError(
                f"messages do not change in place: h[{index!r:.40}] = ... cannot be done; build "
                "the conversations anew, h = h[..., :-1].append(messages, inplace=False) for "
                "another last message, h.replace(content=...) or torch.cat([...], -1) for any other"
            )
        index = tuple(parts)
        if not grids.is_grid(value._tensordict):
            value = _rebuilt(*cells.conversations(value._tensordict))
    _generated_setitem(self, index, value)


def _equal(self: History, other: object) -> Any:
    if not isinstance(other, History):
        return NotImplemented
    return grids.equal_messages(self._tensordict, other._tensordict)


def _different(self: History, other: object) -> Any:
    same = _equal(self, other)
    return same if same is NotImplemented else ~same


def _shape_of(self: History) -> torch.Size:
    # tensordict's stack compares the shapes of its nodes and takes no -1; there, a history is a
    # column of rows, and rows of other lengths stack as any others do.
    asking = sys._getframe(1)
    if asking.f_code is _ASKED_SHAPE and asking.f_back.f_code is _STACKING:
        return self._tensordict.batch_size
    return grids.grid_shape(self._tensordict)


def _batch_size_of(self: History) -> torch.Size:
    node = self._tensordict
    return node.batch_size if asked_inside() else grids.grid_shape(node)


def _set_batch_size(self: History, value: Any) -> None:
    size = torch.Size((value,) if isinstance(value, int) else value)
    if asked_inside(3):  # behind tensordict's __setattr__
        self._tensordict.batch_size = size
    elif size != grids.grid_shape(self._tensordict):
        raise DataError(
            f"the batch size of a History is its shape {list(self.shape)} and cannot be set to "
            f"{list(size)}; index or reshape it"
        )


def _batch_dims_of(self: History) -> int:
    return self._tensordict.batch_dims if asked_inside() else _dim(self)


_ASKED_SHAPE, _STACKING = tensordict_shape.__code__, tensordict_stack.__code__


def _from_node(
    cls: type[History], tensordict: Any, non_tensordict: Any = None, safe: bool = True
) -> History:
    # lazy_stack counts a negative dimension on the nodes, which lack that of the messages.
    asking = sys._getframe(1)
    if asking.f_code is _LAZY_STACKING and asking.f_locals["dim"] < 0:
        return _stack(asking.f_locals["items"], asking.f_locals["dim"])
    return _generated_from(tensordict, non_tensordict, safe)


_LAZY_STACKING = LazyStackedTensorDict.lazy_stack.__func__.__code__


def _size(self: History, dim: int | None = None) -> Any:
    shape = grids.grid_shape(self._tensordict)
    return shape if dim is None else shape[dim]


def _dim(self: History) -> int:
    node = self._tensordict
    if node.get("messages", None) is None:
        return node.batch_dims
    return node.batch_dims + grids.is_grid(node)


def _numel(self: History) -> int:
    _, chats = cells.conversations(self._tensordict)
    return max(1, sum(map(len, chats)))  # tensordict counts an empty batch as one, too


def _over_grid(name: str) -> Any:
    """An operation of tensors over batch and messages; of single messages, the generated one."""
    generated = getattr(History, name)

    def operation(self: History, *args: Any, **kwargs: Any) -> Any:
        node = self._tensordict
        if node.get("messages", None) is None or not grids.is_grid(node):
            return generated(self, *args, **kwargs)
        args = tuple(arg for arg in args if arg is not None)
        made = grids.rearranged(node, lambda places: getattr(places, name)(*args, **kwargs), name)
        if made and isinstance(made[0], tuple) and made[0] and isinstance(made[0][0], tuple):
            return tuple(_rebuilt(*one) for one in made)
        return _rebuilt(*made)

    operation.__name__ = name
    operation.__doc__ = f"``Tensor.{name}`` over batch and messages."
    return operation


def _unbind(self: History, dim: int = 0) -> tuple[History, ...]:
    axis = grids.axis(dim, max(1, _dim(self)))
    node = self._tensordict
    if axis < node.batch_dims or not grids.is_grid(node):
        rows = _generated_unbind(self, axis)
        return rows if axis else tuple(_linked(self, row, i) for i, row in enumerate(rows))
    if -1 in grids.grid_shape(node):
        raise grids.ragged_error("unbind over messages")
    return tuple(self[..., at] for at in range(grids.grid_shape(node)[-1]))


def _squeeze(self: History, dim: int | None = None) -> History:
    node = self._tensordict
    if not grids.is_grid(node):
        return _generated_squeeze(self) if dim is None else _generated_squeeze(self, dim)
    shape = grids.grid_shape(node)
    axes = range(len(shape)) if dim is None else [grids.axis(dim, len(shape))]
    drop = shape[-1] == 1 and len(shape) - 1 in axes
    rows = self[..., 0] if drop else self
    inner = [axis for axis in axes if axis < node.batch_dims and shape[axis] == 1]
    made = rows._tensordict
    for axis in reversed(inner):
        made = made.squeeze(axis)
    return History._from_tensordict(made)


def _cat(histories: Sequence[History], dim: int = 0) -> History:
    nodes = [history._tensordict for history in histories]
    axis = grids.axis(dim, _same_dims("cat", histories))
    forms = {grids.is_grid(node) for node in nodes}
    if len(forms) == 1 and all(axis < node.batch_dims for node in nodes):
        return History._from_tensordict(torch.cat(nodes, axis))
    rows = [cells.conversations(node) for node in nodes]
    if axis < len(rows[0][0]):
        return _cat([_rebuilt(*row) for row in rows], axis)
    if len({batch for batch, _ in rows}) != 1:
        raise DataError(f"cat over messages needs equal batches, got {[list(b) for b, _ in rows]}")
    joined = [sum(chats[1:], chats[0]) for chats in zip(*(c for _, c in rows), strict=True)]
    return _rebuilt(rows[0][0], joined)


def _stack(histories: Sequence[History], dim: int = 0) -> History:
    nodes = [history._tensordict for history in histories]
    axis = grids.axis(dim, _same_dims("stack", histories) + 1)
    forms = {grids.is_grid(node) for node in nodes}
    if len(forms) == 2:
        return _stack([_rebuilt(*cells.conversations(node)) for node in nodes], axis)
    if axis <= nodes[0].batch_dims:
        return History._from_tensordict(torch.stack(nodes, axis))
    return _rebuilt(*grids.stacked(nodes, axis))


def _same_dims(name: str, histories: Sequence[History]) -> int:
    dims = {_dim(history) for history in histories}
    if len(dims) != 1 or not all(isinstance(history, History) for history in histories):
        shapes = [list(grids.grid_shape(history._tensordict)) for history in histories]
        raise DataError(f"{name} needs histories with as many dimensions, got shapes {shapes}")
    return dims.pop()


_METHODS = (
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "unsqueeze", "expand"),
    *("repeat", "repeat_interleave", "roll", "flip", "gather", "masked_select", "split", "chunk"),
)


def _torch_function(
    cls: type[History], func: Any, types: Any, args: tuple = (), kwargs: Any = None
) -> Any:
    kwargs = dict(kwargs or {})
    name = getattr(func, "__name__", "")
    if func in (torch.cat, torch.concat, torch.stack) and "out" not in kwargs:
        given = args or (kwargs.pop("tensors"),)
        return (_stack if func is torch.stack else _cat)(*given, **kwargs)
    known = getattr(torch, name, None) is func and name in (*_METHODS, "unbind", "squeeze")
    if known and args and isinstance(args[0], History):
        return getattr(args[0], name)(*args[1:], **kwargs)
    if name in _OTHER_ORDER and getattr(torch, name, None) is func:
        raise DataError(
            f"torch.{name} of a History is not defined here; write it with transpose, permute, "
            "reshape or an index"
        )
    return _generated_torch_function(func, types, args, kwargs)


_OTHER_ORDER = frozenset(
    ("movedim", "moveaxis", "narrow", "rot90", "swapaxes", "swapdims", "tile", "fliplr", "flipud")
    + ("broadcast_to", "atleast_1d", "atleast_2d", "atleast_3d")
)


def _length(self: History) -> int:
    if self._tensordict.batch_dims:
        return _generated_len(self)
    stored = cells.cells_of(self._tensordict)
    return _generated_len(self) if cells.is_message(stored) else len(stored)


def _iterate(self: History) -> Iterator[History]:
    return (self[index] for index in range(_length(self)))


def _from_fields(cls: type[History], tensordict: Any, *args: Any, **kwargs: Any) -> History:
    if tensordict is not None and "role" in tensordict.keys():
        return cls(**read_fields(tensordict))
    return cls._from_tensordict(tensordict, *args, **kwargs)


# The tensorclass decorator writes its own operators into the class, so ours follow it.
History.__init__ = _init
History.__getitem__ = _getitem
History.__eq__ = _equal
History.__ne__ = _different
History.__len__ = _length
History.__deepcopy__ = lambda self, memo: self.clone()  # cells never change; no link to a batch
History.__iter__ = _iterate
History.__setitem__ = _setitem
History.__torch_function__ = classmethod(_torch_function)
History.unbind = History._unbind = _unbind
History.squeeze = _squeeze
History.size = _size
History.dim = History.ndimension = _dim
History.numel = _numel
History.shape = property(_shape_of)
History.cat = staticmethod(_cat)
History.stack = staticmethod(_stack)
History.ndim = property(_dim)
History.batch_size = property(_batch_size_of, _set_batch_size)
History.batch_dims = property(_batch_dims_of)
for _name in FIELDS:
    setattr(History, _name, getattr(History, _name).setter(_fixed(_name)))
for _name in _METHODS:
    if hasattr(History, _name):
        setattr(History, _name, _over_grid(_name))
History._set_str = cells.set_as_column
History._memmap_ = cells.mapped_with_its_rows(History._memmap_)
History._from_tensordict = classmethod(_from_node)
History.from_tensordict = classmethod(_from_fields)
