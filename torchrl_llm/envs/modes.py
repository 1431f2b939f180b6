"""The three input modes of a chat environment, one class each.

A mode knows which keys hold the conversation, how a conversation becomes a prompt at reset, and how
the policy's output becomes the next prompt. Nothing else in :mod:`torchrl_llm.envs` asks which mode
it is in.

Shape legend: ``B`` rows, ``T`` tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from torchrl_llm.data.column import Chat, Column
from torchrl_llm.data.containers import ChatHistory, Text, TokenTrace
from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.formatter import ChatFormatter, Encoded
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import ragged_rows, read_rows, unpad_rows
from torchrl_llm.envs.specs import ColumnSpec, RaggedSpec
from torchrl_llm.errors import ConfigError, DataError

__all__ = [
    "HistoryMode",
    "InputMode",
    "TextMode",
    "TokensMode",
    "formatter_arguments",
    "make_mode",
    "message_text",
    "response_reader",
]


def message_text(message: dict[str, Any]) -> str:
    """The text of a message: what the model wrote where that is known, else its content.

    Args:
        message: a message dict. Where reasoning or tool calls were split off, ``raw`` (the decoded
            sample) is the text; else the content is all of it. The text items of a list content are
            joined; separate reasoning without ``raw`` is put back in ``<think>`` marks.

    Example:
        >>> message_text({"role": "assistant", "content": "4", "reasoning_content": "2+2"})
        '<think>2+2</think>4'
    """
    split = message.get("reasoning_content") is not None or message.get("tool_calls")
    if split and message.get("raw") is not None:
        return message["raw"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        parts = [part if isinstance(part, str) else part.get("text") or "" for part in content]
        content = "".join(parts)
    reasoning = message.get("reasoning_content")
    return f"<think>{reasoning}</think>{content}" if reasoning else content


class InputMode(ABC):
    """What an environment does differently for history, text and tokens.

    Args:
        formatter: renders and encodes conversations; history mode needs none.
        example: a conversation that ends with a user message, for the specs.
        policy_role: role of the model's messages.
    """

    name: str

    def __init__(self, formatter: ChatFormatter | None, example: Chat, policy_role: str) -> None:
        self.formatter = formatter
        self.example = example
        self.policy_role = policy_role

    @abstractmethod
    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """Specs of the keys that reset and step write, for ``size`` rows."""

    @abstractmethod
    def full_specs(self, size: int) -> dict[str, Composite]:
        """Specs of the key that the policy writes."""

    @abstractmethod
    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Write the prompts of new conversations; ``None`` gets a filler."""

    @abstractmethod
    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write the next prompts; rows that are not stepped keep theirs."""

    @abstractmethod
    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """The text of each response, and of nothing before it; an error where there is none."""


def _merge(new: Sequence[Any], old: Sequence[Any], stepped: list[bool] | None) -> list[Any]:
    if stepped is None:
        return list(new)
    return [a if moved else b for a, b, moved in zip(new, old, stepped, strict=True)]


def _missing(key: tuple[str, str]) -> DataError:
    return DataError(
        f"the policy did not write {key!r}, which the environment turns into the next prompt"
    )


class HistoryMode(InputMode):
    """Conversations: ``("history", "full")`` becomes the next ``("history", "prompt")``."""

    name = "history"

    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """``history.prompt``."""
        return {"history": self._spec("prompt", self.example, size)}

    def full_specs(self, size: int) -> dict[str, Composite]:
        """``history.full``."""
        answered = self.example + [{"role": self.policy_role, "content": "An answer."}]
        return {"history": self._spec("full", answered, size)}

    @staticmethod
    def _spec(field: str, chat: Chat, size: int) -> Composite:
        column = ColumnSpec((size, -1), example_data=chat)
        history = Composite(messages=column, shape=(size,), data_cls=History)
        return Composite({field: history}, shape=(size,), data_cls=ChatHistory)

    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Write ``history.prompt``."""
        self._write(out, [Chat() if chat is None else chat for chat in chats])

    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write ``history.prompt``; the token record moves with each chat."""
        full = self._read(td, "full")
        self._write(
            out, full if stepped is None else _merge(full, self._read(td, "prompt"), stepped)
        )

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """The last message of each conversation, if the model wrote it."""
        return [
            message_text(chat[-1])
            if len(chat) and chat[-1].get("role") == self.policy_role
            else DataError(f"the conversation does not end with a {self.policy_role!r} message")
            for chat in self._read(td, "full")
        ]

    @staticmethod
    def _read(td: TensorDictBase, field: str) -> list[Chat]:
        history = td.get(("history", field), None)
        if history is None:
            raise _missing(("history", field))
        return history.chats

    @staticmethod
    def _write(out: TensorDictBase, chats: list[Chat]) -> None:
        node = TensorDict._new_unsafe(
            source={"prompt": History.of(chats)}, batch_size=torch.Size([len(chats)])
        )
        out.set("history", ChatHistory._from_tensordict(node))


_TRACE = TokenTrace._dtypes
# What a token of unknown provenance gets.
_UNKNOWN = {
    "source": int(Source.TEMPLATE),
    "turn": -1,
    "policy_version": -1,
    "mask_reason": int(MaskReason.NOT_SAMPLED),
}


class _TokenCarrier(InputMode):
    """Text and tokens mode: ids, trace and log-probs travel as keys of their own."""

    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """``tokens.prompt``, ``log_probs.prompt`` and ``trace``."""
        return {
            "tokens": RaggedSpec({"prompt": torch.int64}, shape=(size,)),
            "log_probs": RaggedSpec({"prompt": torch.float32}, shape=(size,)),
            "trace": RaggedSpec(_TRACE, shape=(size,)),
        }

    def _start_tokens(
        self, out: TensorDictBase, rows: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        columns = {name: _filled(rows, value, name) for name, value in _UNKNOWN.items()}
        columns["source"] = [source.to(torch.int8) for source in sources]
        zeros = [torch.zeros(ids.shape) for ids in rows]
        self._write_tokens(out, rows, zeros, columns)

    def _step_tokens(
        self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None
    ) -> None:
        prompts = read_rows(td, ("tokens", "prompt"))
        # A policy that writes text only leaves no ids; its next prompt is encoded anew.
        full = _valid_rows(td, ("tokens", "full")) or [ids.new_zeros(0) for ids in prompts]
        trace = {
            name: _aligned(_valid_rows(td, ("trace", name)), full) or _filled(full, value, name)
            for name, value in _UNKNOWN.items()
        }
        # Empty rows say that the log-probs are unknown, which zeros would not.
        log_probs = _aligned(_valid_rows(td, ("log_probs", "full")), full)
        log_probs = log_probs or [torch.zeros(0) for _ in full]
        if stepped is not None:
            # The policy has run on these rows too: what belongs to the prompt is its beginning.
            kept = [len(ids) for ids in prompts]
            full = _merge(full, prompts, stepped)
            log_probs = _merge(log_probs, _cut(log_probs, kept), stepped)
            trace = {name: _merge(rows, _cut(rows, kept), stepped) for name, rows in trace.items()}
        self._write_tokens(out, full, log_probs, trace)

    @staticmethod
    def _write_tokens(
        out: TensorDictBase,
        rows: Sequence[Tensor],
        log_probs: Sequence[Tensor],
        trace: dict[str, Sequence[Tensor]],
    ) -> None:
        out.set("tokens", ragged_rows({"prompt": list(rows)}))
        out.set("log_probs", ragged_rows({"prompt": list(log_probs)}))
        out.set("trace", ragged_rows(trace))


def _filled(rows: Sequence[Tensor], value: int, name: str) -> list[Tensor]:
    return [torch.full(ids.shape, value, dtype=_TRACE[name]) for ids in rows]


def _cut(rows: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _aligned(column: list[Tensor] | None, rows: Sequence[Tensor]) -> list[Tensor] | None:
    if column is None or any(a.shape != b.shape for a, b in zip(column, rows, strict=True)):
        return None
    return column


def _valid_rows(td: TensorDictBase, key: tuple[str, str]) -> list[Tensor] | None:
    """Ragged rows as they are, right-padded dense ones cut to their valid tokens."""
    dense = td.get(key[0], None)
    rows = read_rows(td, key, None)
    if rows is None or not rows or dense is None:
        return rows
    mask = read_rows(td, ("masks", "all_attention_mask"), None)
    if mask is None or any(m.shape != row.shape for m, row in zip(mask, rows, strict=True)):
        return rows
    if all(bool(m.all()) for m in mask):
        return rows
    return unpad_rows(torch.stack(rows), torch.stack(mask))


class TextMode(_TokenCarrier):
    """Strings: ``("text", "full")`` becomes the next ``("text", "prompt")``.

    The sampled ids travel along in ``("tokens", "prompt")``, ``("log_probs", "prompt")`` and
    ``"trace"``, which are empty at reset, so that a turn that was sampled is not encoded again.
    """

    name = "text"

    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """``text.prompt`` beside the tokens."""
        return {"text": self._spec("prompt", "A question?", size), **super().prompt_specs(size)}

    def full_specs(self, size: int) -> dict[str, Composite]:
        """``text.full``."""
        return {"text": self._spec("full", "A question? An answer.", size)}

    @staticmethod
    def _spec(field: str, example: str, size: int) -> Composite:
        column = ColumnSpec((size, -1), example_data=example)
        return Composite({field: column}, shape=(size,), data_cls=Text)

    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Render the conversations, generation prompt included."""
        encoded = iter(self.formatter.encode_batch([chat for chat in chats if chat is not None]))
        texts = [
            "" if chat is None else self.formatter.decode(next(encoded).token_ids) for chat in chats
        ]
        self._write(out, texts)
        empty = [torch.zeros(0, dtype=torch.int64)] * len(chats)
        self._start_tokens(out, empty, empty)

    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write ``text.prompt`` and the ids beside it."""
        full = self._read(td, "full")
        self._write(
            out, full if stepped is None else _merge(full, self._read(td, "prompt"), stepped)
        )
        self._step_tokens(td, out, stepped)

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """``text.response``, or what ``text.full`` adds to the prompt."""
        responses = self._column(td, "response")
        if responses is not None:
            return responses.tolist()
        return [
            full[len(prompt) :]
            if full.startswith(prompt)
            else DataError("text.full does not begin with text.prompt, so the response is unknown")
            for full, prompt in zip(self._read(td, "full"), self._read(td, "prompt"), strict=True)
        ]

    @staticmethod
    def _column(td: TensorDictBase, field: str) -> Any:
        node = td.get("text", None)
        # Attribute access of a tensorclass unwraps the column; reading its tensordict keeps it.
        node = getattr(node, "_tensordict", node)
        return None if node is None else node.get(field, None)

    def _read(self, td: TensorDictBase, field: str) -> list[str]:
        column = self._column(td, field)
        if column is None:
            raise _missing(("text", field))
        return column.tolist()

    @staticmethod
    def _write(out: TensorDictBase, texts: list[str]) -> None:
        node = TensorDict._new_unsafe(
            source={"prompt": Column.of(texts)}, batch_size=torch.Size([len(texts)])
        )
        out.set("text", Text._from_tensordict(node))


class TokensMode(_TokenCarrier):
    """Token ids: ``("tokens", "full")`` becomes the next ``("tokens", "prompt")``."""

    name = "tokens"

    def full_specs(self, size: int) -> dict[str, Composite]:
        """``tokens.full``."""
        return {"tokens": RaggedSpec({"full": torch.int64}, shape=(size,))}

    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Encode the conversations, generation prompt included."""
        encoded = iter(self.formatter.encode_batch([chat for chat in chats if chat is not None]))
        nothing = torch.zeros(0, dtype=torch.int64)
        filler = Encoded(nothing, nothing, nothing.bool())
        items = [filler if chat is None else next(encoded) for chat in chats]
        self._start_tokens(out, [item.token_ids for item in items], [item.source for item in items])

    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write ``tokens.prompt`` and its trace."""
        if read_rows(td, ("tokens", "full"), None) is None:
            raise _missing(("tokens", "full"))
        self._step_tokens(td, out, stepped)

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """The decoded ids of each response."""
        rows = read_rows(td, ("tokens", "response"), None)
        if rows is None:
            full, prompts = _valid_rows(td, ("tokens", "full")), read_rows(td, ("tokens", "prompt"))
            rows = [ids[len(prompt) :] for ids, prompt in zip(full, prompts, strict=True)]
        return [self.formatter.decode(ids) for ids in rows]


_MODES: dict[str, type[InputMode]] = {
    mode.name: mode for mode in (HistoryMode, TextMode, TokensMode)
}

_FORMATTER_ARGS = ("chat_template", "chat_template_name", "tools")


def formatter_arguments(template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a formatter, with variables of the template in a mapping of their own.

    Example:
        >>> formatter_arguments({"tools": [], "enable_thinking": False})
        {'tools': [], 'template_kwargs': {'enable_thinking': False}}
    """
    given = template_kwargs or {}
    named = {key: value for key, value in given.items() if key in _FORMATTER_ARGS}
    variables = {key: value for key, value in given.items() if key not in _FORMATTER_ARGS}
    return {**named, "template_kwargs": variables}


def make_mode(
    name: str,
    *,
    tokenizer: Any = None,
    template_kwargs: dict[str, Any] | None = None,
    example: Chat,
    policy_role: str,
) -> InputMode:
    """The mode of that name.

    Args:
        name: ``"history"``, ``"text"`` or ``"tokens"``.
        tokenizer: a Hugging Face tokenizer; text and tokens mode cannot do without.
        template_kwargs: ``chat_template``, ``chat_template_name`` and ``tools`` of
            :class:`~torchrl_llm.data.formatter.ChatFormatter`; any other name is a variable of the
            template.
        example: conversation for the specs.
        policy_role: role of the model's messages.

    Raises:
        ConfigError: for an unknown mode, a missing tokenizer, or template arguments that would not
            be used.
        TemplateError: for a tokenizer without chat template.
    """
    if name not in _MODES:
        raise ConfigError(f"input_mode must be one of {sorted(_MODES)}, got {name!r}")
    if name == "history":
        if template_kwargs:
            raise ConfigError(
                "template_kwargs have no effect in history mode, where the policy's wrapper "
                f"applies the template; pass them there. Got {sorted(template_kwargs)}"
            )
        return HistoryMode(None, example, policy_role)
    if tokenizer is None:
        raise ConfigError(
            f"input_mode={name!r} needs a tokenizer to render conversations: pass tokenizer=..."
        )
    formatter = ChatFormatter(tokenizer, **formatter_arguments(template_kwargs))
    return _MODES[name](formatter, example, policy_role)


class _Decoder:
    """The one method of a formatter that reading responses takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: Tensor) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def response_reader(name: str, tokenizer: Any = None, policy_role: str = "assistant") -> InputMode:
    """A mode that can only read responses, for rows outside an environment.

    Args:
        name: ``"history"``, ``"text"`` or ``"tokens"``.
        tokenizer: decodes in tokens mode.
        policy_role: role of the model's messages.

    Raises:
        ConfigError: for an unknown mode, or tokens mode without a tokenizer.
    """
    if name not in _MODES:
        raise ConfigError(f"input_mode must be one of {sorted(_MODES)}, got {name!r}")
    if name == "tokens" and tokenizer is None:
        raise ConfigError("reading responses from tokens needs a tokenizer")
    return _MODES[name](_Decoder(tokenizer), Chat(), policy_role)
