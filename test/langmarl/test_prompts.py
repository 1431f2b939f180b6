"""Templates: fields that are filled, and fields that nobody fills."""

from __future__ import annotations

import json

import pytest

from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl.critic import CRITIC_FIELDS
from torchrl_llm.langmarl.optimizer import _FIELDS
from torchrl_llm.langmarl.prompts import PROMPTS, Template


def test_fields_are_filled_in_one_pass_so_braces_in_values_are_text():
    template = Template('{a} {b} {a} {"json": {}} {0} {1a} { a }')
    found = template.fill(a="{b}", b="\\1 {unknown} $x")
    assert found == '{b} \\1 {unknown} $x {b} {"json": {}} {0} {1a} { a }'


def test_a_field_that_nobody_fills_is_named_with_its_file_and_what_there_is(tmp_path):
    (tmp_path / "gradient.txt").write_text("Improve {polcy} of {agent}.")
    with pytest.raises(ConfigError) as caught:
        Template.load("gradient", tmp_path, {"policy", "agent"})
    message = str(caught.value)
    assert str(tmp_path / "gradient.txt") in message
    assert "{polcy}" in message
    assert "agent, policy" in message
    assert "did you mean {policy}?" in message


def test_a_field_without_a_value_is_an_error_also_when_it_was_not_checked(tmp_path):
    (tmp_path / "mine.txt").write_text("{who}")
    with pytest.raises(ConfigError, match=r"\{who\}, which nobody fills"):
        Template.load("mine", tmp_path, None).fill(whom="you")


def test_a_file_of_the_first_folder_that_has_it_is_taken_and_else_ours(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (second / "rewrite.txt").write_text("second\n")
    folders = [first, str(second)]
    assert Template.load("rewrite", folders).text == "second"
    (first / "rewrite.txt").write_text("first")
    assert Template.load("rewrite", folders).text == "first"
    ours = Template.load("gradient", folders, None)
    assert ours.source == str(PROMPTS / "gradient.txt")


def test_a_template_that_is_nowhere_is_a_value_error_that_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match="no template 'other'") as caught:
        Template.load("other", tmp_path)
    assert str(tmp_path / "other.txt") in str(caught.value)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        Template.load("gradient", tmp_path / "none", None)


@pytest.mark.parametrize("name", ["central_credit", "central_global", *_FIELDS])
def test_our_templates_have_no_field_that_nobody_fills_and_use_what_they_need(name):
    known = _FIELDS.get(name, CRITIC_FIELDS)
    fields = set(Template.load(name, None, known).fields)
    unused = known - fields
    assert unused == (
        {"agent_evaluation_sections", "answer_format"} if name == "central_global" else set()
    )


def test_every_file_of_the_folder_is_a_template_that_is_used_or_the_critics_words():
    names = {path.name for path in PROMPTS.iterdir()}
    templates = {f"{name}.txt" for name in ("central_credit", "central_global", *_FIELDS)}
    assert names == templates | {"critic.json", "optimizer.json"}
    assert set(json.loads((PROMPTS / "critic.json").read_text())) == {"system", "roles", "criteria"}
