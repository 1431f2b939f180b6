"""The three input modes, which read and continue conversations, text or token ids of rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.input_modes.input_mode import HistoryMode, InputMode, message_text
from torchrl_llm.data.input_modes.token_modes import TextMode, TokensMode
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError

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

_MODES: dict[str, type[InputMode]] = {
    mode.name: mode for mode in (HistoryMode, TextMode, TokensMode)
}

_FORMATTER_ARGS = ("chat_template", "chat_template_name", "tools")


def formatter_arguments(template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a formatter, with the template's variables in one mapping.

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
    """Make the mode of that name.

    Args:
        name: ``"history"``, ``"text"`` or ``"tokens"``.
        tokenizer: a Hugging Face tokenizer; required in text and tokens mode.
        template_kwargs: ``chat_template``, ``chat_template_name`` and ``tools`` of
            :class:`~torchrl_llm.data.text.ChatFormatter`; any other name is a variable of the
            template.
        example: conversation for the specs.
        policy_role: role of the model's messages.

    Raises:
        ConfigError: the mode is unknown, the tokenizer is missing, or template arguments would not
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
    """A formatter with the only method that reading responses needs."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: Tensor) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def response_reader(name: str, tokenizer: Any = None, policy_role: str = "assistant") -> InputMode:
    """Make a mode that only reads responses, for rows outside an environment.

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
