"""GameEnv: conversations in which a game is played."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason, TruncationReason
from torchrl_llm.data.history import History
from torchrl_llm.envs.games import (
    Game,
    GameEnv,
    KeyDoorEnv,
    Outcome,
    TicTacToe,
    TicTacToeEnv,
    expert,
)
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.recipes.tasks import task_class

ENVS = {"tic_tac_toe": TicTacToeEnv, "key_door": KeyDoorEnv}


def answered(td, *texts, **message):
    chats = td["history"].prompt.chats
    td["history"].full = History.of(
        chat + [{"role": "assistant", "content": text, **message}]
        for chat, text in zip(chats, texts, strict=True)
    )
    return td


def last(td, row=0):
    return td["history"].prompt.chats[row][-1]


def best_answer(env):
    """A policy that knows the game and answers in its tag."""
    choose = expert(0)
    game = env.game

    def answer(td):
        tag = game.action_name
        states = [game.load(text) for text in td["game_state"]]
        actions = [choose(game, s) if game.legal_actions(s) else "none" for s in states]
        return answered(td, *(f"Hm. <{tag}>{action}</{tag}>" for action in actions))

    return answer


@pytest.mark.parametrize("name", sorted(ENVS))
def test_a_game_is_a_task_by_name_and_keeps_its_specs(name):
    assert task_class(name) is ENVS[name]
    check_env_specs(ENVS[name](num_envs=3))


def test_a_conversation_begins_with_the_rules_and_the_first_observation():
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False)
    chat = env.reset()["history"].prompt.chats[0]
    assert [m["role"] for m in chat] == ["system", "user"]
    assert chat[0]["content"].startswith("Play tic-tac-toe.")
    assert chat[0]["content"].endswith(
        "Answer with the number of a free cell between <move> and </move>."
    )
    assert chat[1]["content"] == "1 2 3\n4 5 6\n7 8 9\nYou are X. Your move."


def test_an_answer_moves_the_game_and_the_next_message_tells_what_came_of_it():
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False)
    td = env.step(answered(env.reset(), "<think>2?</think>The middle: <move> 5 </move>"))["next"]
    state = env.game.load(td["game_state"][0])
    assert state.board.count("X") == state.board.count("O") == 1
    assert state.board[4] == "X"
    assert last(td)["role"] == "user"
    assert last(td)["content"].startswith(f"O takes {state.board.index('O') + 1}.\n")
    assert (td["game_action"][0], td["game_legal"].tolist()) == ("5", [True])
    assert td["reward"].tolist() == [[[0.0]]]
    assert td["reward_valid"].tolist() == [True]
    assert not td["done"].any()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("I take the middle.", "No <move>...</move> in your answer."),
        ("", "No <move>...</move> in your answer."),
        ("<move></move>", "No <move>...</move> in your answer."),
        ("<think><move>5</move></think> done", "No <move>...</move> in your answer."),
        ("<think><move>5</move>", "No <move>...</move> in your answer."),
        ("<move>5", "No <move>...</move> in your answer."),
        ("<move>10</move>", "There is no such cell. Free cells: 1, 2, 3, 4, 5, 6, 7, 8, 9."),
        ("<move>middle</move>", "There is no such cell. Free cells: 1, 2, 3, 4, 5, 6, 7, 8, 9."),
    ],
)
def test_an_answer_without_a_legal_action_costs_a_penalty_and_a_turn_and_moves_nothing(answer, why):
    env = TicTacToeEnv(num_envs=1, player="X", max_steps=2)
    before = env.reset()
    td = env.step(answered(before.clone(), answer))["next"]
    assert td["game_state"][0] == before["game_state"][0]
    assert td["reward"].item() == pytest.approx(-0.3)
    assert (td["game_legal"].item(), td["done"].item(), td["reward_valid"].item()) == (
        False,
        False,
        True,
    )
    assert last(td)["content"] == (
        f"{why} Answer with the number of a free cell between <move> and </move>."
    )
    td = env.step(answered(td, answer))["next"]
    assert (td["truncated"].item(), td["terminated"].item(), td["done"].item()) == (
        True,
        False,
        True,
    )
    assert td["truncation_reason"].item() == TruncationReason.MAX_STEPS


def test_a_turn_without_a_legal_action_can_end_the_game():
    env = TicTacToeEnv(num_envs=1, stop_on_invalid=True)
    td = env.step(answered(env.reset(), "?"))["next"]
    assert (td["terminated"].item(), td["truncated"].item(), td["reward"].item()) == (
        True,
        False,
        -1.0,
    )
    assert last(td)["content"] == "No <move>...</move> in your answer."


@dataclass(frozen=True)
class Secret:
    number: str


class Guess(Game):
    """A wrong guess is told, and leaves the state as it is."""

    name, rules, action_help, state_type = "guess", "Guess.", "a digit", Secret

    def reset(self, seed):
        return Secret("5")

    def observe(self, state):
        return "Guess."

    def legal_actions(self, state):
        return tuple("123456789")

    def best_actions(self, state):
        return (state.number,)

    def _apply(self, state, action):
        right = action == state.number
        return Outcome(state, f"Not {action}.", reward=float(right) - 0.5, terminated=right)


def test_an_action_that_changes_nothing_is_done_once_and_not_again_in_the_next_turn():
    env = GameEnv(Guess(), num_envs=1)
    td = env.step(answered(env.reset(), "<action>3</action>"))["next"]
    assert (last(td)["content"], td["reward"].item()) == ("Not 3.", -0.5)
    td = env.step(answered(td, "?"))["next"]
    assert last(td)["content"].startswith("No <action>...</action> in your answer.")
    assert "Not 3." not in last(td)["content"]
    assert td["reward"].item() == pytest.approx(-0.1)


def test_nonsense_until_the_turns_run_out_is_worse_than_a_loss():
    # X plays four moves that do not end the game, the most there are, and then gives no more.
    env = TicTacToeEnv(num_envs=1, player="X", shuffle=False)
    td, total, turns = env.reset(), 0.0, 0
    done = False
    while not done:
        state = env.game.load(td["game_state"][0])
        quiet = [
            move
            for move in env.game.legal_actions(state)
            if turns < 4 and not env.game.step(state, move).terminated
        ]
        td = env.step(answered(td, f"<move>{quiet[0]}</move>" if quiet else "?"))["next"]
        total, turns, done = total + td["reward"].item(), turns + 1, td["done"].item()
    assert td["truncated"].item()
    assert turns == 8
    assert total < -1
    assert TicTacToeEnv(num_envs=1, invalid_reward=-2).world.invalid_reward == -2
    assert KeyDoorEnv(num_envs=1).world.invalid_reward == -0.1


@pytest.mark.parametrize("accept", [False, True])
def test_an_answer_that_was_cut_is_no_action_unless_it_is_accepted(accept):
    env = TicTacToeEnv(num_envs=2, player="X", accept_cut=accept)
    td = answered(env.reset(), "<move>5</move>", "<move>5</move>")
    reasons = [int(FinishReason.LENGTH), int(FinishReason.STOP)]
    td["tokens"] = TensorDict({"finish_reason": torch.tensor(reasons, dtype=torch.int8)}, [2])
    td = env.step(td)["next"]
    assert td["game_legal"].tolist() == [accept, True]
    assert last(td)["content"].startswith("Your answer was cut off.") is not accept


def test_a_game_to_its_end_with_every_reward_summed_by_hand():
    # two answers without an action, then the winning moves of a board that X has nearly won
    game = TicTacToe(player="X")
    env = GameEnv(game, num_envs=1)
    td = env.reset()
    state = game.load(td["game_state"][0])
    winning = type(state)("XX.OO....", "X", 7)
    td["game_state"] = Column.of([game.dump(winning)])
    rewards, flags = [], []
    for answer in ("?", "<move>1</move>", "<move>3</move>"):
        td = env.step(answered(td, answer))["next"]
        rewards.append(td["reward"].item())
        flags.append((td["terminated"].item(), td["truncated"].item(), td["success"].item()))
    assert rewards == [pytest.approx(-0.3), pytest.approx(-0.3), 1.0]
    assert flags == [(False, False, False)] * 2 + [(True, False, True)]
    assert last(td)["content"] == "X X X\nO O 6\n7 8 9\nYou win."
    assert td["truncation_reason"].item() == TruncationReason.NONE


def test_the_limit_of_a_game_truncates_with_another_reason_than_the_limit_of_turns():
    env = KeyDoorEnv(num_envs=1, slack=1, max_steps=None)
    td = env.reset()
    state = env.game.load(td["game_state"][0])
    for left in reversed(range(state.moves_left)):
        ways = env.game.legal_actions(state)
        action = next(way for way in ways if way not in env.game.best_actions(state)[:1] or left)
        td = env.step(answered(td, f"<action>{action}</action>"))["next"]
        state = env.game.load(td["game_state"][0])
        if td["done"].item():
            break
    assert (td["truncated"].item(), td["terminated"].item()) == (True, False)
    assert td["truncation_reason"].item() == TruncationReason.ENV
    assert td["reward"].item() == 0


@pytest.mark.parametrize("name", sorted(ENVS))
def test_a_policy_that_plays_well_succeeds(name):
    arguments = {"opponent": "minimax"} if name == "tic_tac_toe" else {"slack": 1}
    env = ENVS[name](num_envs=8, split="test", **arguments)
    answer, td = best_answer(env), env.reset()
    running = torch.ones(8, dtype=torch.bool)
    success, terminated = torch.zeros(2, 8, dtype=torch.bool)
    while running.any():
        td = env.step(answer(td.set("_step", running)))["next"]
        success |= td["success"].flatten() & running
        terminated |= td["terminated"].flatten() & running
        running = running & ~td["done"].flatten()
    assert success.all()
    assert terminated.all()


def test_rows_that_are_not_stepped_stay_as_they_are():
    env = TicTacToeEnv(num_envs=3, player="X")
    td = env.reset()
    before = td.clone()
    td["_step"] = torch.tensor([True, False, True])
    after = env.step(answered(td, "<move>5</move>", "<move>5</move>", "?"))["next"]
    assert after["game_state"][1] == before["game_state"][1]
    assert after["game_state"][0] != before["game_state"][0]
    assert after["history"].prompt.chats[1] == before["history"].prompt.chats[1]
    assert after["reward"].flatten().tolist() == [0.0, 0.0, pytest.approx(-0.3)]
    assert after["turn"].tolist() == [1, 0, 1]
    assert after["step_count"].flatten().tolist() == [1, 0, 1]


def test_a_turn_that_only_called_tools_to_think_is_left_alone():
    env = TicTacToeEnv(num_envs=2, player="X")
    steps = env.world
    td = answered(env.reset(), "<move>5</move>", "let me think")
    following = env.base_env.step(td.clone())["next"]
    following["tools"] = TensorDict({"auxiliary": torch.tensor([[False], [True]])}, [2])
    after = steps._step(td, following)
    assert after["game_legal"].tolist() == [True, True]
    assert after["reward"].flatten().tolist() == [0.0, 0.0]
    assert after["game_state"][1] == td["game_state"][1]
    assert [len(chat) for chat in after["history"].prompt.chats] == [4, 3]


def test_the_state_is_in_the_rows_so_a_game_goes_on_anywhere():
    env = TicTacToeEnv(num_envs=2, player="X", seed=3)
    td = env.step(answered(env.reset(), "<move>5</move>", "<move>1</move>"))["next"]
    kept = pickle.loads(pickle.dumps(td))
    # another process with another environment that has seen none of it
    other = TicTacToeEnv(num_envs=2, player="X", seed=99)
    moves = [env.game.legal_actions(env.game.load(text))[0] for text in td["game_state"]]
    texts = [f"<move>{move}</move>" for move in moves]
    here = env.step(answered(td, *texts))["next"]
    there = other.step(answered(kept, *texts))["next"]
    assert list(here["game_state"]) == list(there["game_state"])
    assert here["history"].prompt.content == there["history"].prompt.content
    assert torch.equal(here["reward"], there["reward"])


def test_a_state_of_another_game_is_a_row_with_an_error_and_nothing_else_suffers():
    env = TicTacToeEnv(num_envs=2, player="X")
    td = env.reset()
    td["game_state"] = Column.of(['{"game": "chess", "version": 1}', td["game_state"][1]])
    td = env.step(answered(td, "<move>5</move>", "<move>5</move>"))["next"]
    assert td["reward_valid"].tolist() == [False, True]
    assert td["reward"].isnan().flatten().tolist() == [True, False]
    assert list(td["error", "type"]) == ["DataError", ""]
    assert "chess" in td["error", "message"][0]
    assert td["terminated"].flatten().tolist() == [True, False]


def test_all_repeats_of_a_row_play_the_same_game():
    env = TicTacToeEnv(num_envs=6, repeats=3, group_repeats=True)
    td = env.reset()
    assert td["group_id"].tolist() == [0, 0, 0, 1, 1, 1] or len(set(td["group_id"].tolist())) == 2
    states = list(td["game_state"])
    assert len(set(states[:3])) == len(set(states[3:])) == 1
    cell = env.game.legal_actions(env.game.load(states[0]))[-1]
    after = env.step(answered(td, *[f"<move>{cell}</move>"] * 6))["next"]
    assert len(set(list(after["game_state"])[:3])) == 1


def test_no_game_is_both_trained_and_tested_on():
    train, test = (TicTacToeEnv.default_dataset(split) for split in ("train", "test"))
    seeds = [{row["seed"] for row in rows} for rows in (train[:], test[:])]
    assert [len(s) for s in seeds] == [65_536, 1_024]
    assert not seeds[0] & seeds[1]
    with pytest.raises(ConfigError, match="'train' or 'test'"):
        TicTacToeEnv(split="validation")


def test_games_come_from_a_list_or_a_file_of_seeds(tmp_path):
    path = tmp_path / "seeds.jsonl"
    path.write_text("".join(json.dumps({"seed": seed, "note": "x"}) + "\n" for seed in (7, 8)))
    game = TicTacToe()
    states = [game.dump(game.reset(seed)) for seed in (7, 8)]
    for source in ({"data_files": path}, {"dataset": [{"seed": 7}, {"seed": 8}]}):
        assert list(TicTacToeEnv(num_envs=2, shuffle=False, **source).reset()["game_state"]) == (
            states
        )
    with pytest.raises(DataError, match="'seed'"):
        TicTacToeEnv(dataset=[{"query": "Hi"}])
    for seed in ("7", 1.5, True, None):
        with pytest.raises(DataError, match="whole number"):
            TicTacToeEnv(dataset=[{"seed": seed}])
    with pytest.raises(ConfigError, match="not both"):
        TicTacToeEnv(dataset=[{"seed": 7}], data_files=path)


def test_an_environment_without_calls_has_no_tool_of_its_actions():
    with pytest.raises(ConfigError, match="are no tool calls"):
        _ = TicTacToeEnv().action_tool


def test_without_a_reward_the_game_is_played_all_the_same():
    env = TicTacToeEnv(num_envs=1, player="X", compute_reward=False)
    td = env.step(answered(env.reset(), "<move>5</move>"))["next"]
    assert "reward" not in td.keys()
    assert env.game.load(td["game_state"][0]).board[4] == "X"


def test_rollouts_reset_what_has_ended_and_go_on():
    env = TicTacToeEnv(num_envs=4, max_steps=3)
    policy = AnsweringPolicy(answer=lambda chat: f"<move>{1 + len(chat) % 9}</move>")
    rollout = env.rollout(9, policy, break_when_any_done=False)
    assert rollout.shape == (4, 9)
    done = rollout["next", "done"].squeeze(-1)
    starts = rollout["turn"] == 0
    assert torch.equal(starts[:, 1:], done[:, :-1])
    assert (rollout["next", "step_count"].squeeze(-1) <= 3).all()
    for row in range(4):
        for step in range(1, 9):
            chat = rollout[row, step]["history"].prompt.chats[0]
            assert len(chat) == 2 + 2 * rollout["turn"][row, step].item()


def test_an_environment_travels_to_another_process_and_is_resumed_there():
    env = TicTacToeEnv(num_envs=2, seed=1)
    env.reset()
    state = env.state_dict()
    following = list(env.reset()["game_state"])
    other = pickle.loads(pickle.dumps(TicTacToeEnv(num_envs=2, seed=5)))
    other.load_state_dict(state)
    assert list(other.reset()["game_state"]) == following
