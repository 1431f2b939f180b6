r"""The chat templates of the built-in model families, as Jinja texts.

Every template writes contents as they are (nothing is stripped), adds no system message that the
conversation does not have, puts the assistant's words *and* its end-of-turn token inside
``{% generation %}``, and raises an error that names the message where the family has no form for it
(a tool call in Falcon, a system message in DialoGPT). So each text can be read back by the parser
of the same name in :mod:`torchrl_llm.data.parsers`; change both together.

They serve tokenizers that bring no template of their own; see
:func:`torchrl_llm.data.templates.resolve_template`. ``qwen3`` is asked for by name: it writes the
reasoning of every turn, where the published template drops that of earlier turns and so rewrites
history at each user message. Use it for training and serving alike.
"""

from __future__ import annotations

# (before, after) the tool schemas, one a line, in the system message.
CHATML_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
)
LLAMA_TOOLS = (
    "You can call the functions below. To call one, answer with a JSON object of the form "
    '{"name": function name, "parameters": object of arguments} and nothing else.\n\n',
    "\n\nCall a function only when its result is needed.",
)

# Contents of one message; parts of type text are joined. What no family has a form for, raises.
_MACROS = r"""
{%- macro fail(message, index, why) -%}
{{- raise_exception('message ' ~ index ~ ' (' ~ message['role'] ~ '): FAMILY ' ~ why) -}}
{%- endmacro -%}
{%- macro text(message, index) -%}
{%- if REASONING_KEYS -%}
{{- fail(message, index, 'has no form for this reasoning beside the content; put it there') -}}
{%- endif -%}
{%- if message['tool_responses'] -%}
{{- fail(message, index, 'has no form for tool_responses: write a tool message each') -}}
{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}
{%- if part['type'] != 'text' -%}
{{- fail(message, index, 'has no form for content of type ' ~ part['type']) -}}
{%- endif -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
_NO_TOOLS = r"""
{%- if tools -%}
{{- raise_exception('FAMILY has no form for tools; use a template that declares them') -}}
{%- endif -%}
"""
_NO_CALLS = r"""
{%- if message['tool_calls'] -%}
{{- fail(message, loop.index0, 'has no form for tool calls') -}}
{%- endif -%}
"""
_SYSTEM_WITH_TOOLS = r"""
{%- if messages and messages[0]['role'] == 'system' -%}
{{- text(messages[0], 0) ~ '\n\n' -}}
{%- endif -%}
{{- BEFORE -}}
{%- for tool in tools -%}
{{- tool | tojson -}}
{%- if not loop.last -%}{{- '\n' -}}{%- endif -%}
{%- endfor -%}
{{- AFTER -}}
"""

_CHATML = (
    _MACROS
    + r"""
{%- if tools -%}
{{- '<|im_start|>system\n' -}}"""
    + _SYSTEM_WITH_TOOLS
    + r"""
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- set content = text(message, loop.index0) -%}
{%- if role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- generation -%}
THINK
{{- content -}}
{%- for item in message['tool_calls'] or [] -%}
{%- set call = item['function'] or item -%}
{%- if content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": ' ~ (call['name'] | tojson) -}}
{{- ', "arguments": ' ~ (call['arguments'] | tojson) ~ '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\n' -}}
{%- elif message['tool_calls'] -%}
{{- fail(message, loop.index0, 'has tool calls in assistant messages only') -}}
{%- elif role == 'system' and loop.first and tools -%}
TOOL_RESULTS
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
)
_CHATML_RESULTS = r"""
{%- elif role in ('user', 'system', 'tool') or role.isidentifier() -%}
{{- '<|im_start|>' ~ role ~ '\n' ~ content ~ '<|im_end|>\n' -}}
{%- else -%}
{{- fail(message, loop.index0, 'cannot write this role') -}}
"""
# Qwen joins consecutive results into one user turn.
_QWEN_RESULTS = r"""
{%- elif role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}
{{- '<|im_start|>user\n' -}}
{%- else -%}
{{- '\n' -}}
{%- endif -%}
{{- '<tool_response>\n' ~ content ~ '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- elif role in ('user', 'system') -%}
{{- '<|im_start|>' ~ role ~ '\n' ~ content ~ '<|im_end|>\n' -}}
{%- else -%}
{{- fail(message, loop.index0, 'has the roles system, user, assistant and tool only') -}}
"""  # Kept in every turn, and never written where a turn has none: such a text only ever grows.
_QWEN3_THINK = r"""
{%- if message['reasoning_content'] is string -%}
{{- '<think>\n' ~ message['reasoning_content'] ~ '\n</think>\n\n' -}}
{%- endif -%}
"""

_LLAMA = (
    _MACROS
    + r"""
{{- bos_token -}}
{%- if tools -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}"""
    + _SYSTEM_WITH_TOOLS
    + r"""
{{- '<|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- set content = text(message, loop.index0) -%}
{%- set calls = message['tool_calls'] or [] -%}
{%- if role == 'assistant' -%}
{%- if (calls | length) > 1 or (calls and content) -%}
{{- fail(message, loop.index0, 'writes one tool call a turn, without other content') -}}
{%- endif -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- generation -%}
{{- content -}}
{%- for item in calls -%}
{%- set call = item['function'] or item -%}
{{- '{"name": ' ~ (call['name'] | tojson) -}}
{{- ', "parameters": ' ~ (call['arguments'] | tojson) ~ '}' -}}
{%- endfor -%}
{{- '<|eot_id|>' -}}
{%- endgeneration -%}
{%- elif calls -%}
{{- fail(message, loop.index0, 'has tool calls in assistant messages only') -}}
{%- elif role == 'system' and loop.first and tools -%}
{%- elif role in ('system', 'user', 'tool') -%}
{{- '<|start_header_id|>' ~ ('ipython' if role == 'tool' else role) ~ '<|end_header_id|>' -}}
{{- '\n\n' ~ content ~ '<|eot_id|>' -}}
{%- else -%}
{{- fail(message, loop.index0, 'has the roles system, user, assistant and tool only') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""
)

_DIALOGPT = (
    _MACROS
    + _NO_TOOLS
    + r"""
{%- set end = eos_token or '<|endoftext|>' -%}
{%- for message in messages -%}
{%- set content = text(message, loop.index0) -%}"""
    + _NO_CALLS
    + r"""
{%- if message['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- fail(message, loop.index0, 'names no roles: user and assistant must alternate, user first') -}}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- content ~ end -}}{%- endgeneration -%}
{%- else -%}
{{- content ~ end -}}
{%- endif -%}
{%- endfor -%}
"""
)

# The answer's leading space is inside the block: a model continues "Assistant:" with " word".
_FALCON = (
    _MACROS
    + _NO_TOOLS
    + r"""
{%- set end = eos_token or '<|endoftext|>' -%}
{%- for message in messages -%}
{%- set content = text(message, loop.index0) -%}"""
    + _NO_CALLS
    + r"""
{%- if message['role'] == 'assistant' -%}
{{- 'Assistant:' -}}
{%- generation -%}{{- ' ' ~ content ~ end -}}{%- endgeneration -%}
{{- '\n\n' -}}
{%- elif message['role'] in ('system', 'user') -%}
{{- ('System: ' if message['role'] == 'system' else 'User: ') ~ content ~ '\n\n' -}}
{%- else -%}
{{- fail(message, loop.index0, 'has the roles system, user and assistant only') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- endif -%}
"""
)

_DEEPSEEK = (
    _MACROS
    + _NO_TOOLS
    + r"""
{{- bos_token -}}
{%- set end = eos_token or '<｜end▁of▁sentence｜>' -%}
{%- for message in messages -%}
{%- set content = text(message, loop.index0) -%}"""
    + _NO_CALLS
    + r"""
{%- if message['role'] == 'assistant' -%}
{{- 'Assistant:' -}}
{%- generation -%}{{- ' ' ~ content ~ end -}}{%- endgeneration -%}
{%- elif message['role'] == 'user' -%}
{{- 'User: ' ~ content ~ '\n\n' -}}
{%- elif message['role'] == 'system' and loop.first -%}
{{- content ~ '\n\n' -}}
{%- else -%}
{{- fail(message, loop.index0, 'has user, assistant, and one system message at the start') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- endif -%}
"""
)


def _jinja(text: str) -> str:
    """A Jinja string literal (its escapes are Python's)."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _fill(
    family: str,
    template: str,
    tools: tuple[str, str] = ("", ""),
    *,
    results: str = "",
    think: str = "",
) -> str:
    keys = ["reasoning", "thinking"] if think else ["reasoning_content", "reasoning", "thinking"]
    template = template.replace(
        "REASONING_KEYS", " or ".join(f"message['{key}'] is string" for key in keys)
    )
    template = template.replace("THINK\n", think.lstrip("\n"))
    template = template.replace("TOOL_RESULTS\n", results.lstrip("\n"))
    before, after = map(_jinja, tools)
    template = template.replace("BEFORE", before).replace("AFTER", after)
    return template.replace("FAMILY", family).lstrip("\n")


BUILTIN_TEMPLATES: dict[str, str] = {
    "chatml_format": _fill("chatml_format", _CHATML, CHATML_TOOLS, results=_CHATML_RESULTS),
    "qwen": _fill("qwen", _CHATML, CHATML_TOOLS, results=_QWEN_RESULTS),
    "qwen3": _fill("qwen3", _CHATML, CHATML_TOOLS, results=_QWEN_RESULTS, think=_QWEN3_THINK),
    "llama": _fill("llama", _LLAMA, LLAMA_TOOLS),
    "dialogpt": _fill("dialogpt", _DIALOGPT),
    "falcon": _fill("falcon", _FALCON),
    "deepseek": _fill("deepseek", _DEEPSEEK),
}

FAMILY_KEYWORDS: dict[str, tuple[str, ...]] = {
    "qwen": ("qwen",),
    "llama": ("llama",),
    "dialogpt": ("dialogpt",),
    "falcon": ("falcon",),
    "deepseek": ("deepseek",),
}
