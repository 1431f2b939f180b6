"""What is tried with one published template: dialogues, tool loops, reading, and how each went.

A tokenizer is made for it whose special tokens are the marks that the template spells. The model's
turns are what the template itself writes for a message. Truth is the rendering of the whole
conversation: ids that go on must spell it, and a fork is needed where it does not begin with them.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from data.text.scenarios import TOOLS, sampled_ids, squeezed
from data.text.tokenizers_of_the_zoo import tokenizer_of
from data.text.zoo import Specimen

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.text.templates import resolve_template
from torchrl_llm.data.text.whole_chats import read_text
from torchrl_llm.errors import TorchRLLLMError

_MARKS = re.compile(
    r"<\|[\w\-.:/ ]+\|>|<｜[^｜<>]+｜>|〈\|\w+\|〉|<\|[a-z_\"]+>|<[a-z_]+\|>"
    r"|</?(?:start|end)_\w+>|<escape>"
    r"|<(?:bos|eos|s|/s|unk|sop|extra_id_\d)>|\[/?[A-Z]{2}[A-Z_]*\]|\[gMASK\]|\[\w?(?:BOS|EOS)\]"
    r"|<SPECIAL_\d+>|</?assistant>|<sep>|\[\|\w+\|\]|<_\w+>|\]~!?b\[|\]~b\]|\[e~\[|</?seed:\w+>|\[<_?\w+\|>?\]?"
)
_ADDED = re.compile(
    r"</?(?:think|tool_call|tool_response|tools|longcat_\w+|arg_key|arg_value"
    r"|minimax:tool_call|think:opensource|tool_calls|answer|ifm\|\w+)>"
)
_ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_msg|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|assistant_end|>",
    "[|endofturn|]",
    "[e~[",
    "<|end|>",
    "<|end_of_text|>",
    "<|endofresponse|>",
    "<|eom|>",
    "<|user|>",
    "<｜end▁of▁sentence｜>",
    "<|role_end|>",
    "<|endofturn|>",
    "<seed:eos>",
    "<|eos|>",
    "<SPECIAL_12>",
    "</assistant>",
    "<sep>",
]


@dataclass
class Report:
    """Counts of one template: ``faults`` names what went wrong silently, ``refused`` what was."""

    name: str
    counts: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def family_of(name: str) -> str:
    """The family by the name of the template's file."""
    name = re.sub(r"^(llama-cpp-python|vllm|trl|unsloth|axolotl|xinference)-", "", name).lower()
    name = re.sub(r"^(tool_chat_template|template|chat_template)_", "", name)
    known = (
        "qwen|qwq|deepseek|gemma|llama|mi[sn]i?stral|codestral|devstral|glm|command|cohere|phi"
        "|nemotron|granite|hermes|kimi|minimax|lfm2|gpt-?oss|minicpm|laguna|functionary|falcon"
        "|apertus|gigachat|stepfun|apriel|exaone|seed|hunyuan|smol"
    )
    found = re.search(known, name)
    return found.group().replace("-", "") if found else "others"


def tokenizer_for(template: str):
    """A tokenizer that knows the marks which a template spells, and those which it writes."""
    tokenizer = _tokenizer_with(template, template)
    for chat in ([USER, THINKING, MORE], [USER, CALLING, RESULT]):
        with suppress(Exception):
            written = tokenizer.apply_chat_template(
                chat, chat_template=template, tools=TOOLS, tokenize=False
            )
            if not set(_MARKS.findall(written)) <= set(tokenizer.all_special_tokens):
                return _tokenizer_with(template, template + written)
    return tokenizer


def _tokenizer_with(template: str, marked: str):
    special = list(dict.fromkeys(_MARKS.findall(marked)))
    added = tuple(dict.fromkeys(_ADDED.findall(marked)))
    chinese = "｜" in template
    if "eos_token" in template:
        eos = "<｜end▁of▁sentence｜>" if chinese else "</s>"
        eos = "<|END_OF_TURN_TOKEN|>" if "<|END_OF_TURN_TOKEN|>" in special else eos
    else:
        eos = next((e for e in _ENDS if e in special), "</s>")
    bos = "<｜begin▁of▁sentence｜>" if chinese else "<s>"
    return tokenizer_of(
        Specimen(template, special=tuple(special), added=added, eos=eos, bos=bos), "bytes"
    )


def _call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": "abcdef123", "function": function}


USER = {"role": "user", "content": "What is the weather?"}
MORE = {"role": "user", "content": "And tomorrow?"}
SYSTEM = {"role": "system", "content": "Be kind."}
ANSWER = {"role": "assistant", "content": "It is sunny."}
THINKING = {**ANSWER, "reasoning_content": "let me\nsee"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [_call("get_weather", city="Rome")]}
TWO_CALLS = {
    **CALLING,
    "tool_calls": [
        _call("get_weather", city="Rome"),
        {**_call("get_weather", city="Oslo"), "id": "abcdef124"},
    ],
}
KINDS = {**CALLING, "tool_calls": [_call("get_weather", city="12", n=3)]}
BARE = {**CALLING, "tool_calls": [_call("get_weather")]}
EMPTY = {**ANSWER, "content": ""}
BLANK = {**ANSWER, "content": " \n"}
UNASKED = {**ANSWER, "content": "And more."}
RESULT = {"role": "tool", "name": "get_weather", "content": "21", "tool_call_id": "abcdef123"}


class Trial:
    """Everything that is tried with one template."""

    def __init__(self, name: str, template: str) -> None:
        self.report = Report(name)
        self.tokenizer = tokenizer_for(template)
        self.tokenizer.chat_template = template

    def run(self) -> Report:
        """Dialogues without tools, then a tool loop."""
        try:
            plain = ChatFormatter(self.tokenizer, debug=True)
        except TorchRLLLMError as error:
            self.report.refused.append(f"chat: {error}")
        else:
            self.dialogues(plain)
            self.texts(plain)
        try:
            with_tools = ChatFormatter(self.tokenizer, tools=TOOLS, debug=True)
        except TorchRLLLMError as error:
            self.report.refused.append(f"tools: {error}")
        else:
            self.loops(with_tools)
            self.texts(with_tools)
        return self.report

    def dialogues(self, formatter: ChatFormatter) -> None:
        answers = [ANSWER] + [THINKING] * (formatter.probe.reasoning is not None)
        for answer in answers:
            kind = "thought" if answer is THINKING else "answer"
            for head in ([USER], [SYSTEM, USER], [USER, ANSWER, MORE, ANSWER, MORE, ANSWER, USER]):
                label = f"{kind} after {len(head)}"
                for finish in (FinishReason.STOP, FinishReason.LENGTH):
                    self.step(formatter, head, answer, [MORE], finish, f"{label} {finish.name}")
        for answer in (ANSWER, EMPTY, BLANK):
            for new in ([UNASKED, MORE], [MORE]):
                label = f"{answer['content']!r} before {len(new)}"
                self.step(formatter, [USER], answer, new, FinishReason.LENGTH, label)

    def loops(self, formatter: ChatFormatter) -> None:
        call = {"message": CALLING, "label": "call"}
        calls = [call, {"message": {**CALLING, "content": "I look."}, "label": "call with text"}]
        if formatter.probe.reasoning is not None:
            thought = {**CALLING, "reasoning_content": "let me\nsee"}
            calls.append({"message": thought, "label": "call with thought"})
        for item in calls:
            for head in ([USER], [USER, CALLING, RESULT], [SYSTEM, USER]):
                label = f"{item['label']} after {len(head)}"
                self.step(formatter, head, item["message"], [RESULT], FinishReason.STOP, label)
        for turn, label in ((TWO_CALLS, "two calls"), (KINDS, "kinds"), (BARE, "no arguments")):
            results = [{**RESULT, "tool_call_id": call["id"]} for call in turn["tool_calls"]]
            self.step(formatter, [USER], turn, results, FinishReason.STOP, label)
        self.step(formatter, [USER, CALLING, RESULT], ANSWER, [MORE], FinishReason.STOP, "result")

    def texts(self, formatter: ChatFormatter) -> None:
        """Whole texts, read back without ids where the template is of a family that is known."""
        spec = resolve_template(None, chat_template=formatter.chat_template)
        called = formatter.tools is not None
        chats = [[USER, CALLING, RESULT, ANSWER]] if called else [[USER, ANSWER], [USER, THINKING]]
        for chat in chats if spec.inverse_parser is not None else ():
            counts, message = self.report.counts, chat[1]
            if message is THINKING and formatter.probe.reasoning is None:
                continue
            try:
                text = formatter.render(chat, add_generation_prompt=False)
                read = read_text(text, spec, self.tokenizer).messages
            except TorchRLLLMError as error:
                self.report.refused.append(f"text: {error}")
                continue
            if message is THINKING and THINKING["reasoning_content"] not in text:
                continue
            counts["texts"] += 1
            said = read[-1]
            calls = [c["function"] for m in read for c in m.get("tool_calls", [])]
            wanted = [c["function"] for c in message.get("tool_calls", [])]
            thought = said.get("reasoning_content") or ""
            if (
                said["content"].strip() == ANSWER["content"]
                and calls == wanted
                and thought.strip() == message.get("reasoning_content", "")
            ):
                counts["texts read"] += 1
            else:
                self.report.faults.append(f"text {text[-200:]!r} read as {read[-3:]}")

    def step(self, formatter, head, wanted, new, finish, label) -> None:
        """Sample a turn as the template writes it, read it, go on."""
        counts, faults = self.report.counts, self.report.faults
        try:
            prompt = formatter.encode(head)
            body = self.sampled(formatter, head, wanted, new)
        except (TorchRLLLMError, IndexError) as error:
            self.report.refused.append(f"{label}: {error}")
            return
        terminal = formatter.probe.terminal
        if finish is FinishReason.STOP:
            closer = terminal[-1 if wanted.get("tool_calls") else 0] if terminal else None
            body = [*body, *(closer.ids if closer else [formatter.tokenizer.eos_token_id])]
        try:
            message = formatter.parse_response(prompt.token_ids, body, finish)
        except TorchRLLLMError as error:
            self.report.refused.append(f"{label}: {error}")
            return
        if finish is FinishReason.STOP:
            self.read(wanted, message, label, formatter)
        ids = prompt.token_ids.new_tensor([*prompt.token_ids.tolist(), *body])
        start = len(prompt.token_ids)
        old = [*head, message]
        if wanted.get("tool_calls") and not message.get("tool_calls"):
            new = [MORE]
        try:
            more = formatter.extend(ids, old, finish, new, response_start=start)
            full = squeezed(formatter.render([*old, *new]))
        except TorchRLLLMError as error:
            self.report.refused.append(f"{label}: {error}")
            return
        counts["steps"] += 1
        said = squeezed(formatter.decode(ids))
        if more.forked:
            begins = full.startswith(said)
            whole = squeezed(formatter.decode(more.token_ids)) == full
            counts["forked, needless" if begins else "forked, needed"] += 1
            if begins:
                self.report.refused.append(f"needless fork: {label}: {more.cause}")
            if not whole:
                faults.append(f"{label}: a fork that is not the rendering")
            return
        got = squeezed(formatter.decode(more.token_ids))
        counts["continued"] += 1
        if got != full and not self._own_form(formatter, old, more, full):
            faults.append(f"{label}: continued as {got[-160:]!r}, rendered {full[-160:]!r}")

    @staticmethod
    def sampled(formatter, head, wanted, new) -> list[int]:
        """What a model samples that knows how the template writes a turn: up to its first end."""
        before = formatter.render(head).rstrip()
        own = formatter.render([*head, wanted], add_generation_prompt=False)
        if own.startswith(before):
            ends = sum(own.count(c.text, len(before)) for c in formatter.probe.terminal)
            if ends < 2:
                return sampled_ids(formatter, head, wanted)
            # The last turn is written as two, which history may have as one.
            own = formatter.render([*head, wanted, *new])
        # White space may differ before the turn.
        pairs = enumerate(zip(squeezed(before), squeezed(own), strict=False))
        shared = next((k for k, (one, other) in pairs if one != other), len(squeezed(before)))
        places = (k for k, letter in enumerate(own) if not letter.isspace())
        start = next(islice(places, shared, None), len(own))
        start = len(re.sub(r"<[^<>\s]*$", "", own[:start]))
        if head[-1]["role"] != "tool":  # much may stand behind a result
            header = formatter.probe.header.strip()
            said = own.rfind(head[-1]["content"]) + len(head[-1]["content"])
            start = max(start, own.find(header, said) + len(header) if header in own[said:] else 0)
        opening, closing = formatter.probe.reasoning or ("<think>", "</think>")
        kept = own[:start].rstrip()
        opened = before.endswith(opening)
        if kept.endswith(opening) and not opened:
            start = len(kept) - len(opening)  # the prompt has shut a thought that is open here
        turn = own[start:].lstrip("\n")
        for closer in formatter.probe.terminal:
            turn = turn.partition(closer.text)[0]
        if opened and not kept.endswith(opening):
            shut = re.match(r"<[^<>]*>|\[[^\[\]]*\]|\S+", closing).group()
            if shut not in turn:  # history has no thought: the model shuts the one that is open
                turn = f"\n{shut}\n\n{turn}" if shut == "</think>" else shut + turn
        return formatter._codec.ids(turn)

    @staticmethod
    def _own_form(formatter, old, more, full) -> bool:
        """Whether the new part is the rendering behind the template's own form of the old turns."""
        added = squeezed(formatter.decode(more.token_ids[more.num_kept :]))
        if not full.endswith(added):
            return False
        before = full[: len(full) - len(added)]
        own = squeezed(formatter.render(old, add_generation_prompt=False))
        return own.startswith(before)

    def read(self, wanted, message, label, formatter) -> None:
        """Count what was read back, and note what was not."""
        counts, faults = self.report.counts, self.report.faults
        written = [c["function"]["arguments"] for c in wanted.get("tool_calls", [])]
        if any(arguments.get("city", "") not in message["raw"] for arguments in written):
            self.report.refused.append(f"{label}: the template writes the first call alone")
        elif written:
            counts["calls"] += 1
            got = [c["function"] for c in message.get("tool_calls", [])]
            if got == [c["function"] for c in wanted["tool_calls"]]:
                counts["calls read"] += 1
            else:
                faults.append(f"{label}: call not read: {message['raw'][:300]!r} {message}")
        thought = wanted.get("reasoning_content")
        inside = thought and squeezed(thought) in squeezed(message["raw"])
        if inside:
            counts["thoughts"] += 1
            got = message.get("reasoning_content") or ""
            if squeezed(got) == squeezed(thought):
                counts["thoughts read"] += 1
            else:
                faults.append(f"{label}: thought not read: {message['raw'][:200]!r} -> {got!r}")
        said = squeezed(wanted["content"])
        got = squeezed(message["content"])
        if formatter.probe.reasoning is None:  # an inline thought stays in the content
            got = got.rpartition("</think>")[2]
        beside = squeezed(message.get("reasoning_content") or "")
        if said and wanted.get("tool_calls") and said in beside:
            return  # a form that writes the text beside a call as a thought
        if said and said in squeezed(message["raw"]) and got != said:
            faults.append(f"{label}: content {message['content']!r} for {wanted['content']!r}")
