"""``torchrl-llm train``: the page of a recipe, run as the program that somebody typed."""

from __future__ import annotations

import sys

import pytest

from torchrl_llm.cli import main
from torchrl_llm.recipes import launch


def test_a_page_is_the_main_program_and_knows_what_was_typed(tmp_path, monkeypatch, capsys):
    (tmp_path / "grpo").mkdir()
    page = tmp_path / "grpo" / "grpo-sync.py"
    page.write_text(
        "import sys, beside\n"
        "print(sys.argv, __name__, sys.modules['__main__'].__file__, __file__)\n"
    )
    (tmp_path / "grpo" / "beside.py").write_text("")
    monkeypatch.setattr(launch, "PAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = sys.modules["__main__"]
    assert main(["train", "grpo", "seed=1"]) == 0
    said = f"['torchrl-llm train grpo', 'seed=1'] __main__ {page} {page}\n"
    assert capsys.readouterr().out == said
    assert sys.modules["__main__"] is before


def test_an_unknown_recipe_and_one_that_is_not_installed_are_told(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["train", "gropo"])
    assert "there is no recipe 'gropo'; did you mean 'grpo'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "ppo"])
    assert "it is a loss, torchrl-llm train grpo loss=ppo" in capsys.readouterr().err
    monkeypatch.setattr(launch, "PAGES", tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "grpo"])
    assert "this installation has no recipe grpo/grpo-sync.py" in capsys.readouterr().err
