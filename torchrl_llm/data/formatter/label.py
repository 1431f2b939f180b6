"""Which characters belong to whom, and from them the provenance of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_llm.data.enums import Source
from torchrl_llm.data.formatter.codec import Encoding
from torchrl_llm.data.formatter.probe import Probe
from torchrl_llm.data.formatter.render import Rendered
from torchrl_llm.data.formatter.splice import first_closer


def assistant_regions(
    rendered: Rendered, messages: Sequence[Mapping[str, Any]], probe: Probe
) -> list[tuple[int, int, int]]:
    """What a model would have to generate for each assistant message.

    Returns:
        Half-open character ranges ``(start, end, closed)``: from the end of the header to behind
        the closer; ``closed`` is where the closer begins (``end`` if there is none).
    """
    if rendered.generation is not None:
        return [_with_closer(rendered, start, end, probe) for start, end in rendered.generation]
    text, regions = rendered.text, []
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for start, end, index in rendered.spans:
        first[index] = min(start, first.get(index, start))
        last[index] = max(end, last.get(index, end))
    starts = sorted(set(first.values()))
    floor = 0
    for index in sorted(first, key=first.__getitem__):
        begin, stop = first[index], last[index]
        if messages[index].get("role") != "assistant":
            floor = max(floor, stop)
            continue
        header = text.rfind(probe.header, floor, begin) if probe.header else -1
        start = header + len(probe.header) if header >= 0 else begin
        following = next((s for s in starts if s >= stop and s > begin), len(text))
        closer = first_closer(rendered, stop, following, probe)
        if closer is not None:
            closed, end = closer[0], closer[0] + len(closer[1].text)
        else:
            # The header of the next turn closes this one and is not there yet, or nothing does.
            end = closed = len(text.rstrip()) if following == len(text) else stop
            end = closed = max(stop, end)
        regions.append((start, end, closed))
        floor = end
    return regions


def _with_closer(rendered: Rendered, start: int, end: int, probe: Probe) -> tuple[int, int, int]:
    """A ``{% generation %}`` block, with the closer that ends it or stands right behind it."""
    inside = first_closer(rendered, start, end, probe)
    if inside is not None and inside[0] + len(inside[1].text) >= len(rendered.text[:end].rstrip()):
        return start, end, inside[0]
    behind = first_closer(rendered, end, len(rendered.text), probe)
    if behind is not None and not rendered.text[end : behind[0]].strip():
        return start, behind[0] + len(behind[1].text), behind[0]
    return start, end, end


def char_sources(
    rendered: Rendered,
    messages: Sequence[Mapping[str, Any]],
    regions: Sequence[tuple[int, int, int]],
    *,
    prefilled: int | None = None,
) -> np.ndarray:
    """Source code of each character: int8 ``[len(text)]``.

    Args:
        rendered: the text with its spans.
        messages: the rendered messages.
        regions: from :func:`assistant_regions`.
        prefilled: index of the message whose content was put into the model's turn, if any.
    """
    out = np.zeros(len(rendered.text), dtype=np.int8)
    for start, _, closed in regions:
        out[start:closed] = Source.PROMPT
    for start, end, index in rendered.spans:
        role = messages[index].get("role")
        if index == prefilled:
            out[start:end] = Source.FORCED
        else:
            out[start:end] = Source.TOOL if role in ("tool", "ipython") else Source.PROMPT
    return out


def label_tokens(encoding: Encoding, text: str, chars: np.ndarray) -> np.ndarray:
    """Label of each token: that of its first character which is not white space.

    Args:
        encoding: ids with character ranges in ``text``.
        text: the encoded text.
        chars: a label for each character.
    """
    if not len(encoding.ids) or not len(chars):
        return np.zeros(len(encoding.ids), dtype=chars.dtype)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    blank = (codes == 32) | ((codes >= 9) & (codes <= 13))
    # Position of the next character that is not blank, for each position.
    solid = np.where(blank, len(codes), np.arange(len(codes)))
    solid = np.minimum.accumulate(solid[::-1])[::-1]
    starts = np.minimum(encoding.starts, len(codes) - 1)
    first = solid[starts]
    return chars[np.where(first < encoding.ends, first, starts)]
