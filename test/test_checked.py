"""Arguments checked by their annotations, and every one of the package refuses what it should."""

from __future__ import annotations

import ast
import math
import numbers
import pkgutil
import warnings
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import torchrl_llm
from torchrl_llm._checked import CHECKED, Ge, Gt, In, Pair, checked, rules_of
from torchrl_llm._settings import Group
from torchrl_llm.errors import ConfigError

ROOT = Path(torchrl_llm.__file__).parent


@checked
def draw(
    samples: Annotated[int, Ge(1)],
    top_p: Annotated[float, In("(0, 1]")] = 1.0,
    *,
    seconds: Annotated[float, Gt(0, finite=True)] | None = None,
    kind: Literal["fast", "slow"] | list = "fast",
    style: Annotated[Literal["bold", "thin"], "it is printed so"] = "bold",
    peers: Annotated[int, Ge(2), "nobody plays alone"] = 2,
    band: Annotated[tuple[float, float], Pair("[0, 1]")] = (0, 1),
    weights: Annotated[tuple[float, float], Pair(equal=True)] | None = None,
    free: int = 0,
    later: Later | None = None,
):
    return samples, top_p, seconds, kind, free


class Later:
    """A name that the annotation above reads before it is there."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    steps: Annotated[int, Ge(0)] = 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"samples": 1.5}, "samples must be a whole number at least 1, got 1.5"),
        ({"samples": True}, "samples must be at least 1, got True"),
        ({"samples": "3"}, "samples must be a whole number at least 1, got '3'"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan"),
        ({"seconds": 0}, "seconds must be above 0 and finite or None, got 0"),
        ({"seconds": math.inf}, "seconds must be above 0 and finite or None, got inf"),
        (
            {"kind": "fats"},
            "kind must be one of 'fast', 'slow' or list, got 'fats'; did you mean 'fast'",
        ),
        ({"kind": 1}, "kind must be one of 'fast', 'slow' or list, got 1$"),
        ({"style": "bald"}, "'thin', got 'bald': it is printed so; did you mean 'bold'"),
        ({"peers": 1}, "peers must be at least 2, got 1: nobody plays alone$"),
        ({"peers": 2.5}, "peers must be a whole number at least 2, got 2.5: nobody"),
        ({"band": (1, 0.5)}, r"band must be \(low, high\) with low < high in \[0, 1\], got \(1, 0"),
        ({"band": (0.5, 0.5)}, "low < high"),
        ({"band": (0, 2)}, "band must be"),
        ({"band": (0, math.nan)}, "band must be"),
        ({"band": (0,)}, "band must be"),
        ({"band": ("0", 1)}, "band must be"),
        ({"band": 0.5}, "band must be"),
        ({"weights": [3, 2]}, r"weights must be \(low, high\) with low <= high or None, got \[3"),
    ],
)
def test_a_wrong_value_is_refused_with_name_bound_and_value(wrong, message):
    with pytest.raises(ConfigError, match=message):
        draw(**{"samples": 1} | wrong)


@pytest.mark.parametrize(
    ("bound", "within", "beyond"),
    [
        (In("[0, 1)"), (0, 0.999), (-0.001, 1)),
        (In("(0, 1]"), (0.001, 1), (0, 1.001)),
        (In("(-1, inf)"), (-0.999, 1e300), (-1, math.inf)),
        (Ge(1), (1, math.inf), (0.999,)),
        (Gt(0), (0.001, math.inf), (0,)),
        (Gt(0, finite=True), (0.001, 1e300), (0, math.inf)),
    ],
    ids=str,
)
def test_a_bound_holds_up_to_its_end_and_no_further(bound, within, beyond):
    assert [bound.holds(value) for value in within] == [True] * len(within)
    assert not any(bound.holds(value) for value in (*beyond, math.nan))


def test_right_values_of_every_kind_pass_by_place_and_by_name():
    assert draw(1) == (1, 1.0, None, "fast", 0)
    assert draw(np.int64(2), np.float32(0.5), seconds=1)[0] == 2
    assert draw(1, torch.tensor(0.5), kind=["mine"], free="not looked at")[3] == ["mine"]
    assert draw(1, style="thin", peers=2, band=[0.0, 0.5], weights=(2, math.inf))
    assert draw(1, weights=(2, 2.0), band=(torch.tensor(0.5), np.float32(1)))
    with pytest.raises(ConfigError, match="top_p"):
        draw(1, 2.0)


class Kind(StrEnum):
    FAST = "fast"


def test_what_other_libraries_have_for_a_text_a_whole_number_or_a_pair_passes():
    assert draw(1, kind=Kind.FAST, style=np.str_("thin"))[3] == "fast"
    assert draw(torch.tensor(3), peers=torch.tensor([2]))[0] == 3
    assert draw(1, band=np.array([0.0, 0.5]), weights=torch.tensor([1.0, 2.0]))
    assert draw(1, band=OmegaConf.create([0, 1]))
    for wrong in (torch.tensor(1.5), torch.tensor(3.0), np.array([1, 2])):
        with pytest.raises(ConfigError, match="samples must be a whole number"):
            draw(wrong)
    for wrong in (np.array(0.5), np.array([0.5]), torch.tensor([0.5, 0.1]), {0: 0, 1: 1}):
        with pytest.raises(ConfigError, match="band must be"):
            draw(1, band=wrong)


def test_what_is_missing_is_the_error_of_python():
    with pytest.raises(TypeError, match="samples"):
        draw()


def test_a_dataclass_is_checked_also_where_a_field_is_replaced():
    with pytest.raises(ConfigError, match="steps must be at least 0, got -1"):
        replace(Limits(), steps=-1)


def test_an_annotation_with_a_bound_that_cannot_be_read_is_an_error():
    @checked
    def of(size: Annotated[Unknown, Ge(1)] = 1):  # noqa: F821
        return size

    with pytest.raises(NameError, match="Unknown"):
        of()
    CHECKED.remove(of)


def imported():
    """Every module of the package that imports without an extra."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in pkgutil.walk_packages([str(ROOT)], "torchrl_llm."):
            if ".sota" in found.name or found.name.endswith("__main__"):
                continue
            try:
                yield import_module(found.name)
            except ImportError:
                continue


@pytest.fixture(scope="module")
def modules():
    return list(imported())


def allows(hint, value):
    """Whether a value is what an annotation says, worked out apart from the package."""
    if get_origin(hint) is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(hint))
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        if get_origin(kind) is Literal:
            return allows(kind, value)
        if kind in (int, float):
            number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
            if not number or isinstance(value, bool):
                return False
        return all(bound.holds(value) for bound in marks if not isinstance(bound, str))
    if get_origin(hint) in (tuple, list):
        hint = get_origin(hint)  # what is in it is the constructor's to say
    if isinstance(hint, type):
        return isinstance(value, hint)
    return any(allows(option, value) for option in get_args(hint))


VALUES = st.one_of(
    *(st.integers(-3, 3), st.floats(-2, 2), st.just(math.nan), st.booleans(), st.text(max_size=3)),
    *(st.none(), st.builds(object), st.tuples(st.integers(-1, 2), st.floats(-1, 2))),
)


@settings(max_examples=6, deadline=None)
@given(values=st.lists(VALUES, min_size=6, max_size=6))
def test_every_checked_argument_of_the_package_refuses_what_it_must(modules, values):
    assert CHECKED
    for function in CHECKED:
        for name, _, hint in rules_of(function.__wrapped__):
            for value in (*values, object()):
                if not allows(hint, value):
                    with pytest.raises(ConfigError, match=rf"^{name} must be "):
                        function(**{name: value})


def test_whoever_writes_a_bound_has_it_checked(modules):
    def is_marked(hint):
        return any(mark in hint for mark in ("Ge(", "Gt(", "In(", "Pair("))

    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            hints = [a.annotation for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation]
            if path.name != "_checked.py" and any(is_marked(ast.unparse(hint)) for hint in hints):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                assert "checked" in decorators, f"{path.name}: {node.name}"
    for value in {v for m in modules for v in vars(m).values() if isinstance(v, type)}:
        if is_dataclass(value) and any(is_marked(str(f.type)) for f in fields(value)):
            # A group of settings checks its own, with the key in the error.
            assert issubclass(value, Group) or value.__init__ in CHECKED, value
