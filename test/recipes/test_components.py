from __future__ import annotations

from dataclasses import asdict, field, make_dataclass
from typing import ClassVar, Literal

import pytest

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.command_keys import KeyTable, check_overrides
from torchrl_llm.recipes.strict_config import (
    Component,
    constructor_arguments,
    from_mapping,
    valid_keys,
    variant,
)


class Square:
    def __init__(self, canvas, *, side: float = 1.0, colour: Literal["red", "blue"] = "red"):
        self.canvas, self.side, self.colour = canvas, side, colour


class Box(Square):
    def __init__(self, canvas, *, depth: float | tuple[float, float] = 2.0, **rest):
        super().__init__(canvas, **rest)
        self.depth = depth


class Circle:
    def __init__(self, canvas, *, radius: float = 1.0, centre: Square | str | None = None):
        self.canvas, self.radius = canvas, radius


class Shape(Component):
    """A group of shapes."""

    variants: ClassVar[dict] = {}
    default = "square"


for name, target in (("square", Square), ("box", Box), ("circle", Circle)):
    Shape.variants[name] = variant(Shape, name, target, given={"canvas"})
Config = make_dataclass(
    "Config", [("shape", Shape, field(default_factory=Shape.of)), ("seed", int, 0)]
)


def test_the_keys_of_a_variant_are_the_arguments_of_its_constructor():
    assert asdict(Shape.of()) == {"type": "square", "side": 1.0, "colour": "red"}
    assert asdict(Shape.of("circle")) == {"type": "circle", "radius": 1.0, "centre": None}
    built = Shape.of("square", side=3.0).build("paper", colour="blue")
    assert (built.canvas, built.side, built.colour) == ("paper", 3.0, "blue")
    assert Shape.of("box").takes("canvas")
    assert not Shape.of("circle").takes("side")


def test_arguments_that_a_class_hands_on_to_its_base_are_keys_too():
    assert list(constructor_arguments(Box)) == ["canvas", "depth", "side", "colour"]
    assert Shape.of("box", side=2.0).build(None).side == 2.0


def test_only_the_plain_part_of_a_type_can_be_configured():
    assert from_mapping(Config, {"shape": {"type": "circle", "centre": "here"}}).shape.centre
    with pytest.raises(ConfigError, match=r"shape\.centre must be str or null"):
        from_mapping(Config, {"shape": {"type": "circle", "centre": 3}})


def test_an_argument_that_no_file_can_write_is_no_key_and_a_needed_one_must_be_given():
    class Sealed:
        def __init__(self, size: int, *, canvas: Square | None = None):
            self.size, self.canvas = size, canvas

    with pytest.raises(TypeError, match="Sealed needs size"):
        variant(Shape, "sealed", Sealed)
    sealed = variant(Shape, "sealed", Sealed, given={"size"})()
    assert asdict(sealed) == {"type": "sealed"}
    assert sealed.build(3, canvas=Square(None)).canvas.side == 1.0


def test_a_mapping_chooses_the_variant_and_round_trips():
    config = from_mapping(Config, {"shape": {"type": "box", "depth": [1, 2], "side": "1e-1"}})
    assert config.shape.depth == (1.0, 2.0)
    assert config.shape.side == 0.1
    assert from_mapping(Config, asdict(config)) == config
    assert from_mapping(Config, {}).shape == Shape.of("square")
    with pytest.raises(ConfigError, match=r"shape\.type must be one of 'square', 'box', 'circle'"):
        from_mapping(Config, {"shape": {"type": "star"}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "circle", "side": 1}, "shape.side has no effect with shape=circle.*square, box"),
        ({"radius": 1}, "shape.radius has no effect with shape=square.*circle"),
        ({"sid": 1}, "unknown key 'shape.sid'.*'shape.side'"),
    ],
)
def test_a_key_of_another_variant_is_an_error_that_says_whose_it_is(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(Config, {"shape": values})


def test_the_command_line_is_checked_against_the_variant_that_it_chooses():
    assert list(valid_keys(Config)) == [
        "shape",
        *(f"shape.{key}" for key in ("type", "side", "colour", "depth", "radius", "centre")),
        "seed",
    ]
    options = {name: list(valid_keys(each, "shape.")) for name, each in Shape.variants.items()}
    table = KeyTable(["seed"], {"shape": options}, {"shape": "square"}, open_options=True)
    check_overrides(["shape=circle", "shape.radius=2"], table)
    check_overrides(["shape.radius=2", "shape=circle"], table)
    check_overrides(["shape=my_own_file", "shape.radius=2"], table)
    with pytest.raises(ConfigError, match=r"shape\.side has no effect with shape=circle"):
        check_overrides(["shape.side=2", "shape=circle"], table)
    with pytest.raises(ConfigError, match="choose it with its settings, shape=circle"):
        check_overrides(["shape.type=circle"], table)
