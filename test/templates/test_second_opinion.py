"""The package ``renderers``, written by others, as a second opinion on published templates.

``gather.py`` puts it beside the templates; without it this is skipped. Both render the same chats,
read the same responses and go on behind them. Where they differ, the model's own template decides:
each kind of difference is in ``DECIDED``, with who is right and why.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from pathlib import Path

import pytest
from data.text.scenarios import TOOLS
from templates import trial

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import TorchRLLLMError

pytestmark = pytest.mark.published
# Of each family the published template that its renderer was written for.
FAMILIES = {
    "trl-qwen3": "Qwen3",
    "trl-qwen3_5_think": "Qwen35",
    "trl-qwen3_6": "Qwen36",
    "trl-qwen3_8": "Qwen38",
    "trl-qwen3_vl": "Qwen3VL",
    "trl-glm4moe": "GLM45",
    "xinference-glm-5.1": "GLM51",
    "xinference-glm-5.3": "GLM53",
    "xinference-Kimi-K2.5": "KimiK25",
    "xinference-MiniMax-M2.5": "MiniMaxM2",
    "trl-nemotron_3_nano": "Nemotron3",
    "trl-nemotron_3_ultra": "Nemotron3Ultra",
    "trl-nemotron_3_5_lightning": "Nemotron35",
    "trl-gemma4_v5": "Gemma4",
    "trl-llama3_1": "Llama3",
    "llama-cpp-python-poolside-Laguna-XS.2": "LagunaXS2",
}
# Tokens that a renderer wants to find, and which its template does not spell.
FURTHER = "<|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
# Pattern of "<template> <what> <case>": who is right.
DECIDED = {
    "* goes-on *: they give up": "ours: the template goes on in this way, and they render anew",
    "* goes-on *: ours forks": "ours: the template writes this history in another way; they keep "
    "what was sampled by policy, as on_rewrite='keep' does",
    "*-glm* goes-on *LENGTH: <|endoftext|>": "ours: the template has no <|endoftext|> there",
    "*-Laguna-* goes-on * STOP: other text": "ours: the template writes a line end behind the mark "
    "that closes a turn",
    "xinference-Kimi-K2.5 renders tools*": "theirs declare tools as the model's own code does, "
    "which this template takes ready-made; ours is the template's own fallback",
}


@pytest.fixture(scope="module")
def renderers():
    folder = Path(os.environ.get("TORCHRL_LLM_TEMPLATES", ""), "packages")
    if not folder.is_dir():
        pytest.skip("no package renderers: run test/templates/gather.py FOLDER")
    sys.path.append(str(folder))
    yield pytest.importorskip("renderers")
    sys.path.remove(str(folder))


def text_of(formatter, ids):
    return unbegun(formatter.decode(list(ids)))


def unbegun(text):
    """The text without the first token of all, which renderers take from the model's tokenizer."""
    return re.sub(r"^(<s>|<bos>|<\|begin_of_text\|>)", "", text)


def rendered(formatter, other, tools):
    """Chats that both render: their name, and the two texts."""
    chats = {"user": [trial.USER], "system": [trial.SYSTEM, trial.USER]}
    chats["later"] = [trial.USER, trial.ANSWER, trial.MORE]
    if formatter.probe.reasoning is not None:
        chats["thought"] = [trial.USER, trial.THINKING, trial.MORE]
    if tools:
        chats["call"] = [trial.USER, trial.CALLING, trial.RESULT]
        chats["after"] = [*chats["call"], trial.ANSWER, trial.MORE]
    for name, chat in chats.items():
        theirs = other.render_ids(chat, tools=tools, add_generation_prompt=True)
        ours = unbegun(formatter.render(chat, add_generation_prompt=True))
        yield name, ours, text_of(formatter, theirs)


def turns(formatter, tools):
    yield "answer", trial.ANSWER, [trial.MORE]
    if formatter.probe.reasoning is not None:
        yield "thought", trial.THINKING, [trial.MORE]
    if tools:
        yield "call", trial.CALLING, [trial.RESULT]


def read(message):
    """Content, thought and calls of a message of ours, or of theirs."""
    if isinstance(message, dict):
        calls = [c["function"] for c in message.get("tool_calls", [])]
        calls = [(c["name"], c["arguments"]) for c in calls]
        fields = message["content"], message.get("reasoning_content")
    else:
        calls = [(c.name, c.arguments) for c in message.tool_calls]
        fields = message.content, message.reasoning_content
    return *((field or "").strip() for field in fields), calls


def differences(name, template, make, configuration):
    tokenizer, other = _made(template, make, configuration)
    for tools in (None, TOOLS):
        formatter = ChatFormatter(tokenizer, tools=tools)
        kind = "tools" if tools else "chat"
        for case, ours, theirs in rendered(formatter, other, tools):
            if ours != theirs:
                yield f"{name} renders {kind} {case}"
        for case, turn, new in turns(formatter, tools):
            for finish in (FinishReason.STOP, FinishReason.LENGTH):
                prompt = formatter.encode([trial.USER]).token_ids
                body = trial.Trial.sampled(formatter, [trial.USER], turn, new)
                closers = formatter.probe.terminal
                if finish is FinishReason.STOP:
                    body = [*body, *closers[-1 if turn.get("tool_calls") else 0].ids]
                message = formatter.parse_response(prompt, body, finish)
                theirs = other.parse_response(body, tools=tools, prompt_ids=prompt.tolist())
                label = f"{kind} {case} {finish.name}"
                if read(message) != read(theirs):
                    yield f"{name} reads {label}"
                ids = prompt.new_tensor([*prompt.tolist(), *body])
                start = len(prompt)
                more = formatter.extend(
                    ids, [trial.USER, message], finish, new, response_start=start
                )
                bridge = other.bridge_to_next_turn(prompt.tolist(), body, new, tools=tools)
                yield from _continued(f"{name} goes-on {label}", formatter, more, bridge)


def _made(template, make, configuration):
    """A tokenizer with all tokens that the renderer asks for, and the renderer."""
    known = trial.tokenizer_for(template)
    marks = " ".join([*known.all_special_tokens, *known.get_added_vocab(), FURTHER])
    for _ in range(20):
        tokenizer = trial._tokenizer_with(template, f"{template} {marks}")
        tokenizer.chat_template = template
        try:
            return tokenizer, make(tokenizer, configuration)
        except AssertionError as error:
            missing = re.search(r"Special token '(.*?)' not found", str(error))
            if missing is None or missing[1] in marks.split():
                raise
            marks += f" {missing[1]}"
    raise AssertionError("the renderer asks for more and more tokens")


def _continued(label, formatter, more, bridge):
    if more.forked and bridge is None:
        return
    if more.forked or bridge is None:
        yield f"{label}: {'ours forks' if more.forked else 'they give up'}"
        return
    ours, theirs = (text_of(formatter, ids) for ids in (more.token_ids, bridge.token_ids))
    if ours != theirs:
        end = "<|endoftext|>" if theirs.replace("<|endoftext|>", "") == ours else "other text"
        yield f"{label}: {end}"


@pytest.mark.parametrize("name", FAMILIES)
def test_where_two_implementations_differ_it_is_written_down_who_is_right(name, renderers):
    path = Path(os.environ["TORCHRL_LLM_TEMPLATES"], f"{name}.jinja")
    if not path.exists():
        pytest.skip(f"{name} was not gathered")
    configuration = getattr(renderers, f"{FAMILIES[name]}RendererConfig")()
    try:
        found = list(differences(name, path.read_text(), renderers.create_renderer, configuration))
    except (TorchRLLLMError, AssertionError) as error:
        pytest.skip(f"cannot be compared: {error}")
    sys.stdout.write("\n".join(["", *found, ""]))
    undecided = [d for d in found if not any(fnmatch.fnmatchcase(d, p) for p in DECIDED)]
    assert not undecided
