"""Readers of the three input modes: they turn rows of a tensordict into token records.

A reader also writes the view of its mode (conversations, text). No other part of the wrappers
depends on the mode. Text with known ids is never encoded again.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``P_b`` of its prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import Source
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import are_aligned, pad_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.text.codec import Codec, Piece
from torchrl_llm.data.token_facts import RECORD_COLUMNS, TokenFact, added_facts, find_fact
from torchrl_llm.data.views import ChatHistory, Text
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules.backends.backend_port import Completion
from torchrl_llm.modules.policies.row_blocks import chat_rows, object_rows, tensor_rows

Blocks = Sequence[TensorDictBase]
_CUT_CHARACTER = "\ufffd"
_TOKENIZER = frozenset({"add_special_tokens", "split_special_tokens", "truncation", "max_length"})


@dataclass(frozen=True, kw_only=True)
class KeyNames:
    """Names of the nodes that a wrapper reads and writes."""

    history: str = "history"
    text: str = "text"
    tokens: str = "tokens"
    masks: str = "masks"
    log_probs: str = "log_probs"
    trace: str = "trace"
    support: str = "support"
    attention_mask: str | tuple[str, ...] = "attention_mask"

    @classmethod
    def of(cls, options: Any) -> KeyNames:
        """Read the names from a policy's options, where each is ``<name>_key``."""
        return cls(**{f.name: getattr(options, f"{f.name}_key") for f in fields(cls)})

    def prompt_key(self, fact: TokenFact) -> tuple[str, str]:
        """Return the key of a fact's values for the prompt; a registered fact has its own node."""
        node, column = fact.prompt_key
        return getattr(self, node) if fact.name in RECORD_COLUMNS else node, column


class TextCodec:
    """Encodes and decodes batches of text with one tokenizer, from any thread.

    Text must be complete: the codec adds no token (a chat template writes its own first token).
    Special-token strings become special tokens, because rendered conversations contain them.

    Args:
        tokenizer: a fast tokenizer.
        tokenizer_kwargs: arguments of the tokenizer's call: ``add_special_tokens``,
            ``split_special_tokens``, ``truncation`` and ``max_length``.
        skip_special_tokens: leave special tokens out of decoded text.

    Raises:
        ConfigError: for other arguments. For padding, use ``pad_output=True``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._codec = Codec(tokenizer)
        self._kwargs = dict(tokenizer_kwargs or {})
        if unknown := sorted(set(self._kwargs) - _TOKENIZER):
            raise ConfigError(
                f"tokenizer_kwargs takes {sorted(_TOKENIZER)}, got {unknown}; rows are not padded "
                "before the model, pad_output=True pads what comes out"
            )
        self._skip = skip_special_tokens

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """``B`` int64 tensors ``[T_b]``."""
        with self._codec.lock:
            options = {"add_special_tokens": False, **self._kwargs}
            rows = self.tokenizer(list(texts), **options)["input_ids"]
        return [torch.as_tensor(row, dtype=torch.int64) for row in rows]

    def encode_continuation(self, text: str) -> Tensor:
        """Encode text that continues other text, without a prefix space: int64 ``[T]``."""
        return torch.from_numpy(self._codec.encode(Piece(text, continues=True)).ids.copy())

    def decode(self, rows: Sequence[Tensor]) -> list[str]:
        """Return the text of each row; equal rows are decoded once."""
        keys = [ids.numpy().tobytes() for ids in rows]
        different = dict(zip(keys, rows, strict=True))
        texts = {key: self._decode(ids.tolist()) for key, ids in different.items()}
        return [texts[key] for key in keys]

    def decode_longer(
        self, rows: Sequence[Tensor], known: Sequence[Tensor], texts: Sequence[str]
    ) -> list[str]:
        """Return the text of each row, given the text of its beginning.

        Args:
            rows: ``B`` int64 tensors ``[T_b]``.
            known: the ids that each row begins with.
            texts: their texts.
        """
        if self._skip or not self._codec.bytewise:
            return self.decode(rows)
        more = self.decode([row[ids.shape[0] :] for row, ids in zip(rows, known, strict=True)])
        return [
            # A character may be split between the known and the unknown part.
            self._decode(row.tolist()) if _CUT_CHARACTER in text + new else text + new
            for row, text, new in zip(rows, texts, more, strict=True)
        ]

    def _decode(self, ids: list[int]) -> str:
        if self._skip:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self._codec.decode(ids)


class Prompts(NamedTuple):
    """Prompts to answer.

    Attributes:
        records: ``B`` records of the prompts.
        chats: the conversations, in history mode.
        unscored: ``B`` flags: whether earlier turns of the row were sampled with log-probs that are
            not known.
    """

    records: list[TokenRecord]
    chats: list[Chat] | None
    unscored: list[bool]

    def repeat(self, times: int) -> Prompts:
        """Return each prompt repeated that many times, one after the other."""
        if times == 1:
            return self
        return Prompts(
            *(None if rows is None else [x for x in rows for _ in range(times)] for rows in self)
        )


class Sequences(NamedTuple):
    """Whole rows to score.

    Attributes:
        token_ids: ``B`` int64 tensors ``[T_b]``.
        assistant: ``B`` bool tensors ``[T_b]``, tokens of the assistant's turns.
    """

    token_ids: list[Tensor]
    assistant: list[Tensor]


@dataclass(eq=False)
class RowReader(ABC):
    """Reads the rows of one input mode, and writes the mode's view of the answers.

    Args:
        key: key of the rows, ``(mode, "prompt")`` or ``(mode, "full")``.
        names: names of the other nodes.
        formatter: formatter of conversations; history mode only.
        codec: codec of text; optional in tokens mode.
        prefer_tokens: whether to use known ids instead of encoding text again.
    """

    views: ClassVar[tuple[str, ...]] = ()
    """Nodes that :meth:`view` writes, by their names in :class:`KeyNames`."""

    scored_views: ClassVar[tuple[str, ...]] = ()
    """Nodes that :meth:`scored_view` writes."""

    key: tuple[str, ...]
    names: KeyNames
    formatter: ChatFormatter | None
    codec: TextCodec | None
    prefer_tokens: bool

    @abstractmethod
    def read_prompts(self, blocks: Blocks) -> Prompts:
        """Read the prompts of all rows."""

    @abstractmethod
    def read_sequences(self, blocks: Blocks) -> Sequences:
        """Read the whole conversations of all rows."""

    def parse(self, prompts: Prompts, completions: Sequence[Completion]) -> list[dict] | None:
        """Return the answers as messages; ``None`` in modes without messages."""
        return None

    def view(
        self, prompts: Prompts, records: Sequence[TokenRecord], messages: list[dict] | None
    ) -> dict[str, Any]:
        """Return the nodes specific to the mode, by name.

        Args:
            prompts: the answered prompts.
            records: records of prompt and answer.
            messages: result of :meth:`parse`.
        """
        return {}

    def scored_view(self, sequences: Sequences, blocks: Blocks) -> dict[str, Any]:
        """Return the nodes specific to the mode for scored rows, by name.

        Args:
            sequences: the scored rows.
            blocks: the blocks from which they were read.
        """
        return {}

    @property
    def view_keys(self) -> list[tuple[str, str]]:
        """Keys that :meth:`view` writes."""
        nodes = [getattr(self.names, name) for name in self.views]
        return [(node, part) for node in nodes for part in ("prompt", "response", "full")]

    @property
    def scored_view_keys(self) -> list[tuple[str, str]]:
        """Keys that :meth:`scored_view` writes."""
        return [(getattr(self.names, name), "full") for name in self.scored_views]

    @staticmethod
    def _turns(blocks: Blocks, count: int) -> list[int]:
        """Return each conversation's number of turns if an environment counts them; else zeros.

        The turns in the conversation itself are not enough, because a fork may have removed some.
        """
        rows = tensor_rows(blocks, "turn")
        if rows is None or any(row.numel() != 1 or row.is_floating_point() for row in rows):
            return [0] * count
        return [int(row) for row in rows]

    def _known(self, rows: list[Any] | None) -> list[Any]:
        if rows is None:
            raise DataError(f"the input has no column {self.key!r}, which this policy reads")
        return rows

    def read_support(self, blocks: Blocks, sequences: Sequence[Tensor]) -> list[Support] | None:
        """Read the ids that sampling kept for each token of whole rows; ``None`` if not recorded.

        Args:
            blocks: the rows.
            sequences: ``B`` int64 tensors ``[T_b]``, their ids.

        Raises:
            DataError: the record belongs to different tokens.
        """
        counts = self.unpadded(blocks, (self.names.support, "counts"))
        ids = tensor_rows(blocks, (self.names.support, "token_ids"))
        if counts is None or ids is None:
            return None
        if not are_aligned(counts, sequences):
            raise DataError(
                f"the kept ids under {self.names.support!r} were recorded for other tokens than "
                "those that are scored (the text was encoded again?); drop that node to score "
                "under the whole vocabulary"
            )
        return [Support(i[: int(c.sum())], c) for i, c in zip(ids, counts, strict=True)]

    def _stored_assistant(self, blocks: Blocks, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Derive assistant masks from other columns: trace, mask, or the prompt's length."""
        names = self.names
        sources = self.unpadded(blocks, (names.trace, "source"))
        if sources is not None and are_aligned(sources, sequences):
            return [source == Source.SAMPLED for source in sources]
        masks = self.unpadded(blocks, (names.masks, "all_assistant_mask"))
        if masks is not None and are_aligned(masks, sequences):
            return [mask.bool() for mask in masks]
        prompts = tensor_rows(blocks, (names.tokens, "prompt"))
        if prompts is None:
            return [torch.zeros(ids.shape, dtype=torch.bool) for ids in sequences]
        return [
            torch.arange(ids.shape[0]) >= prompt.shape[0]
            if torch.equal(ids[: prompt.shape[0]], prompt)
            else torch.zeros(ids.shape, dtype=torch.bool)
            for ids, prompt in zip(sequences, prompts, strict=True)
        ]

    def read_places(
        self, blocks: Blocks, sequences: Sequence[Tensor], side: Literal["left", "right"] = "right"
    ) -> Tensor:
        """Return the positions of the tokens of whole rows in a dense column, bool ``[B, T]``.

        Args:
            blocks: the rows. The attention mask of padded rows contains the positions.
            sequences: ``B`` int64 tensors ``[T_b]``, their ids.
            side: side on which ragged rows are padded.
        """
        lengths = [ids.shape[0] for ids in sequences]
        for masks in self._attention(blocks):
            one_length = len({mask.shape for mask in masks}) == 1
            if one_length and [int(mask.sum()) for mask in masks] == lengths:
                return torch.stack(masks)
        ones = [torch.ones(length, dtype=torch.bool) for length in lengths]
        return pad_rows(ones, False, side=side)

    def unpadded(self, blocks: Blocks, key: NestedKey) -> list[Tensor] | None:
        """Read a column over whole rows; the mask removes the padding of a dense column."""
        rows = tensor_rows(blocks, key)
        for masks in [] if rows is None else self._attention(blocks):
            if are_aligned(masks, rows):
                return [row[mask] for row, mask in zip(rows, masks, strict=True)]
        return rows

    def _attention(self, blocks: Blocks) -> Iterator[list[Tensor]]:
        """Return the rows' attention masks, bool ``[T_b]``: of this package, else of the input."""
        for key in ((self.names.masks, "all_attention_mask"), self.names.attention_mask):
            masks = tensor_rows(blocks, key)
            if masks is not None:
                yield [mask.bool() for mask in masks]


class HistoryRows(RowReader):
    """Conversations that contain their token records."""

    views = ("history", "text")
    scored_views = ("history", "text")

    def read_prompts(self, blocks: Blocks) -> Prompts:
        """Return the records of the prompts: reused, extended, or newly encoded."""
        chats = self._known(chat_rows(blocks, self.key))
        records: list[TokenRecord | None] = [None] * len(chats)
        begun = [
            row for row, chat in enumerate(chats) if chat.record is not None and self.prefer_tokens
        ]
        continued = self.formatter.continue_records(
            [chats[row].record for row in begun], [chats[row] for row in begun]
        )
        for row, record in zip(begun, continued, strict=True):
            records[row] = record
        self._encode_new(chats, records, self._turns(blocks, len(chats)))
        return Prompts(records, chats, [False] * len(chats))

    def _encode_new(
        self, chats: list[Chat], records: list[TokenRecord | None], turns: Sequence[int]
    ) -> None:
        # The repeats of a group follow each other and are the same conversation, which is encoded
        # once.
        new: list[Chat] = []
        place: dict[int, int] = {}
        for row, record in enumerate(records):
            if record is None:
                if not new or chats[row] != new[-1]:
                    new.append(chats[row])
                place[row] = len(new) - 1
        if not new:
            return
        made = [
            encoded.prompt_record(chat)
            for encoded, chat in zip(self.formatter.encode_batch(new), new, strict=True)
        ]
        for row, index in place.items():
            turn = turns[row]
            records[row] = replace(made[index], earlier_turns=turn) if turn else made[index]

    def read_sequences(self, blocks: Blocks) -> Sequences:
        """Return ids of whole conversations, from records or complete ids of the rows."""
        chats = self._known(chat_rows(blocks, self.key))
        ids: list[Tensor | None] = [None] * len(chats)
        assistant: list[Tensor | None] = [None] * len(chats)
        stored = self.unpadded(blocks, (self.names.tokens, "full")) if self.prefer_tokens else None
        stored_masks = None if stored is None else self._stored_assistant(blocks, stored)
        new = []
        for row, chat in enumerate(chats):
            record = chat.record if self.prefer_tokens else None
            if record is not None and record.num_messages == len(chat):
                ids[row], assistant[row] = record.token_ids, record.source == Source.SAMPLED
            elif record is None and stored is not None:
                ids[row], assistant[row] = stored[row], stored_masks[row]
            else:
                new.append(row)
        encoded = self.formatter.encode_batch(
            [chats[row] for row in new], add_generation_prompt=False
        )
        for row, one in zip(new, encoded, strict=True):
            ids[row], assistant[row] = one.token_ids, one.assistant
        return Sequences(ids, assistant)

    def parse(self, prompts: Prompts, completions: Sequence[Completion]) -> list[dict]:
        """Return one message per row, from its ids."""
        messages = []
        for record, completion in zip(prompts.records, completions, strict=True):
            asked, said = record.token_ids, completion.token_ids
            if record.continues:
                asked, begun = asked[: record.response_start], asked[record.response_start :]
                said = torch.cat([begun, said])
            messages.append(self.formatter.parse_response(asked, said, completion.finish_reason))
        return messages

    def view(
        self, prompts: Prompts, records: Sequence[TokenRecord], messages: list[dict] | None
    ) -> dict[str, Any]:
        """``history`` and ``text``."""
        answers = [Chat([message]) for message in messages]
        rows = zip(prompts.records, prompts.chats, answers, records, strict=True)
        wholes = [
            ((chat[:-1] if before.continues else chat) + answer).with_record(record)
            for before, chat, answer, record in rows
        ]
        size = torch.Size([len(wholes)])
        node = {
            "prompt": History.of(prompts.chats),
            "response": History.of(answers),
            "full": History.of(wholes),
        }
        history = ChatHistory._from_tensordict(TensorDict._new_unsafe(node, batch_size=size))
        return {
            self.names.history: history,
            self.names.text: text_node(self.codec, prompts.records, records),
        }

    def scored_view(self, sequences: Sequences, blocks: Blocks) -> dict[str, Any]:
        """``history.full`` and ``text.full``."""
        chats = History.of(chat_rows(blocks, self.key))
        node = TensorDict._new_unsafe({"full": chats}, batch_size=torch.Size([len(chats)]))
        texts = self.codec.decode(sequences.token_ids)
        return {
            self.names.history: ChatHistory._from_tensordict(node),
            self.names.text: _text({"full": texts}),
        }


class TokensRows(RowReader):
    """Token ids, ragged or padded with a mask."""

    def read_prompts(self, blocks: Blocks) -> Prompts:
        """Build records from the ids and the columns that belong to them."""
        rows = self._known(tensor_rows(blocks, self.key))
        masks = tensor_rows(blocks, self.names.attention_mask)
        if masks is not None and are_aligned(masks, rows):
            rows = [ids[mask.bool()] for ids, mask in zip(rows, masks, strict=True)]
        return self.with_stored(blocks, [ids.to("cpu", torch.int64) for ids in rows])

    def with_stored(self, blocks: Blocks, rows: list[Tensor]) -> Prompts:
        """Build records of ids, with trace and log-probs if these belong to the same tokens."""
        names = self.names
        facts = [find_fact(name) for name in RECORD_COLUMNS] + added_facts()
        stored = {fact.name: tensor_rows(blocks, names.prompt_key(fact)) for fact in facts}
        # Values for different tokens count as missing.
        columns = {
            name: column
            for name, column in stored.items()
            if column is not None and are_aligned(column, rows)
        }
        columns["token_ids"] = rows
        turns = self._turns(blocks, len(rows))
        if any(fact.key[0] == "trace" and fact.name not in columns for fact in facts):
            made = [_of_text(ids, turns=turn) for ids, turn in zip(rows, turns, strict=True)]
            return Prompts(made, None, [False] * len(rows))
        known = "log_probs" in columns
        if not known:
            columns["log_probs"] = [torch.zeros(ids.shape) for ids in rows]
        records = [
            TokenRecord.of(dict(zip(columns, row, strict=True)), num_messages=0, earlier_turns=turn)
            for *row, turn in zip(*columns.values(), turns, strict=True)
        ]
        return Prompts(records, None, [not known] * len(rows))

    def read_sequences(self, blocks: Blocks) -> Sequences:
        """Return the ids, unchanged."""
        rows = self._known(self.unpadded(blocks, self.key))
        rows = [ids.to("cpu", torch.int64) for ids in rows]
        return Sequences(rows, self._stored_assistant(blocks, rows))


class TextRows(RowReader):
    """Strings, with the sampled ids in columns next to them."""

    views = ("text",)
    scored_views = ("text",)

    def read_prompts(self, blocks: Blocks) -> Prompts:
        """Build records; stored ids are used if they decode to the text or its start."""
        texts = self._known(object_rows(blocks, self.key))
        stored = tensor_rows(blocks, (self.names.tokens, "prompt")) if self.prefer_tokens else None
        if stored is None:
            encoded = zip(self.codec.encode(texts), self._turns(blocks, len(texts)), strict=True)
            made = [_of_text(ids, turns=turn) for ids, turn in encoded]
            return Prompts(made, None, [False] * len(texts))
        as_tokens = TokensRows(
            self.key, self.names, formatter=None, codec=self.codec, prefer_tokens=True
        )
        prompts = as_tokens.with_stored(blocks, stored)
        spelled = self.codec.decode(stored)
        records = list(prompts.records)
        unscored = list(prompts.unscored)
        for row, (text, known, ids) in enumerate(zip(texts, spelled, stored, strict=True)):
            if ids.shape[0] and text == known:
                continue
            if ids.shape[0] and text.startswith(known):
                more = self.codec.encode_continuation(text[len(known) :])
                source = torch.full_like(more, Source.PROMPT)
                records[row] = records[row].extend(more, source, 0)
                continue
            # The text was rewritten, so that these ids no longer decode to it.
            cause = "history_changed" if records[row].num_turns else None
            records[row] = _of_text(self.codec.encode([text])[0], cause, records[row].num_turns)
            unscored[row] = False
        return Prompts(records, None, unscored)

    def read_sequences(self, blocks: Blocks) -> Sequences:
        """Return the ids of the texts; stored ids are used if they decode to the text."""
        texts = self._known(object_rows(blocks, self.key))
        stored = self.unpadded(blocks, (self.names.tokens, "full")) if self.prefer_tokens else None
        spelled = None if stored is None else self.codec.decode(stored)
        rows = [
            stored[row]
            if stored is not None and spelled[row] == text
            else self.codec.encode([text])[0]
            for row, text in enumerate(texts)
        ]
        return Sequences(rows, self._stored_assistant(blocks, rows))

    def view(
        self, prompts: Prompts, records: Sequence[TokenRecord], messages: list[dict] | None
    ) -> dict[str, Any]:
        """``text``."""
        return {self.names.text: text_node(self.codec, prompts.records, records)}

    def scored_view(self, sequences: Sequences, blocks: Blocks) -> dict[str, Any]:
        """Return ``text.full``, as it was read."""
        return {self.names.text: _text({"full": object_rows(blocks, self.key)})}


def _of_text(ids: Tensor, cause: str | None = None, turns: int = 0) -> TokenRecord:
    source = torch.full_like(ids, Source.PROMPT)
    return TokenRecord.from_prompt(ids, source, 0, fork_cause=cause, earlier_turns=turns)


def text_node(
    codec: TextCodec, prompts: Sequence[TokenRecord], records: Sequence[TokenRecord]
) -> Text:
    """Return the text of prompts, of responses, and of both together, decoded from their ids.

    The response is the part of the whole text after the prompt's text, because a decoder may drop a
    space at the beginning of its input.
    """
    before = [record.token_ids for record in prompts]
    asked = codec.decode(before)
    whole = codec.decode_longer([record.token_ids for record in records], before, asked)
    said = [
        full[len(prompt) :]
        if full.startswith(prompt)
        # A character split between prompt and response decodes differently in the whole text.
        else codec.decode([record.token_ids[ids.shape[0] :]])[0]
        for prompt, full, ids, record in zip(asked, whole, before, records, strict=True)
    ]
    return _text({"prompt": asked, "response": said, "full": whole})


def _text(columns: dict[str, list[str]]) -> Text:
    node = {name: Column.of(texts) for name, texts in columns.items()}
    size = torch.Size([len(next(iter(columns.values())))])
    return Text._from_tensordict(TensorDict._new_unsafe(node, batch_size=size))
