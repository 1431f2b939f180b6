"""Files of keys: they are what the dataclasses say, and a key is declared in one place."""

import importlib.util
import sys
from typing import Annotated, Literal

import pytest

from torchrl_llm._checked import Ge, Gt, In, marks_of
from torchrl_llm._settings import Count, Group, bounded, own, several
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import GRPOConfig, OptimizerConfig, launch
from torchrl_llm.recipes.strict_config import from_mapping


@pytest.fixture(scope="module")
def writer():
    path = launch.PAGES / "write_config.py"
    spec = importlib.util.spec_from_file_location("write_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_those_that_the_classes_say(writer, monkeypatch):
    files = writer.files()
    monkeypatch.setattr(writer, "files", lambda: files)
    monkeypatch.setattr(sys, "argv", ["write_config.py", "--check"])
    writer.main()
    monkeypatch.setattr(writer, "files", lambda: {writer.launch.PAGES / "sft": "else"})
    with pytest.raises(SystemExit, match=r"out of date: .*sft"):
        writer.main()
    written = {path for folder in ("loss", "advantage", "agent") for path in _options(folder)}
    assert written <= set(files), "a file of a class that there is not"


def _options(folder):
    return (launch.PAGES / "grpo" / "config" / folder).glob("*.yaml")


class Decay(OptimizerConfig):
    """An optimizer with a key more.

    Attributes:
        half_life: steps after which the learning rate is halved. ``None`` would be for ever.
        shape: of the curve.
        bounds: of the rate.
    """

    half_life: Annotated[float, Gt(0)] | None = 1e-6
    shape: Literal["step", "line"] = "line"
    bounds: list[float] = several(0.0, 1.0)


class Recipe(GRPOConfig):
    optimizer: Decay = own(lr=1e-4, shape="step")


def test_a_key_that_is_declared_is_written_read_checked_and_suggested(writer):
    new = {"optimizer.half_life", "optimizer.shape", "optimizer.bounds"}
    keys = [key for key in writer.keys_of(Recipe) if key.path in new]
    assert list(writer._lines(keys)) == [
        "  half_life: 1.0e-6         # steps after which the learning rate is halved",
        "  shape: step               # step | line: of the curve",
        "  bounds: [0.0, 1.0]        # of the rate",
    ]
    config = from_mapping(Recipe, {"optimizer": {"half_life": "2e1"}})
    assert (config.optimizer.half_life, config.optimizer.lr) == (20.0, 1e-4)
    assert config.flat()["optimizer.shape"] == "step"
    assert Recipe().optimizer.bounds is not Recipe().optimizer.bounds
    with pytest.raises(ConfigError, match=r"did you mean 'optimizer\.half_life'"):
        from_mapping(Recipe, {"optimizer": {"half_live": 1}})
    with pytest.raises(ConfigError, match=r"optimizer\.half_life must be above 0 or null, got 0"):
        from_mapping(Recipe, {"optimizer": {"half_life": 0}})


NEEDED = {"LLMConfig": {"name": "it", "model_string": "it"}}


class Bounded(Group, key="some"):
    count: Count = 1
    share: Annotated[float, In("[0, 1]")] = 0.5
    part: Annotated[float, In("(0, 1]")] | None = None
    cost: Annotated[float, Ge(0)] = 0.0
    rest: Annotated[int, Ge(2)] | None = None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"count": 0}, "some.count must be at least 1, got 0"),
        ({"share": 1.5}, "some.share must be in [0, 1], got 1.5"),
        ({"part": 0}, "some.part must be in (0, 1] or null, got 0"),
        ({"cost": -1.0}, "some.cost must be at least 0, got -1.0"),
        ({"cost": float("nan")}, "some.cost must be at least 0, got nan"),
        ({"rest": 1}, "some.rest must be at least 2 or null, got 1"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_key_and_its_bounds(values, problem):
    with pytest.raises(ConfigError) as caught:
        Bounded(**values)
    assert str(caught.value) == problem


def _groups(base=Group):
    """All groups that can be imported: other tests run recipes as ``__main__``."""
    for group in base.__subclasses__():
        if getattr(sys.modules.get(group.__module__), group.__name__, None) is group:
            yield group
        yield from _groups(group)


def test_every_bound_of_every_recipe_is_held(writer):
    writer.files()  # imports all recipes
    tried = 0
    for group in {*_groups()} - {Bounded}:
        wrong = {Ge: lambda bound: bound.least - 1, Gt: lambda bound: bound.limit, In: lambda _: 2}
        for name, hint in bounded(group).items():
            bound = next(mark for mark in marks_of(hint) if type(mark) in wrong)
            with pytest.raises(ConfigError, match=rf"^[\w.]*\b{name} must be "):
                group(**{**NEEDED.get(group.__name__, {}), name: wrong[type(bound)](bound)})
            tried += 1
    assert tried > 80


def test_values_at_their_bounds_are_taken():
    assert Bounded(count=1, share=1, part=1, cost=0, rest=None) == Bounded(share=1, part=1)
