"""What can be imported from a module of TorchRL's LLM part can be imported from its counterpart."""

from __future__ import annotations

from fork_server import run_program

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
