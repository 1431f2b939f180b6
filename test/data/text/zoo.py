"""Chat templates of our own, each written to show one thing that templates do to history.

``ZOO`` maps a name to a :class:`Specimen`. The templates share macros for the dull parts; none is
taken from a published model. Their tokenizers are in ``tokenizers_of_the_zoo``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CHATML = ("<|im_start|>", "<|im_end|>")
_IM = "{{- '<|im_start|>' + m.role + '\n' -}}"
_END = "{{- '<|im_end|>\n' -}}"
_GEN = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
_TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\nTools:\n' -}}"
    "{%- for t in tools -%}{{- (t | tojson) + '\n' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}"
)
_CALLS = (
    "{%- for c in m.tool_calls or [] -%}"
    "{%- set call = {'name': c.function.name, 'arguments': c.function.arguments} -%}"
    "{{- '\n<tool_call>\n' + (call | tojson) + '\n</tool_call>' -}}{%- endfor -%}"
)
# The index of the last real user message: reasoning before it is history.
_LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)


def _loop(body):
    return "{%- for m in messages -%}" + body + "{%- endfor -%}"


def _merged_results(content="m.content"):
    """Consecutive tool results inside one user turn."""
    return (
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}"
        "{{- '<|im_start|>user' -}}{%- endif -%}"
        "{{- '\n<tool_response>\n' + " + content + " + '\n</tool_response>' -}}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}"
        "{{- '<|im_end|>\n' -}}{%- endif -%}"
    )


@dataclass(frozen=True)
class Specimen:
    """A template, the special tokens it needs, and what it can express.

    ``forks`` gives the cause for which history is rewritten: by the name of the sampled turn
    (:func:`scenarios.turns`), ``"*"`` for any, ``"closer"`` for an answer that was closed as the
    last turn is, ``"system"`` for an answer in a conversation with a system message.
    ``loses_text`` marks templates that drop the text beside a call, ``loses_thoughts`` those that
    drop what a ``<think>`` block in a content holds.
    """

    template: str
    special: tuple[str, ...] = CHATML
    eos: str = "<|im_end|>"
    bos: str | None = None
    added: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    forks: dict = field(default_factory=dict)
    loses_text: bool = False
    loses_thoughts: bool = False
    system: bool = True
    tools: bool = True
    reasoning: str | None = None
    alternates: bool = False
    closers: tuple[str, ...] = ("<|im_end|>",)


_REASON_IF_LAST = (
    "{%- set content = m.content -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if not thought and '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
)

ZOO: dict[str, Specimen] = {
    # Nothing happens to history.
    "faithful": Specimen(
        _TOOLS
        + _loop(
            "{%- if m.role == 'tool' -%}"
            + _merged_results()
            + "{%- else -%}"
            + _IM
            + "{{- m.content -}}"
            + _CALLS
            + _END
            + "{%- endif -%}"
        )
        + _GEN
    ),
    # One message a turn, no line end behind the closer, with {% generation %} that leaves it out.
    "generation_block": Specimen(
        _loop(
            "{{- '<|im_start|>' + m.role + '\n' -}}{%- if m.role == 'assistant' -%}"
            "{%- generation -%}{{- m.content -}}{%- endgeneration -%}{%- else -%}"
            "{{- m.content -}}{%- endif -%}{{- '<|im_end|>' -}}"
        )
        + _GEN,
        tools=False,
    ),
    # Thoughts before the last user message are dropped; the last turn always has a think block.
    "drops_thoughts": Specimen(
        _TOOLS
        + _LAST_USER
        + _loop(
            "{%- if m.role == 'tool' -%}"
            + _merged_results()
            + "{%- elif m.role == 'assistant' -%}"
            + _REASON_IF_LAST
            + "{{- '<|im_start|>assistant\n' -}}"
            "{%- if loop.index0 > ns.last and (loop.last or thought) -%}"
            "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}"
            "{%- else -%}{{- content -}}{%- endif -%}"
            + _CALLS
            + _END
            + "{%- else -%}"
            + _IM
            + "{{- m.content -}}"
            + _END
            + "{%- endif -%}"
        )
        + _GEN,
        # A turn that is written as the template writes the last one has a block that goes away.
        forks=dict.fromkeys(
            ("answer", "empty", "blanks", "marker", "thought", "call", "call_text"), "think_dropped"
        ),
        reasoning="reasoning_content",
    ),
    # The repaired form of it: thoughts stay.
    "keeps_thoughts": Specimen(
        _TOOLS
        + _loop(
            "{%- if m.role == 'tool' -%}"
            + _merged_results()
            + "{%- else -%}"
            + _IM
            + "{%- if m.reasoning_content -%}"
            "{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}"
            "{{- m.content -}}" + _CALLS + _END + "{%- endif -%}"
        )
        + _GEN,
        reasoning="reasoning_content",
    ),
    # The generation prompt opens a thought that history does not have.
    "prompt_opens_thought": Specimen(
        _loop(
            "{%- set content = m.content -%}{%- if m.role == 'assistant' -%}"
            "{%- set content = content.split('</think>')[-1].lstrip() -%}{%- endif -%}"
            + _IM
            + "{{- content -}}"
            + _END
        )
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}",
        forks={"*": "prompt_changed", "inline": "think_dropped"},
        loses_thoughts=True,
        tools=False,
    ),
    # The generation prompt opens a thought, and history keeps it.
    "prompt_opens_and_history_keeps": Specimen(
        _TOOLS
        + _loop(
            "{%- if m.role == 'tool' -%}"
            + _merged_results()
            + "{%- else -%}"
            + _IM
            + "{%- if m.role == 'assistant' -%}{{- '<think>\n' + (m.reasoning_content or '') -}}"
            "{{- '\n</think>\n\n' -}}{%- endif -%}{{- m.content -}}"
            + _CALLS
            + _END
            + "{%- endif -%}"
        )
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}",
        reasoning="reasoning_content",
    ),
    # Thinking switched off: the prompt opens and shuts a thought, history has none.
    "prompt_shuts_thought": Specimen(
        _loop(_IM + "{{- m.content -}}" + _END) + "{%- if add_generation_prompt -%}"
        "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' -}}{%- endif -%}",
        forks={"*": "prompt_changed"},
        tools=False,
    ),
    # Two special tokens close a turn.
    "two_closers": Specimen(
        "{{- '<bos>' -}}"
        + _loop(
            "{{- '<turn><' + m.role + '>' -}}{%- if m.role == 'assistant' -%}"
            "{{- '<begin>' + m.content.strip() + '<end_text><end_turn>' -}}{%- else -%}"
            "{{- m.content.strip() + '<end_turn>' -}}{%- endif -%}"
        )
        + "{%- if add_generation_prompt -%}{{- '<turn><assistant><begin>' -}}{%- endif -%}",
        special=("<turn>", "<end_turn>", "<begin>", "<end_text>")
        + ("<system>", "<user>", "<assistant>", "<tool>"),
        eos="<end_turn>",
        bos="<bos>",
        tools=False,
        closers=("<end_text><end_turn>",),
    ),
    # The header of the next turn is what closes a turn.
    "header_closes": Specimen(
        "{{- '[gMASK]<sop>' -}}"
        + _LAST_USER
        + "{%- if tools -%}{{- '<|system|>\n' + (tools | tojson) -}}{%- endif -%}"
        + _loop(
            "{%- if m.role == 'tool' -%}{%- if messages[loop.index0 - 1].role != 'tool' -%}"
            "{{- '<|observation|>' -}}{%- endif -%}"
            "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}"
            "{%- elif m.role == 'assistant' -%}{{- '<|assistant|>' -}}"
            "{%- if m.reasoning_content and loop.index0 > ns.last -%}"
            "{{- '\n<think>' + m.reasoning_content.strip() + '</think>' -}}{%- endif -%}"
            "{%- if m.content.strip() -%}{{- '\n' + m.content.strip() -}}{%- endif -%}"
            "{%- for c in m.tool_calls or [] -%}{{- '\n<tool_call>' + c.function.name -}}"
            "{%- for k, v in c.function.arguments | items -%}"
            "{{- '\n<arg_key>' + k + '</arg_key>\n<arg_value>' -}}"
            "{{- (v if v is string else v | tojson) + '</arg_value>' -}}{%- endfor -%}"
            "{{- '\n</tool_call>' -}}{%- endfor -%}"
            "{%- else -%}{{- '<|' + m.role + '|>\n' + m.content -}}{%- endif -%}"
        )
        + "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="<|endoftext|>",
        closers=("<|user|>", "<|observation|>"),
        forks={"thought": "think_dropped"},
        reasoning="reasoning_content",
    ),
    # The last turn is closed with another token than turns of the history.
    "closes_last_otherwise": Specimen(
        _LAST_USER
        + _loop(
            "{%- if m.role == 'tool' -%}"
            "{{- '<|start|>functions.' + (m.name or 'f') + ' to=assistant<|channel|>commentary' -}}"
            "{{- '<|message|>' + m.content + '<|end|>' -}}"
            "{%- elif m.role == 'assistant' -%}"
            "{%- if m.thinking and loop.index0 > ns.last -%}"
            "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}"
            "{%- endif -%}"
            "{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}"
            "{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json' -}}"
            "{{- '<|message|>' + (f.arguments | tojson) + '<|call|>' -}}"
            "{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}"
            "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}"
            "{%- endif -%}"
            "{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}"
            "{%- endif -%}"
        )
        + "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        eos="<|return|>",
        closers=("<|end|>", "<|call|>", "<|return|>"),
        forks={"thought": "think_dropped", "closer": "closer_changed"},
        loses_text=True,
        reasoning="thinking",
    ),
    # Contents are trimmed.
    "strips": Specimen(
        "{{- bos_token -}}"
        + _loop(
            "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}"
            "{%- if m.tool_calls -%}{%- if m.tool_calls | length != 1 -%}"
            "{{- raise_exception('one call a turn') -}}{%- endif -%}"
            "{%- set f = m.tool_calls[0].function -%}"
            '{{- \'{"name": "\' + f.name + \'", "parameters": \' -}}'
            "{{- (f.arguments | tojson) + '}' -}}"
            "{%- else -%}{{- m.content | trim -}}{%- endif -%}{{- '<|eot_id|>' -}}"
        )
        + "{%- if add_generation_prompt -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        closers=("<|eot_id|>",),
        loses_text=True,
    ),
    # A system message that nobody wrote.
    "default_system": Specimen(
        "{%- if messages[0].role != 'system' -%}"
        "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}{%- endif -%}"
        + _loop(_IM + "{{- m.content -}}" + _CALLS + _END)
        + _GEN
    ),
    # Text of a turn with calls is written behind the results.
    "text_after_results": Specimen(
        _loop(
            "{%- if m.role == 'tool' -%}{{- '<|im_start|>tool\n' + m.content + '<|im_end|>\n' -}}"
            "{%- set ns2 = namespace(text='') -%}"
            "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}"
            "{%- for p in messages[: loop.index0] -%}{%- if p.tool_calls -%}"
            "{%- set ns2.text = p.content -%}{%- endif -%}{%- endfor -%}"
            "{%- if ns2.text -%}{{- '<|im_start|>assistant\n' + ns2.text + '<|im_end|>\n' -}}"
            "{%- endif -%}{%- endif -%}"
            "{%- else -%}"
            + _IM
            + "{%- if not m.tool_calls or loop.last -%}{{- m.content -}}{%- endif -%}"
            + _CALLS
            + _END
            + "{%- endif -%}"
        )
        + _GEN,
        forks={"call_text": "history_changed", "call/stop_string": "history_changed"},
    ),
    # Consecutive messages of the model are joined into one turn.
    "joins_turns": Specimen(
        _loop(
            "{%- if m.role == 'assistant' -%}"
            "{%- if loop.first or messages[loop.index0 - 1].role != 'assistant' -%}"
            + _IM
            + "{%- endif -%}{{- m.content -}}"
            "{%- if loop.last or messages[loop.index0 + 1].role != 'assistant' -%}"
            + _END
            + "{%- endif -%}{%- else -%}"
            + _IM
            + "{{- m.content -}}"
            + _END
            + "{%- endif -%}"
        )
        + _GEN,
        tools=False,
    ),
    # Roles must alternate, and there is no system role.
    "alternates": Specimen(
        "{{- bos_token -}}"
        + _loop(
            "{%- if m.role not in ['user', 'assistant'] -%}"
            "{{- raise_exception('no role ' + m.role) -}}{%- endif -%}"
            "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
            "{{- raise_exception('roles must alternate') -}}{%- endif -%}"
            "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}"
            "{{- m.content | trim + '<end_of_turn>\n' -}}"
        )
        + "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}",
        special=("<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        bos="<bos>",
        system=False,
        tools=False,
        alternates=True,
        closers=("<end_of_turn>",),
    ),
    # No generation prompt: the end of the user's turn is the header.
    "no_generation_prompt": Specimen(
        "{%- if messages[0].role == 'system' -%}{%- set sys = messages[0].content -%}"
        "{%- set rest = messages[1:] -%}{%- else -%}{%- set sys = '' -%}"
        "{%- set rest = messages -%}{%- endif -%}"
        "{%- for m in rest -%}{%- if m.role == 'user' -%}"
        "{{- '<s>[INST] ' + ('<<' + sys + '>>\n\n' if loop.first and sys else '') -}}"
        "{{- m.content.strip() + ' [/INST]' -}}"
        "{%- else -%}{{- ' ' + m.content.strip() + ' </s>' -}}{%- endif -%}{%- endfor -%}",
        special=("<s>", "</s>"),
        eos="</s>",
        bos="<s>",
        tools=False,
        closers=("</s>",),
    ),
    # The system message and the tools stand at the last user message.
    "tools_at_last_user": Specimen(
        "{{- '<s>' -}}"
        + _LAST_USER
        + _loop(
            "{%- if m.role == 'system' -%}"
            "{%- elif m.role == 'user' -%}"
            "{%- if loop.index0 == ns.last and messages[0].role == 'system' -%}"
            "{{- '[SYSTEM]' + messages[0].content + '[/SYSTEM]' -}}{%- endif -%}"
            "{{- '[INST]' + m.content + '[/INST]' -}}"
            "{%- elif m.role == 'tool' -%}{{- '[RESULT]' + m.content + '[/RESULT]' -}}"
            "{%- elif m.tool_calls -%}{{- '[TOOL_CALLS][' -}}"
            "{%- for c in m.tool_calls -%}"
            "{%- if c.id is not defined or c.id | length != 9 -%}"
            "{{- raise_exception('ids have nine characters') -}}{%- endif -%}"
            "{%- set f = c.function -%}"
            "{{- {'name': f.name, 'arguments': f.arguments, 'id': c.id} | tojson -}}"
            "{{- ', ' if not loop.last else '' -}}{%- endfor -%}{{- ']</s>' -}}"
            "{%- else -%}{{- m.content + '</s>' -}}{%- endif -%}"
        ),
        special=("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM]", "[/SYSTEM]", "[TOOL_CALLS]")
        + ("[RESULT]", "[/RESULT]"),
        eos="</s>",
        bos="<s>",
        forks={"system": "prompt_changed"},
        loses_text=True,
        closers=("</s>",),
    ),
    # Contents are lists of parts, strings are not understood.
    "parts": Specimen(
        _loop(
            _IM + "{%- for p in m['content'] -%}{%- if p['type'] == 'text' -%}"
            "{{- p['text'] -}}{%- else -%}{{- '<image>' -}}{%- endif -%}{%- endfor -%}" + _END
        )
        + _GEN,
        special=(*CHATML, "<image>"),
        tools=False,
    ),
    # Arguments must be text, calls are wrapped in special tokens, and thoughts always go.
    "arguments_as_text": Specimen(
        "{{- '<bos>' -}}"
        + _loop(
            "{%- if m.role == 'user' -%}{{- '<|User|>' + m.content -}}"
            "{%- elif m.role == 'system' -%}{{- m.content -}}"
            "{%- elif m.role == 'tool' -%}"
            "{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' -}}"
            "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}"
            "{%- if not add_generation_prompt or not loop.last -%}{{- '' -}}{%- endif -%}"
            "{%- endif -%}"
            "{%- elif m.tool_calls -%}{{- '<|Assistant|>' + m.content -}}"
            "{{- '<|tool_calls_begin|>' -}}{%- for c in m.tool_calls -%}"
            "{{- '<|tool_call_begin|>function<|tool_sep|>' + c.function.name + '\n```json\n' -}}"
            "{{- c.function.arguments + '\n```<|tool_call_end|>' -}}{%- endfor -%}"
            "{{- '<|tool_calls_end|><|eos|>' -}}"
            "{%- else -%}{%- set text = m.content.split('</think>')[-1] -%}"
            "{{- '<|Assistant|>' + text + '<|eos|>' -}}{%- endif -%}"
        )
        + "{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}",
        special=("<|User|>", "<|Assistant|>", "<|tool_calls_begin|>", "<|tool_calls_end|>")
        + ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_sep|>")
        + ("<|tool_output_begin|>", "<|tool_output_end|>"),
        eos="<|eos|>",
        bos="<bos>",
        closers=("<|eos|>",),
        loses_thoughts=True,
    ),
    # An eos behind the closer at the end of the text only.
    "eos_at_the_end": Specimen(
        _loop("{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' -}}")
        + "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}"
        "{%- else -%}{{- eos_token -}}{%- endif -%}",
        special=("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"),
        eos="<|endoftext|>",
        tools=False,
        closers=("<|end|>",),
    ),
    # Tags inside the call, one an argument.
    "tagged_arguments": Specimen(
        _loop(
            _IM + "{%- if m.reasoning_content -%}{{- '<think>\n' + m.reasoning_content -}}"
            "{{- '\n</think>\n\n' -}}{%- endif -%}{{- m.content -}}"
            "{%- for c in m.tool_calls or [] -%}"
            "{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' -}}"
            "{%- for k, v in c.function.arguments | items -%}"
            "{{- '<parameter=' + k + '>\n' + (v if v is string else v | tojson) -}}"
            "{{- '\n</parameter>\n' -}}{%- endfor -%}{{- '</function>\n</tool_call>' -}}"
            "{%- endfor -%}" + _END
        )
        + _GEN,
        reasoning="reasoning_content",
    ),
    # Nothing special in the text: a turn ends with a line.
    "plain_text": Specimen(
        _loop("{{- m.role | capitalize + ': ' + m.content + '\n' -}}")
        + "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}",
        special=(),
        eos="<eos>",
        tools=False,
        closers=(),
    ),
}
