"""What can be imported from a module of TorchRL's LLM part can be imported from its counterpart."""

from __future__ import annotations

import importlib

import pytest
from fork_server import run_program

from torchrl_llm.errors import ConfigError

# Type variables, optional packages' classes, and what no program of TorchRL's users needs.
PROGRAM = """
import importlib, pkgutil, warnings
from types import ModuleType
from typing import TypeVar
warnings.simplefilter("ignore")
PARTS = ["data", "envs", "collectors", "weight_update", "objectives", "modules"]
LEFT = {"vllm_sync.LLM", "vllm_sync.Worker", "ray_collector.RAY_ERR"}
LEFT |= {"kl.LLMWrapperBase", "kl.RayKLRewardTransform", "kl.RayRetrieveKL"}
def theirs(module):
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or module.__name__
        if name[0] == "_" or isinstance(value, (ModuleType, TypeVar)) or not isinstance(home, str):
            continue
        if home.startswith("torchrl.") and ".llm" in home and (
            callable(value) or (name.isupper() and not isinstance(value, bool))
        ):
            yield name
    yield from (name for name in getattr(module, "__all__", ()) if name[0] != "_")
for part in PARTS:
    root = importlib.import_module(f"torchrl.{part}.llm")
    found = [info.name for info in pkgutil.walk_packages(root.__path__, root.__name__ + ".")]
    for path in [root.__name__, *found]:
        if "._" in path:
            continue
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            if "torchrl" in str(error.name):
                raise
            continue
        counterpart = path.replace("torchrl.", "torchrl_llm.", 1).replace(".llm", "", 1)
        names = sorted(set(theirs(module)))
        try:
            ours = importlib.import_module(counterpart)
        except ModuleNotFoundError:
            print(counterpart, "is missing, with", names)
            continue
        lost = [name for name in names if not hasattr(ours, name)]
        lost = [n for n in lost if f"{path.rpartition('.')[2]}.{n}" not in LEFT]
        if lost:
            print(counterpart, "lacks", lost)
from torchrl_llm.envs import MLGymEnv, MLGymWrapper
assert MLGymEnv is MLGymWrapper
print("walked")
"""


def test_every_name_of_every_module_is_there():
    run = run_program(PROGRAM)
    assert run.stdout.splitlines() == ["walked"], run.stdout + run.stderr[-2000:]


def test_a_path_of_torchrl_gives_the_same_module_and_not_a_second_one():
    theirs = importlib.import_module("torchrl_llm.envs.transforms.format")
    ours = importlib.import_module("torchrl_llm.compat.template_transform")
    assert theirs is ours
    assert ours.__spec__.name == ours.__name__ == "torchrl_llm.compat.template_transform"


def test_a_name_that_is_left_out_can_be_imported_and_says_why_at_use():
    from torchrl_llm.modules.backends.sglang import AsyncSGLang, get_open_port

    assert get_open_port() > 0
    assert not isinstance(1, AsyncSGLang)
    for use in (AsyncSGLang, lambda: AsyncSGLang.from_pretrained("a")):
        with pytest.raises(ConfigError, match="AsyncSGLang is left out: SGLang is not offered"):
            use()


def test_the_older_data_classes_are_those_of_torchrl():
    import torchrl.data.llm as theirs

    from torchrl_llm import data
    from torchrl_llm.compat import torchrl_classes

    names = set(torchrl_classes.__all__) - {"pre_tokenization_hook"}
    assert {"PairwiseDataset", "PromptData", "RewardData", "RolloutFromModel"} < names
    assert all(getattr(data, name) is getattr(theirs, name) for name in names)
    for module in ("prompt", "reward"):
        wanted = importlib.import_module(f"torchrl.data.llm.{module}").DEFAULT_DATASET
        assert wanted == importlib.import_module(f"torchrl_llm.data.{module}").DEFAULT_DATASET
