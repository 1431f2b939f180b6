"""Text and tokens mode of a chat environment, with separate keys for the ids.

Next: :mod:`torchrl_llm.data.input_modes.appending` appends messages to a sampled turn,
:mod:`torchrl_llm.data.input_modes.input_mode` is the interface.

Shape legend: ``B`` rows, ``T`` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.input_modes import appending, input_mode
from torchrl_llm.data.input_modes.input_mode import InputMode, Message, merge_rows
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.specs import ColumnSpec, RaggedSpec
from torchrl_llm.data.text import ChatFormatter, Encoded
from torchrl_llm.data.token_facts import TokenFact, by_node, carried_facts
from torchrl_llm.data.views import Text
from torchrl_llm.errors import DataError


class _TokenCarrier(InputMode):
    """Text and tokens mode: separate keys for the ids and their carried facts."""

    def __init__(self, formatter: ChatFormatter | None, example: Chat, policy_role: str) -> None:
        super().__init__(formatter, example, policy_role)
        self._facts = carried_facts()

    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """``tokens.prompt`` and the other carried facts, and ``history.prompt`` if kept."""
        specs = {}
        if self.keeps_history:
            specs["history"] = input_mode.history_spec("prompt", self.example, size)
        facts = {
            fact.prompt_key: Unbounded(shape=(size, -1, *fact.shape), dtype=fact.dtype)
            for fact in self._facts
        }
        nodes = by_node(facts).items()
        return specs | {node: RaggedSpec(keys, shape=(size,)) for node, keys in nodes}

    def _reset_ids(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> list[Tensor]:
        """Write the ids of new conversations; a row without a new conversation gets none."""
        encoded = iter(self.formatter.encode_batch([chat for chat in chats if chat is not None]))
        nothing = torch.zeros(0, dtype=torch.int64)
        filler = Encoded(nothing, nothing, nothing.bool())
        items = [filler if chat is None else next(encoded) for chat in chats]
        ids, sources = [item.token_ids for item in items], [item.source for item in items]
        self._write_tokens(out, self._unsampled(ids, sources))
        self._start_chats(out, chats)
        return ids

    def _start_chats(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        if self.keeps_history:
            input_mode.write_chats(out, [Chat() if chat is None else chat for chat in chats])

    def _step_chats(
        self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None
    ) -> None:
        if not self.keeps_history:
            return
        before = input_mode.read_chats(td, "prompt")
        said = zip(before, self.turns(td), strict=True)
        after = [chat if turn is None else chat + [turn] for chat, turn in said]
        input_mode.write_chats(out, merge_rows(after, before, stepped))

    def _unsampled(
        self, rows: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> dict[str, Sequence[Tensor]]:
        """Return the columns for ids that were not sampled."""
        given = {"token_ids": rows, "source": [source.to(torch.int8) for source in sources]}
        return {
            fact.name: given[fact.name] if fact.name in given else _filled(rows, fact)
            for fact in self._facts
        }

    def _step_tokens(
        self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None
    ) -> None:
        prompts = read_rows(td, ("tokens", "prompt"))
        # A policy that writes only text provides no ids, so its next prompt is encoded again.
        full = appending.valid_rows(td, ("tokens", "full")) or [ids.new_zeros(0) for ids in prompts]
        columns = {fact.name: self._written(td, fact, full) for fact in self._facts}
        if stepped is not None:
            # The policy has run on these rows too, so their prompt is only the beginning of each
            # column.
            kept = [len(ids) for ids in prompts]
            columns = {
                name: merge_rows(rows, _cut(rows, kept), stepped) for name, rows in columns.items()
            }
            columns["token_ids"] = merge_rows(full, prompts, stepped)
        self._write_tokens(out, columns)

    @staticmethod
    def _written(td: TensorDictBase, fact: TokenFact, full: list[Tensor]) -> Sequence[Tensor]:
        """Return the policy's column of a fact, if it belongs to these ids."""
        if fact.name == "token_ids":
            return full
        rows = appending.aligned_rows(appending.valid_rows(td, fact.key), full)
        if rows is not None:
            return rows
        # Empty rows mean that the log-probs are unknown; zeros would look like values.
        return _filled([row[:0] for row in full] if fact.name == "log_probs" else full, fact)

    def turns(self, td: TensorDictBase) -> list[Message | None]:
        """Return each response as a message, read from its ids in the form of the template."""
        return appending.read_turns(self.formatter, td, self.responses(td))

    def append(
        self, td: TensorDictBase, out: TensorDictBase, added: Sequence[Sequence[Message]]
    ) -> None:
        """Append the template's text for the messages, up to the next generation prompt."""
        if any(added):
            self._append_ids(td, out, added)

    def replace(self, out: TensorDictBase, chats: Mapping[int, Chat]) -> None:
        """Replace the ids by those of the conversations, including the generation prompt."""
        self._replace_ids(out, chats)

    def _replace_ids(self, out: TensorDictBase, chats: Mapping[int, Chat]) -> list[Tensor]:
        """Replace ids, and return the new ones in the order of the conversations."""
        if self.keeps_history:
            input_mode.replace_chats(out, chats)
        columns = self._carried(out)
        encoded = self.formatter.encode_batch(list(chats.values()))
        ids = [item.token_ids for item in encoded]
        new = self._unsampled(ids, [item.source for item in encoded])
        for name, rows in columns.items():
            for row, values in zip(chats, new[name], strict=True):
                rows[row] = values
        self._write_tokens(out, columns)
        return ids

    def _append_ids(
        self, td: TensorDictBase, out: TensorDictBase, added: Sequence[Sequence[Message]]
    ) -> list[appending.NewText]:
        if self.keeps_history:
            input_mode.append_chats(out, added)
        grown = appending.append_ids(
            self.formatter, td, self._carried(out), added, self.responses(td)
        )
        self._write_tokens(out, grown.columns)
        return grown.texts

    def _carried(self, out: TensorDictBase) -> dict[str, list[Tensor]]:
        """Return the column of each fact, as a reset or step has written it."""
        return {fact.name: read_rows(out, fact.prompt_key) for fact in self._facts}

    def _write_tokens(self, out: TensorDictBase, columns: Mapping[str, Sequence[Tensor]]) -> None:
        keyed = {fact.prompt_key: list(columns[fact.name]) for fact in self._facts}
        for node, rows in by_node(keyed).items():
            out.set(node, ragged_rows(rows))


def _filled(rows: Sequence[Tensor], fact: TokenFact) -> list[Tensor]:
    return [fact.filled(ids.shape[0]) for ids in rows]


def _cut(rows: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


class TextMode(_TokenCarrier):
    """Strings: ``("text", "full")`` becomes the next ``("text", "prompt")``.

    The ids are kept next to the text in ``("tokens", "prompt")``, ``("log_probs", "prompt")`` and
    ``"trace"``. So sampled turns are not encoded again, and user text that looks like a special
    token does not become a special token, as it would if the text were encoded.
    """

    name = "text"

    def prompt_specs(self, size: int) -> dict[str, Composite]:
        """``text.prompt`` and the tokens."""
        return {"text": self._spec("prompt", "A question?", size), **super().prompt_specs(size)}

    def full_specs(self, size: int) -> dict[str, Composite]:
        """``text.full``."""
        return {"text": self._spec("full", "A question? An answer.", size)}

    @staticmethod
    def _spec(field: str, example: str, size: int) -> Composite:
        column = ColumnSpec((size, -1), example_data=example)
        return Composite({field: column}, shape=(size,), data_cls=Text)

    def reset(self, out: TensorDictBase, chats: Sequence[Chat | None]) -> None:
        """Render the conversations, including the generation prompt."""
        self._write(out, [self.formatter.decode(ids) for ids in self._reset_ids(out, chats)])

    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write ``text.prompt`` and its ids."""
        full = self._read(td, "full")
        self._write(
            out, full if stepped is None else merge_rows(full, self._read(td, "prompt"), stepped)
        )
        self._step_tokens(td, out, stepped)
        self._step_chats(td, out, stepped)

    def replace(self, out: TensorDictBase, chats: Mapping[int, Chat]) -> None:
        """Render the conversations; the policy encodes them."""
        texts = self._read(out, "prompt")
        for row, ids in zip(chats, self._replace_ids(out, chats), strict=True):
            texts[row] = self.formatter.decode(ids)
        self._write(out, texts)

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """Return ``text.response``, or the part of ``text.full`` after the prompt."""
        responses = self._column(td, "response")
        if responses is not None:
            return responses.tolist()
        return [
            full[len(prompt) :]
            if full.startswith(prompt)
            else DataError("text.full does not begin with text.prompt, so the response is unknown")
            for full, prompt in zip(self._read(td, "full"), self._read(td, "prompt"), strict=True)
        ]

    def append(
        self, td: TensorDictBase, out: TensorDictBase, added: Sequence[Sequence[Message]]
    ) -> None:
        """Append text and ids of the messages, up to the next generation prompt."""
        if any(added):
            new = self._append_ids(td, out, added)
            texts = zip(self._read(out, "prompt"), new, strict=True)
            self._write(out, [text.removesuffix(old) + more for text, (old, more) in texts])

    @staticmethod
    def _column(td: TensorDictBase, field: str) -> Any:
        node = td.get("text", None)
        # Attribute access of a tensorclass unwraps the column; reading its tensordict keeps it.
        node = getattr(node, "_tensordict", node)
        return None if node is None else node.get(field, None)

    def _read(self, td: TensorDictBase, field: str) -> list[str]:
        column = self._column(td, field)
        if column is None:
            raise input_mode.missing_key(("text", field))
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
        """Encode the conversations, including the generation prompt."""
        self._reset_ids(out, chats)

    def step(self, td: TensorDictBase, out: TensorDictBase, stepped: list[bool] | None) -> None:
        """Write ``tokens.prompt`` and its trace."""
        if read_rows(td, ("tokens", "full"), None) is None:
            raise input_mode.missing_key(("tokens", "full"))
        self._step_tokens(td, out, stepped)
        self._step_chats(td, out, stepped)

    def responses(self, td: TensorDictBase) -> list[str | DataError]:
        """Decode the ids of each response."""
        rows = read_rows(td, ("tokens", "response"), None)
        if rows is None:
            full, prompts = (
                appending.valid_rows(td, ("tokens", "full")),
                read_rows(td, ("tokens", "prompt")),
            )
            rows = [ids[len(prompt) :] for ids, prompt in zip(full, prompts, strict=True)]
        return [self.formatter.decode(ids) for ids in rows]
