from __future__ import annotations

import os
import sys

import pytest

from torchrl_llm.envs.libs.pettingzoo import joint_step, make_pettingzoo
from torchrl_llm.errors import ConfigError, DataError, MissingExtraError

pytest.importorskip("pettingzoo", reason="pip install torchrl_llm[pettingzoo]")
NAME = "butterfly/pistonball_v6"
UP = {"piston_0": 2, "piston_1": 2, "piston_2": 2}


def game(seed=5, **settings):
    env = make_pettingzoo(NAME, n_pistons=3, continuous=False, **settings)
    env.reset(seed=seed)
    return env


def test_rewards_are_those_of_the_game_stepped_by_hand():
    from pettingzoo.butterfly import pistonball_v6

    by_hand = pistonball_v6.env(n_pistons=3, continuous=False)  # one agent after another
    by_hand.reset(seed=5)
    env = game()
    for _ in range(3):
        found = joint_step(env, UP)
        for name in UP:
            by_hand.step(UP[name])
        assert found == {name: pytest.approx(by_hand.unwrapped.rewards[name]) for name in UP}
        assert env.unwrapped.ball.position == by_hand.unwrapped.ball.position


def test_the_seed_decides_and_nothing_else():
    first, again, other = (game(seed).unwrapped for seed in (5, 5, 6))
    heights = [[p.position[1] for p in world.pistonList] for world in (first, again, other)]
    assert heights[0] == heights[1]
    assert (heights[0], first.ball.position) != (heights[2], other.ball.position)


@pytest.mark.parametrize(
    ("actions", "told"),
    [
        ({"piston_0": 2, "piston_1": 2}, r"for the agents \['piston_0', 'piston_1', 'piston_2'\]"),
        (UP | {"piston_3": 2}, "got .*'piston_3'"),
        (UP | {"piston_1": 3}, r"action of piston_1 must be in Discrete\(3\), got 3"),
    ],
)
def test_actions_that_cannot_be_are_refused_before_anything_moves(actions, told):
    env = game()
    before = env.unwrapped.ball.position
    with pytest.raises(DataError, match=told):
        joint_step(env, actions)
    assert env.unwrapped.ball.position == before


def test_a_game_that_is_over_takes_no_actions():
    env = game(max_cycles=1)
    joint_step(env, UP)
    assert env.agents == []
    with pytest.raises(DataError, match="for the agents"):
        joint_step(env, UP)


def test_there_is_no_window(monkeypatch):
    import pygame

    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    make_pettingzoo(NAME, render_mode="human")
    assert "SDL_VIDEODRIVER" not in os.environ
    joint_step(game(), UP)
    assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    assert not pygame.display.get_init() or pygame.display.get_driver() == "dummy"
    assert pygame.display.get_surface() is None
    monkeypatch.setenv("SDL_VIDEODRIVER", "offscreen")
    game()
    assert os.environ["SDL_VIDEODRIVER"] == "offscreen"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    install = r'pip install "torchrl_llm\[pettingzoo\]"'
    for name in [name for name in sys.modules if name.startswith("pettingzoo.butterfly")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pymunk", None)
    with pytest.raises(MissingExtraError, match=f"needs the package 'pymunk': {install}"):
        make_pettingzoo(NAME)
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(MissingExtraError, match=f"'pettingzoo', which is not .*{install}"):
        make_pettingzoo(NAME)


def test_an_environment_that_there_is_not_is_no_missing_package():
    with pytest.raises(ConfigError, match="no environment 'butterfly/footballl_v1'"):
        make_pettingzoo("butterfly/footballl_v1")
