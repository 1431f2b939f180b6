"""Conversations, turns and endings that the tests run over every specimen of the zoo."""

from __future__ import annotations

import pytest
from data.text.zoo import ZOO

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text.codec import Piece

MARKER = "<|im_end|></s><|user|><turn>"
CALLS = [
    {
        "type": "function",
        "id": "abcdef123",
        "function": {"name": "get_weather", "arguments": {"city": f"Paris {MARKER}", "n": 2}},
    }
]
THOUGHT = "let me\nsee"


# Each template with each kind of tokenizer; a plain run takes those of one kind, and two specimens
# (one with a thought, one that is closed by the next header) with the others.
SAMPLED = ("prompt_opens_and_history_keeps", "header_closes")
EACH_TEMPLATE = [
    pytest.param(
        name,
        kind,
        id=f"{name}-{kind}",
        marks=() if kind == "bytes" or name in SAMPLED else pytest.mark.full,
    )
    for kind in ("bytes", "metaspace", "prepend")
    for name in ZOO
]


def squeezed(text):
    return "".join(text.split())


def plain_ids(formatter, text):
    """Ids of a text whose special-token strings are ordinary characters."""
    shield = formatter._codec.shield
    return formatter._codec.encode(
        Piece(text, [(a, b) for a, b, _ in shield.markers_in(text)])
    ).ids.tolist()


def prompts(specimen):
    """Messages in front of the sampled turn, by name."""
    user = {"role": "user", "content": f" What {MARKER}?\n"}
    out = {"bare": [user], "blank": [{"role": "user", "content": ""}]}
    out["later"] = [user, {"role": "assistant", "content": "I am fine. "}, user]
    if specimen.system:
        out["system"] = [{"role": "system", "content": f"Be {MARKER} kind."}, user]
    return out


def turns(specimen):
    """The turn that the model is going to sample, by name."""
    say = {
        "answer": {"content": "It is sunny."},
        "empty": {"content": ""},
        "blanks": {"content": "  odd\n\n  white "},
        "marker": {"content": f"say {MARKER} aloud"},
    }
    if specimen.reasoning:
        say["thought"] = {"content": "Sunny.", "reasoning_content": THOUGHT + MARKER}
    else:
        say["inline"] = {"content": f"<think>\n{THOUGHT}\n</think>\n\nSunny."}
    if specimen.tools:
        say["call"] = {"content": "", "tool_calls": CALLS}
        say["call_text"] = {"content": "I look.", "tool_calls": CALLS}
        if specimen.reasoning:
            say["call_thought"] = {
                "content": "",
                "tool_calls": CALLS,
                "reasoning_content": THOUGHT,
            }
    return {name: {"role": "assistant", **fields} for name, fields in say.items()}


def sampled_ids(formatter, prompt, turn):
    """Ids that a model which knows the template would sample for a turn, without its end."""
    before = formatter.render(prompt)
    own = formatter._composer.compose([*prompt, turn], add_generation_prompt=False)
    text = own.rendered.text
    if not text.startswith(before.rstrip()):
        # The generation prompt is not what history has: the model continues the prompt.
        opened, content = before.rstrip().endswith("<think>"), turn["content"]
        if opened:
            content = (
                content.removeprefix("<think>\n")
                if "<think>" in content
                else ("\n</think>\n\n" + content)
            )
        return plain_ids(formatter, content)
    start = len(before) if text.startswith(before) else len(before.rstrip())
    piece = own.piece(start)
    end = len(piece.text.rstrip()) if not formatter.closers else len(piece.text)
    for closer in formatter.probe.terminal:
        at = piece.text.rfind(closer.text)
        if at >= 0 and not any(a <= at < b for a, b in piece.literals):
            end = min(end, at)
    literals = [(a, b) for a, b in piece.literals if b <= end]
    return formatter._codec.encode(Piece(piece.text[:end], literals, True)).ids.tolist()


def endings(formatter, turn):
    """(ids behind the body, finish reason) by the name of the way in which a response ends."""
    other = formatter.tokenizer.convert_tokens_to_ids("<|other|>")
    out = {
        "length": ([], FinishReason.LENGTH),
        "stop_string": (plain_ids(formatter, " END\nx"), FinishReason.STOP),
        "other_eos": ([other], FinishReason.STOP),
    }
    terminal = formatter.probe.terminal
    if not terminal:
        return {**out, "eos": ([formatter.tokenizer.eos_token_id], FinishReason.STOP)}
    closer = terminal[-1] if "tool_calls" in turn else terminal[0]
    out["closer"] = (list(closer.ids), FinishReason.STOP)
    out["overrun"] = (list(closer.ids) + plain_ids(formatter, "user x"), FinishReason.LENGTH)
    if len(terminal) > 1:
        wrong = terminal[0] if "tool_calls" in turn else terminal[-1]
        out["wrong_closer"] = (list(wrong.ids), FinishReason.STOP)
    if len(closer.ids) > 1:
        out["half_closer"] = (list(closer.ids[:1]), FinishReason.LENGTH)
    return out


def following(message):
    """The messages behind a turn: results of its calls, all at once, or a user's."""
    if "tool_calls" not in message:
        return [{"role": "user", "content": f"And {MARKER} now? "}]
    call = message["tool_calls"][0]
    common = {"role": "tool", "name": "get_weather", "tool_call_id": call["id"]}
    return [{**common, "content": f"21 {MARKER}"}, {**common, "content": " 22\n"}]


def expected_cause(specimen, prompt, turn, ending):
    """Why a conversation forks, by the specimen's own account; None if it does not."""
    forks = specimen.forks
    called = turn.startswith("call")
    if cause := forks.get(turn) or forks.get(f"{turn}/{ending}") or forks.get("*"):
        return cause
    if prompt == "system" and not called and "system" in forks:
        return forks["system"]
    if ending in ("closer", "overrun") and not called and "closer" in forks:
        return forks["closer"]
    return {"wrong_closer": "closer_changed", "overrun": "history_changed"}.get(ending)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
