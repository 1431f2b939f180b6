"""Probe of a chat template: renders short conversations of unusual words once.

It does not depend on the names of model families. The probe finds out which form of messages the
template needs, which header opens the model's turn, which tokens close it (after an answer, after a
tool call, at the end of the text), how the template writes reasoning and calls, and what it drops.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_llm.data.messages import REASONING_KEYS
from torchrl_llm.data.text.call_syntax import ANSWER, CALL_ID, NAME, VALUE
from torchrl_llm.data.text.codec import Codec
from torchrl_llm.data.text.renderer import Form, Renderer
from torchrl_llm.errors import TemplateError

USER, NEXT = "kqxuser", "kqxnext"
THOUGHT, RESULT = "kqxthought", "kqxresult"
_SECOND = "kqxsecond"
_BLANK = re.compile(r"\s")
_CUT_TAG = re.compile(r"<[/\w:]*$")
_BRACKET = re.compile(r"tool[^a-z]*calls?", re.IGNORECASE)
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "A value."}},
            "required": ["key"],
        },
    },
}


# Cached per tokenizer: a probe renders thirty times, and each environment creates a formatter.
_FOUND: weakref.WeakKeyDictionary[Any, dict[Any, Probe]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Closer:
    """Special tokens that end a turn: their text and their ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The findings about one template with one tokenizer.

    Args:
        form: the form of messages that the template needs.
        header: text that opens a turn of the model, the common prefix of history and generation
            prompt.
        lead: text in history between the header and an answer without reasoning.
        generation_prompt: text that ``add_generation_prompt`` adds.
        closers: all sequences of special tokens that end a turn anywhere in a text.
        terminal: the closers that end a sampled response.
        openers: ids of special tokens that open a turn of any role.
        reasoning: text directly before and after reasoning; ``None`` if it is never written.
        call: text between header and closer for a call of ``NAME`` with ``{"key": VALUE}``;
            ``None`` if the template drops calls.
        results: whether tool results are written.
        system: whether a leading system message is written.
        counts: whether the text of a turn depends on the number of turns before it.
        trail: text in history between an answer and the closer.
        beside: text for such a call with the content ``ANSWER`` next to it; ``None`` if the
            template drops the content.
        loses_calls: whether the template drops a call that has text next to it.
        behind_result: text, without white space, that history has between tool results and an
            answer, and the generation prompt lacks.
        headers_close: whether only the next header ends a turn, and no separate token does.
    """

    form: Form
    header: str
    lead: str
    generation_prompt: str
    closers: tuple[Closer, ...]
    terminal: tuple[Closer, ...]
    openers: frozenset[int]
    reasoning: tuple[str, str] | None
    call: str | None
    results: bool
    system: bool
    counts: bool = False
    trail: str = ""
    beside: str | None = None
    loses_calls: bool = False
    behind_result: str = ""
    headers_close: bool = False


def probe_template(renderer: Renderer, codec: Codec) -> Probe:
    """Probe a template, once per tokenizer, its tokens and the template's variables.

    Raises:
        TemplateError: the template does not even render a user message.
    """
    variables = repr(sorted(renderer.variables.items()))
    tokens = (*codec.added.items(), codec.special_ids, codec.eos_ids, codec.bytewise)
    known = _FOUND.setdefault(codec.tokenizer, {})
    key = (renderer.template, renderer.form, variables, tokens)
    if key not in known:
        known[key] = _Prober(renderer, codec).run()
    return known[key]


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _answer(text: str, **fields: Any) -> dict:
    return {"role": "assistant", "content": text, **fields}


def calling(names_and_values: Iterable[tuple[str, str]], **fields: Any) -> dict:
    """A message with calls, given names and the values of their only argument ``key``."""
    calls = [
        {
            "type": "function",
            "id": CALL_ID[:-1] + str(k),
            "function": {"name": name, "arguments": {"key": value}},
        }
        for k, (name, value) in enumerate(names_and_values)
    ]
    return _answer("", tool_calls=calls, **fields)


_RESULT = {"role": "tool", "content": RESULT, "name": NAME, "tool_call_id": CALL_ID[:-1] + "0"}
_ASKED = [_user(USER)]
_ANSWERED = [*_ASKED, _answer(ANSWER)]
_ANSWERED_AND_ON = [*_ANSWERED, _user(NEXT)]
_CALLED = [*_ASKED, calling([(NAME, VALUE)])]
_CALLED_AND_ON = [*_CALLED, _RESULT]
_CALLED_IN_THOUGHT = [*_ASKED, calling([(NAME, VALUE)], reasoning_content=THOUGHT), _RESULT]
_ANSWERED_IN_THOUGHT = [*_ASKED, _answer(ANSWER, reasoning_content=THOUGHT)]


class _Prober:
    def __init__(self, renderer: Renderer, codec: Codec) -> None:
        self.codec = codec
        self.renderer = renderer
        self.shield = codec.shield

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        form: Form | None = None,
    ) -> str | None:
        """Rendered text, with declared tools if necessary; None if the template raises."""
        renderer = self.renderer if form is None else self.renderer.with_form(form)
        needs_tools = any("tool_calls" in m for m in messages)
        for tools in ([TOOL], None) if needs_tools else (None,):
            try:
                text = renderer.render(messages, tools=tools, add_generation_prompt=prompt).text
            except TemplateError:
                continue
            return text
        return None

    def _going_on(self, chat: list[dict]) -> str | None:
        """A chat as history, or at the end of a text if the template rejects a user after it."""
        return self.text([*chat, _user(NEXT)]) or self.text(chat)

    def run(self) -> Probe:
        self.renderer = self.renderer.with_form(self._contents())
        form, call = self._calls(self.renderer.form)
        self.renderer = self.renderer.with_form(form)
        form = self._reasoning_field(form, call)
        self.renderer = self.renderer.with_form(form)

        header, lead, prompt = self._header()
        answer = self._closer(_ANSWERED_AND_ON, ANSWER, NEXT)
        last = self._closer(_ANSWERED, ANSWER, None)
        called = ended = None
        if call is not None:
            brackets = self._brackets()
            called = self._closer(_CALLED_AND_ON, VALUE, RESULT, brackets)
            ended = self._closer(_CALLED, VALUE, None, brackets)
        if last is not None and answer is not None and last.text.startswith(answer.text):
            last = answer  # the template only adds an eos at the end of the text
        # If the last turn is closed differently from turns of the history (gpt-oss), the model
        # samples the former, and the closer of history may occur inside a response.
        terminal = [last if last is not None else answer, ended if ended is not None else called]
        if last is None or last == answer:
            terminal.append(called)
        closers = _distinct([answer, called, last, ended])
        end_of_call = called or ended or answer
        written = self._call_text(call, header, lead, end_of_call)
        beside = None if call is None else self._beside()
        told = [{"role": "system", "content": RESULT}, *_ASKED]
        terminal = _distinct(terminal)
        return Probe(
            form=form,
            header=header,
            lead=lead,
            generation_prompt=prompt,
            closers=closers,
            terminal=terminal,
            openers=self._openers(prompt, call is not None, closers),
            reasoning=self._reasoning_marks(form, header),
            call=written,
            results=RESULT in (call or self.text([*_ANSWERED, _RESULT]) or ""),
            system=RESULT in (self.text(told) or ""),
            counts=self._counts(call is not None),
            trail=self._trail(answer or last),
            beside=self._call_text(beside, header, lead, end_of_call, ANSWER) if beside else None,
            loses_calls=beside == "",
            behind_result=self._behind_result(lead) if call is not None else "",
            headers_close=answer is not None and self._heads(answer),
        )

    def _heads(self, closer: Closer) -> bool:
        """Whether a closer begins the user's turn but does not end it."""
        before, _, behind = (self.text(_ASKED) or "").partition(USER)
        return closer.text in before and closer.text not in behind

    # -- form of the messages ---------------------------------------------------------------------

    def _contents(self) -> Form:
        """Whether contents may be strings, and whether they may be lists of parts."""
        for form in (Form(), Form(empty_tools=True)):
            plain = self.text(_ASKED, prompt=True, form=form)
            text = plain is not None and USER in plain
            as_parts = replace(form, text=False, parts=True)
            parted = self.text(_ASKED, prompt=True, form=as_parts)
            parts = parted is not None and USER in parted and "'type'" not in parted
            if text or parts:
                return replace(form, text=text, parts=parts)
            if plain is not None or parted is not None:
                raise TemplateError("the chat template drops the content of a plain user message")
        self.renderer.render(_ASKED, add_generation_prompt=True)  # raises with the cause
        raise TemplateError("the chat template rejects a plain user message")

    def _calls(self, form: Form) -> tuple[Form, str | None]:
        """The form for calls, and a text with call and result; None if calls are dropped."""
        found = self._calls_by_name(form)
        if found[1] is None:
            found = self._calls_by_name(replace(form, named_ids=True))
        return found if found[1] is not None else (form, None)

    def _calls_by_name(self, form: Form) -> tuple[Form, str | None]:
        # A template may reject the tool role and still write calls.
        for chat, prompts in ((_CALLED_AND_ON, (True, False)), (_CALLED, (False,))):
            dropped: tuple[Form, str] | None = None
            for as_text in (False, True):
                tried = replace(form, arguments_as_text=as_text)
                texts = (self.text(chat, prompt=prompt, form=tried) for prompt in prompts)
                text = next(filter(None, texts), "")
                if NAME not in _call_in(text):
                    continue
                if not as_text and "{'key'" in _call_in(text):
                    dropped = (tried, text)  # a mapping printed by Python: the template needs text
                    continue
                return replace(tried, call_ids=self._needs_ids(chat, tried)), text
            if dropped is not None:
                return dropped
        return form, None

    def _needs_ids(self, chat: list[dict], form: Form) -> bool:
        bare = [{k: v for k, v in message.items() if k != "tool_call_id"} for message in chat]
        for message in bare:
            if "tool_calls" in message:
                calls = message["tool_calls"]
                message["tool_calls"] = [{k: v for k, v in c.items() if k != "id"} for c in calls]
        return self.text(bare, prompt=len(chat) > 2, form=form) is None

    def _reasoning_field(self, form: Form, call: str | None) -> Form:
        for key in REASONING_KEYS:
            tried = replace(form, reasoning_field=key)
            chats = [_ANSWERED_IN_THOUGHT] + ([] if call is None else [_CALLED_IN_THOUGHT])
            if any(THOUGHT in (self.text(chat, form=tried) or "") for chat in chats):
                return tried
        return form

    # -- header and closers -----------------------------------------------------------------------

    def _header(self) -> tuple[str, str, str]:
        """Header of the model's turn, the text between it and an answer, the generation prompt."""
        bare = self.text(_ASKED)
        full = self.text(_ASKED, prompt=True)
        turn = self._going_on(_ANSWERED)
        if turn is None or ANSWER not in turn:
            raise TemplateError("the chat template drops the content of an assistant message")
        if USER not in turn:
            raise TemplateError("the chat template drops turns: it only writes the last of three")
        # The text before the user's content may depend on the generation prompt.
        bare, full, turn = (t[t.find(USER) :] if t and USER in t else t for t in (bare, full, turn))
        user, answer = turn.index(USER) + len(USER), turn.index(ANSWER)
        if bare is None or full is None or bare == full:
            header = turn[user:answer].rstrip()
            prompted = _common_prefix(full or "", turn)
            rest = turn[self._outside(turn, len(prompted)) : answer]
            told = USER in prompted and prompted[prompted.rindex(USER) + len(USER) :].strip()
            if told and self._is_marked(rest):
                # The template writes it after every user's turn, and the model begins with these
                # marks.
                return header.removesuffix(rest.strip()), rest, ""
            return header, "", ""
        # The end of a user's turn may be missing from `bare` (it is written with the next header).
        start = self._outside(full, len(_common_prefix(_common_prefix(bare, full), turn)))
        prompt, gap = full[start:], turn[start:answer]
        header = prompt[: self._outside(prompt, len(_common_prefix(prompt, gap)))]
        return header, gap[len(header) :], prompt

    def _is_marked(self, text: str) -> bool:
        """Whether a text consists of at least one special token and nothing else."""
        markers = [m for _, _, m in self.shield.markers_in(text)]
        return bool(markers) and "".join(markers) == "".join(text.split())

    def _outside(self, text: str, at: int) -> int:
        """The position, or the start of the special token or tag that contains it."""
        at = next((a for a, b, _ in self.shield.markers_in(text) if a < at < b), at)
        tag = _CUT_TAG.search(text, 0, at)
        return tag.start() if tag and text[at : at + 1] not in ("", "\n", " ") else at

    def _trail(self, closer: Closer | None) -> str:
        """The text in history between an answer and the token that closes the turn."""
        text = self._going_on(_ANSWERED) or ""
        if closer is None or ANSWER not in text:
            return ""
        start = text.index(ANSWER) + len(ANSWER)
        end = text.find(closer.text, start)
        return text[start:end].strip() if end >= 0 else ""

    def _counts(self, calls: bool) -> bool:
        """Whether the text of a turn changes after more turns."""
        before = [_user(RESULT), _answer(THOUGHT)] * 3
        chats = [(_ANSWERED_AND_ON, before)]
        if calls:
            chats.append((_CALLED_AND_ON, [*_CALLED_AND_ON, _answer(THOUGHT)] * 2))
        for chat, earlier in chats:
            few, many = (self.text(c, prompt=True) or "" for c in (chat, [*earlier, *chat]))
            tails = [text[text.rfind(USER) :] for text in (few, many) if USER in text]
            if len(tails) == 2 and tails[0] != tails[1]:
                return True
        return False

    def _closer(
        self,
        messages: list[dict],
        after: str,
        before: str | None,
        brackets: frozenset[str] = frozenset(),
    ) -> Closer | None:
        """The sequence of special tokens that ends the turn whose last content is ``after``."""
        text = self.text(messages)
        if text is None or after not in text:
            return None
        start = text.rindex(after) + len(after)
        end = text.find(before, start) if before is not None else len(text)
        eos = self.codec.eos_ids
        found = self._runs(text, start, end if end >= 0 else len(text))
        runs = [[m for m in run if m not in brackets and not _BRACKET.search(m)] for run in found]
        runs = [run for run in runs if run]
        if after == ANSWER and runs:
            eos = eos | self._last_mark()
        ended = [run for run in runs if any(self.codec.special.get(m) in eos for m in run)]
        if ended and ended[0] is not runs[0]:
            stop = text.find(ended[0][0], start)
            glued = text[start:stop]
            for _, _, marker in self.shield.markers_in(text, start, stop):
                glued = glued.replace(marker, "")
            glued = glued.strip()
            if glued and not _BLANK.search(glued):
                runs = ended  # marks joined to words are the structure of an answer, not its end
        for run in runs:
            last = next((k for k, m in enumerate(run) if self.codec.special.get(m) in eos), 0)
            closing = run[: last + 1]
            return Closer("".join(closing), tuple(self.codec.special[m] for m in closing))
        return None

    def _last_mark(self) -> set[int]:
        """The special token at the end of a text, if the end of the turn has words before it.

        Marks before these words do not end the turn.
        """
        text = (self.text(_ANSWERED) or "").rstrip()
        at = text.rfind(ANSWER)
        markers = self.shield.markers_in(text, at + len(ANSWER)) if at >= 0 else []
        if len(markers) < 2 or markers[-1][1] != len(text):
            return set()
        glued = text[markers[0][1] : markers[-1][0]]
        for _, _, marker in markers[1:-1]:
            glued = glued.replace(marker, "")
        return {self.codec.special[markers[-1][2]]} if glued and not _BLANK.search(glued) else set()

    def _runs(self, text: str, start: int, end: int) -> list[list[str]]:
        runs: list[list[str]] = []
        last = -1
        for a, b, marker in self.shield.markers_in(text, start, end):
            if a == last:
                runs[-1].append(marker)
            else:
                runs.append([marker])
            last = b
        return runs

    def _brackets(self) -> frozenset[str]:
        """Special tokens between two calls of one turn; they end a call, not the turn."""
        second = VALUE + "2"
        text = self.text([*_ASKED, calling([(NAME, VALUE), (_SECOND, second)])])
        if text is None or VALUE not in text or second not in text:
            return frozenset()
        first = text.index(VALUE)
        if text.startswith(second, first):
            return frozenset()
        between = self.shield.markers_in(text, first, text.index(second, first))
        return frozenset(m for _, _, m in between)

    def _openers(self, prompt: str, calls: bool, closers: tuple[Closer, ...]) -> frozenset[int]:
        texts = [prompt]
        whole = self.text(_ANSWERED_AND_ON)
        if whole is not None:
            texts += [whole[: whole.index(USER)] if USER in whole else ""]
            if ANSWER in whole and NEXT in whole:
                texts.append(whole[whole.index(ANSWER) : whole.index(NEXT)])
        if calls:
            whole = self.text(_CALLED_AND_ON) or ""
            if VALUE in whole and RESULT in whole[whole.index(VALUE) :]:
                at = whole.index(VALUE)
                texts.append(whole[at : whole.index(RESULT, at)])
        markers = {m for text in texts for _, _, m in self.shield.markers_in(text)}
        markers = {m for m in markers if not _BRACKET.search(m)}
        ids = {self.codec.special[m] for m in markers}
        return frozenset(ids - {i for c in closers for i in c.ids} - self.codec.eos_ids)

    # -- reasoning and calls ----------------------------------------------------------------------

    def _reasoning_marks(self, form: Form, header: str) -> tuple[str, str] | None:
        if form.reasoning_field is None:
            return None
        text = self.text(_ANSWERED_IN_THOUGHT)
        if text is None or THOUGHT not in text:
            text = self.text(_CALLED_IN_THOUGHT) or ""
            stop = text.find(NAME, text.find(THOUGHT))
        else:
            stop = text.find(ANSWER, text.find(THOUGHT))
        at = text.find(THOUGHT)
        if at < 0 or stop < 0:
            return None
        closing = text[at + len(THOUGHT) : stop].strip()
        head = text.rfind(header, 0, at) + len(header) if header else text.find(USER) + len(USER)
        if header and header not in text[:at]:  # history has a different header than this turn
            near = re.search(r"<[^<>]*>\s*$", text[:at]) or _named_mark(text[:at], closing)
            head = near.start() if near else at
        opening = text[head:at].strip()
        if ANSWER not in text:  # found next to a call: keep only the first marker
            first = re.match(r"<[^<>]*>", closing)
            closing = first.group() if first else closing.split("\n")[0]
        if not opening and header.rstrip().endswith(closing.replace("/", "", 1)):
            opening = closing.replace("/", "", 1)  # the generation prompt has it already
        return (opening, closing) if closing else None

    def _beside(self) -> str | None:
        """A text with ``ANSWER`` next to a call; "" if the call is lost, None if the text is."""
        chat = [*_ASKED, {**_CALLED[-1], "content": ANSWER}]
        text = self.text([*chat, _RESULT], prompt=True) or self.text(chat) or ""
        if ANSWER not in text:
            return None
        return text if NAME in _call_in(text) else ""

    def _behind_result(self, lead: str) -> str:
        prompt = self.text(_CALLED_AND_ON, prompt=True) or ""
        told = self._going_on([*_CALLED_AND_ON, _answer(ANSWER)])
        if RESULT not in prompt or not told or RESULT not in told or ANSWER not in told:
            return ""
        prompted = "".join(prompt[prompt.rindex(RESULT) :].split())
        written = "".join(told[told.rindex(RESULT) : told.rindex(ANSWER)].split())
        more = written.removeprefix(prompted)
        return more if more not in (written, "".join(lead.split())) else ""

    def _call_text(
        self, call: str | None, header: str, lead: str, closer: Closer | None, beside: str = ""
    ) -> str | None:
        if call is None:
            return None
        at = call.rfind(NAME, 0, call.rindex(VALUE)) if NAME in call else -1
        at = min(at, call.index(beside)) if beside else at
        heads = (header + lead, (header + lead).rstrip(), header, header.rstrip())
        begin = next((h for h in heads if h and call.rfind(h, 0, at) >= 0), "")
        start = call.rfind(begin, 0, at) + len(begin) if begin else call.find(USER) + len(USER)
        end = max(call.rindex(word) + len(word) for word in (VALUE, beside or VALUE))
        stop = call.find(closer.text, end) if closer is not None else -1
        if stop < 0:
            stop = call.find(RESULT, end)
        return call[start : stop if stop >= 0 else len(call)]


def _call_in(text: str) -> str:
    """The call up to its value: from the user's text on, or from the name's last occurrence.

    Tool schemas are before the user's message in some templates and inside it in others.
    """
    end = text.rfind(VALUE)
    if end < 0:
        return ""
    return text[max(text.rfind(USER, 0, end), text.rfind(NAME, 0, end), 0) : end]


def _named_mark(text: str, closing: str) -> re.Match[str] | None:
    """A mark followed by a word at the end of a text, if the closing mark has its letters."""
    found = re.search(r"<([^<>]*)>\w+\s*$", text)
    return found if found and found[1].strip("|/") == closing.strip("<|/>") else None


def _common_prefix(one: str, two: str) -> str:
    size = min(len(one), len(two))
    return next((one[:i] for i in range(size) if one[i] != two[i]), one[:size])


def _distinct(closers: Iterable[Closer | None]) -> tuple[Closer, ...]:
    return tuple(dict.fromkeys(c for c in closers if c is not None))
