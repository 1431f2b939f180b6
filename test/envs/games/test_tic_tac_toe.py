"""The rules of tic-tac-toe, and its opponents."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.envs.games import IllegalAction, TicTacToe, expert, play, random_player
from torchrl_llm.envs.games.tic_tac_toe import TicTacToeState
from torchrl_llm.errors import DataError

LINES = ["123", "456", "789", "147", "258", "369", "159", "357"]


def naive_winner(board):
    for line in LINES:
        marks = {board[int(cell) - 1] for cell in line}
        if len(marks) == 1 and marks != {"."}:
            return marks.pop()
    return None


def naive_value(board, mark, turn):
    """Value of a board for ``mark`` by searching everything."""
    winner = naive_winner(board)
    if winner or "." not in board:
        return 0 if winner is None else 1 if winner == mark else -1
    after = [
        naive_value(board[:i] + turn + board[i + 1 :], mark, "XO"[turn == "X"])
        for i, free in enumerate(board)
        if free == "."
    ]
    return max(after) if turn == mark else min(after)


def boards(game, state):
    """Every position that the player can meet from here on."""
    yield state
    for action in game.legal_actions(state):
        outcome = game.step(state, action)
        if not outcome.terminated:
            yield from boards(game, outcome.state)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("mark", ["X", "O"])
def test_three_in_a_row_win_the_game_and_one_point(line, mark):
    cells = ["."] * 9
    for cell in line[:2]:
        cells[int(cell) - 1] = mark
    state = TicTacToeState("".join(cells), mark, seed=0)
    outcome = TicTacToe().step(state, line[2])
    assert (outcome.reward, outcome.terminated, outcome.success) == (1.0, True, True)
    assert not outcome.truncated
    assert outcome.observation.endswith("You win.")


def test_the_move_of_the_opponent_that_loses_the_game_is_told():
    # O holds 1 and 2 and plays perfectly: whatever X does elsewhere, O takes 3
    state = TicTacToeState("OO.XX.X..", "X", seed=0)
    outcome = TicTacToe(opponent="minimax").step(state, "9")
    assert outcome.observation == "O takes 3.\nO O O\nX X 6\nX 8 X\nYou lose."
    assert (outcome.reward, outcome.terminated, outcome.success) == (-1.0, True, False)


def test_a_full_board_is_a_draw_which_is_a_success_against_a_perfect_opponent_only():
    state = TicTacToeState("XOXXOOO.X", "X", seed=0)
    for opponent, success in (("random", False), ("minimax", True)):
        outcome = TicTacToe(opponent=opponent).step(state, "8")
        assert (outcome.reward, outcome.terminated) == (0.0, True)
        assert outcome.success is success
        assert outcome.observation == "X O X\nX O O\nO X X\nA draw."


@pytest.mark.parametrize("player", ["X", "O"])
def test_nobody_beats_a_perfect_opponent(player):
    game = TicTacToe(opponent="minimax", player=player)
    for seed in range(3):
        for state in boards(game, game.reset(seed)):
            outcomes = [game.step(state, action) for action in game.legal_actions(state)]
            assert all(outcome.reward <= 0 for outcome in outcomes)


def test_the_best_actions_are_those_of_a_search_through_everything():
    game = TicTacToe(player="X")
    for state in list(boards(game, game.reset(1)))[:60]:
        if state.board.count(".") > 7:
            continue
        values = {}
        for action in game.legal_actions(state):
            cell = int(action) - 1
            board = state.board[:cell] + "X" + state.board[cell + 1 :]
            values[action] = naive_value(board, "X", "O")
        best = max(values.values())
        assert set(game.best_actions(state)) == {a for a, v in values.items() if v == best}


def test_an_expert_draws_with_a_perfect_opponent_and_never_loses_to_a_random_one():
    for seed in range(60):
        perfect = play(TicTacToe(opponent="minimax"), expert(seed), seed)
        assert perfect[-1].outcome.reward == 0
        assert play(TicTacToe(), expert(seed), seed)[-1].outcome.reward >= 0


def test_a_random_player_wins_and_loses_against_a_random_one():
    ends = [play(TicTacToe(), random_player(s), s)[-1].outcome.reward for s in range(100)]
    assert {-1.0, 0.0, 1.0} == set(ends)


def test_the_seed_says_who_begins_and_what_the_opponent_does():
    starts = [TicTacToe().reset(seed) for seed in range(40)]
    assert {state.player for state in starts} == {"X", "O"}
    assert all(state.board.count("X") == (state.player == "O") for state in starts)
    game = TicTacToe(player="X")
    replies = [game.step(game.reset(seed), "5").state.board for seed in range(40)]
    assert replies == [game.step(game.reset(seed), "5").state.board for seed in range(40)]
    assert len(set(replies)) > 4


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("1", r"Cell 1 is taken\. Free cells: 2, 3, 4, 5, 6, 7, 8, 9\."),
        ("0", "no such cell"),
        ("10", "no such cell"),
        ("", "no such cell"),
        ("\u0665", "no such cell"),  # a digit five of another script
        ("five", "no such cell"),
    ],
)
def test_what_the_rules_forbid_is_refused_with_a_reason(action, why):
    with pytest.raises(IllegalAction, match=why):
        TicTacToe().step(TicTacToeState("X........", "O", 0), action)


def test_nobody_moves_after_the_end():
    over = TicTacToeState("XXXOO....", "X", 0)
    assert TicTacToe().legal_actions(over) == () == TicTacToe().best_actions(over)
    with pytest.raises(IllegalAction, match="over"):
        TicTacToe().step(over, "9")


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.lists(st.integers(0, 8), min_size=9, max_size=9))
def test_any_game_is_a_game(seed, picks):
    game = TicTacToe()
    state = game.reset(seed)
    for pick in picks:
        legal = game.legal_actions(state)
        outcome = game.step(state, legal[pick % len(legal)])
        assert game.step(state, legal[pick % len(legal)]) == outcome
        state = outcome.state
        assert state.board.count("X") - state.board.count("O") in (0, 1)
        assert game.load(game.dump(state)) == state
        winner = naive_winner(state.board)
        assert outcome.terminated == (winner is not None or "." not in state.board)
        assert outcome.reward == (0 if winner is None else 1 if winner == state.player else -1)
        if outcome.terminated:
            return
    raise AssertionError("a game must end within nine turns")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        '{"board": "........."}',
        '{"game": "key_door", "version": 1}',
        '{"game": "tic_tac_toe", "version": 2, "board": ".........", "player": "X", "seed": 0}',
        '{"game": "tic_tac_toe", "version": 1, "board": "........."}',
        '{"game": "tic_tac_toe", "version": 1, "board": "", "player": "X", "seed": 0, "x": 1}',
    ],
)
def test_a_state_of_another_game_or_version_is_refused(text):
    with pytest.raises(DataError, match="state"):
        TicTacToe().load(text)
