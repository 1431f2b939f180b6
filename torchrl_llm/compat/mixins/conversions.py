"""``to_text``, ``to_tokens`` and ``to_history``, which convert one view of rows into another.

They are for datasets and for inspection; a rollout keeps the token record of a conversation
instead. A class that uses a mixin has ``_made`` with

- ``columns(view)``: its filled columns by name, each a list of rows;
- ``text(columns)``, ``tokens(columns)``, ``chats(histories)``: the views that are created;
- ``history``: the class of conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from tensordict import lazy_stack
from torch import Tensor


def _row_by_row(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a conversion of rows ``[B]`` to any number of batch dimensions."""

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


class TokensConversions:
    """Mixin for token ids, which have the attribute ``padded``."""

    @_row_by_row
    def to_text(self, tokenizer: Any, skip_special_tokens: bool = False) -> Any:
        """Decode every row.

        Args:
            tokenizer: a Hugging Face tokenizer.
            skip_special_tokens: leave special tokens out of the text.

        Raises:
            ValueError: the rows are padded, which a text cannot represent.
        """
        if self.padded:
            raise ValueError("padded tokens cannot be converted; pass ragged rows")
        how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        columns = {
            name: tokenizer.batch_decode([row.tolist() for row in rows], **how)
            for name, rows in self._made.columns(self).items()
        }
        return self._made.text(columns)

    @_row_by_row
    def to_history(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        skip_special_tokens: bool = False,
        *,
        chat_template: str | None = None,
    ) -> Any:
        """Decode every row and parse the text into messages, see ``Text.to_history``.

        Args:
            tokenizer: a Hugging Face tokenizer.
            chat_template_name: name of the template that wrote the text.
            skip_special_tokens: must be ``False``: special tokens separate the messages.
            chat_template: its Jinja text.

        Raises:
            ValueError: special tokens are left out.
        """
        if skip_special_tokens:
            raise ValueError(
                "skip_special_tokens=True takes away what separates messages, got it in "
                "to_history; leave it out, or use to_text(..., skip_special_tokens=True)"
            )
        return self.to_text(tokenizer).to_history(tokenizer, chat_template_name, chat_template)


class TextConversions:
    """Mixin for texts."""

    @_row_by_row
    def to_tokens(
        self,
        tokenizer: Any,
        padding: bool = False,
        truncation: bool = False,
        return_tensors: str | None = "pt",
    ) -> Any:
        """Encode every row; the text of a special token becomes that token, and none is added.

        Args:
            tokenizer: a Hugging Face tokenizer.
            padding: must be ``False``, as in TorchRL: rows are ragged.
            truncation: cut rows at the tokenizer's ``model_max_length``.
            return_tensors: ``"pt"`` or ``None``, with the same result.

        Returns:
            Ragged tokens. Prompt and response are encoded separately, and ``full`` is their
            concatenation.

        Raises:
            ValueError: padding or tensors of a different library are requested.
        """
        if padding:
            raise ValueError(
                "padding must be False, got True: rows are ragged; pad them with "
                "torchrl_llm.data.ragged.pad_rows"
            )
        if return_tensors not in ("pt", None):
            raise ValueError(f'return_tensors must be "pt" or None, got {return_tensors!r}')
        options = {"add_special_tokens": False, "truncation": truncation}
        ids = {
            name: [
                torch.tensor(row, dtype=torch.int64)
                for row in tokenizer(column, **options)["input_ids"]
            ]
            for name, column in _filled(self, "text").items()
        }
        if "prompt" in ids and "response" in ids:
            pairs = zip(ids["prompt"], ids["response"], strict=True)
            ids["full"] = [torch.cat(pair) for pair in pairs]
        return self._made.tokens(ids)

    @_row_by_row
    def to_history(
        self,
        tokenizer: Any = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Any:
        """Parse every row's text into messages.

        Args:
            tokenizer: finds the template, as for ``History.from_text``.
            chat_template_name: name of the template that wrote the text.
            chat_template: its Jinja text.

        Returns:
            Histories of prompt and full; the response is the part of full after the prompt.

        Raises:
            TemplateError: a text does not follow the template.
        """
        texts, history = _filled(self, "text"), self._made.history
        if "full" not in texts and "response" in texts:
            pairs = zip(texts["prompt"], texts["response"], strict=True)
            texts["full"] = [prompt + response for prompt, response in pairs]
        read = {
            name: history.from_text(texts[name], chat_template_name, chat_template, tokenizer)
            for name in ("prompt", "full")
            if name in texts
        }
        if len(read) == 2:
            rows = zip(read["prompt"].chats, read["full"].chats, strict=True)
            read["response"] = history.of([full[len(prompt) :] for prompt, full in rows])
        return self._made.chats(read)


class ChatConversions:
    """Mixin for conversations."""

    @_row_by_row
    def to_text(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Any:
        """Render every row with a chat template.

        Args:
            tokenizer: a Hugging Face tokenizer.
            chat_template_name: name of the template; see ``History.apply_chat_template``.
            chat_template: its Jinja text.

        Returns:
            Prompt (with its generation prompt), full, and the response: the part of full after it.

        Raises:
            ValueError: the full text does not begin with the prompt's text.
        """
        how = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        how |= {"tokenizer": tokenizer, "tokenize": False}
        columns = {
            name: self._made.history.of(chats).apply_chat_template(
                add_generation_prompt=name == "prompt", **how
            )
            for name, chats in self._sides().items()
        }
        return self._made.text(_with_response(columns))

    @_row_by_row
    def to_tokens(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Any:
        """Token ids of every row, from its token record if it has one, else encoded.

        Args:
            tokenizer: a fast Hugging Face tokenizer.
            chat_template_name: name of the template; see ``History.apply_chat_template``.
            chat_template: its Jinja text.

        Returns:
            Ragged prompt (with its generation prompt), full, and the response: the rest of full.

        Raises:
            ValueError: the full ids do not begin with the prompt's ids.
        """
        how = {"chat_template_name": chat_template_name, "chat_template": chat_template}
        how |= {"tokenizer": tokenizer, "return_tensors": "pt", "return_dict": False}
        columns = {}
        for name, chats in self._sides().items():
            prompt = name == "prompt"
            rows = columns[name] = [_held(chat, prompt) for chat in chats]
            if missing := [index for index, row in enumerate(rows) if row is None]:
                history = self._made.history.of([chats[index] for index in missing])
                encoded = history.apply_chat_template(add_generation_prompt=prompt, **how)
                for index, row in zip(missing, encoded, strict=True):
                    rows[index] = row
        return self._made.tokens(_with_response(columns))

    def _sides(self) -> dict[str, list[Any]]:
        found = _filled(self, "history")
        if len(found) > 1:
            found.pop("response", None)  # the part of full after the prompt
        return found


def _filled(view: Any, kind: str) -> dict[str, list[Any]]:
    found = view._made.columns(view)
    if not found:
        raise ValueError(f"there is no {kind} to convert")
    return found


def _held(chat: Any, prompt: bool) -> Tensor | None:
    """Recorded ids of a conversation, if they are complete and of the requested kind."""
    record = chat.record
    if record is None or record.num_messages != len(chat):
        return None
    return record.token_ids if (record.finish_reason is None) == prompt else None


def _with_response(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Prompt, full and the part of full after the prompt, if both exist."""
    if len(columns) < 2:
        return columns
    rest = []
    for row, (prompt, full) in enumerate(zip(columns["prompt"], columns["full"], strict=True)):
        begins = full[: len(prompt)]
        same = begins == prompt if isinstance(full, str) else torch.equal(begins, prompt)
        if not same:
            raise ValueError(
                f"row {row}: the full conversation does not begin with the prompt (a template that "
                "rewrites history, or other messages), so there is no response to cut out"
            )
        rest.append(full[len(prompt) :])
    return {**columns, "response": rest}
