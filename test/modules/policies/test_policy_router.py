"""Several policies behind one: who answers which row, what the others see of it, and seeds."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.collectors import AgentShares, LLMCollector
from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.games import PrisonersDilemmaEnv, TicTacToeForTwoEnv
from torchrl_llm.errors import BackendError, CheckpointError, ConfigError, DataError
from torchrl_llm.modules import FakeWrapper, PolicyRouter, TransformersWrapper
from torchrl_llm.modules.policies.policy_router import CallCounts, derived_seed
from torchrl_llm.objectives import GRPOLoss


def fakes(tokenizer, **said):
    return {name: FakeWrapper(text, tokenizer=tokenizer) for name, text in said.items()}


def rows_of(env):
    td = env.reset()
    return td.set("_step", td["active"].clone())


def models(make_tiny_model, tokenizer, *names):
    policies = {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        model = make_tiny_model(len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        policies[name] = TransformersWrapper(
            model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3}
        )
    return policies


def test_each_row_is_answered_by_the_policy_of_its_player(tokenizer):
    env = PrisonersDilemmaEnv(num_envs=4, shuffle=False)
    policies = fakes(tokenizer, A="defect", B="cooperate, always")
    td = PolicyRouter(policies)(rows_of(env))
    said = [chat[-1]["content"] for chat in td["history"].full.chats]
    assert said == ["defect", "cooperate, always"] * 2
    ids = read_rows(td, ("tokens", "response"))
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in ids] == said
    alone = {name: policy(rows_of(env)) for name, policy in policies.items()}
    for row, name in enumerate("ABAB"):
        for key in (("tokens", "full"), ("log_probs", "full"), ("trace", "source")):
            want, got = read_rows(alone[name], key)[row], read_rows(td, key)[row]
            assert torch.equal(want, got)


def test_who_does_not_act_is_not_asked_and_says_nothing(tokenizer):
    env = TicTacToeForTwoEnv(num_envs=4, shuffle=False)
    router = PolicyRouter(fakes(tokenizer, X="5", O="1"))
    td = router(rows_of(env))
    assert [len(ids) for ids in read_rows(td, ("tokens", "response"))] == [2, 0, 2, 0]
    assert router.calls.counts == {"X": 1, "O": 0}


def test_a_conversation_stays_its_players_while_others_speak(tokenizer):
    """Whole games through a router are those of one policy that knows both scripts."""
    script = {"X": ["5", "4", "3", "8", "6"], "O": ["1", "2", "7", "9"]}

    def says(prompt):
        name = "O" if "You are O" in prompt else "X"
        return script[name][prompt.count("assistant") - 1]

    def game(policy):
        env = TicTacToeForTwoEnv(num_envs=4, repeats=2, shuffle=False, actions="bare")
        collector = LLMCollector(
            env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
        )
        return [
            (str(r["agent"]), r["tokens", "full"].tolist(), float(r["next", "reward"]))
            for r in row_list(next(iter(collector)))
        ]

    routed = game(PolicyRouter({n: FakeWrapper(says, tokenizer=tokenizer) for n in "XO"}))
    assert routed == game(FakeWrapper(says, tokenizer=tokenizer))
    # Each turn goes on with the one before, so that all turns of a player join to one row.
    before = {}
    for name, ids, _ in routed[: len(routed) // 4]:
        assert ids[: len(before.get(name, []))] == before.get(name, [])
        before[name] = ids


def test_one_policy_may_stand_for_several_players(tokenizer):
    policy = FakeWrapper("defect", tokenizer=tokenizer)
    router = PolicyRouter({"A": policy, "B": policy})
    assert len(router.asked) == 1
    td = router(rows_of(PrisonersDilemmaEnv()))
    assert [chat[-1]["content"] for chat in td["history"].full.chats] == ["defect", "defect"]


class Failing(FakeWrapper):
    """A policy whose engine fails."""

    def forward(self, tensordict, **kwargs):
        raise BackendError("out of memory")


def test_what_cannot_be_routed_says_why(tokenizer):
    env = PrisonersDilemmaEnv()
    with pytest.raises(ConfigError, match="got none"):
        PolicyRouter({})
    with pytest.raises(ConfigError, match="policy of 'A' must be a wrapper"):
        PolicyRouter({"A": torch.nn.Identity()})
    with pytest.raises(ConfigError, match=r"players \['B'\] have no policy; there are A"):
        PolicyRouter(fakes(tokenizer, A="x"))(rows_of(env))
    router = PolicyRouter(fakes(tokenizer, A="x", B="y"))
    with pytest.raises(DataError, match=r"2 policies wait.*no 'agent'"):
        router(TensorDict(batch_size=[2]))
    nobody = rows_of(env).set("_step", torch.zeros(2, 1, dtype=torch.bool))
    with pytest.raises(DataError, match="no row is to be answered"):
        router(nobody)
    broken = {"A": FakeWrapper("x", tokenizer=tokenizer), "B": Failing("x", tokenizer=tokenizer)}
    with pytest.raises(BackendError, match="the policy of 'B' failed: out of memory"):
        PolicyRouter(broken)(rows_of(env))


def test_seeds_differ_by_call_and_player_and_follow_from_the_runs(tokenizer, make_tiny_model):
    policies = models(make_tiny_model, tokenizer, "A", "B")
    twins = {"A": policies["A"], "B": policies["A"]}
    env = PrisonersDilemmaEnv(num_envs=16, repeats=2, shuffle=False)

    def answers(router, calls=2):
        found = []
        for _ in range(calls):
            torch.manual_seed(0)  # what is drawn elsewhere has no part in it
            td = router(rows_of(env))
            found.append([ids.tolist() for ids in read_rows(td, ("tokens", "response"))])
        return found

    first, again, other = (answers(PolicyRouter(twins, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] != first[1]
    assert first[0][::2] != first[0][1::2]
    resumed = PolicyRouter(twins, seed=1)
    resumed.calls.load_state_dict({"A": 1, "B": 1})
    assert answers(resumed, 1) == first[1:]
    with pytest.raises(CheckpointError, match="for \\['A', 'B'\\], and the saved one had them"):
        resumed.calls.load_state_dict(CallCounts(["A"]).state_dict())
    seeds = {derived_seed(0, name, call) for name in "AB" for call in range(100)}
    assert len(seeds) == 200


def test_gradients_of_one_policy_are_zero_on_the_rows_of_the_other(tokenizer, make_tiny_model):
    policies = models(make_tiny_model, tokenizer, "A", "B")
    env = PrisonersDilemmaEnv(num_envs=8, repeats=4, num_rounds=1, max_steps=2)
    collector = LLMCollector(
        env, policy=PolicyRouter(policies), yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )  # fmt: skip
    shares = AgentShares(collector, {"A": ["A"], "B": ["B"]})
    batches = {name: next(iter(shares[name])) for name in policies}
    for name, policy in policies.items():
        own = batches[name]
        assert {str(row["agent"]) for row in row_list(own)} == {name}
        for row in row_list(own):
            row.set("advantage", torch.ones(1, 1))
        loss = GRPOLoss(policy)
        loss(own).total_loss().backward()
        for other, its in policies.items():
            grads = [p.grad for p in its.parameters()]
            trained = any(g is not None and bool(g.abs().sum() > 0) for g in grads)
            assert trained == (other == name)
        policy.zero_grad(set_to_none=True)


def test_versions_are_those_of_each_policy(tokenizer):
    policies = fakes(tokenizer, A="defect", B="defect")
    router = PolicyRouter(policies)
    collector = LLMCollector(
        PrisonersDilemmaEnv(num_rounds=1), policy=router, yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )  # fmt: skip
    collector.update_policy_weights_()
    policies["B"].policy_version = 7
    rows = {str(row["agent"]): row for row in row_list(next(iter(collector)))}
    versions = {name: row["trace", "policy_version"].max().item() for name, row in rows.items()}
    assert versions == {"A": 1, "B": 7}


def test_columns_that_only_a_list_holds_are_read(tokenizer):
    router = PolicyRouter(fakes(tokenizer, A="x"))
    td = rows_of(PrisonersDilemmaEnv())
    td.set("agent", Column.of(["A", "A"]))
    assert len(router(td)["history"].full.chats) == 2
