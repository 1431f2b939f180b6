"""Every import path of the release before the rooms were drawn again still works."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
import torchrl

from torchrl_llm.errors import ConfigError

LINES = (Path(__file__).parent / "import_paths.txt").read_text().splitlines()
# Helpers of a policy that took it as their first argument are its methods now.
METHODS = {"score_rows", "whole_distribution", "whole_log_probs"}
# The live line of a run, whose place another bar has taken (trainers.ProgressBar).
METHODS |= {"ProgressBar"}
# TorchRL's stand-ins for classes of vLLM, where that is not installed.
VLLM_OWN = {"LLM", "Worker"}


def _public_modules(root: str):
    module = importlib.import_module(root)
    yield module
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not found.name.startswith("_"):
            yield from _public_modules(f"{root}.{found.name}")


def _own_names(module: ModuleType):
    """What TorchRL's LLM part defines and this module gives, private names aside."""
    for name in sorted({*dir(module), *getattr(module, "__all__", ())} - VLLM_OWN):
        found = getattr(module, name)
        home = getattr(found, "__module__", None) or ""
        if not name.startswith("_") and home.startswith("torchrl.") and ".llm" in home:
            yield name


def test_a_path_that_worked_still_works():
    lost = []
    for line in LINES:
        module, _, names = line.partition(":")
        found = importlib.import_module(module)
        lost += [f"{module}.{name}" for name in names.split() if not hasattr(found, name)]
    lost = [path for path in lost if path.rpartition(".")[2] not in METHODS]
    assert not lost


def test_an_old_path_gives_the_same_module_and_not_a_second_one():
    old = importlib.import_module("torchrl_llm.envs.reward.ifeval.content")
    new = importlib.import_module("torchrl_llm.rewards.ifeval.paper_instructions")
    assert old is new
    assert new.__spec__.name == new.__name__ == "torchrl_llm.rewards.ifeval.paper_instructions"


@pytest.mark.parametrize("room", ["modules"])
def test_what_torchrl_gives_under_a_path_is_found_under_the_path_without_llm(room):
    lost = []
    for module in _public_modules(f"torchrl.{room}.llm"):
        path = module.__name__.replace("torchrl.", "torchrl_llm.", 1).replace(".llm", "")
        ours = importlib.import_module(path)
        lost += [f"{path}.{name}" for name in _own_names(module) if not hasattr(ours, name)]
    assert torchrl.__version__.startswith("0.14")
    assert not lost


def test_a_name_that_is_left_out_can_be_imported_and_says_why_at_use():
    from torchrl_llm.modules.backends.sglang import AsyncSGLang, get_open_port

    assert get_open_port() > 0
    assert not isinstance(1, AsyncSGLang)
    for use in (AsyncSGLang, lambda: AsyncSGLang.from_pretrained("a")):
        with pytest.raises(ConfigError, match="AsyncSGLang is left out: SGLang is not offered"):
            use()
