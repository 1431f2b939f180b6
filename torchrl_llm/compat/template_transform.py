"""Messages as text for a model, and its text as an action: ``TemplateTransform``.

For environments that use strings without templates. Chat environments render messages themselves
(:class:`~torchrl_llm.envs.ChatEnv`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torchrl.data import Composite
from torchrl.envs import Transform

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.history import History
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError


class TemplateTransform(Transform):
    r"""Renders the environment's output with a chat template, and extracts the answer.

    Forward: each row under ``in_keys`` (a string, which is a user's message, a list of message
    dicts, or a :class:`~torchrl_llm.data.History` row) becomes text that ends with the header of
    the model's turn. Inverse: from each text that the policy writes (its response, or prompt and
    response), the environment gets the content of the model's last turn, without the template's
    markers.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        chat_template: a template; by default the tokenizer's own, or the one of its model family.
        in_keys: keys of the environment's output.
        out_keys: keys of the rendered text; ``in_keys`` if not given.
        in_keys_inv: keys that the environment reads.
        out_keys_inv: keys that the policy writes; ``in_keys_inv`` if not given.

    Raises:
        TemplateError: there is no usable template.
        ConfigError: the numbers of keys on both sides differ.
        DataError: a row is not a message.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import AutoTokenizer
        >>> from torchrl_llm.assets import embedded_model_path
        >>> tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        >>> template = TemplateTransform(tokenizer)
        >>> td = template(TensorDict(message=["Hi"], batch_size=[1]))
        >>> text = td["message"][0]; text.count("Hi"), text.endswith("assistant\n")
        (1, True)
        >>> td["action"] = [text + "Hello<|im_end|>"]
        >>> list(template.inv(td)["action"])
        ['Hello']
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        in_keys: Sequence[NestedKey] = ("message",),
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] = ("action",),
        out_keys_inv: Sequence[NestedKey] | None = None,
    ) -> None:
        out_keys = in_keys if out_keys is None else out_keys
        out_keys_inv = in_keys_inv if out_keys_inv is None else out_keys_inv
        for here, there in ((in_keys, out_keys), (in_keys_inv, out_keys_inv)):
            if len(here) != len(there):
                raise ConfigError(f"keys must be as many on both sides, got {here} and {there}")
        super().__init__(
            in_keys=list(in_keys),
            out_keys=list(out_keys),
            in_keys_inv=list(in_keys_inv),
            out_keys_inv=list(out_keys_inv),
        )
        self.tokenizer = tokenizer
        self.formatter = ChatFormatter(tokenizer, chat_template=chat_template)
        question = [{"role": "user", "content": "?"}]
        closed = self.formatter.render(question, add_generation_prompt=False)
        self._header = self.formatter.render(question)[len(closed) :]

    @property
    def chat_template(self) -> str:
        """The template in use."""
        return self.formatter.chat_template

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = next_tensordict.get(in_key, None)
            if value is None:
                continue
            if next_tensordict.batch_dims:
                rows = _rows(value, next_tensordict.batch_size.numel(), in_key)
                texts = [self.formatter.render(_messages(row, in_key)) for row in rows]
                next_tensordict.set(out_key, Column.of(texts))
            else:
                text = self.formatter.render(_messages(_single(value), in_key))
                next_tensordict.set(out_key, text)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Render the messages of rows outside an environment."""
        return self._call(tensordict)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            value = tensordict.get(out_key, None)
            if value is None:
                continue
            if tensordict.batch_dims:
                rows = _rows(value, tensordict.batch_size.numel(), out_key)
                tensordict.set(in_key, Column.of(self.answer_of(text) for text in rows))
            else:
                tensordict.set(in_key, self.answer_of(_single(value)))
        return tensordict

    def answer_of(self, text: str) -> str:
        """Content of the model's last turn.

        Args:
            text: a response, or a prompt and its response.
        """
        header = self._header.strip()
        if header and header in text:
            text = text.rpartition(header)[2]
            text = text.removeprefix(self._header[len(self._header.rstrip()) :])
        marks = [closer.text for closer in self.formatter.closers]
        marks += [self.tokenizer.eos_token] if self.tokenizer.eos_token else []
        ends = [at for mark in marks if mark.strip() and (at := text.find(mark.strip())) >= 0]
        return text[: min(ends, default=len(text))]

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Replaces messages by texts."""
        for out_key in self.out_keys:
            shape = (*observation_spec.shape, -1)
            observation_spec[out_key] = ColumnSpec(shape, example_data="A question?")
        return observation_spec


def _single(value: Any) -> Any:
    """The object of a tensordict without batch dimensions."""
    return value.data if is_non_tensor(value) and not isinstance(value, History) else value


def _rows(value: Any, count: int, key: NestedKey) -> list[Any]:
    """One object per row."""
    if isinstance(value, History):
        return value.chats
    rows = value.tolist() if is_non_tensor(value) else value
    rows = rows if isinstance(rows, list) else [rows] * count
    if len(rows) != count:
        raise DataError(f"{key!r} must hold one object per row, {count} in all, got {len(rows)}")
    return rows


def _messages(row: Any, key: NestedKey) -> Any:
    if isinstance(row, str):
        return [{"role": "user", "content": row}]
    if isinstance(row, History):
        return row.chats[0]
    if isinstance(row, Chat):
        return row
    if isinstance(row, Mapping):
        return [row]
    if isinstance(row, (list, tuple)) and all(isinstance(item, Mapping) for item in row):
        return row
    raise DataError(
        f"{key!r} must hold strings, lists of message dicts or History rows, "
        f"got {type(row).__name__}"
    )
