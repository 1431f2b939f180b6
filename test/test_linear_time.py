"""Whatever a policy writes, it is read in time linear in its length: parsers, rewards, families.

A policy that collapses writes one mark a hundred thousand times, and a search that begins anew at
each of them takes minutes. What is fuzzed is found by its base class or registry, so a new parser,
reward or instruction is covered as soon as it is imported; one that needs arguments gets them in
``MADE``.
"""

import gc
import importlib
import inspect
import pkgutil
import random
import time
from contextlib import suppress
from functools import cache, partial
from typing import get_args
from zlib import crc32

import pytest
from rewards.ifeval.test_instructions import TABLE
from rewards.local_sandbox import LocalSandbox

import torchrl_llm.envs
import torchrl_llm.rewards
import torchrl_llm.tools
from torchrl_llm.compat.gsm8k_text import _ResponseReward
from torchrl_llm.data.messages import split_thoughts
from torchrl_llm.data.text.call_syntax import ANSWER, NAME, VALUE
from torchrl_llm.data.text.families import BUILTIN_PARSERS, split_tool_calls
from torchrl_llm.data.text.learnt_calls import syntax_of
from torchrl_llm.data.text.published_texts import parser_for_template
from torchrl_llm.data.text.splice import thoughts_of
from torchrl_llm.envs.actions import (
    ActionParser,
    BareAction,
    BoxedAction,
    CallAction,
    ParserChain,
    TagAction,
    ThinkPrefix,
)
from torchrl_llm.errors import TorchRLLLMError
from torchrl_llm.rewards import (
    CodeRewardParser,
    CodeRunner,
    CompositeReward,
    HumanEvalRewardParser,
    IfEvalScorer,
    JudgeReward,
    LengthReward,
    LetterCountingRewardParser,
    MATHRewardParser,
    RewardParser,
    judge,
    reward_scorer,
)
from torchrl_llm.rewards.answer_block import AnswerBlockParser, extract_blocks, split_response
from torchrl_llm.rewards.answer_formats import AnswerFormat
from torchrl_llm.rewards.code import FilesRewardParser, extract_code
from torchrl_llm.rewards.function_reward import FunctionReward
from torchrl_llm.rewards.ifeval import INSTRUCTIONS, check
from torchrl_llm.rewards.ifeval.ifeval_scorer import IFEvalExample
from torchrl_llm.rewards.model_reward import ModelReward
from torchrl_llm.rewards.number_rewards import CountdownRewardParser, GSM8KRewardParser
from torchrl_llm.rewards.reward_scorer import Sample, Scorer
from torchrl_llm.tools import call_parsers
from torchrl_llm.tools.call_parsers import ToolParser
from torchrl_llm.tools.code_blocks import python_blocks

pytest.importorskip("math_verify")  # one of those that read answers

# A megabyte takes at most half a second of CPU (test/benchmarks/bench_parsers.py), so this takes
# 16 ms; what took a time that grows with the square took half a second and more.
SIZE, LIMIT_S = 32_000, 0.2
# Of each reader; all texts are read by some.
TEXTS = 40

for room in (torchrl_llm.envs, torchrl_llm.tools, torchrl_llm.rewards):
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        if not module.name.endswith("_program"):  # those run under a Python of their own
            importlib.import_module(module.name)

# A call in each syntax that is learnt from an example.
SYNTAXES = {
    "tagged": '<tool_call>{"name": "NAME", "arguments": {"key": "VALUE"}}</tool_call>',
    "listed": '[TOOL_CALLS][{"name": "NAME", "arguments": {"key": "VALUE"}}]',
    "bare": '{"name": "NAME", "parameters": {"key": "VALUE"}}',
    "named": '[TOOL_CALLS]NAME[ARGS]{"key": "VALUE"}',
    "dotted": '<|call|>functions.NAME:0<|args|>{"key": "VALUE"}<|end|>',
    "fenced": '<|calls|><|call|>function<|sep|>NAME\n```json\n{"key": "VALUE"}\n```<|end|>',
    "tags": "<tool_call>\n<function=NAME>\n<parameter=key>\nVALUE\n</parameter>\n</function>\n"
    "</tool_call>",
    "keyed": "<tool_call>NAME\n<arg_key>key</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "pythonic": '<|calls|>[NAME(key="VALUE")]<|end|>',
    "bare_pythonic": '[NAME(key="VALUE")]',
    "name_keyed": '<|calls|>[{"NAME": {"key": "VALUE"}}]',
    "braces": '<|call>call:NAME{key:<|"|>VALUE<|"|>}<call|>',
    "invoked": '<calls>\n<invoke name="NAME">\n<parameter name="key">VALUE</parameter>\n</invoke>\n'
    "</calls>",
}
NEXT_TO_TEXT = {
    "behind": (SYNTAXES["bare"], "SAID" + SYNTAXES["bare"]),
    "in_front": (SYNTAXES["bare_pythonic"], SYNTAXES["bare_pythonic"] + "SAID"),
}
# A template that is not ours, with a thought and with calls in tags.
FOREIGN = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}{%- if m.reasoning_content -%}"
    "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}{{- m.content -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<do><function=' + c.function.name + '>' -}}"
    "{%- for k, v in c.function.arguments | items -%}{{- '<parameter=' + k + '>' + v | string + "
    "'</parameter>' -}}{%- endfor -%}{{- '</function></do>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
)
CODE = {"entry_point": "f", "tests": "assert f() == 1", "prelude": "def f():\n"}
ANSWERS = {
    LetterCountingRewardParser: '{"r": 3, "s": 1}',
    CountdownRewardParser: "target=24, numbers=2,3,4",
    CodeRewardParser: CODE,
    HumanEvalRewardParser: CODE,
    IfEvalScorer: IFEvalExample([row[0] for row in TABLE[::8]], [row[1] for row in TABLE[::8]]),
}


def _read_no_block(response):
    return {"calls": []}


class _Spelling(AnswerBlockParser):
    def read_truth(self, answer):
        return answer

    def is_right(self, block, truth):
        return block == truth


def _runner():
    return CodeRunner(LocalSandbox(broken="nothing runs here"), cache_size=0)


# What cannot be made without arguments: its instances by what they are called.
MADE = {
    call_parsers.SyntaxParser: lambda: {
        n: call_parsers.SyntaxParser(e) for n, e in SYNTAXES.items()
    },
    call_parsers.PatternParser: lambda: {
        "": call_parsers.PatternParser(r"CALL\[(\w{1,99})\]\(([^()]*+)\)")
    },
    call_parsers._FunctionParser: lambda: {"": call_parsers.as_parser(_read_no_block)},
    AnswerBlockParser: lambda: {"": _Spelling()},
    CodeRewardParser: lambda: {"": CodeRewardParser(runner=_runner())},
    HumanEvalRewardParser: lambda: {"": HumanEvalRewardParser(runner=_runner())},
    IfEvalScorer: lambda: {p: IfEvalScorer(scored_part=p) for p in ("answer", "response")},
    GSM8KRewardParser: lambda: {
        f: GSM8KRewardParser(answer_format=f) for f in get_args(AnswerFormat)
    },
    MATHRewardParser: lambda: {"": MATHRewardParser(boxed=True)},
    reward_scorer.FunctionScorer: lambda: {"": reward_scorer.as_scorer(_Spelling())},
    LengthReward: lambda: {u: LengthReward(9, unit=u) for u in ("words", "characters")},
    JudgeReward: lambda: {
        "score": JudgeReward(lambda asked: [text[-1]["content"] for text in asked], "{response}"),
        "verdict": JudgeReward(
            lambda asked: [text[-1]["content"] for text in asked],
            "{response}",
            read=judge.read_verdict,
        ),
    },
    TagAction: lambda: {"": TagAction("move", "a cell")},
    BareAction: lambda: {"": BareAction("move", "a cell")},
    BoxedAction: lambda: {"": BoxedAction("move", "a cell")},
    ThinkPrefix: lambda: {"": ThinkPrefix()},
    ParserChain: lambda: {"": ParserChain(ThinkPrefix(), TagAction("move", "a cell"))},
    CallAction: lambda: {"": CallAction("add", "a cell", calls=call_parsers.HermesParser())},
    _ResponseReward: lambda: {"": _ResponseReward()},
    FunctionReward: lambda: {"": FunctionReward(lambda said, answer: answer in said)},
    FilesRewardParser: lambda: {},  # reads files, and nothing that a policy wrote
    ModelReward: lambda: {},  # a model reads the text, as it reads every prompt
    CompositeReward: lambda: {},  # scores a batch, by the scorers that stand here themselves
}


def _concrete(base):
    found, waiting = [], [base]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        ours = cls.__module__.startswith("torchrl_llm.")
        if ours and (cls in MADE or not inspect.isabstract(cls)) and cls is not base:
            found.append(cls)
    return sorted(set(found), key=lambda cls: cls.__qualname__)


def _instances(base):
    for cls in _concrete(base):
        made = MADE[cls]() if cls in MADE else {"": cls()}
        for name, instance in made.items():
            yield f"{cls.__name__}{name and ':'}{name}", instance


def _answer(reader):
    return next((a for cls, a in ANSWERS.items() if isinstance(reader, cls)), "4")


@cache
def readers():
    """Every reader of what a policy writes, as a function of the text."""
    found = {}
    message = {"role": "assistant"}
    for name, parser in _instances(ToolParser):
        found[name] = lambda text, p=parser: p.parse(message | {"content": text}, {})
    for name, reward in _instances(RewardParser):
        found[name] = lambda text, r=reward: r.score(text, _answer(r))
    for name, scorer in _instances(Scorer):
        found[name] = lambda text, s=scorer: s.score(Sample(text, answer="4"))
    for name, action in _instances(ActionParser):
        found[name] = lambda text, a=action: a.parse(message | {"content": text})
    for name in INSTRUCTIONS:
        arguments = next(row[1] for row in TABLE if row[0] == name)
        found[name] = partial(check, name, arguments=arguments)
    for name, family in BUILTIN_PARSERS.items():
        found[name] = family.parse
        found[f"{name}:strict"] = partial(family.parse, strict=True)
    for name, (alone, beside) in NEXT_TO_TEXT.items():
        alone, beside = (
            text.replace("NAME", NAME).replace("VALUE", VALUE).replace("SAID", ANSWER)
            for text in (alone, beside)
        )
        syntax = syntax_of(alone, beside)
        found[f"beside:{name}"] = lambda text, s=syntax: s.parse(text, {"add": {}})
    found["published"] = parser_for_template(FOREIGN).parse
    found["thoughts_of"] = lambda text: thoughts_of({"content": text})
    found["extract_code"] = partial(extract_code, entry_point="f")
    found["extract_blocks"] = partial(extract_blocks, tag="answer")
    for function in (split_tool_calls, split_thoughts, python_blocks, split_response):
        found[function.__name__] = function
    found["MATHRewardParser.extract_boxed"] = MATHRewardParser.extract_boxed
    return found


def _call(example):
    return example.replace("NAME", "add").replace("VALUE", "1")


# Every mark that the code knows, complete calls, and what makes strings, numbers and nests.
MARKS = sorted(
    {
        *("<think>", "</think>", "<answer>", "</answer>", "<tool>", "</tool>", "<move>", "</move>"),
        *("<tool_call>", "</tool_call>", '{"name":', "[TOOL_CALLS]", "\\boxed{", "\\boxed", "####"),
        *("```python", "```py x``` ", "```\n", "```a\n", "~~~", "CALL[", "](", ")", "<score>"),
        *("{", "}", "[", "]", "(", '"', "\\", '\\"', ",", "-", ".", "*", "**", "_", "<", ">", "<<"),
        *(" ", "\n", "\n\n", "\t", "1", "a", "A. ", "1. ", "é", "\U0001f600", "\ud83d", "=", "/"),
        *("Score: 1 ", "score (", "Verdict: ", "<tool name=", '<tool name="a">', "<tool>add\n"),
        *('{"a":', '["', "{}", "[]", '""', "1,", "null,", "add(", "a.", "functions.", "function"),
        *(
            "<function=f>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "<arg_key>",
            "</arg_key>",
        ),
        *(
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "[ARGS]",
            "<|call|>",
            "<|args|>",
            "<|end|>",
            "<|calls|>",
        ),
        *("\n<|im_start|>a\n", "<|im_end|>\n", "<|python_tag|>", "User: a\n\n", "Assistant:"),
        *("The answer is 1", "answer a ", "#### 1", "1,", "1/1", "Question:", "\nQ:", "0."),
        *("<think>a</think>", "<answer>1</answer>", "<answer>{", "\\boxed{1}", "CALL[add]({})"),
        *('<tool name="a">{"a": 1}</tool>', "<tool>add\n{}</tool>", "<score>7</score>", "[a]"),
        *("```python\nprint(1)\n```\n", "```\nls\n```\n", "~~~py\nx\n~~~\n", "<move>1</move>"),
        *map(_call, SYNTAXES.values()),
        *(mark for family in BUILTIN_PARSERS.values() for mark in (*family.marks, *family.tags)),
    }
)


def _filled(piece, size):
    return (piece * (size // len(piece) + 1))[:size]


def texts(size, seed=0):
    """Texts of a length: each mark over and over, behind one, in front of one, and mixtures."""
    generator = random.Random(seed)
    for mark in MARKS:
        other = generator.choice(MARKS)
        for piece in (mark, mark + other):
            yield f"{piece!r} repeated", _filled(piece, size)
        blank = generator.choice([" ", "\n", "a", "1", '"', "\\", "[", '{"a":', "`", "</think>"])
        yield f"{mark!r} before {blank!r}", mark + _filled(blank, size)
        yield f"{mark!r} around {blank!r}", mark + _filled(blank, size) + mark
    for number in range(8):
        some = generator.sample(MARKS, generator.choice([2, 3, 8, len(MARKS)]))
        pieces = generator.choices(some, k=size // 3)
        yield f"mixture {number} of {some[:8]}", "".join(pieces)[:size]
    inside = _filled(generator.choice(MARKS), size)
    yield "a long answer", f"<answer>{inside}</answer>"


@pytest.fixture(scope="module", autouse=True)
def _nothing_to_collect():
    """The objects of all imports are not searched for garbage in the middle of a measurement."""
    readers()["language:response_language"]("It loads its profiles once.")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def fuzzed():
    return list(texts(SIZE))


def seconds(read, text):
    """CPU time of the quickest of three readings, or of the first that is quick enough."""
    times = []
    while not times or (times[-1] > LIMIT_S and len(times) < 3):
        begun = time.process_time()
        with suppress(TorchRLLLMError):  # a text that is refused was read, too
            read(text)
        times.append(time.process_time() - begun)
    return min(times)


@pytest.mark.parametrize("name", readers())
def test_what_a_policy_wrote_is_read_in_linear_time(name):
    chosen = random.Random(crc32(name.encode())).sample(fuzzed(), TEXTS)
    slow = [label for label, text in chosen if seconds(readers()[name], text) > LIMIT_S]
    assert not slow


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("split_thoughts", "</think>"),
        ("thoughts_of", "</think>"),
        ("split_tool_calls", '<tool_call>{"name": "a", "arguments": {}}</tool_call>'),
        ("chatml_format", "<tool_call>"),
        ("HermesParser", "<tool_call>{"),
        ("SyntaxParser:named", '[TOOL_CALLS]add[ARGS]{"key": "1"}'),
        ("SyntaxParser:keyed", "<tool_call>a<arg_key>"),
        ("SyntaxParser:bare", "[]"),
        ("LlamaParser", '{"name":'),
        ("CodeBlockParser", "```py\n~~~~"),
        ("ToolTagParser", "<tool>"),
        ("beside:behind", 'a{"name":'),
        ("beside:in_front", "[add("),
        ("published", "<|im_end|>"),
    ],
)
def test_what_a_collapsed_policy_repeats_is_read_in_linear_time(name, piece):
    size = 4 * SIZE
    # Begun in front of something, and broken off in the middle of the last one.
    for text in (_filled(piece, size), "a" + _filled(piece, size), _filled(piece, size)[:-3]):
        assert seconds(readers()[name], text) < 4 * LIMIT_S
