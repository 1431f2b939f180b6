r"""The built-in model families: for each, its chat template and the parser that reads it back.

Every template writes contents as they are (nothing is stripped), adds no system message that the
conversation does not have, puts the assistant's words *and* its end-of-turn token inside
``{% generation %}``, and raises an error that names the message where the family has no form for it
(a tool call in Falcon, a system message in DialoGPT). So its parser can read each text back.

They serve tokenizers without a chat template; see
``torchrl_llm.data.text.templates.resolve_template``. ``qwen3`` is asked for by name: it writes
the reasoning of every turn, where the published template drops that of earlier turns and so
rewrites history at each user message. Use it for training and serving alike.
``PRESERVING_TEMPLATES`` does the same for further families, without a parser.

A new family is a template, a parser and an entry of ``FAMILIES``, all in this file. A user's own is
registered with :func:`~torchrl_llm.data.text.templates.add_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchrl_llm.data.text.call_syntax import SYNTAXES, behind_blanks
from torchrl_llm.data.text.inverse_parser import (
    KNOWN_BOS,
    AlternatingParser,
    Hook,
    InverseParser,
    Message,
)

_HERMES = SYNTAXES["hermes"]


@dataclass(frozen=True)
class TemplateSpec:
    """A chat template that was found for a tokenizer.

    Args:
        name: its registered name, ``"tokenizer"`` for the tokenizer's own, ``"explicit"`` for a
            text that was passed.
        template: the Jinja text.
        inverse_parser: reads a rendered text back: an
            ``InverseParser``, a user's function
            ``text -> History`` (or list of messages), or ``None``.
        keywords: model names that contain one of these get this template.
    """

    name: str
    template: str
    inverse_parser: InverseParser | Callable[[str], Any] | None = None
    keywords: tuple[str, ...] = ()

    @property
    def builtin(self) -> bool:
        """Whether this is one of the package's own families, whose text is known to read back."""
        return BUILTIN_TEMPLATES.get(self.name) == self.template


# (before, after) the tool schemas, one per line, in the system message.
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

_CHATML_TEXT = (
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

_LLAMA_TEXT = (
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

# Llama 4 writes other marks around the same turns.
_LLAMA_4_TEXT = (
    _LLAMA_TEXT.replace("start_header_id", "header_start")
    .replace("end_header_id", "header_end")
    .replace("eot_id", "eot")
)

_DIALOGPT_TEXT = (
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
_FALCON_TEXT = (
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

_DEEPSEEK_TEXT = (
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


def _family(
    parser: InverseParser,
    text: str,
    tools: tuple[str, str] = ("", ""),
    *,
    results: str = "",
    think: str = "",
    keywords: tuple[str, ...] = (),
) -> TemplateSpec:
    keys = ["reasoning", "thinking"] if think else ["reasoning_content", "reasoning", "thinking"]
    before, after = map(_jinja, tools)
    for name, value in {
        "REASONING_KEYS": " or ".join(f"message['{key}'] is string" for key in keys),
        "THINK\n": think.lstrip("\n"),
        "TOOL_RESULTS\n": results.lstrip("\n"),
        "BEFORE": before,
        "AFTER": after,
        "FAMILY": parser.family,
    }.items():
        text = text.replace(name, value)
    return TemplateSpec(parser.family, text.lstrip("\n"), parser, keywords)


# -- the way back ---------------------------------------------------------------------------------


def _reading(tools: tuple[str, str], *readers: Callable[[Message], list[Message]]) -> Hook:
    return partial(_read, tools, readers)


def _read(tools: tuple[str, str], readers: tuple, messages: list[Message]) -> list[Message]:
    """Messages without the declared tools, each passed through the readers."""
    first = messages[0] if messages else {"role": None}
    if first["role"] == "system" and first.get("is_complete", True):
        content = _without_tools(first["content"], tools)
        messages = (
            messages[1:] if content is None else [first | {"content": content}, *messages[1:]]
        )
    for reader in readers:
        messages = [read for message in messages for read in reader(message)]
    return messages


def _without_tools(content: str, tools: tuple[str, str]) -> str | None:
    """A system content without the declared tools; ``None`` when nothing else was in it."""
    before, after = tools
    start = content.find(before)
    if start < 0 or not content.endswith(after) or len(content) < start + len(before + after):
        return content
    return content[:start].removesuffix("\n\n") if start else None


def _calls(message: Message) -> list[Message]:
    if message["role"] == "assistant" and message.get("is_complete", True):
        content, calls = split_tool_calls(message["content"])
        if calls:
            return [message | {"content": content, "tool_calls": calls}]
    return [message]


def _results(message: Message) -> list[Message]:
    opened, shut = "<tool_response>\n", "\n</tool_response>"
    content = message["content"]
    wrapped = content.startswith(opened) and content.endswith(shut)
    wrapped = wrapped and len(content) >= len(opened) + len(shut)
    if message["role"] != "user" or not wrapped or not message.get("is_complete", True):
        return [message]
    results = content[len(opened) : -len(shut)].split(f"{shut}\n{opened}")
    return [{"role": "tool", "content": result} for result in results]


def _thought(message: Message) -> list[Message]:
    thought, shut, rest = message["content"].partition("\n</think>\n\n")
    # "<think>\n" and "\n</think>" share no newline, even around no thought at all.
    if message["role"] != "assistant" or not shut or not thought.startswith("<think>\n"):
        return [message]
    return [message | {"content": rest, "reasoning_content": thought.removeprefix("<think>\n")}]


def _llama_call(message: Message) -> list[Message]:
    content = message["content"]
    whole = content.startswith("{") and content.endswith("}")
    if message["role"] == "assistant" and whole and message.get("is_complete", True):
        with suppress(ValueError, RecursionError):
            if (call := _exact_call(json.loads(content), "parameters")) is not None:
                return [message | {"content": "", "tool_calls": [call]}]
    return [message]


def split_tool_calls(content: str) -> tuple[str, list[Message]]:
    r"""Take the ``<tool_call>`` blocks that end an answer off its content.

    Args:
        content: an assistant turn in the Hermes form, calls last.

    Returns:
        The content before the calls (without the newline that joins them) and the calls as
        ``{"type": "function", "function": {"name", "arguments"}}``. A block whose JSON is broken,
        or that other text follows, stays in the content.

    Example:
        >>> call = '{"name": "add", "arguments": {"a": 1}}'
        >>> text = f"One moment.\n<tool_call>\n{call}\n</tool_call>"
        >>> split_tool_calls(text)[0]
        'One moment.'
    """
    # Each block is read once: what does not reach the end from one block does not from its next.
    tried: set[int] = set()
    start = content.find(_HERMES.opening)
    while start >= 0:
        if calls := _calls_to_the_end(content, start, tried):
            return content[:start].removesuffix("\n"), calls
        start = content.find(_HERMES.opening, start + 1)
    return content, []


def _calls_to_the_end(text: str, place: int, tried: set[int]) -> list[Message]:
    calls = []
    while place < len(text):
        if place in tried or not text.startswith(_HERMES.opening, place):
            return []
        tried.add(place)
        try:
            value, end = _HERMES.value_at(text, place, strict=True)
        except ValueError:
            return []
        if (call := _exact_call(value, "arguments")) is None:
            return []
        calls.append(call)
        place = behind_blanks(text, end)
    return calls


def _exact_call(value: Any, arguments: str) -> Message | None:
    """The call that a JSON value spells, ``None`` if it is anything else (more keys, say)."""
    if not isinstance(value, dict) or set(value) != {"name", arguments}:
        return None
    if not isinstance(value["name"], str) or not isinstance(value[arguments], (dict, str)):
        return None
    return {
        "type": "function",
        "function": {"name": value["name"], "arguments": value[arguments]},
    }


# -- the families ---------------------------------------------------------------------------------

_CHATML = InverseParser(
    family="chatml_format",
    header=r"<\|im_start\|>(?P<role>[^\W\d]\w*)\n",
    ends={None: (r"<\|im_end\|>", r"\n")},
    bos=True,
    hook=_reading(CHATML_TOOLS, _calls),
    marks=("<|im_start|>", "<|im_end|>"),
    tags=("<tool_call>", CHATML_TOOLS[0]),
    doubts={None: r"<\|im_(?:start|end)\|>", "assistant": r"<tool_call>"},
)
_QWEN = replace(
    _CHATML,
    family="qwen",
    hook=_reading(CHATML_TOOLS, _calls, _results),
    tags=(*_CHATML.tags, "<tool_response>", "</tool_response>"),
    doubts={**_CHATML.doubts, "tool": r"</?tool_response>", "user": r"</?tool_response>"},
)
_QWEN3 = replace(
    _QWEN,
    family="qwen3",
    hook=_reading(CHATML_TOOLS, _thought, _calls, _results),
    tags=(*_QWEN.tags, "<think>", "</think>"),
    doubts={**_QWEN.doubts, "assistant": r"<tool_call>|</?think>"},
)
_LLAMA = InverseParser(
    family="llama3",
    header=r"<\|start_header_id\|>(?P<role>[^\W\d]\w*)<\|end_header_id\|>\n\n",
    ends={None: (r"<\|eot_id\|>", "")},
    bos=True,
    roles={"ipython": "tool"},
    hook=_reading(LLAMA_TOOLS, _llama_call),
    marks=("<|start_header_id|>", "<|eot_id|>"),
    tags=('"name"', LLAMA_TOOLS[0]),
    doubts={None: r"<\|(?:start_header_id|end_header_id|eot_id)\|>"},
)
_LLAMA_4 = replace(
    _LLAMA,
    family="llama",
    header=r"<\|header_start\|>(?P<role>[^\W\d]\w*)<\|header_end\|>\n\n",
    ends={None: (r"<\|eot\|>", "")},
    marks=("<|header_start|>", "<|eot|>"),
    doubts={None: r"<\|(?:header_start|header_end|eot)\|>"},
)
_DIALOGPT = AlternatingParser(family="dialogpt", header="", ends={})
_FALCON = InverseParser(
    family="falcon",
    header=r"(?P<role>System(?=: )|User(?=: )|Assistant(?=:)): ?",
    ends={"Assistant": ("EOS", r"\n\n"), None: (r"\n\n", "")},
    roles={"System": "system", "User": "user", "Assistant": "assistant"},
    marks=("System:", "User:", "Assistant:"),
    doubts={None: r"EOS|\n\n(?:System: |User: |Assistant:)"},
)
_DEEPSEEK = InverseParser(
    family="deepseek",
    header=r"(?P<role>User(?=: )|Assistant(?=:)): ?",
    ends={"Assistant": ("EOS", ""), None: (r"\n\n", "")},
    headless="system",
    eos="<｜end▁of▁sentence｜>",
    bos=True,
    own_bos="<｜begin▁of▁sentence｜>",
    roles={"User": "user", "Assistant": "assistant"},
    marks=("User:", "Assistant:", *KNOWN_BOS),
    doubts={None: r"EOS|\n\n(?:User: |Assistant:)"},
)

FAMILIES: dict[str, TemplateSpec] = {
    spec.name: spec
    for spec in (
        _family(_CHATML, _CHATML_TEXT, CHATML_TOOLS, results=_CHATML_RESULTS),
        _family(_QWEN, _CHATML_TEXT, CHATML_TOOLS, results=_QWEN_RESULTS, keywords=("qwen",)),
        _family(_QWEN3, _CHATML_TEXT, CHATML_TOOLS, results=_QWEN_RESULTS, think=_QWEN3_THINK),
        _family(_LLAMA_4, _LLAMA_4_TEXT, LLAMA_TOOLS, keywords=("llama-4", "llama4")),
        _family(_LLAMA, _LLAMA_TEXT, LLAMA_TOOLS, keywords=("llama",)),
        _family(_DIALOGPT, _DIALOGPT_TEXT, keywords=("dialogpt",)),
        _family(_FALCON, _FALCON_TEXT, keywords=("falcon",)),
        _family(_DEEPSEEK, _DEEPSEEK_TEXT, keywords=("deepseek",)),
    )
}
"""The built-in families by name; the first whose keyword is in a model's name is that model's."""

BUILTIN_TEMPLATES: dict[str, str] = {name: spec.template for name, spec in FAMILIES.items()}
BUILTIN_PARSERS: dict[str, InverseParser] = {
    name: spec.inverse_parser for name, spec in FAMILIES.items()
}
FAMILY_KEYWORDS = {name: spec.keywords for name, spec in FAMILIES.items() if spec.keywords}


# -- templates that never rewrite history ---------------------------------------------------------

# A turn without a thought is written with an empty block where the generation prompt opens one
# (deepseek_r1), and with none elsewhere (glm4).
_DEEPSEEK_R1 = r"""
{{- bos_token -}}
{%- if messages and messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] -}}
{%- endif -%}
{%- if tools -%}
{{- '\n\n## Tools\n\nCall a function by a JSON object of its arguments.\n' -}}
{%- for tool in tools -%}
{{- '\n' + (tool | tojson) -}}
{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}
{{- raise_exception('message ' ~ loop.index0 ~ ' (system): only the first message may be one') -}}
{%- endif -%}
{%- elif message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'tool' -%}
{%- if messages[loop.index0 - 1]['role'] != 'tool' -%}
{{- '<｜tool▁outputs▁begin｜>' -}}
{%- endif -%}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}
{{- '<｜tool▁outputs▁end｜>' -}}
{%- endif -%}
{%- else -%}
{{- '<｜Assistant｜><think>\n' -}}
{%- generation -%}
{{- (message['reasoning_content'] or '') + '\n</think>\n\n' + message['content'] -}}
{%- if message['tool_calls'] -%}
{{- '<｜tool▁calls▁begin｜>' -}}
{%- for call in message['tool_calls'] -%}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['function']['name'] -}}
{{- '\n```json\n' + (call['function']['arguments'] | tojson) + '\n```<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}
{%- endif -%}
{{- eos_token -}}
{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜><think>\n' -}}
{%- endif -%}
"""

_GLM4 = r"""
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\n# Tools\n\nYou may call the functions below; write a call as\n' -}}
{{- '<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>\n' -}}
{%- for tool in tools -%}
{{- '\n' + (tool | tojson) -}}
{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if messages[loop.index0 - 1]['role'] != 'tool' -%}
{{- '<|observation|>' -}}
{%- endif -%}
{{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' -}}
{%- if message['reasoning_content'] is string -%}
{{- '\n<think>' + message['reasoning_content'] + '</think>' -}}
{%- endif -%}
{%- if message['content'] -%}
{{- '\n' + message['content'] -}}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '\n<tool_call>' + call['function']['name'] -}}
{%- for key, value in call['function']['arguments'] | items -%}
{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
{{- (value if value is string else value | tojson) + '</arg_value>' -}}
{%- endfor -%}
{{- '\n</tool_call>' -}}
{%- endfor -%}
{%- else -%}
{{- '<|' + message['role'] + '|>\n' + message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

PRESERVING_TEMPLATES: dict[str, str] = {
    "deepseek_r1": _DEEPSEEK_R1.replace("\n{", "{").replace("}\n", "}").strip(),
    "glm4": _GLM4.replace("\n{", "{").replace("}\n", "}").strip(),
}
"""Templates of common reasoning families that never rewrite history, by family.

The published ones drop earlier thoughts, or write the last turn in another way than the turns
before it: a conversation then forks at every user message. With these, one conversation stays one
row of tokens. A model must be trained *and* served with the same template; name it in the recipe::

    ChatFormatter(tokenizer, chat_template=PRESERVING_TEMPLATES["deepseek_r1"])
"""
