"""What a build of the documentation does not notice: lost pages, stale pictures, old claims."""

from __future__ import annotations

import ast
import csv
import json
import re
import sys
from pathlib import Path

import pytest

from torchrl_llm.recipes.command_keys import KeyTable

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs/source"
GROUPS = (
    "first_steps",
    "data_and_rewards",
    "algorithms",
    "tools_and_environments",
    "engines_and_clusters",
    "extending",
)
PAGES = [*SOURCE.rglob("*.rst"), *SOURCE.rglob("*.ipynb")]
PICTURES = re.compile(r"(?:figure|image|img-top|:file):+ (\S+\.(?:svg|png))")


def entries(group: str) -> tuple[list[str], list[str]]:
    """The pages that a group tells of, and those in its table of contents."""
    text, _, tree = (SOURCE / f"{group}.rst").read_text().partition(".. toctree::")
    return re.findall(r"^:doc:`(.+)`$", text, re.MULTILINE), tree.split()[1:]


def pictures() -> dict[Path, list[Path]]:
    """Picture to the pages that show it."""
    shown: dict[Path, list[Path]] = {}
    for page in SOURCE.rglob("*.rst"):
        for name in PICTURES.findall(page.read_text()):
            shown.setdefault((page.parent / name).resolve(), []).append(page)
    return shown


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_tells_of_each_of_its_pages_in_their_order(group):
    told, listed = entries(group)
    assert told == listed


def test_every_how_to_and_notebook_is_in_exactly_one_group():
    listed = [page for group in GROUPS for page in entries(group)[1]]
    there = {
        str(page.relative_to(SOURCE).with_suffix(""))
        for page in PAGES
        if page.parent.name in ("howto", "notebooks")
    }
    assert sorted(page for page in listed if "/" in page) == sorted(there)
    assert len(set(listed)) == len(listed)


def test_the_front_page_has_a_card_with_a_picture_for_each_group():
    text = (SOURCE / "index.rst").read_text()
    cards = re.findall(r":img-top: _static/cards/(\w+)\.svg\n\s+:link: (\w+)\n", text)
    assert cards == [(group, group) for group in GROUPS]


def test_each_picture_is_there_and_shown_and_made_by_a_program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import draw_pictures
    import make_curves

    static = SOURCE / "_static"
    made = {static / f"curves/{name}.svg" for name in make_curves.RUNS}
    made |= {static / f"cards/{card.__name__}.svg" for card in draw_pictures.CARDS}
    made |= {static / f"{name}.svg" for name in ("benchmarks", "floors", "life_of_a_row")}
    # test/evaluation/report/test_view_in_browser.py
    names = ("view", "view_evaluation", "view_two_runs", "view_two_evaluations")
    screenshots = {static / f"{name}.png" for name in names}
    assert set(pictures()) == made | screenshots
    assert made == set(static.rglob("*.svg"))
    for name in make_curves.RUNS:
        drawn = (static / f"curves/{name}.svg").read_text()
        for line in make_curves.kept(name):
            assert f">{line}</text>" in drawn, f"{name}.svg is older than its figures"


def test_at_least_eight_how_tos_have_a_curve():
    curves = {
        page for picture, pages in pictures().items() for page in pages if "curves" in str(picture)
    }
    assert len([page for page in curves if page.parent.name == "howto"]) >= 8


def test_drawings_are_those_of_their_program(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_pictures

    kept = draw_pictures.STATIC
    monkeypatch.setattr(draw_pictures, "STATIC", tmp_path)
    (tmp_path / "curves").symlink_to(kept / "curves")
    draw_pictures.main()
    for path in (*tmp_path.glob("*.svg"), *tmp_path.glob("cards/*.svg")):
        assert path.read_text() == (kept / path.relative_to(tmp_path)).read_text(), path.name


def test_the_three_lines_are_at_most_ten():
    cells = json.loads((SOURCE / "notebooks/three_lines.ipynb").read_text())["cells"]
    _, *program = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    lines = [line for cell in program for line in cell.splitlines() if line.strip()]
    assert len(lines) <= 10
    assert any("GRPO(" in line for line in lines)


def test_notebooks_are_kept_without_their_outputs():
    for path in SOURCE.rglob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") for cell in cells), path.name


def test_no_page_leaves_a_name_to_the_reader_that_does_not_exist():
    texts = [*SOURCE.rglob("*.rst"), ROOT / "README.rst", ROOT / "CONTRIBUTING.rst"]
    assert not [path.name for path in texts if "this repository>" in path.read_text()]


def dictionary(path: str, name: str) -> dict:
    """A dictionary of a test file, without what that file imports."""
    for statement in ast.parse((ROOT / "test" / path).read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == name:
            return {
                key.value: value
                for key, value in zip(statement.value.keys, statement.value.values, strict=True)
            }
    raise AssertionError(f"{path} has no {name}")


def test_models_that_are_said_to_be_tested_are():
    backends = "modules/backends"
    heads = dictionary(f"{backends}/test_head.py", "FAMILIES").values()
    tested = {  # and those that tests of one model take
        "packed": {
            *dictionary(f"{backends}/test_layouts.py", "PACKABLE"),
            *dictionary(f"{backends}/test_layouts.py", "UNPACKABLE"),
            "qwen2",
            "mistral",
        },
        "logits in chunks": {head.elts[0].value.split()[0] for head in heads},
        "weights into vLLM": {
            *dictionary("weights/test_vllm_experts.py", "FAMILIES"),
            *("llama", "qwen2", "qwen3"),
        },
    }
    with (SOURCE / "tested_models.csv").open() as file:
        rows = list(csv.DictReader(file))
    for column, families in tested.items():
        assert {row["architecture"] for row in rows if row[column]} == families, column
    no = {row["architecture"] for row in rows if row["packed"] == "no"}
    assert no == set(dictionary(f"{backends}/test_layouts.py", "UNPACKABLE"))


def test_each_setting_that_a_page_gives_is_a_key_of_a_recipe():
    # Those of an agent of one's own are its arguments.
    keys = set()
    open_keys = {"reward.components", "env.options", "agent", "model.template_kwargs"}
    for path in (ROOT / "sota-implementations").glob("*/config/*.yaml"):
        keys.update(KeyTable.read(path.parent, path.stem).keys)
    groups = {key.partition(".")[0] for key in keys if "." in key}
    unknown = []
    for page in SOURCE.rglob("*.rst"):
        if page.stem.startswith("coming_from"):  # and gives those of others
            continue
        for key in re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)=", page.read_text()):
            own = any(key.startswith(f"{prefix}.") for prefix in open_keys)
            if key.partition(".")[0] in groups and key not in keys and not own:
                unknown.append(f"{page.name}: {key}")
    assert not unknown
