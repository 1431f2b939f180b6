"""Several players in an episode: who acts, what each is told, and where rewards and ends arrive."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import AsyncEnvPool

from torchrl_llm.collectors import AgentShares, LLMCollector
from torchrl_llm.data.enums import FinishReason, TruncationReason
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.games import (
    GameEnv,
    PrisonersDilemma,
    PrisonersDilemmaEnv,
    TicTacToeForTwo,
    TicTacToeForTwoEnv,
)
from torchrl_llm.envs.games.table_game import TableOutcome
from torchrl_llm.envs.transforms import ContextLimit, SlidingWindow
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.modules.backends.fake import Answer
from torchrl_llm.objectives.credit import MCAdvantage
from torchrl_llm.rewards import Component, CompositeReward, WrittenReward
from torchrl_llm.tools import ToolTransform

WIN_OF_X = ["5", "1", "4", "2", "6"]


def two(**options):
    return TicTacToeForTwoEnv(**{"actions": "bare", "shuffle": False, **options})


def played(env, moves):
    """What follows each move of whoever must act; the moves are those of the first episode."""
    td, seen = env.reset(), []
    for said in moves:
        chats, acts = td["history"].prompt.chats, td["active"].flatten().tolist()
        words = iter(said if isinstance(said, list) else [said] * sum(acts))
        full = [
            chat + [{"role": "assistant", "content": next(words)}] if act else chat
            for chat, act in zip(chats, acts, strict=True)
        ]
        td["history"].full = History.of(full)
        td = env.step(td.set("_step", td["active"].clone()))
        seen.append(td["next"].clone())
        td = env.step_mdp(td)
    return seen


def flat(td, name):
    return [round(value, 4) for value in td[name].flatten().tolist()]


def collect(env, answers, tokenizer, **options):
    policy = FakeWrapper(answers, tokenizer=tokenizer)
    options = {"reset_at_each_iter": True, **options}
    collector = LLMCollector(env, policy=policy, yield_completed_trajectories=True, **options)
    return collector, row_list(next(iter(collector)))


def by_player(rows):
    games = {}
    for row in rows:
        games.setdefault((int(row["episode_id"]), str(row["agent"])), []).append(row)
    return games


# -- the environment ------------------------------------------------------------------------------


def test_a_player_is_a_row_of_its_episode():
    td = two(num_envs=8, repeats=4).reset()
    assert list(td["agent"]) == ["X", "O"] * 4
    assert td["episode_id"].diff().tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert td["group_id"].diff().tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert td["active"].flatten().tolist() == [True, False] * 4
    assert len(set(td["traj_id"].tolist())) == 8


def test_who_waited_is_told_what_has_happened_since():
    seen = played(two(), ["5", "1"])
    assert [each["active"].flatten().tolist() for each in seen] == [[False, True], [True, False]]
    x, o = seen[1]["history"].prompt.chats
    assert [m["role"] for m in x] == ["system", "user", "assistant", "user"]
    assert [m["content"].splitlines()[0] for m in x[1:]] == ["1 2 3", "5", "O takes 1."]
    # Its first message holds all that came before its first turn; its last turn is its own.
    assert [m["role"] for m in o] == ["system", "user", "assistant"]
    assert o[1]["content"].startswith("X takes 5.\n")


def test_the_loser_that_did_not_move_last_gets_its_reward_and_its_end():
    last = played(two(), WIN_OF_X)[-1]
    assert flat(last, "reward") == [1.0, -1.0]
    assert flat(last, "done") == flat(last, "terminated") == [True, True]
    assert flat(last, "success") == [True, False]
    assert list(last["untold"])[1].endswith("You lose.")


def test_a_turn_without_a_legal_move_is_that_players_again():
    seen = played(two(), ["5", "5", "no", "1"])
    assert [flat(each, "reward")[1] for each in seen] == [0.0, -0.3, -0.3, 0.0]
    assert [each["active"].flatten().tolist()[1] for each in seen] == [True, True, True, False]
    said = seen[1]["history"].prompt.chats[1][-1]["content"]
    assert said.startswith("'5' is not possible now.")
    assert said.endswith("Answer with the number of a free cell and nothing else.")


def test_such_a_turn_may_end_the_game_instead():
    last = played(two(stop_on_invalid=True), ["5", "5"])[-1]
    assert flat(last, "reward") == [0.0, -1.0]
    assert flat(last, "terminated") == [True, True]
    assert last["game_legal"].tolist() == [True, False]


def test_an_action_waits_for_those_of_others_in_the_same_step():
    env = PrisonersDilemmaEnv(num_rounds=2, actions="bare", shuffle=False)
    seen = played(env, [["defect", "what?"], ["cooperate"], ["cooperate", "cooperate"]])
    assert [each["active"].flatten().tolist() for each in seen][:2] == [[False, True], [True, True]]
    assert list(seen[0]["game_committed"]) == ["defect", ""]
    # The reward of the round comes when it is played: to A in a step in which A did not act.
    assert [flat(each, "reward") for each in seen] == [[0.0, -0.3], [5.0, 0.0], [3.0, 3.0]]
    assert flat(seen[-1], "done") == [True, True]


def test_a_limit_of_turns_ends_the_episode_for_all():
    seen = played(two(max_steps=1), ["x"])
    assert flat(seen[0], "done") == flat(seen[0], "truncated") == [True, True]
    reasons = [TruncationReason(n).name for n in seen[0]["truncation_reason"].flatten().tolist()]
    assert reasons == ["MAX_STEPS", "ENV"]


def test_a_scripted_seat_has_no_row_and_plays_the_same_game_each_time(tokenizer):
    boards = set()
    for _ in range(2):
        env = two(num_envs=2, repeats=2, seats={"X": "random"})
        assert env.players == ("O",)
        seen = played(env, [["1", "9"]])
        boards.add(tuple(seen[0]["game_state"]))
    assert len(boards) == 1
    best = two(seats={"O": "best"}, num_envs=64)
    rng = random.Random(0)
    _, rows = collect(best, lambda prompt: str(rng.randint(1, 9)), tokenizer)
    assert max(float(row["next", "reward"].sum()) for row in rows) <= 0.0
    mine = two(seats={"O": lambda seat, state: seat.legal_actions(state)[0]})
    assert played(mine, ["5"])[0]["history"].prompt.chats[0][-1]["content"].startswith("O takes 1")


class Paid(TicTacToeForTwo):
    """Pays for each move, which is a success."""

    def _apply(self, state, actions):
        outcome, (player,) = super()._apply(state, actions), actions
        return outcome._replace(rewards=outcome.rewards | {player: 0.1}, success=(player,))


def test_reward_and_success_of_a_move_are_kept_while_scripted_players_move():
    env = GameEnv(Paid(), seats={"O": "best"}, actions="bare", shuffle=False)
    seen = played(env, ["5", "no"])
    assert [flat(each, "reward") for each in seen] == [[0.1], [-0.3]]
    assert [flat(each, "success") for each in seen] == [[True], [False]]


def test_a_team_shares_its_rewards():
    env = PrisonersDilemmaEnv(num_rounds=1, rewards="team", actions="bare")
    assert flat(played(env, [["defect", "cooperate"]])[0], "reward") == [5.0, 5.0]


class Broken(TicTacToeForTwo):
    """Fails in the second move of the first game."""

    def _apply(self, state, actions):
        if state.board.count("X"):
            raise ZeroDivisionError("by a rule")
        return super()._apply(state, actions)


def test_a_game_that_fails_ends_its_episode_and_no_other():
    env = GameEnv(Broken(), actions="bare", num_envs=4, repeats=2, shuffle=False)
    seen = played(env, [["5", "x"], ["1", "5"]])
    assert seen[1]["reward_valid"].tolist() == [False, False, True, True]
    assert flat(seen[1], "done") == [True, True, False, False]
    assert list(seen[1]["error", "type"]) == ["ZeroDivisionError"] * 2 + [""] * 2


def test_a_world_that_raises_fails_the_episodes_of_that_step(monkeypatch):
    env = two(num_envs=4, repeats=2)

    def react_together(td, episodes):
        raise ZeroDivisionError("by the world")

    monkeypatch.setattr(env.world, "react_together", react_together)
    [seen] = played(env, ["5"])
    assert seen["reward_valid"].tolist() == [False] * 4
    assert flat(seen, "done") == [True] * 4
    assert list(seen["error", "type"]) == ["ZeroDivisionError"] * 4


def test_an_action_of_a_player_whose_turn_it_is_not_is_no_move():
    env = two()
    td = env.reset()
    said = [{"role": "assistant", "content": "5"}]
    td["history"].full = History.of([chat + said for chat in td["history"].prompt.chats])
    td = env.step(td)["next"]
    assert flat(td, "reward") == [0.0, -0.3]
    assert "it is not the turn of O, but of X" in td["history"].prompt.chats[1][-1]["content"]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"counts rows.*which is no multiple"):
        two(num_envs=3)
    with pytest.raises(ConfigError, match="history"):
        two(input_mode="tokens")
    with pytest.raises(ConfigError, match=r"has the players \['X', 'O'\], got \['Z'\]"):
        two(seats={"Z": "random"})
    with pytest.raises(ConfigError, match="all seats are scripted"):
        two(seats={"X": "random", "O": "best"})
    with pytest.raises(ConfigError, match="needs a function"):
        two(seats={"X": "rando"})
    half = TensorDict({"_reset": torch.tensor([[True], [False]])}, batch_size=[2])
    env = two()
    with pytest.raises(DataError, match="begin together"):
        env.reset(half)


# -- collectors, evaluation, credit ---------------------------------------------------------------


@pytest.mark.parametrize("wave", [True, False])
def test_late_rewards_and_ends_come_to_the_last_own_row(wave, tokenizer):
    script = dict(zip(["X", "O"], [["5", "4", "6"], ["1", "2"]], strict=True))

    def answer(prompt):
        name = "O" if "You are O" in prompt else "X"
        return script[name][prompt.count("assistant") - 1]

    options = {} if wave else {"reset_at_each_iter": False, "dialog_turns_per_batch": 20}
    _, rows = collect(two(num_envs=8, repeats=8), answer, tokenizer, **options)
    games = by_player(rows)
    assert len(games) == 8
    for (_, name), turns in games.items():
        assert len(turns) == {"X": 3, "O": 2}[name]
        rewards = [float(row["next", "reward"].sum()) for row in turns]
        assert rewards == ([0.0, 0.0, 1.0] if name == "X" else [0.0, -1.0])
        ends = [bool(row["next", "done"].all()) for row in turns]
        assert ends == [False] * (len(turns) - 1) + [True]
        assert [bool(row["next", "success"].all()) for row in turns][-1] == (name == "X")


def test_rewards_of_many_games_add_up_to_zero_and_every_token_is_there(tokenizer):
    rng = random.Random(0)

    def answer(prompt):
        board = prompt.rpartition("You are")[0][-18:]
        return rng.choice([c for c in "123456789" if c in board])

    env = two(num_envs=128, repeats=128)
    collector, rows = collect(env, answer, tokenizer)
    total = Counter()
    for row in rows:
        total[int(row["episode_id"])] += float(row["next", "reward"].sum())
    assert len(total) == 64
    assert set(total.values()) == {0.0}
    assert all(bool(row["next", "game_legal"]) for row in rows)
    assert sum(len(row["tokens", "response"]) for row in rows) == collector.sampled_tokens
    assert sum(bool(row["next", "done"].all()) for row in rows) == 128


def test_who_never_acted_has_no_row_and_is_counted(tokenizer):
    collector, rows = collect(two(num_envs=4, repeats=4, max_steps=2), "x", tokenizer)
    assert {str(row["agent"]) for row in rows} == {"X"}
    assert collector.take_absent() == {"O": (2, 0.0)}
    assert collector.take_absent() == {}


class Gift(TicTacToeForTwo):
    """Gives the other player something for each move, before that one has acted too."""

    def _apply(self, state, actions):
        outcome = super()._apply(state, actions)
        [player] = actions
        gifts = {each: 0.0 if each == player else 0.25 for each in self.players}
        rewards = {each: outcome.rewards[each] + gifts[each] for each in self.players}
        return TableOutcome(**outcome._asdict() | {"rewards": rewards})


def test_what_came_before_the_first_turn_is_in_the_first_own_row(tokenizer):
    env = GameEnv(Gift(), actions="bare", shuffle=False)
    _, rows = collect(env, WIN_OF_X, tokenizer)
    rewards = {name: [float(r["next", "reward"]) for r in turns] for (_, name), turns in
               by_player(rows).items()}  # fmt: skip
    assert rewards == {"X": [0.25, 0.25, 1.0], "O": [0.5, -0.75]}


def test_parts_of_a_reward_leave_late_rewards_alone(tokenizer):
    env = two()
    parts = {"game": Component(WrittenReward()), "one": Component(lambda sample: 1.0, weight=0.5)}
    env.append_transform(CompositeReward(parts, set_done_if_answer=False))
    assert type(env.transform[len(env.transform) - 1]).__name__ == "EpisodeEnds"
    _, rows = collect(env, WIN_OF_X, tokenizer)
    rewards = {name: [float(r["next", "reward"]) for r in turns] for (_, name), turns in
               by_player(rows).items()}  # fmt: skip
    assert rewards == {"X": [0.5, 0.5, 1.5], "O": [0.5, -0.5]}


def test_a_run_that_is_resumed_goes_on_in_the_middle_of_games(tokenizer):
    def make():
        rng = random.Random(0)
        env = two(num_envs=4, repeats=2, worker_id=0)
        policy = FakeWrapper(lambda prompt: str(rng.randint(1, 9)), tokenizer=tokenizer)
        collector = LLMCollector(
            env, policy=policy, yield_completed_trajectories=True, dialog_turns_per_batch=9
        )
        return collector, iter(collector), rng

    def facts(batch):
        return [
            (int(r["episode_id"]), str(r["agent"]), r["tokens", "full"].tolist(),
             float(r["next", "reward"]), bool(r["next", "done"]))
            for r in row_list(batch)
        ]  # fmt: skip

    whole, batches, rng = make()
    next(batches)
    state, random_state = whole.state_dict(), rng.getstate()
    expected = [facts(next(batches)) for _ in range(2)]
    resumed, again, rng = make()
    resumed.load_state_dict(state)
    rng.setstate(random_state)
    assert [facts(next(again)) for _ in range(2)] == expected


def test_advantages_compare_a_player_with_itself_in_other_games(tokenizer):
    rng = random.Random(1)
    env = two(num_envs=8, repeats=8)
    _, rows = collect(env, lambda prompt: str(rng.randint(1, 9)), tokenizer)
    buffer = ReplayBuffer()
    buffer.append_transform(JoinTurns())
    buffer.append_transform(MCAdvantage(grpo_size=4))
    buffer.extend(rows)
    found = [buffer[i] for i in range(len(buffer))]
    for name in ("X", "O"):
        own = [float(row["advantage"].flatten()[0]) for row in found if row["agent"] == name]
        assert len(own) == 4
        assert sum(own) == pytest.approx(0.0, abs=1e-4)


def test_evaluation_plays_each_row_to_its_end(tokenizer):
    env = two(num_envs=4, repeats=2, split="test")
    script = {"X": ["5", "4", "x", "6"], "O": ["1", "2"]}
    seen = Counter()

    def answer(prompt):
        name = "O" if "You are O" in prompt else "X"
        seen[name] += 1
        return script[name][prompt.count("assistant") - 1]

    told = []
    result = evaluate(
        env,
        FakeWrapper(answer, tokenizer=tokenizer),
        num_prompts=4,
        max_turns=8,
        share_keys=("game_legal",),
        on_answer=lambda row, outcome: told.append((str(row["agent"]), outcome)),
    )
    assert seen == {"X": 8, "O": 4}
    assert result.accuracy == 0.5
    assert result.metrics()["eval/game_legal"] == pytest.approx(10 / 12)
    assert [(name, outcome.success) for name, outcome in told] == [("X", True), ("O", False)] * 2
    assert [outcome.reward for _, outcome in told] == pytest.approx([0.7, -1.0] * 2)


def test_fixed_numbers_of_turns_and_pools_are_refused(tokenizer):
    policy = FakeWrapper("5", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="yield_completed_trajectories=True"):
        LLMCollector(two(), policy=policy, dialog_turns_per_batch=4)
    pool = AsyncEnvPool([two, two], backend="threading", stack="lazy")
    with pytest.raises(ConfigError, match="several players"):
        LLMCollector(
            pool, policy=policy, yield_completed_trajectories=True, dialog_turns_per_batch=4
        )
    pool.close()


def test_learners_get_the_rows_of_their_players_and_what_waits_is_saved(tokenizer):
    env = two(num_envs=4, repeats=4)
    collector, _ = collect(env, "1", tokenizer)
    shares = AgentShares(collector, {"first": ["X"], "second": ["O"]})
    mine = row_list(next(iter(shares["first"])))
    assert {str(row["agent"]) for row in mine} == {"X"}
    other = AgentShares([], {"first": ["X"], "second": ["O"]})
    other.load_state_dict(shares.state_dict())
    theirs = [row_list(next(iter(each["second"]))) for each in (shares, other)]
    assert {str(row["agent"]) for row in theirs[0]} == {"O"}
    ids = [[row["tokens", "full"].tolist() for row in rows] for rows in theirs]
    assert ids[0] == ids[1]
    frozen = AgentShares(collector, {"first": ["X"]})
    next(iter(frozen["first"]))
    assert frozen.untrained_tokens > 0


def test_rows_of_earlier_weights_are_given_to_nobody(tokenizer):
    collector, _ = collect(two(num_envs=4, repeats=4), "1", tokenizer)
    shares = AgentShares(collector, {"first": ["X"], "second": ["O"]})
    next(iter(shares["first"]))
    collector.increment_version()
    rows = row_list(next(iter(shares["second"])))
    versions = {int(row["trace", "policy_version"].max()) for row in rows}
    assert versions == {collector.policy_version}
    assert shares.untrained_tokens > 0


@pytest.mark.parametrize(
    ("players", "why"),
    [({"a": ["X"], "b": ["X"]}, "two learners"), ({"a": []}, "list"), ({"a": "X"}, "list")],
)
def test_shares_that_cannot_be_are_refused(players, why):
    with pytest.raises(ConfigError, match=why):
        AgentShares([], players)


def test_rows_without_a_player_are_refused_where_learners_wait():
    rows = lazy_rows([TensorDict(turn=torch.tensor(0))])
    with pytest.raises(DataError, match="no 'agent'"):
        next(iter(AgentShares([rows], {"a": ["X"]})["a"]))


# -- transforms beside it -------------------------------------------------------------------------


def count_cells(board: str) -> int:
    """Count free cells.

    Args:
        board: the board.
    """
    return sum(character.isdigit() for character in board)


def test_a_player_may_think_with_tools_while_others_wait(embedded):
    call = '<tool_call>\n{"name": "count_cells", "arguments": {"board": "1 2"}}\n</tool_call>'
    env = PrisonersDilemmaEnv(num_rounds=1, actions="bare", shuffle=False)
    env = env.append_transform(ToolTransform([count_cells]))
    _, rows = collect(env, [call, "defect", "cooperate"], embedded)
    turns = {name: len(rows) for (_, name), rows in by_player(rows).items()}
    assert turns == {"A": 2, "B": 1}
    rewards = {str(r["agent"]): float(r["next", "reward"]) for r in rows if r["next", "done"]}
    assert rewards == {"A": 0.0, "B": 5.0}


@pytest.fixture(scope="module")
def embedded():
    from torchrl_llm.modules import load_tokenizer

    return load_tokenizer()


def test_a_window_and_a_limit_look_at_who_must_act(tokenizer):
    env = two(max_steps=8)
    policy = FakeWrapper("x", tokenizer=tokenizer)
    env.append_transform(SlidingWindow(1))
    env.append_transform(ContextLimit(420, policy.formatter))
    _, rows = collect(env, ["5", "x", "x", "x", "x", "x", "x", "x", "x"], tokenizer)
    last = rows[-1]
    assert bool(last["next", "done"])
    long = [row for row in rows if row["agent"] == "O"]
    assert max(len(row["tokens", "prompt"]) for row in long) <= 420


def test_an_answer_that_was_cut_is_no_move(tokenizer):
    _, rows = collect(two(max_steps=1), [Answer("5", FinishReason.LENGTH)], tokenizer)
    assert rows[0]["next", "error", "type"] == "IncompleteCompletion"
    assert float(rows[0]["next", "reward"]) == pytest.approx(-0.3)


def test_the_payoffs_of_the_dilemma_reach_both(tokenizer):
    env = GameEnv(PrisonersDilemma(num_rounds=2), actions="bare", shuffle=False)
    _, rows = collect(env, ["defect", "cooperate", "defect", "defect"], tokenizer)
    returns = Counter()
    for row in rows:
        returns[str(row["agent"])] += float(row["next", "reward"])
    assert returns == {"A": 6.0, "B": 1.0}
