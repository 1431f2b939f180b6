"""Items of a multimodal content (texts, pictures, files, calls), as users write and read them.

Messages store each item as a dict, which templates, JSON and processors receive unchanged.

Next: :mod:`torchrl_llm.data.messages` defines messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from tensordict import TensorClass, lazy_stack

from torchrl_llm.errors import DataError

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]


class ContentBase(TensorClass["nocast", "shadow"]):
    """One item of a multimodal content, or a stack of items as the content of a message.

    Args:
        type: ``"text"``, ``"image"``, ``"audio"``, ``"video"``, ``"file"`` or ``"function_call"``.
        text: the text of a text item.
        url: address of the data.
        data: the data itself, encoded as a string, or an object for a processor.
        mime_type: for instance ``"image/png"``.
        name: name of a file.
        size: size of a file in bytes.
        function_name: name of the called function.
        function_args: its arguments.

    Raises:
        DataError: the type is unknown.

    Example:
        >>> from tensordict import lazy_stack
        >>> see = ContentBase(type="text", text="See")
        >>> parts = lazy_stack([see, ContentBase(type="image", url="cat.png")])
        >>> parts.type, parts[1].url, parts[1].text
        (['text', 'image'], 'cat.png', None)
    """

    type: ContentType
    text: str | None = None
    url: str | None = None
    data: Any = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.type, str) and self.type not in get_args(ContentType):
            allowed = get_args(ContentType)
            raise DataError(f"content type must be one of {allowed}, got {self.type!r}")


class ContentItem(dict):
    """The stored form of a :class:`ContentBase`: the fields that have a value."""

    def __reduce__(self) -> tuple:
        return rebuild_content, (dict(self),)


def rebuild_content(fields: dict[str, Any]) -> ContentItem:
    """Restore a part of a message's content from its pickle."""
    return ContentItem(fields)


_FIELDS = tuple(ContentBase.__dataclass_fields__)


def content_items(part: ContentBase | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dicts that a message stores for one part of its content, or for a stack."""
    if not isinstance(part, ContentBase):
        return [part]
    if part.batch_dims:
        return [item for row in part.unbind(0) for item in content_items(row)]
    fields = {name: getattr(part, name) for name in _FIELDS}
    return [ContentItem((name, value) for name, value in fields.items() if value is not None)]


def as_written(content: Any) -> Any:
    """Return a message's content in its original form, which may be a :class:`ContentBase`."""
    if not isinstance(content, list) or not content:
        return content
    if not all(isinstance(item, ContentItem) for item in content):
        return content
    return lazy_stack([ContentBase(**item) for item in content])
