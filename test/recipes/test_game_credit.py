"""A game through the recipe's own parts: what is sampled, what it earns, what is trained."""

from itertools import pairwise

import pytest
import torch

from torchrl_llm.algorithms import Algorithm
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.objectives.credit import MCAdvantage
from torchrl_llm.recipes.builders import make_policy, make_step_buffer, make_train_env
from torchrl_llm.trainers import load_config

PROMPTS, GROUP = 4, 4


@pytest.fixture(scope="module")
def played():
    """One wave of games of the embedded model, turn by turn, and as rows to train on."""
    torch.manual_seed(0)
    # One token a move, which is often a digit: the model has learnt to add.
    options = {"actions": "bare"}
    values = {
        "env": {"dataset": "tic_tac_toe", "options": options, "repeats": GROUP},
        "agent": {"type": "none", "accept_cut": True},
        "train": {"prompts_per_batch": PROMPTS},
        "inference_model": {"max_tokens": 1},
        "eval": {"num_prompts": 0},
    }
    config = load_config(values)
    policy = make_policy(config)
    env = make_train_env(config, policy.tokenizer, seed=0)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    batch = next(iter(collector))
    games = {}
    for row in row_list(batch):
        games.setdefault(int(row["traj_id"]), []).append(row)
    credit = MCAdvantage(grpo_size=GROUP)
    algorithm = Algorithm(name="games", loss=GRPOLoss(policy), credit=credit)
    buffer = algorithm.append_to(make_step_buffer(config))
    buffer.extend(batch)
    env.close()
    return games, buffer[:]


def test_a_game_ends_once_and_its_tokens_only_grow(played):
    games, _ = played
    assert len(games) == PROMPTS * GROUP
    for rows in games.values():
        assert [bool(row["next", "done"].any()) for row in rows] == [False] * (len(rows) - 1) + [
            True
        ]
        ended = rows[-1]["next", "terminated"].any(), rows[-1]["next", "truncated"].any()
        assert ended[0] != ended[1]
        assert bool(ended[1]) == (len(rows) == 8 and not ended[0])
        for before, after in pairwise(rows):
            full = before["tokens", "full"]
            assert torch.equal(after["tokens", "prompt"][: len(full)], full)
            assert before["next", "game_state"] == after["game_state"]


def test_the_rewards_of_all_turns_make_the_advantage_of_all_moves(played):
    games, trained = played
    groups = {}
    for traj, rows in games.items():
        total = sum(row["next", "reward"].item() for row in rows)
        groups.setdefault(int(rows[0]["group_id"]), {})[traj] = total
    assert len({round(total, 3) for group in groups.values() for total in group.values()}) > 1
    rows = row_list(trained)
    assert sorted(int(row["traj_id"]) for row in rows) == sorted(games)
    for row in rows:
        returns = groups[int(row["group_id"])]
        values = torch.tensor(list(returns.values()))
        spread = values.std()
        expected = (returns[int(row["traj_id"])] - values.mean()) / spread.clamp_min(1e-6)
        found = row["advantage"].flatten()
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-4, atol=1e-4)


def test_each_move_is_trained_once_and_nothing_that_the_game_said(played):
    games, trained = played
    masks = read_rows(trained, ("masks", "all_assistant_mask"))
    for row, mask in zip(row_list(trained), masks, strict=True):
        turns = games[int(row["traj_id"])]
        said = torch.cat([turn["tokens", "response"] for turn in turns])
        assert torch.equal(row["tokens", "full"][mask], said)
        assert (row["trace", "source"][mask] == Source.SAMPLED).all()
        assert row["trace", "turn"][mask].unique().tolist() == list(range(len(turns)))
