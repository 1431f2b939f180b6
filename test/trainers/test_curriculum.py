"""What the rows of a step say of the prompts that they began with."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_llm.data.row_order import BandOrder, WeightedOrder
from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.transforms import DataLoadingPrimer
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives import MCAdvantage, SPOAdvantage
from torchrl_llm.trainers.curriculum import Curriculum, successes

ROWS = [{"query": f"{n} + 1 ="} for n in range(4)]


def row(number, reward=0.0, *, done=True, valid=True, traj=None, success=None):
    next_ = {"reward": torch.full((1, 1), reward), "done": torch.tensor([done])}
    next_["reward_valid"] = torch.tensor([[valid]])
    if success is not None:
        next_["success"] = torch.tensor([success])
    made = TensorDict(row_id=torch.tensor(number), next=next_, query=torch.tensor(number))
    return made if traj is None else made.set("traj_id", torch.tensor(traj))


def test_the_reward_of_all_turns_is_the_success_where_rows_do_not_say_it():
    turns = [
        row(2, 0.25, done=False, traj=10),
        row(1, 1.0, traj=11),
        row(2, 0.5, traj=10),
        row(2, 0.0, traj=12),
        row(3, 0.5, done=False, traj=13),  # goes on
        row(3, 1.0, valid=False, traj=14),
        row(3, float("nan"), traj=15),
    ]
    assert successes(lazy_stack(turns)) == {2: [0.75, 0.0], 1: [1.0]}
    parts = [row(0, share, done=share == 0.3, traj=1) for share in (0.4, 0.30000004, 0.3)]
    assert successes(lazy_stack(parts)) == {0: [1.0]}  # 1.0000001 in float32


def test_success_of_the_last_turn_counts_whatever_the_reward():
    turns = [
        row(0, -3.0, success=True, done=False, traj=1),
        row(0, 5.0, success=False, traj=1),
        row(0, -3.0, success=True, traj=2),
    ]
    assert successes(lazy_stack(turns)) == {0: [0.0, 1.0]}


def test_rows_that_cannot_be_judged_are_refused():
    with pytest.raises(DataError, match=r"a reward is -3: write success, or rewards in \[0, 1\]"):
        successes(lazy_stack([row(0, -3.0)]))
    with pytest.raises(DataError, match="'row_id', and the rows lack it"):
        successes(lazy_stack([row(0).exclude("row_id")]))


def test_all_repeats_of_a_prompt_are_drawn_together_and_results_return_to_it():
    env = DatasetChatEnv(
        dataset=ROWS, num_envs=4, repeats=2, group_repeats=True, seed=0, order=BandOrder(revisit=9)
    )
    curriculum = Curriculum(env.primer, MCAdvantage(2))
    for _ in range(2):
        td = env.reset()
        ids = td["row_id"].tolist()
        assert ids == [ids[0]] * 2 + [ids[2]] * 2
        assert [ROWS[i]["query"] for i in ids] == list(td["query"])
        metrics = curriculum.see(
            lazy_stack([row(i, float(i == 1 and k % 2)) for k, i in enumerate(ids)])
        )
    assert metrics["train/curriculum_seen"] == 1.0
    assert metrics["train/curriculum_active"] == 0.25
    assert env.reset()["row_id"].tolist() == [1] * 4


def test_rates_that_spo_tracks_are_those_of_the_order():
    primer = DataLoadingPrimer(
        DatasetChatEnv(dataset=ROWS, order=WeightedOrder()).primer.dataloader
    )
    spo = SPOAdvantage(normalize="none")
    rows = lazy_stack([row(2, 1.0), row(0, 0.0)])
    spo.inv(rows)
    Curriculum(primer, spo).see(rows)
    weights = primer.order.weights()
    assert weights[[2, 0]].tolist() == pytest.approx(spo.sampling_weights([2, 0]).tolist())
    assert weights[1].item() == pytest.approx(0.55)


def test_an_order_that_follows_no_results_is_told():
    with pytest.raises(ConfigError, match="does not follow results"):
        Curriculum(DatasetChatEnv(dataset=ROWS).primer).ended()
    with pytest.raises(ConfigError, match=r"\['order'\] would have no effect"):
        DatasetChatEnv.from_dataloader(ROWS, order=BandOrder())
