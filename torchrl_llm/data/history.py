"""Batches of conversations: build, index, extend, render with a template, read back.

A :class:`History` looks like a tensor of messages: a message has shape ``[]``, a conversation
``[T]``, a batch ``[*B, T]``, or ``[*B, -1]`` if the number of messages differs. It stores one
immutable :class:`~torchrl_llm.data.chat.Chat` per conversation, in a node of ``batch_size``
``[*B]``.

Next: :mod:`torchrl_llm.data.text.templates` finds templates,
:mod:`torchrl_llm.data.text.whole_chats` renders and reads back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorClass
from torchrl.data import Composite, NonTensor

from torchrl_llm.compat.mixins import message_grid as grids
from torchrl_llm.compat.mixins.history_fields import HistoryFields, read_field
from torchrl_llm.compat.mixins.history_grid import HistoryGrid, over_generated
from torchrl_llm.data import column as cells
from torchrl_llm.data.chat import Chat, Message, chat_of
from torchrl_llm.data.column import Column
from torchrl_llm.data.content import ContentBase, as_written  # noqa: F401
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.data.text.templates import (  # noqa: F401
    DEFAULT_TEMPLATE,
    add_chat_template,
    remove_chat_template,
    resolve_template,
)
from torchrl_llm.data.text.whole_chats import WholeChats, read_text
from torchrl_llm.data.tokenize_options import TokenizeOptions
from torchrl_llm.errors import DataError, TokenizerError


class History(HistoryFields, HistoryGrid, TensorClass["nocast"]):
    """A message, a conversation, or a batch of conversations (one per row).

    ``History(role=..., content=...)`` makes one message, with lists a conversation, with nested
    lists a batch of conversations. :meth:`from_chats` takes message dicts, and :meth:`of` takes
    chats. Read messages by ``role``, ``content``, ``is_complete``, ``tool_calls`` and
    ``tool_responses``: each is one value for a message, a list for a conversation, and nested lists
    for a batch.

    Shape, indices and torch functions refer to the batch and to messages, which are the last
    dimension. ``h[0]`` is a conversation, ``h[..., -1]`` the last message of each conversation, and
    ``h[..., :-1]`` all other messages. ``torch.cat([h, g], -1)`` joins messages, and
    ``h.unbind(-1)`` splits them. ``shape`` ends with -1 if the number of messages differs;
    functions that need equal numbers then raise. ``batch_size`` is ``shape`` without the -1. ``==``
    compares message by message, or row by row if the number of messages differs.

    A conversation never changes: an index, a slice or a mask returns a copy. ``append`` and
    ``extend`` on a row (``h[0]``, ``h.unbind(0)``, ``for row in h``) also change the row in its
    batch.

    Args:
        role: author of the message: ``"system"``, ``"user"``, ``"assistant"``, ``"tool"`` or any
            other name.
        content: a string, a :class:`ContentBase` (one item or a stack ``[N]``), or a list of
            content items, which may be dicts.
        is_complete: whether the message has ended, for example by its end-of-turn token.
        tool_calls: ``{"name", "arguments"}`` mappings, with or without the ``"function"`` level.
        tool_responses: results in a message of role ``"tool"``, besides its content.
        tool_call_id: id of the call that a tool message answers.
        name: name of the speaker or tool.
        reasoning_content: reasoning, for templates that write it separately from the content.
        batch_size: with ``[n]``, lists of ``n`` values make a batch of single messages, which is
            accepted as a conversation where one is expected.

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
        """Make a batch of conversations, batch size ``[B]``; keeps their token records."""
        return cls._from_tensordict(cells.row_node(Column.of(chats)))

    @classmethod
    def _of_rows(cls, batch: tuple[int, ...], chats: list[Chat]) -> History:
        if not batch:
            return cls._from_tensordict(cells.cell_node(chats[0]))
        node = cells.row_node(Column.of(chats))
        return cls._from_tensordict(node if len(batch) == 1 else node.reshape(batch))

    @classmethod
    def from_chats(cls, chats: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]) -> History:
        """Make conversations from message dicts.

        Args:
            chats: a list of messages (shape ``[T]``), a list of such lists (``[B, T]``), or nested
                lists of equal length (``[*B, T]``).

        Raises:
            DataError: a message has no role, or its content has the wrong form.

        Example:
            >>> History.from_chats([{"role": "user", "content": "Hi"}]).content
            ['Hi']
        """
        chats = list(chats)
        if not chats:
            raise DataError("from_chats needs at least one conversation")
        if isinstance(chats[0], Mapping):
            return cls._of_rows((), [chat_of(chats, "message")])
        if isinstance(chats[0], (list, tuple)) and chats[0] and isinstance(chats[0][0], list):
            return cls.stack([cls.from_chats(rows) for rows in chats])
        return cls.of([chat_of(chat, f"chat {row}, message") for row, chat in enumerate(chats)])

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
        r"""Parse rendered text into messages, exact to the character.

        The template is chosen as in :meth:`apply_chat_template`. A last turn without its end mark
        gets ``is_complete=False``. A generation prompt at the end adds no message. Tool calls are
        removed from the content. For sampled text, use its token ids instead if possible.

        Args:
            text: one text (result: batch size ``[]``) or several (``[B]``).
            chat_template_name: name of the template that wrote the text; ChatML by default.
            chat_template: its Jinja text.
            tokenizer: its tokenizer, which defines the end-of-sequence token if the family uses
                one.
            strict: raise if the text can be read in two ways.

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
            return cls._of_rows((), [read_text(text, spec, tokenizer, strict=strict)])
        return cls.of([read_text(one, spec, tokenizer, strict=strict) for one in text])

    @classmethod
    def default_spec(cls, shape: Any = (-1,), example: Chat | None = None) -> Composite:
        """Return the spec of a history.

        Args:
            shape: the batch and one dynamic dimension for the messages, ``(*B, -1)``.
            example: the conversation that ``rand`` and ``zero`` return; a greeting by default. An
                environment must be able to step it.
        """
        shape = torch.Size(shape)[:-1]
        if example is None:
            example = Chat([{"role": "user", "content": "Hello"}])
        leaf = NonTensor(shape=shape, example_data=example)
        return Composite(messages=leaf, shape=shape, data_cls=cls)

    # -- reading ----------------------------------------------------------------------------------

    @property
    def chats(self) -> list[Chat]:
        """The conversations, with batch dimensions flattened in row-major order."""
        return grids.flattened(grids.cells_of(self._tensordict), self._tensordict.batch_dims)

    role = read_field("role", "Who speaks in each message.")
    is_complete = read_field("is_complete", "Whether each message was ended.", default=True)
    tool_calls = read_field("tool_calls", "The tool calls; ``None`` where no message has any.")
    tool_responses = read_field(
        "tool_responses", "The tool responses; ``None`` where no message has any."
    )
    content = read_field(
        "content",
        "The content of each message (a string, a list of dicts, or :class:`ContentBase`).",
        change=as_written,
    )

    def conversations(self) -> list[Chat]:
        """The conversations; a batch of single messages counts as one conversation."""
        return grids.conversations(self._tensordict)[1]

    # -- growing ----------------------------------------------------------------------------------

    def append(
        self, history: History | Mapping[str, Any], *, inplace: bool = True, dim: int = -1
    ) -> History:
        """Append one message to each conversation, or with ``dim=0`` a conversation to a batch.

        Args:
            history: one message for a conversation, ``[B]`` messages for ``[B]`` conversations (a
                conversation of ``B`` messages is also accepted), or a message dict.
            inplace: change this history (its column is replaced) and return it.
            dim: the dimension along which to append; batch and messages count as dimensions.

        Raises:
            ValueError: the number of messages differs from the number of conversations.

        Example:
            >>> h = History(role=["user"], content=["Hi"])
            >>> h.append(History(role="assistant", content="Hello")).content
            ['Hi', 'Hello']
        """
        batch, chats = grids.conversations(self._tensordict)
        if isinstance(history, Mapping):
            history = self._of_rows((), [Message.of(history)])
        self._require_history("append", history)
        axis = grids.axis(dim, len(batch) + 1)
        if axis < len(batch):
            return self.extend(history.unsqueeze(axis), inplace=inplace, dim=axis)
        added = grids.single_messages(history._tensordict)
        if added is None or len(added) != len(chats):
            raise ValueError(
                f"append needs one message per conversation, shape {list(batch)}, got a history of "
                f"shape {list(history.shape)}; use extend for several"
            )
        return self._grown(batch, [a + b for a, b in zip(chats, added, strict=True)], inplace)

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Append the messages, or the rows, of another history with as many dimensions.

        Args:
            history: the messages or rows to add.
            inplace: change this history and return it.
            dim: the dimension along which to append. 0 means the messages of one conversation, or
                the rows of a batch; -1 always means the messages.

        Raises:
            ValueError: the shapes do not fit, or rows are added to a row of another batch.

        Example:
            >>> h = History(role=["user"], content=["Hi"])
            >>> h.extend(History(role=["assistant", "user"], content=["Hello", "Bye"])).role
            ['user', 'assistant', 'user']
        """
        batch, chats = grids.conversations(self._tensordict)
        self._require_history("extend", history)
        other_batch, other = grids.conversations(history._tensordict)
        axis = grids.axis(dim, len(batch) + 1)
        if len(batch) != len(other_batch):
            raise ValueError(
                f"extend needs histories with as many dimensions, got {list(self.shape)} and "
                f"{list(history.shape)}; use append for one message"
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
        return self._grown(batch, [a + b for a, b in zip(chats, other, strict=True)], inplace)

    def _grown(self, batch: tuple[int, ...], chats: list[Chat], inplace: bool) -> History:
        new = self._of_rows(batch, chats)
        if not inplace:
            return new
        self._tell_batch(chats)
        if tuple(self._tensordict.batch_size) != batch:  # messages that count as one conversation
            object.__setattr__(self, "_tensordict", new._tensordict)
        else:
            self._tensordict.set("messages", new._tensordict.get("messages"))
        return self

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
        r"""Render the conversations with a chat template, and tokenize them on request.

        The method uses the first available template of: ``chat_template``, ``chat_template_name``,
        a template registered by :func:`add_chat_template` for the model, the tokenizer's own, the
        built-in one of the model's family, ChatML. Messages of role ``"<none>"`` are left out. A
        last assistant message with ``is_complete=False`` is left open. In token ids, special-token
        strings inside contents are plain characters.

        Args:
            tokenizer: required for ids; for text, required only without ``chat_template`` and
                ``chat_template_name``.
            add_generation_prompt: end with the header of the model's turn.
            chat_template: a Jinja text.
            chat_template_name: name of a template.
            continue_final_message: end with the content of the last message, without closing its
                turn.
            tokenize: return ids instead of text; by default if a mask, tensors or a dict are
                requested.
            padding: pad the rows to one length on the tokenizer's side.
            truncation: cut rows to ``max_length`` (the tokenizer's by default) on its side.
            max_length: length in tokens for truncation and ``padding="max_length"``.
            return_tensors: ``"pt"`` for tensors if ``return_dict=False``.
            return_dict: return a TensorDict with ``input_ids`` (int64), ``attention_mask`` (bool)
                and ``assistant_masks`` (bool), each ``[T]``; the default if ids are requested.
            return_assistant_tokens_mask: also return the mask of the assistant's words, including
                end-of-turn tokens, with or without ``{% generation %}`` in the template.
            tools: JSON schemas or documented functions.
            strict: reject contents that would be parsed as different messages (built-in families).
            **template_variables: variables of the template, such as ``enable_thinking``; a name
                that the template does not use raises an error.

        Returns:
            Text: a string, or a list for a batch. Ids with ``return_dict``: a TensorDict; for a
            batch, a lazy stack of rows, or a dense ``[B, T]`` TensorDict if padded. Ids without
            ``return_dict``: lists of ids, or tensors.

        Raises:
            TemplateError: there is no template, it rejects or cannot express a message, or an
                argument is unknown.
            TokenizerError: ids are requested without a fast tokenizer.

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
        batch, chats = grids.conversations(self._tensordict)
        chats = [grids.without_placeholders(chat) for chat in chats]
        how = WholeChats(
            spec=spec,
            tokenizer=tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=template_variables,
            strict=strict,
        )
        if not options.ids:
            return grids.nested(how.texts(chats), batch)
        if tokenizer is None:
            raise TokenizerError("token ids need a tokenizer; for text pass tokenize=False")
        if len(batch) > 1:
            raise DataError(f"ids need at most one batch dimension, got batch size {list(batch)}")
        encoded = how.encoded(chats, assistant_mask=options.assistant_mask)
        return options.finish(encoded, tokenizer, bool(batch))


# -- replacements of generated methods -------------------------------------------------------------

_generated_init = History.__init__


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


# The tensorclass decorator writes its own operators into the class, so these are assigned after it.
History.__init__ = _init
History.__deepcopy__ = lambda self, memo: self.clone()  # cells never change; no link to a batch
History._set_str = cells.set_as_column
History._memmap_ = cells.mapped_with_its_rows(History._memmap_)
History._canonical = staticmethod(canonical_message)
over_generated(History, HistoryGrid)
over_generated(History, HistoryFields)
