"""The table of Ludic's features names what there is, and says of the rest why not."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "docs" / "source"
WANTED_NAMES = "Environment Agent ToolAgent InteractionProtocol DelegatingProtocol AgentStep Step "
WANTED_NAMES += "EnvironmentStep StepOutcome TokenTrace Rollout RolloutRequest RequestStrategy "
WANTED_NAMES += "GRPORequestStrategy RolloutEngine SAWItem BatchSource Trainer RLAlgorithm Loss "
WANTED_NAMES += "CreditAssigner make_grpo make_sapo make_gmpo make_dr_grpo make_gspo make_cispo "
WANTED_NAMES += "make_reinforce make_sft CheckpointManager ChatTemplate HFChatTemplate ChatClient "
WANTED_NAMES += "HermesToolParser TokenCompletionRequest ChatResponse ToolRequest VLLMExtensions"


def rows_of(name):
    with (SOURCE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


ROWS, NAMES = rows_of("ludic_features.csv"), rows_of("ludic_names.csv")
# Those of the requirements that are stated, or asked for, there.
WANTED = "1 3 5 6 7 8 10 11 12 13 14 15 16 17 18 19 20 23 24 25 27 28 29 30 32 33 34 36 37 38 40 43"
WANTED += " 44 45 46 47 48 51 52 53 54 56 57 59 60 61 63 64 66 67 68 69 70 71 72 73 74"


def test_every_row_is_there_once():
    assert [row["row"] for row in ROWS] == WANTED.split()


def is_there(paths):
    """Whether each of these names of ours can be imported."""
    for path in paths.split():
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            if not hasattr(importlib.import_module(module), name):
                return False
    return True


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["feature"])
def test_each_name_can_be_imported_and_what_is_nowhere_has_a_reason(row):
    assert is_there(row["where"])
    assert row["where"] or len(row["how or why not"]) > 20


def test_each_class_of_ludic_is_there_once_and_leads_to_ours_or_to_a_reason():
    named = [row["Ludic"] for row in NAMES]
    assert len(set(named)) == len(named)
    # Those that the pages of Ludic tell of first.
    assert {f"``{name}``" for name in WANTED_NAMES.split()} <= set(named)
    for row in NAMES:
        assert is_there(row["here"]), row
        assert row["here"] or row["what to know"], row
