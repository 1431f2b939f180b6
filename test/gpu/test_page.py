"""The page "On one GPU" holds what was measured on a GPU and nothing else."""

import json

from gpu import page


def entry(name="ours / other", **changed):
    figure = {"name": name, "value": 1.25, "unit": "ratio", "aim": ">= 1.5", "met": False}
    one = {
        "status": "done",
        "on": "NVIDIA H100, torch 2.11.0",
        "seconds": 12.3,
        "facts": {"layout": "packed", "outcomes": {f"test {k}": "passed" for k in range(99)}},
        "figures": [figure, {"name": "rows", "value": 12345.0, "unit": ""}],
    }
    return {**one, **changed}


def test_the_page_is_what_the_script_makes_of_the_stored_figures():
    assert page.PAGE.read_text() == page.page(page.read_results(page.FIGURES))


def test_a_measured_section_has_its_table_and_the_others_say_that_they_were_not():
    text = page.page({"head": entry()})
    assert text.count("Not measured yet.") == len(page._SECTIONS) - 1
    table = text.split("The head alone")[1].split("Sampling with")[0]
    assert "   * - ours / other\n     - 1.25\n     - ratio\n     - >= 1.5 (missed)\n" in table
    assert "   * - rows\n     - 12,345\n     -\n     -\n" in table
    assert "- layout: ``packed``" in table
    assert "outcomes" not in table
    assert "NVIDIA H100, torch 2.11.0; the section took 12 s." in table


def test_rehearsals_and_sections_that_did_not_end_give_no_figures(tmp_path):
    on_cpu = entry(on="CPU, torch 2.11.0")
    cases = {"step": entry(), "head": on_cpu, "whole": entry(status="out of time")}
    for name, case in cases.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(case))
    assert list(page.read_results(tmp_path)) == ["step"]
