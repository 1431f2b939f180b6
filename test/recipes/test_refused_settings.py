"""Settings that no run can have: one in each line of a table, and what a recipe says of it."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchrl_llm.cli.doctor import PAGES
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import launch

with Path(__file__).with_name("refused_settings.csv").open(newline="") as file:
    ROWS = [tuple(row.values()) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("recipe", "settings", "message"), ROWS)
def test_settings_that_no_run_can_have_are_refused(recipe, settings, message):
    page = launch.load_page(PAGES[recipe])
    schema = [page.AsyncGRPOConfig] if recipe == "grpo-async" else []
    with pytest.raises(ConfigError, match=message):
        page.load_config(OmegaConf.from_dotlist(shlex.split(settings)), *schema)
