"""Rules for several players: whose turn it is, what each gets, and what is not possible."""

from __future__ import annotations

import random

import pytest

from torchrl_llm.envs.games import (
    IllegalAction,
    PrisonersDilemma,
    TicTacToe,
    TicTacToeForTwo,
    expert,
    play_table,
    random_player,
)
from torchrl_llm.errors import ConfigError, DataError

GAMES = [TicTacToeForTwo(), PrisonersDilemma(num_rounds=3)]


def _played(game, actions):
    state = game.reset(0)
    for each in actions:
        outcome = game.step(state, each)
        state = outcome.state
    return outcome


def _alternating(*cells):
    return [{"XO"[turn % 2]: cell} for turn, cell in enumerate(cells)]


def test_rewards_of_ten_thousand_random_games_add_up_to_zero():
    game, ends = TicTacToeForTwo(), {-1.0: 0, 0.0: 0, 1.0: 0}
    for seed in range(10_000):
        seats = {"X": random_player(seed), "O": random_player(-1 - seed)}
        steps = play_table(game, seats, seed)
        assert [list(step.actions) for step in steps] == [["XO"[i % 2]] for i in range(len(steps))]
        assert all(not any(step.outcome.rewards.values()) for step in steps[:-1])
        last = steps[-1].outcome
        assert last.terminated
        assert last.rewards["X"] + last.rewards["O"] == 0
        ends[last.rewards["X"]] += 1
    # Of two random players X wins 58.5 %, O 28.8 %, and 12.7 % are drawn (exact; 4 deviations).
    for end, share in ((1.0, 0.585), (-1.0, 0.288), (0.0, 0.127)):
        assert abs(ends[end] / 10_000 - share) < 0.02


def test_perfect_players_draw_and_one_never_loses():
    game = TicTacToeForTwo()
    for seed in range(50):
        both = {"X": expert(seed), "O": expert(seed + 1)}
        assert play_table(game, both, seed)[-1].outcome.rewards == {"X": 0.0, "O": 0.0}
        for seat, other in (("X", "O"), ("O", "X")):
            seats = {seat: expert(seed), other: random_player(seed)}
            assert play_table(game, seats, seed)[-1].outcome.rewards[seat] >= 0


def test_the_loser_that_did_not_move_last_gets_its_reward_and_is_told():
    outcome = _played(TicTacToeForTwo(), _alternating("1", "4", "2", "5", "3"))
    assert outcome.rewards == {"X": 1.0, "O": -1.0}
    assert outcome.success == ("X",)
    assert outcome.observations["X"] == "X X X\nO O 6\n7 8 9\nYou win."
    assert outcome.observations["O"] == "X takes 3.\nX X X\nO O 6\n7 8 9\nYou lose."


def test_the_payoffs_are_those_of_the_dilemma():
    game = PrisonersDilemma(num_rounds=4)
    rounds = [("cooperate", "cooperate"), ("cooperate", "defect"), ("defect", "cooperate")]
    state, payoffs = game.reset(0), []
    for a, b in [*rounds, ("defect", "defect")]:
        outcome = game.step(state, {"A": a, "B": f" {b.upper()} "})
        state = outcome.state
        payoffs.append(tuple(outcome.rewards.values()))
    assert payoffs == [(3, 3), (0, 5), (5, 0), (1, 1)]
    assert outcome.terminated
    assert outcome.observations["A"] == "The other defects. You get 1."
    second = _played(game, [{"A": "cooperate", "B": "defect"}])
    assert second.observations["A"] == "The other defects. You get 0.\nRound 2 of 4. Decide."
    assert second.observations["B"].startswith("The other cooperates. You get 5.")


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
def test_a_state_written_down_goes_on_as_it_would_have(game):
    choose = random.Random(0)
    state = game.reset(0)
    while active := game.active(state):
        assert game.load(game.dump(state)) == state
        actions = {each: choose.choice(game.legal_actions(state, each)) for each in active}
        assert game.step(game.load(game.dump(state)), actions) == game.step(state, actions)
        state = game.step(state, actions).state
    assert not any(game.legal_actions(state, each) for each in game.players)
    with pytest.raises(IllegalAction, match="over"):
        game.step(state, {game.players[0]: "1"})


def test_a_state_of_the_game_for_one_is_not_taken():
    single = TicTacToe(player="X")
    with pytest.raises(DataError, match="tic_tac_toe"):
        TicTacToeForTwo().load(single.dump(single.reset(0)))


@pytest.mark.parametrize(
    ("actions", "error", "why"),
    [
        ({"O": "1"}, IllegalAction, "not the turn of O, but of X"),
        ({"X": "1", "O": "2"}, IllegalAction, "not the turn of O"),
        ({}, IllegalAction, "X must act too"),
        ({"X": "10"}, IllegalAction, "'10' is not possible"),
        ({"Z": "1"}, ConfigError, "'X', 'O'"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_has_happened(actions, error, why):
    game = TicTacToeForTwo()
    with pytest.raises(error, match=why):
        game.step(game.reset(0), actions)


def test_both_must_decide():
    game = PrisonersDilemma()
    with pytest.raises(IllegalAction, match="B must act too"):
        game.step(game.reset(0), {"A": "defect"})


def test_an_empty_seat_or_one_that_there_is_not_is_refused():
    game = TicTacToeForTwo()
    for seats in ({"X": expert(0)}, {"X": expert(0), "O": expert(0), "Z": expert(0)}):
        with pytest.raises(ConfigError, match="for each of"):
            play_table(game, seats, 0)
    with pytest.raises(ConfigError, match="has the players"):
        game.seat("Z")


def test_openings_follow_from_the_seed_and_end_no_game():
    game = TicTacToeForTwo(random_plies=4)
    boards = [game.reset(seed).board for seed in range(200)]
    assert boards == [game.reset(seed).board for seed in range(200)]
    moves = [9 - board.count(".") for board in boards]
    assert set(moves) == {0, 1, 2, 3, 4}
    assert all(game.active(game.reset(seed)) for seed in range(200))
    assert {game.active(game.reset(seed)) for seed in range(200)} == {("X",), ("O",)}
    with pytest.raises(ConfigError, match=r"in \[0, 4\], got 5"):
        TicTacToeForTwo(random_plies=5)
