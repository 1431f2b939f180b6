"""Python code blocks are found however carelessly a model writes its fences."""

from __future__ import annotations

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.tools.code_blocks import CodeBlockParser, python_blocks

CASES = cases(__file__)

CODE = "x = 1\nprint(x)"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{CODE}\n```",
        f"```py\n{CODE}\n```",
        f"```python3\n{CODE}\n```",
        f"```python3.11\n{CODE}\n```",
        f"```Python\n{CODE}\n```",
        f"``` python \n{CODE}\n``` ",
        f"```python  \n{CODE}\n```\nand more",
        f"```python\n{CODE}```",
        f"```python\r\n{CODE}\n```\r\n",
        f"Look: ```python\n{CODE}\n```",
        f"```python title=a.py\n{CODE}\n```",
        f"````python\n{CODE}\n````",
        f"~~~python\n{CODE}\n~~~",
        f"```python\n{CODE}",
        f"```python\n{CODE}\n",
        "  ```python\n  x = 1\n  print(x)\n  ```",
        f"1. Do this:\n\n   ```py\n   x = 1\n   print(x)\n   ```\n2. Done: {CODE}",
    ],
)
def test_a_block_is_read_with_any_fence(text):
    assert python_blocks(text) == [CODE]


def test_several_blocks_are_read_in_order():
    text = "a\n```python\n1\n```\nb\n```py\n2```\nc ```python print(3)``` d\n```python\n4"
    assert python_blocks(text) == ["1", "2", " print(3)".strip(), "4"]


@pytest.mark.parametrize(
    "text",
    CASES["what_is_no_python_block_is_left_alone"],
)
def test_what_is_no_python_block_is_left_alone(text):
    assert python_blocks(text) == []


def test_blocks_of_other_languages_hide_what_is_in_them():
    text = "```bash\ncat <<E\nlooks like ```python\nE\n```\n```python\nprint(1)\n```"
    assert python_blocks(text) == ["print(1)"]
    nested = "````markdown\n```python\nprint(1)\n```\n````\n"
    assert python_blocks(nested) == []


def test_a_longer_fence_holds_shorter_ones():
    code = 's = """\n```\nquoted\n```\n"""\nprint(s)'
    assert python_blocks(f"````python\n{code}\n````") == [code]


def test_a_stray_fence_does_not_swallow_the_next_block():
    assert python_blocks("that was it ```\n```python\nprint(1)\n```") == ["print(1)"]


def test_code_in_reasoning_is_not_run():
    parser = CodeBlockParser()
    content = "<think>```python\n1/0\n```</think>```python\nprint(1)\n```"
    calls = parser.parse({"role": "assistant", "content": content}, {})
    assert [(call.tool, call.args, call.tag) for call in calls] == [
        ("python", {"code": "print(1)"}, "1")
    ]


code = st.text(st.characters(codec="utf-8", exclude_characters="`~\r"), min_size=1).filter(
    lambda text: text.strip() and text == text.strip("\n") and not text[0].isspace()
)


@given(
    st.lists(code, max_size=4), st.sampled_from(["```python", "``` py", "~~~python3", "`````py"])
)
def test_what_is_written_into_blocks_is_read_back(codes, opening):
    fence = opening.rstrip("python3 ")
    text = "\n\n".join(f"{opening}\n{code}\n{fence}" for code in codes)
    assert python_blocks(text) == codes


@given(st.text(st.sampled_from("`~ py\nthon3x{"), max_size=200))
def test_no_text_is_too_strange(text):
    assert isinstance(python_blocks(text), list)


@pytest.mark.parametrize(
    "text", ["```python\n" * 20_000, " " * 99_999, "`" * 99_999, "```" * 50_000, "~~~a\n" * 20_000]
)
@pytest.mark.timeout(60)
def test_long_and_hostile_texts_take_no_quadratic_time(text):
    assert len(python_blocks(text)) <= 1
