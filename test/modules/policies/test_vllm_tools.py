"""Conversations with a tool on a real vLLM engine: what is sampled, kept, and given versions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from modules.backends.vllm.engine_helper import shared_tiny, small_engine

from torchrl_llm.agents import ReActAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Source
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.datasets.number_tasks import CalculatorEnv
from torchrl_llm.envs.games import PrisonersDilemmaEnv
from torchrl_llm.modules import (
    PolicyRouter,
    TransformersWrapper,
    load_model,
    load_tokenizer,
    vLLMWrapper,
)

pytest.importorskip("vllm")
from torchrl_llm.modules.backends.vllm import VLLMBackend

pytestmark = pytest.mark.vllm

MODES = ("history", "text", "tokens")
NUM_ENVS = 24


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def engine():
    """One over the embedded model, which knows how to call its calculator."""
    return small_engine()


@pytest.fixture(scope="module")
def scorer(tokenizer):
    return TransformersWrapper(load_model(), tokenizer=tokenizer).backend


def play(policy, tokenizer, **options):
    """One conversation in each row, as lists of turns."""
    env = CalculatorEnv(num_envs=NUM_ENVS, seed=0, tokenizer=tokenizer, **options)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    found = {}
    for row in row_list(next(iter(collector))):
        found.setdefault(int(row["traj_id"]), []).append(row)
    env.close()
    assert len(found) == NUM_ENVS
    return list(found.values())


@pytest.fixture(scope="module")
def played(engine, tokenizer):
    """The same draws in each input mode."""

    def in_mode(mode):
        torch.manual_seed(0)
        options = {"input_mode": mode, "generate_kwargs": {"max_new_tokens": 36}}
        policy = vLLMWrapper(VLLMBackend(engine), tokenizer=tokenizer, **options)
        return play(policy, tokenizer, input_mode=mode)

    return {mode: in_mode(mode) for mode in MODES}


def check_growth(conversations):
    """Ids of each turn begin the next one; returns how many were compared."""
    compared = 0
    for turns in conversations:
        for before, after in pairwise(turns):
            full, prompt = before["tokens", "full"], after["tokens", "prompt"]
            assert torch.equal(prompt[: len(full)], full)
            for key in (("log_probs", "full"), ("trace", "source"), ("trace", "turn")):
                assert torch.equal(after[key][: len(full)], before[key])
            compared += 1
    return compared


@pytest.mark.parametrize("mode", MODES)
def test_ids_of_a_turn_begin_the_next_one_and_results_are_not_trained(played, mode):
    assert check_growth(played[mode]) > NUM_ENVS // 4
    for turns in played[mode]:
        last = turns[-1]
        source, trained = last["trace", "source"], last["masks", "all_assistant_mask"]
        assert torch.equal(trained, source == Source.SAMPLED)
        assert (last["log_probs", "full"][~trained] == 0).all()
        assert (source == Source.TOOL).any() == (len(turns) > 1)
        assert last["trace", "turn"][trained].unique().tolist() == list(range(len(turns)))


def test_all_input_modes_sample_the_same_conversations(played):
    history = played["history"]
    for mode in ("text", "tokens"):
        for theirs, ours in zip(played[mode], history, strict=True):
            assert len(theirs) == len(ours)
            for key in (("tokens", "full"), ("tokens", "response")):
                assert torch.equal(theirs[-1][key], ours[-1][key])
            assert torch.equal(theirs[-1]["next", "reward"], ours[-1]["next", "reward"])


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_gives_every_turn_the_log_probs_that_the_engine_sampled(played, scorer, mode):
    for turns in played[mode]:
        last = turns[-1]
        mask = last["masks", "all_assistant_mask"]
        scores = scorer.token_scores([last["tokens", "full"]], [mask]).log_probs.detach()
        torch.testing.assert_close(scores, last["log_probs", "full"][mask], atol=2e-5, rtol=2e-5)


def test_the_calculator_is_used_and_its_results_are_copied(played):
    turns = [turns for turns in played["history"] if len(turns) > 1]
    assert len(turns) > NUM_ENVS // 4
    assert all(first["next", "tools", "auxiliary"].all() for first, *_ in turns)
    assert sum(t[-1]["next", "reward"].item() == 1 for t in turns) > len(turns) // 4


def test_turns_that_a_stop_string_ended_continue_and_get_the_missing_token_untrained(
    engine, tokenizer, scorer
):
    torch.manual_seed(0)
    stopped = {"max_new_tokens": 36, "stop_sequences": ["</tool_call>"]}
    policy = vLLMWrapper(VLLMBackend(engine), tokenizer=tokenizer, generate_kwargs=stopped)
    conversations = play(policy, tokenizer)
    assert check_growth(conversations) > NUM_ENVS // 4
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for first, second in (turns[:2] for turns in conversations if len(turns) > 1):
        size = len(first["tokens", "full"])
        assert first["tokens", "finish_reason"] == FinishReason.TOOL_CALLS
        assert tokenizer.decode(first["tokens", "full"]).endswith("</tool_call>")
        assert second["tokens", "prompt"][size] == end
        assert second["trace", "source"][size] != Source.SAMPLED
        assert not second["masks", "all_assistant_mask"][size]
    last = conversations[-1][-1]
    mask = last["masks", "all_assistant_mask"]
    scores = scorer.token_scores([last["tokens", "full"]], [mask]).log_probs.detach()
    torch.testing.assert_close(scores, last["log_probs", "full"][mask], atol=2e-5, rtol=2e-5)


def test_weights_that_change_between_two_turns_are_told_apart_token_by_token(engine, tokenizer):
    backend = VLLMBackend(engine)
    first = backend.version + 7
    backend.weights_changed(first)
    policy = vLLMWrapper(backend, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 36})

    def changing(td):
        out = policy(td)
        backend.weights_changed(backend.version + 1)
        return out

    conversations = play(changing, tokenizer)
    assert check_growth(conversations) > NUM_ENVS // 4
    for turns in conversations:
        trace = turns[-1]["trace"]
        sampled = trace["source"] == Source.SAMPLED
        # The weights of turn k are those of call k, and no later call writes over them.
        assert torch.equal(trace["policy_version"][sampled], first + trace["turn"][sampled].int())
        assert (trace["policy_version"][~sampled] == -1).all()


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_acts_on_the_engine_as_on_any_policy(engine, tokenizer, mode):
    torch.manual_seed(0)
    options = {"input_mode": mode, "generate_kwargs": {"max_new_tokens": 36}}
    policy = vLLMWrapper(VLLMBackend(engine), tokenizer=tokenizer, **options)
    agent = ReActAgent(max_auxiliary_turns=1)
    env = CalculatorEnv(num_envs=NUM_ENVS, seed=0, tokenizer=tokenizer, input_mode=mode)
    collector = LLMCollector(
        agent.wrap(env), policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    rows = row_list(next(iter(collector)))
    second = [row for row in rows if row["turn"] == 1]
    assert len(second) > NUM_ENVS // 4
    assert {int(row["env_step"]) for row in rows} == {0}
    for row in second:
        assert agent.last_request in tokenizer.decode(row["tokens", "prompt"])
        assert row["next", "done"].all()
    env.close()


def test_two_engines_are_the_policies_of_two_players(
    engine, tokenizer, scorer, make_tiny_model, make_tokenizer
):
    theirs = make_tokenizer()
    other, model = shared_tiny(make_tiny_model, theirs)
    options = {"generate_kwargs": {"max_new_tokens": 4}}
    mine = VLLMBackend(engine)
    policies = {
        "A": vLLMWrapper(mine, tokenizer=tokenizer, **options),
        "B": vLLMWrapper(other, tokenizer=theirs, **options),
    }
    env = PrisonersDilemmaEnv(num_envs=16, num_rounds=1, max_steps=2, system_prompt="Go.")
    collector = LLMCollector(
        env,
        policy=PolicyRouter(policies, seed=0),
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    rows = row_list(next(iter(collector)))
    assert {str(row["agent"]) for row in rows} == {"A", "B"}
    tiny = TransformersWrapper(model, tokenizer=theirs).backend
    for row in rows:
        mask = row["masks", "all_assistant_mask"]
        by = scorer if row["agent"] == "A" else tiny
        scores = by.token_scores([row["tokens", "full"]], [mask]).log_probs.detach()
        torch.testing.assert_close(scores, row["log_probs", "full"][mask], atol=2e-5, rtol=2e-5)
    # New weights of one are no new weights of the other.
    before = max(int(row["trace", "policy_version"].max()) for row in rows if row["agent"] == "B")
    mine.weights_changed(before + 7)
    again = row_list(next(iter(collector)))
    versions = {
        name: {int(row["trace", "policy_version"].max()) for row in again if row["agent"] == name}
        for name in "AB"
    }
    assert versions == {"A": {before + 7}, "B": {before}}
