"""The rules of the maze with key and door."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.envs.games import IllegalAction, KeyDoor, expert, play, random_player
from torchrl_llm.envs.games.key_door import KeyDoorState

# @.K
# ##.
# D..
SMALL = KeyDoorState(("...", "##.", "..."), (0, 0), (0, 2), (2, 0), False, moves_left=30)


def naive_solution(game, state):
    """Length of a shortest solution by trying everything, one step after the other."""
    seen, queue = set(), deque([(state, 0)])
    while queue:
        state, steps = queue.popleft()
        for action in game.legal_actions(state):
            outcome = game.step(state, action)
            if outcome.success:
                return steps + 1
            key = (outcome.state.player, outcome.state.has_key)
            if key not in seen:
                seen.add(key)
                queue.append((replace(outcome.state, moves_left=99), steps + 1))
    return None


def test_a_solution_worked_by_hand():
    game, state = KeyDoor(size=3), SMALL
    way = ["east", "east", "take", "south", "south", "west", "west", "open"]
    for number, action in enumerate(way):
        assert game.best_actions(state) == (action,)
        outcome = game.step(state, action)
        state = outcome.state
        last = number == len(way) - 1
        assert (outcome.reward, outcome.terminated, outcome.success) == (float(last), last, last)
    assert state.moves_left == 22
    assert outcome.observation == "The door is open."


def test_what_the_player_sees():
    game = KeyDoor(size=3)
    assert game.observe(SMALL) == "@.K\n##.\nD..\nYou do not have the key. 30 moves left."
    on_key = replace(SMALL, player=(0, 2))
    text = "..@\n##.\nD..\nYou do not have the key. You stand on it. 30 moves left."
    assert game.observe(on_key) == text
    assert game.step(on_key, "take").observation == (
        "You take the key.\n..@\n##.\nD..\nYou have the key. 29 moves left."
    )
    at_door = replace(SMALL, player=(2, 0), has_key=True)
    assert game.observe(at_door).endswith("You have the key. You stand at the door. 30 moves left.")


@pytest.mark.parametrize(
    ("player", "has_key", "action"),
    [
        ((0, 0), False, "north"),  # out of the maze
        ((0, 0), False, "south"),  # a wall
        ((0, 0), False, "take"),  # no key here
        ((0, 2), True, "take"),  # taken already
        ((2, 0), False, "open"),  # without the key
        ((0, 0), True, "open"),  # not at the door
        ((0, 0), False, "fly"),
        ((0, 0), False, ""),
    ],
)
def test_what_the_rules_forbid_is_refused_with_what_is_possible(player, has_key, action):
    state = replace(SMALL, player=player, has_key=has_key)
    with pytest.raises(IllegalAction, match=r"is not possible now\. Possible: "):
        KeyDoor(size=3).step(state, action)


def test_a_game_without_moves_is_cut_and_an_open_door_ends_it_even_with_the_last_move():
    game = KeyDoor(size=3)
    cut = game.step(replace(SMALL, moves_left=1), "east")
    assert (cut.truncated, cut.terminated, cut.reward) == (True, False, 0.0)
    assert cut.observation.endswith("0 moves left. The game is over.")
    assert game.legal_actions(cut.state) == ()
    at_door = replace(SMALL, player=(2, 0), has_key=True, moves_left=1)
    ended = game.step(at_door, " OPEN ")
    assert (ended.truncated, ended.terminated, ended.reward) == (False, True, 1.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(), st.integers(2, 6))
def test_every_maze_can_be_solved_and_the_expert_needs_the_fewest_actions(seed, size):
    game = KeyDoor(size=size, slack=1)
    state = game.reset(seed)
    assert state == game.reset(seed)
    assert game.load(game.dump(state)) == state
    turns = play(game, expert(seed), seed)
    assert turns[-1].outcome.success
    assert len(turns) == state.moves_left == naive_solution(game, state)


def test_slack_gives_so_many_times_the_moves_of_a_solution():
    tight, wide = KeyDoor(slack=1).reset(5), KeyDoor(slack=2.5).reset(5)
    assert wide.moves_left == int(2.5 * tight.moves_left)


def test_a_random_player_solves_some_mazes_and_runs_out_of_moves_in_others():
    ends = [play(KeyDoor(), random_player(s), s)[-1].outcome for s in range(60)]
    assert any(end.success for end in ends)
    assert any(end.truncated for end in ends)
    assert all(end.success != end.truncated for end in ends)
