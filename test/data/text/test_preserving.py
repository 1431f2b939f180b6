"""Our own templates: the built-in families and those that keep reasoning never rewrite history."""

from __future__ import annotations

import pytest
import torch
from data.text import scenarios
from data.text.tokenizers_of_the_zoo import tokenizer_of
from data.text.zoo import Specimen

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.text.families import BUILTIN_TEMPLATES, PRESERVING_TEMPLATES

USER = {"role": "user", "content": "Hi"}
DEEPSEEK = ["User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin"]
DEEPSEEK += ["tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end"]
DEEPSEEK += ["tool▁output▁begin", "tool▁output▁end"]
OURS = {
    "deepseek_r1": Specimen(
        PRESERVING_TEMPLATES["deepseek_r1"],
        special=tuple(f"<｜{m}｜>" for m in DEEPSEEK),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        reasoning="reasoning_content",
    ),
    "glm4": Specimen(
        PRESERVING_TEMPLATES["glm4"],
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="<|endoftext|>",
        reasoning="reasoning_content",
    ),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_a_preserving_template_never_forks(name, kind):
    specimen = OURS[name]
    formatter = ChatFormatter(tokenizer_of(specimen, kind), debug=True, tools=scenarios.TOOLS)
    assert formatter.probe.form.reasoning_field == "reasoning_content"
    for turn_name, turn in scenarios.turns(specimen).items():
        prompt = [{"role": "system", "content": "Be kind."}, USER]
        start = formatter.encode(prompt).token_ids
        body = scenarios.sampled_ids(formatter, prompt, turn)
        for ending, (tail, finish) in scenarios.endings(formatter, turn).items():
            if ending in ("overrun", "wrong_closer"):
                continue
            message = formatter.parse_response(start, body + tail, finish)
            if ending == "closer":
                calls = [c["function"] for c in message.get("tool_calls", [])]
                assert calls == [c["function"] for c in turn.get("tool_calls", [])]
                thought = message.get("reasoning_content") or None
                assert thought == turn.get("reasoning_content")
            new = scenarios.following(message)
            ids = torch.cat([start, torch.tensor(body + tail, dtype=torch.int64)])
            out = formatter.extend(ids, [*prompt, message], finish, new, response_start=len(start))
            assert not out.forked, (turn_name, ending, out.cause)
            assert torch.equal(out.token_ids[: len(ids)], ids)


def test_an_empty_thought_that_was_sampled_stays():
    formatter = ChatFormatter(tokenizer_of(OURS["glm4"], "bytes"), on_rewrite="error")
    start = formatter.encode([USER]).token_ids
    response = torch.tensor(formatter._codec.ids("\n<think></think>\nYes.<|user|>"))
    message = formatter.parse_response(start, response, FinishReason.STOP)
    assert message["reasoning_content"] == ""
    out = formatter.extend(
        torch.cat([start, response]),
        [USER, message],
        FinishReason.STOP,
        [USER],
        response_start=len(start),
    )
    assert formatter.decode(out.token_ids).endswith("</think>\nYes.<|user|>\nHi<|assistant|>")


BUILTIN = {
    "<|im_end|>": ("<|im_start|>", "<|im_end|>"),
    "<|eot_id|>": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot|>": ("<|header_start|>", "<|header_end|>", "<|eot|>"),
}


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_the_built_in_families_keep_what_was_sampled(name):
    template = BUILTIN_TEMPLATES[name]
    eos = next((e for e in BUILTIN if e in template), "<|endoftext|>")
    specimen = Specimen(template, special=BUILTIN.get(eos, ()), eos=eos, bos="<|begin_of_text|>")
    formatter = ChatFormatter(tokenizer_of(specimen, "bytes"), debug=True)
    assert formatter.closers
    prompt = [USER]
    start = formatter.encode(prompt).token_ids
    turns = [{"content": c} for c in ("Yes.", "", " a\n")]
    if formatter.probe.reasoning:
        turns += [{"content": "A", "reasoning_content": "hm"}]
    if formatter.probe.call:
        turns += [{"content": "", "tool_calls": scenarios.CALLS}]
    for fields in turns:
        turn = {"role": "assistant", **fields}
        body = scenarios.sampled_ids(formatter, prompt, turn)
        for tail, finish in (
            (list(formatter.closers[0].ids), FinishReason.STOP),
            ([], FinishReason.LENGTH),
        ):
            message = formatter.parse_response(start, body + tail, finish)
            assert message["content"].strip() == turn["content"].strip()
            assert message.get("reasoning_content") == turn.get("reasoning_content")
            new = scenarios.following(message)
            ids = torch.cat([start, torch.tensor(body + tail, dtype=torch.int64)])
            out = formatter.extend(ids, [*prompt, message], finish, new, response_start=len(start))
            assert not out.forked, (turn, out.cause)
            assert torch.equal(out.token_ids[: len(ids)], ids)
            want = formatter.render([*prompt, message, *new])
            assert scenarios.squeezed(formatter.decode(out.token_ids)) == scenarios.squeezed(want)
