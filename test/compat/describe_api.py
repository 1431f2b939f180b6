"""Signatures and public attributes of the classes of ``torchrl.*.llm`` and of its counterpart."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import pkgutil
import textwrap
from typing import TypeVar

import torch
from tensordict import is_tensorclass
from tensordict.nn import TensorDictModuleBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs import EnvBase, Transform
from torchrl.objectives import LossModule

BASES = {
    "TensorClass": None,
    "Transform": Transform,
    "EnvBase": EnvBase,
    "Module": torch.nn.Module,
    "TensorDictModuleBase": TensorDictModuleBase,
    "LossModule": LossModule,
    "Sampler": Sampler,
}
ROOMS = ("data", "modules", "envs", "objectives", "collectors")


def rooms(root: str):
    """Yield (room, module), the module that users import from."""
    for room in ROOMS:
        path = f"torchrl.{room}.llm" if root == "torchrl" else f"torchrl_llm.{room}"
        yield room, importlib.import_module(path)


def describe(root: str) -> dict:
    """``{"classes": {name: ...}, "paths": [...]}`` of one import root."""
    found: dict[str, dict] = {}
    for room, module in rooms(root):
        for name in getattr(module, "__all__", None) or vars(module):
            if name.startswith("_"):
                continue
            with contextlib.suppress(ImportError, AttributeError):
                value = getattr(module, name)
                if inspect.isclass(value) or inspect.isfunction(value):
                    found[f"{room}.{name}"] = _describe(value)
    return {"names": found, "paths": paths() if root == "torchrl" else []}


def paths() -> list[str]:
    """``module:name`` of all that the modules of ``torchrl.*.llm`` define, private ones aside."""
    lines = []
    for _, package in rooms("torchrl"):
        names = [package.__name__]
        names += [each.name for each in pkgutil.walk_packages(package.__path__, f"{names[0]}.")]
        for name in names:
            if any(part.startswith("_") for part in name.split(".")):
                continue
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            offered = getattr(module, "__all__", None) or [
                each
                for each, value in vars(module).items()
                if getattr(value, "__module__", None) == name and not isinstance(value, TypeVar)
            ]
            counterpart = name.replace("torchrl.", "torchrl_llm.").replace(".llm", "", 1)
            lines += [f"{counterpart}:{each}" for each in offered if each[0] != "_"]
    return lines


def _describe(value) -> dict:
    if not inspect.isclass(value):
        return {"arguments": _arguments(value), "own": [], "attributes": [], "methods": {}}
    own = [each for each in value.__mro__ if ".llm" in each.__module__]
    every = {name for name in dir(value) if name[0] != "_"}
    for each in value.__mro__:
        if each.__module__.partition(".")[0] in ("torchrl", "torchrl_llm"):
            every |= _assigned(each) | set(vars(each).get("__annotations__", ()))
    functions = {
        name: _arguments(function)
        for name in every
        if callable(function := _read(value, name)) and not inspect.isclass(function)
    }
    return {
        "arguments": _arguments(value),
        "own": sorted(name for each in own for name in _defined(each)),
        "attributes": sorted(every),
        "methods": functions,
        "bases": [name for name, base in BASES.items() if _is(value, base)],
    }


def _read(value, name: str):
    # A property of TorchRL's vLLMWrapper imports vLLM when it is read from the class.
    with contextlib.suppress(ImportError):
        return getattr(value, name, None)


def _is(value, base) -> bool:
    return is_tensorclass(value) if base is None else issubclass(value, base)


@functools.cache
def _defined(cls) -> set[str]:
    """Public names that the body and the methods of one class define themselves."""
    found = set(vars(cls).get("__annotations__", ())) | _assigned(cls)
    for name, part in vars(cls).items():
        function = getattr(part, "__func__", getattr(part, "fget", part))
        theirs = ".llm" in (getattr(function, "__module__", None) or "")
        if theirs or isinstance(part, str | int | list | tuple | dict):
            found.add(name)
    return {name for name in found if name[0] != "_"}


def _arguments(function) -> dict[str, str]:
    """Names and defaults; a name with stars for those that take anything."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {
        marks.get(each.kind, "") + name: (
            "-" if each.default is inspect.Parameter.empty else _default(each.default)
        )
        for name, each in parameters.items()
        if name not in ("self", "cls")
    }


def _default(value) -> str:
    if value is None or isinstance(value, str | int | float | tuple | list | bool):
        return repr(value).replace(" ", "")
    return getattr(value, "__name__", type(value).__name__)


@functools.cache
def _assigned(cls) -> set[str]:
    """Public names that the methods of a class set on ``self``, or register as buffers."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.Call) and _registers_a_buffer(node):
            found.add(node.args[0].value)
    return {name for name in found if name[0] != "_"}


def _registers_a_buffer(call: ast.Call) -> bool:
    named = isinstance(call.func, ast.Attribute) and call.func.attr == "register_buffer"
    return named and isinstance(call.args[0], ast.Constant)
