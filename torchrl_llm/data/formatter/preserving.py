r"""Chat templates of common reasoning families that never rewrite history.

The published templates of these families drop earlier thoughts, or write the last turn in another
way than the turns before it: a conversation then forks at every user message. Those here keep what
was sampled, so that one conversation stays one row of tokens. A model must be trained *and* served
with the same template; name it in the recipe::

    ChatFormatter(tokenizer, chat_template=PRESERVING_TEMPLATES["deepseek_r1"])

The qwen3 family needs no entry: its built-in template (:mod:`torchrl_llm.data.families`) keeps
history already.

A turn without a thought is written with an empty block where the generation prompt opens one
(``deepseek_r1``), and with none elsewhere (``glm4``).
"""

from __future__ import annotations

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
"""Template by family, to be passed as ``chat_template``."""
