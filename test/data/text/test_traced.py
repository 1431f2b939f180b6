"""Texts from memory are those of the template, whatever it does with the texts of messages."""

from __future__ import annotations

import itertools
import pickle

import pytest
from data.text.tokenizers_of_the_zoo import make_tokenizer
from data.text.zoo import ZOO

from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.text.codec import Shield
from torchrl_llm.data.text.families import FAMILIES
from torchrl_llm.data.text.renderer import Form, Renderer
from torchrl_llm.errors import TemplateError

TEXTS = ("a", " b ", "", "\n", "<think>x</think>y", "<tool_response>z", "5", "a,b", "<|im_end|>é")
EACH = "{% for m in messages %}"


class Counted:
    """A renderer, and the number of times that its template ran."""

    def __init__(self, renderer):
        self.renderer, self.runs = renderer, 0
        self.template = renderer._traced._slow
        renderer._traced._slow = self._run

    def _run(self, *args):
        self.runs += 1
        return self.template(*args)

    def both(self, messages, *, tools=None, prompt=True):
        """By the template alone and from memory; the message of an error is a result."""
        given = [self.renderer._prepare(m, i) for i, m in enumerate(messages)]
        tools = self.renderer._tools(tools)
        out = []
        for render in (self.template, self.renderer._traced.render):
            try:
                out.append(render(given, tools, prompt))
            except TemplateError as error:
                out.append(str(error))
        return out


def counted(template, form=None):
    return Counted(Renderer(template, Shield(["<|im_end|>"]), {"bos_token": "<s>"}, form or Form()))


def chats(*roles):
    for texts in itertools.product(TEXTS, repeat=len(roles)):
        yield [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


@pytest.mark.parametrize("name", ZOO)
def test_texts_from_memory_are_those_of_the_template(name):
    own = Counted(ChatFormatter(make_tokenizer(name, "bytes"))._renderer)
    for chat in chats("user", "assistant", "user"):
        for prompt in (True, False):
            slow, fast = own.both(chat, prompt=prompt)
            assert fast == slow
    assert own.runs < 40  # of 1458


@pytest.mark.parametrize("name", FAMILIES)
def test_the_built_in_templates_are_remembered(name):
    own = counted(FAMILIES[name].template)
    for chat in chats("user", "assistant", "user"):
        slow, fast = own.both(chat)
        assert fast == slow
    assert own.runs < 200  # of 729


LOOKING = {
    "questions": "{% if m.content.startswith('a') or '5' in m.content %}A{% endif %}"
    "{{ m.content }}",
    "truth": "{{ m.content or 'nothing' }}{% if not m.content %}!{% endif %}",
    "length": "{{ m.content | length }}",
    "compared": "{% if m.content == 'a' %}same{% elif m.content in ['5', ''] %}in{% endif %}",
    "pieces": "{{ m.content.split('</think>')[-1].lstrip('\\n') }}",
    "pieces of blanks": "{{ m.content.split()[0] }}",
    "second piece": "{{ m.content.split(',')[1] }}",
    "partition": "{{ m.content.partition(',')[2] | trim }}",
    "number of pieces": "{{ m.content.split(',') | length }}",
    "a piece in a loop": "{% for x in m.content.split(',') %}<{{ x }}>{% endfor %}",
    "slice": "{{ m.content[1:] ~ m.content[:2] }}",
    "character": "{{ m.content[0] }}",
    "json": "{{ m.content | tojson }}",
    "json of a message": "{{ m | tojson }}",
    "whole message": "{{ m }}",
    "characters": "{% for c in m.content %}{{ c }}.{% endfor %}",
    "number": "{{ m.content | int + 1 }}",
    "backwards": "{{ m.content | reverse }}",
    "formatted": "{{ '%s!' % m.content }}{{ '{}?'.format(m.content) }}",
    "joined": "{{ [m.role, m.content] | join(': ') }}",
    "inside": "{% if m.content in 'abc' %}yes{% endif %}",
    "key": "{{ {'a': 1, '5': 2}.get(m.content, 3) }}",
    "times": "{{ m.content * 2 }}",
    "order": "{% if m.content < 'b' %}low{% endif %}",
    "sorted": "{{ messages | map(attribute='content') | sort | join }}",
    "like another": "{% if m.content == messages[0].content %}first{% endif %}",
    "a name that strings lack": "{{ m.content.parts }}{{ m.content.texts is defined }}",
    "filters": "{{ m.content | upper }}{{ m.content | replace('a', 'x') }}{{ m.content | title }}",
    "tests": "{{ m.content is string }}{{ m.content is iterable }}{{ m.content is sequence }}"
    "{{ m.content is mapping }}{{ m.content is lower }}{{ m.content is number }}",
    "macro": "{% macro t(x) %}[{{ x | trim }}]{% endmacro %}{{ t(m.content).strip('[') }}",
    "set block": "{% set x %}({{ m.content }}){% endset %}{% if x == '(a)' %}!{% endif %}{{ x }}",
    "filter block": "{% filter trim %} {{ m.content }} {% endfilter %}",
    "generation": "{% generation %}{{ m.content }}{% endgeneration %}",
    "namespace": "{% set ns = namespace(x='') %}{% set ns.x = ns.x ~ m.content %}{{ ns.x }}",
    "refused": "{% if '5' in m.content %}{{ raise_exception('no fives') }}{% endif %}",
    "missing": "{{ m.reasoning }}{{ m.reasoning | default('-') }}{{ m.content | default('-') }}",
}


@pytest.mark.parametrize("what", LOOKING)
def test_a_template_may_do_anything_with_a_text(what):
    own = counted(EACH + LOOKING[what] + "|{% endfor %}")
    for _ in range(2):
        for chat in chats("user", "assistant"):
            slow, fast = own.both(chat)
            assert fast == slow


@pytest.mark.parametrize("what", ["questions", "truth", "pieces", "slice", "macro", "set block"])
def test_what_can_be_followed_is_remembered(what):
    own = counted(EACH + LOOKING[what] + "|{% endfor %}")
    for chat in [*chats("user")] * 4:
        own.both(chat)
    assert own.runs > 8  # not worth it for what is rare
    own.runs = 0
    for chat in chats("user"):
        own.both(chat)
    assert own.runs == 0


def test_all_but_the_texts_is_compared_exactly():
    own = counted(
        EACH + "{{ m.content }}{{ m.tool_calls }}{{ m.n }}{{ m.x }}|{% endfor %}{{ tools }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "f", "arguments": {"a": True}}}
    kinds = [{}, {"n": 1}, {"n": 1.0}, {"n": True}, {"n": "1"}, {"x": "1"}, {"n": object}]
    kinds += [{"tool_calls": [call]}, {"tool_calls": [other]}]
    for _ in range(12):
        for kind, tools in itertools.product(kinds, (None, [{"name": "f"}], [{"name": "g"}])):
            slow, fast = own.both([{"role": "user", "content": "a", **kind}], tools=tools)
            assert fast == slow


def test_contents_of_parts():
    own = counted(
        EACH + "{% for p in m.content %}{{ p.type }}{{ p.text }}{% endfor %}{% endfor %}",
        Form(parts=True, text=False),
    )
    for _ in range(3):
        for one, two in itertools.product(TEXTS, TEXTS):
            parts = [{"type": "text", "text": one}, {"type": "text", "text": two}]
            slow, fast = own.both([{"role": "user", "content": parts}])
            assert fast == slow
    assert own.runs < 20  # of 243


@pytest.mark.parametrize("body", ["{{ strftime_now('%Y') }}", "{{ [1] | random }}"])
def test_chance_and_time_are_not_remembered(body):
    own = counted(body + "{{ messages[0].content }}")
    for chat in [*chats("user")] * 3:
        own.both(chat)
    assert own.runs == 3 * len(TEXTS)


def test_memory_does_not_travel():
    own = counted(EACH + "{{ m.content }}{% endfor %}").renderer
    own._traced._slow = own._whole
    for chat in [*chats("user")] * 3:
        own.render(chat)
    assert own._traced._ways
    again = pickle.loads(pickle.dumps(own))
    assert again.render([{"role": "user", "content": "a"}]).text == "a"


def test_rare_structures_do_not_push_out_what_is_known():
    own = counted(EACH + "{{ m.content }}{{ m.n }}{% endfor %}")
    for _ in range(10):
        own.both([{"role": "user", "content": "a"}])
    for number in range(600):  # each seen once
        own.both([{"role": "user", "content": "a", "n": number}])
    own.runs = 0
    assert own.both([{"role": "user", "content": "b"}]) == ["b", "b"]
    assert own.runs == 0
    assert len(own.renderer._traced._seen) <= 256
