"""Choice of the chat template for a tokenizer, and the registry that users extend.

Next: :mod:`torchrl_llm.data.text.families` has the built-in families,
:mod:`torchrl_llm.data.text.whole_chats` renders with the chosen template.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchrl._utils import logger

from torchrl_llm.data.text.families import FAMILIES, InverseParser, TemplateSpec
from torchrl_llm.data.text.published_texts import parser_for_template
from torchrl_llm.data.text.renderer import has_generation
from torchrl_llm.errors import TemplateError

DEFAULT_TEMPLATE = "chatml_format"
_USERS: dict[str, TemplateSpec] = {}
_USERS_LOCK = threading.Lock()
_WARNED: set[str] = set()


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | InverseParser | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Register a chat template under a name, for this process.

    Args:
        template_name: the name for ``chat_template_name``. An existing template of this name is
            replaced.
        template: Jinja text that marks the assistant's words with ``{% generation %}``.
        inverse_parser: function from a rendered text to a ``History`` or a list of messages.
        model_family_keywords: the template is used for tokenizers whose model name (the last two
            parts of ``name_or_path``) contains one of these, ignoring case.

    Raises:
        TemplateError: the template (a ``ValueError``) has no ``{% generation %}`` block.

    Example:
        >>> add_chat_template(
        ...     "shout",
        ...     "{% for message in messages %}{{ message['role'] }}> "
        ...     "{% generation %}{{ message['content'] }}!{% endgeneration %}{% endfor %}",
        ... )
        >>> resolve_template(None, chat_template_name="shout").name
        'shout'
        >>> remove_chat_template("shout")
    """
    if not has_generation(template):
        raise TemplateError(
            f"chat template {template_name!r} has no {{% generation %}} ... {{% endgeneration %}} "
            "block; put the assistant's words and their end-of-turn token into one"
        )
    keywords = tuple(keyword.lower() for keyword in model_family_keywords or ())
    with _USERS_LOCK:
        _USERS[template_name] = TemplateSpec(template_name, template, inverse_parser, keywords)


def remove_chat_template(template_name: str) -> None:
    """Remove a template that :func:`add_chat_template` registered.

    Raises:
        TemplateError: no user registered this name.
    """
    with _USERS_LOCK:
        if _USERS.pop(template_name, None) is None:
            raise TemplateError(f"no chat template {template_name!r} was added; {_names()}")


def resolve_template(
    tokenizer: Any,
    chat_template: str | None = None,
    chat_template_name: str | None = None,
    default: str | None = None,
) -> TemplateSpec:
    """Find the template of a tokenizer.

    Returns the first that exists: the explicit text; the name (registered by a user, built in, or
    one of the tokenizer's named templates); a template that a user registered for the model's
    family; the tokenizer's own; the built-in one of its family; ChatML (with one warning).

    Args:
        tokenizer: a Hugging Face tokenizer, or ``None`` with an explicit text or name.
        chat_template: Jinja text that overrides everything.
        chat_template_name: name of a template.
        default: name of the template to use if neither is given.

    Raises:
        TemplateError: both arguments were given, the name is unknown, or no argument selects a
            template.

    Example:
        >>> resolve_template(None, chat_template_name="qwen").template[:10] != ""
        True
    """
    if chat_template is not None and chat_template_name is not None:
        raise TemplateError("pass chat_template or chat_template_name, not both")
    if chat_template is not None:
        return TemplateSpec("explicit", chat_template, parser_for_template(chat_template))
    if chat_template_name is None and tokenizer is None:
        chat_template_name = default
    if chat_template_name is not None:
        return _by_name(tokenizer, chat_template_name)
    if tokenizer is None:
        raise TemplateError(
            f"no chat template: pass tokenizer, chat_template or chat_template_name ({_names()})"
        )
    model = _model_name(tokenizer)
    for spec in reversed(list(_USERS.values())):
        if any(keyword in model for keyword in spec.keywords):
            return spec
    own = _own_template(tokenizer)
    if own is not None:
        return TemplateSpec("tokenizer", own, parser_for_template(own))
    for spec in FAMILIES.values():
        if any(keyword in model for keyword in spec.keywords):
            return spec
    if model not in _WARNED:
        _WARNED.add(model)
        logger.warning(
            f"the tokenizer {model!r} has no chat template and belongs to no known family: using "
            f"{DEFAULT_TEMPLATE}; pass chat_template or chat_template_name to choose"
        )
    return FAMILIES[DEFAULT_TEMPLATE]


def _by_name(tokenizer: Any, name: str) -> TemplateSpec:
    if name in _USERS or name in FAMILIES:
        return _USERS.get(name) or FAMILIES[name]
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict) and name in own:
        return TemplateSpec("tokenizer", own[name], parser_for_template(own[name]))
    known = [*_USERS, *FAMILIES, *(own if isinstance(own, dict) else ())]
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise TemplateError(f"unknown chat template chat_template_name={name}: {hint}{_names()}")


def _names() -> str:
    return f"known names: {', '.join(sorted({*_USERS, *FAMILIES}))}"


def _model_name(tokenizer: Any) -> str:
    # A keyword must match the model, not one of its parent folders.
    path = str(getattr(tokenizer, "name_or_path", "") or "")
    parts = [part for part in re.split(r"[/\\]", path) if part]
    return "/".join(parts[-2:]).lower()


def _own_template(tokenizer: Any) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        return own.get("default")
    return own or None
