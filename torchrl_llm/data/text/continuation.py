"""Continuation of known token ids by new messages.

:mod:`~torchrl_llm.data.text.splice` compares rendered texts and decides whether the old ids can be
continued and from which position. This module renders a window of the conversation for it, and
encodes the new part in one piece, which begins with the token that closes the sampled turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text import splice
from torchrl_llm.data.text.codec import Encoding
from torchrl_llm.data.text.compose import Composed, Composer, Messages
from torchrl_llm.data.text.renderer import Rendered
from torchrl_llm.errors import TemplateError, TokenizerError

OnRewrite = Literal["fork", "keep", "error"]
ForkCause = Literal["think_dropped", "prompt_changed", "closer_changed", "history_changed"]

COUNTED = (
    "the chat template counts the turns before a message, so new messages cannot be appended "
    "without all old ones: expected a template that does not count; pass the whole conversation "
    'to extend with on_rewrite="fork" or "error"'
)


class Extension(NamedTuple):
    """Old ids, extended by the ids of new messages.

    Attributes:
        token_ids: int64 ``[T]``, the whole conversation.
        num_kept: length of the prefix that consists of the old ids, unchanged (0 when forked).
        source: int8 ``[T - num_kept]``, provenance of the new part.
        forked: the template rewrote history, and all ids are new.
        cause: the rewritten part; also set under ``on_rewrite="keep"``, which never forks.
    """

    token_ids: Tensor
    num_kept: int
    source: Tensor
    forked: bool
    cause: ForkCause | None


class Request(NamedTuple):
    """Arguments of a continuation; see :meth:`ChatFormatter.extend`."""

    token_ids: Tensor
    old: Messages
    finish_reason: FinishReason | None
    new: Messages
    response_start: int
    tools: Sequence[Any] | None


class Addition(NamedTuple):
    """Ids that new messages add to the old ids or, if ``forked``, the ids that replace all of them.

    Attributes:
        token_ids: int64 ``[N]``.
        source: int8 ``[N]``, provenance of each.
        forked: the template rewrote history.
        cause: see :class:`Extension`.
    """

    token_ids: Tensor
    source: Tensor
    forked: bool
    cause: ForkCause | None


class _Rest(NamedTuple):
    """Text to encode: ``composed`` from ``start`` on; the old ids already end with ``held``."""

    composed: Composed
    start: int
    held: list[int]
    forked: bool = False
    cause: ForkCause | None = None


class Continuation:
    """Continue conversations of one formatter.

    Args:
        composer: renders and labels.
        on_rewrite: what to do if the template rewrites history.
        debug: check each result.
    """

    def __init__(self, composer: Composer, on_rewrite: OnRewrite, *, debug: bool) -> None:
        self._composer = composer
        self._codec = composer.codec
        self._probe = composer.probe
        self._on_rewrite = on_rewrite
        self._debug = debug

    def extend(self, request: Request) -> Extension:
        """See :meth:`ChatFormatter.extend`."""
        [added] = self.additions([request])
        if added.forked:
            return Extension(added.token_ids, 0, added.source, True, added.cause)
        kept = request.token_ids
        whole = torch.cat([kept, added.token_ids])
        return Extension(whole, kept.shape[0], added.source, False, added.cause)

    def additions(self, requests: Sequence[Request]) -> list[Addition]:
        """The addition for each request, all encoded by one call of the tokenizer."""
        rests = [self._continued(request) for request in requests]
        encodings = self._codec.encode_batch([self._piece(rest) for rest in rests])
        return [self._added(*pair) for pair in zip(rests, encodings, strict=True)]

    def _continued(self, request: Request) -> _Rest:
        tools = self._composer.tools if request.tools is None else request.tools
        response = request.token_ids[request.response_start :].tolist()
        ending = splice.read_ending(response, request.finish_reason, self._probe, self._codec)
        return self._rest(request.old, ending, request.new, tools)

    def _added(self, rest: _Rest, encoding: Encoding) -> Addition:
        source, _ = rest.composed.sources(encoding, rest.start)
        # Skip the part of the closer that the old ids already end with: all of it or a prefix.
        ids, held = encoding.ids.tolist(), rest.held
        skip = next((n for n in range(len(held), 0, -1) if ids[:n] == held[-n:]), 0)
        if self._debug:
            self._composer.verify(rest.composed, rest.start, encoding)
            self._verify_text(rest, ids)
        added, source = torch.from_numpy(encoding.ids[skip:]), torch.from_numpy(source[skip:])
        return Addition(added, source, rest.forked, rest.cause)

    # -- the decision -----------------------------------------------------------------------------

    def _rest(
        self, old: Messages, ending: splice.Ending, new: Messages, tools: Sequence[Any] | None
    ) -> _Rest:
        self._composer.check(new, first=len(old))
        turn, body = old[-1], self._codec.decode(ending.body)
        window, (prompt, alone, full) = self._window(old, new, tools)
        said = splice.Said(prompt, alone, full, body, ending.closer, turn, self._probe)
        cut = splice.find_cut(said)
        if cut is None and not ending.body + ending.tail and full.text.startswith(prompt.text):
            cut = splice.Cut(len(prompt.text), None)  # nothing was sampled that could be rewritten
        composed = self._composer.label(full, [*window, *new])
        if cut is not None and self._fits(composed, cut, ending):
            start = cut.start if cut.closer else _behind_blanks(full.text, cut.start, body)
            return _Rest(composed, start, ending.tail if cut.closer else [])
        cause: ForkCause = "history_changed"  # ids sampled after the end of the turn are lost
        if cut is None:
            cause = splice.fork_cause(said, window)
        if self._on_rewrite == "error":
            raise TemplateError(
                f"the chat template rewrites history ({cause}); use a template that keeps it, "
                'or on_rewrite="fork"'
            )
        if self._on_rewrite == "fork":
            whole = self._composer.compose([*old, *new], add_generation_prompt=True, tools=tools)
            return _Rest(whole, 0, [], True, cause)
        return self._behind_dummy(turn, new, tools, ending, cause)

    def _window(
        self, old: Messages, new: Messages, tools: Sequence[Any] | None
    ) -> tuple[list[Mapping[str, Any]], tuple[Rendered, Callable[[], Rendered], Rendered]]:
        """The relevant old messages; renderings of the old prompt, the old and all messages."""
        if self._probe.counts:
            return list(old), self._three(list(old), new, tools)
        short = bool(new) and all(m.get("role") == "tool" for m in new)
        window = [old[i] for i in splice.window_start(old, len(old) - 1, short=short)]
        try:
            return window, self._three(window, new, tools)
        except TemplateError:  # the template needs more than the window
            return list(old), self._three(list(old), new, tools)

    def _three(
        self, window: Messages, new: Messages, tools: Sequence[Any] | None
    ) -> tuple[Rendered, Callable[[], Rendered], Rendered]:
        render = partial(self._composer.renderer.render, tools=tools)

        @cache
        def alone() -> Rendered:  # seldom needed
            try:
                return render(window)
            except TemplateError:  # the template cannot end with this turn: no text matches
                return Rendered("")

        prompt = render(window[:-1], add_generation_prompt=True)
        return prompt, alone, render([*window, *new], add_generation_prompt=True, spans=True)

    def _fits(self, composed: Composed, cut: splice.Cut, ending: splice.Ending) -> bool:
        """Whether the ids sampled after the closer are those that the template writes there."""
        if not ending.overrun:
            return True
        ids = self._codec.encode(composed.piece(cut.start)).ids.tolist()
        return ids[: len(ending.tail)] == ending.tail

    def _behind_dummy(
        self,
        turn: Mapping[str, Any],
        new: Messages,
        tools: Sequence[Any] | None,
        ending: splice.Ending,
        cause: ForkCause,
    ) -> _Rest:
        """The new part, rendered after a dummy conversation."""
        if self._probe.counts:
            raise TemplateError(COUNTED)
        dummy: dict[str, Any] = {"role": "assistant", "content": "Yes."}
        if turn.get("tool_calls"):
            dummy = {**dummy, "content": "", "tool_calls": turn["tool_calls"]}
        window: list[Mapping[str, Any]] = [{"role": "user", "content": "Go on."}, dummy]
        full = self._composer.renderer.render(
            [*window, *new], tools=tools, add_generation_prompt=True, spans=True
        )
        composed = self._composer.label(full, [*window, *new])
        after = max((s.end for s in full.spans if s.index == 1), default=0)
        before = (s.start for s in full.spans if s.index > 1 and s.start >= after)
        found = splice.first_closer(full, after, min(before, default=len(full.text)), self._probe)
        if found is None:
            return _Rest(composed, after, [], False, cause)
        at, closer = found
        # A turn that any token has already closed is not closed again.
        held = ending.tail if ending.closer is None else list(closer.ids)
        return _Rest(composed, at, held, False, cause)

    # -- encoding ---------------------------------------------------------------------------------

    def _piece(self, rest: _Rest) -> Any:
        piece = rest.composed.piece(rest.start)
        if rest.start and not any(piece.text.startswith(c.text) for c in self._probe.closers):
            piece = piece._replace(continues=True)
        return piece

    def _verify_text(self, rest: _Rest, ids: list[int]) -> None:
        """The ids of the new part decode to the rendered text, white space aside."""
        text = rest.composed.rendered.text[rest.start :]
        got, again = self._codec.decode(ids), self._codec.decode(self._codec.ids(text))
        if "".join(got.split()) not in ("".join(text.split()), "".join(again.split())):
            raise TokenizerError(f"the new part decodes to {got!r}, the template wrote {text!r}")


def _behind_blanks(text: str, start: int, body: str) -> int:
    """Skip white space that the response has sampled already."""
    blank = len(body) - len(body.rstrip())
    while blank and text[start : start + 1].isspace():
        start, blank = start + 1, blank - 1
    return start
