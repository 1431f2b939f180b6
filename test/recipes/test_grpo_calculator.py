"""Training with a tool on the embedded model: what is sampled and trained, and that it learns."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from recipes.grpo_helper import column, run_script

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Source
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.datasets.number_tasks import CalculatorEnv
from torchrl_llm.modules import TransformersWrapper, load_model, load_tokenizer


@pytest.fixture(scope="module")
def trajectories():
    """Two waves of the embedded model with its calculator, turn by turn."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer()
    policy = TransformersWrapper(
        load_model(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 36}
    )
    env = CalculatorEnv(num_envs=64, seed=0, tokenizer=tokenizer)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    found = {}
    for _, batch in zip(range(2), collector, strict=False):
        for row in row_list(batch):
            found.setdefault(int(row["traj_id"]), []).append(row)
    env.close()
    assert len(found) == 128
    return list(found.values())


def test_the_model_calls_reads_the_result_and_answers(trajectories):
    calls = [rows for rows in trajectories if len(rows) > 1]
    assert len(calls) > 40
    solved = 0
    for rows in calls:
        first, second = rows[0], rows[1]
        assert first["next", "tools", "auxiliary"].all()
        assert first["next", "reward"].item() == 0
        assert not first["next", "done"].any()
        solved += second["next", "reward"].item() == 1
    # Right calls are copied; the others had the calculator do something else.
    assert solved > 20


def test_ids_of_a_turn_are_a_prefix_of_the_next_unless_the_row_is_marked_as_a_fork(trajectories):
    compared = 0
    for rows in trajectories:
        for before, after in pairwise(rows):
            record = after["history", "full"].chats[0].record
            if record.fork_cause is not None:
                continue
            full, prompt = before["tokens", "full"], after["tokens", "prompt"]
            assert torch.equal(prompt[: len(full)], full)
            kept = after["log_probs", "full"][: len(full)]
            assert torch.equal(kept, before["log_probs", "full"])
            compared += 1
    assert compared > 40


def test_tokens_of_tools_are_never_trained(trajectories):
    seen = 0
    for rows in trajectories:
        last = rows[-1]
        tool = last["trace", "source"] == Source.TOOL
        assert not last["masks", "all_assistant_mask"][tool].any()
        seen += int(tool.any())
    assert seen > 40


@pytest.mark.full
def test_held_out_accuracy_rises_in_a_few_steps(tmp_path, monkeypatch):
    run = partial(run_script, monkeypatch)
    table = run(
        tmp_path,
        "env=calculator",
        "train.max_steps=15",
        "train.prompts_per_batch=8",
        "env.repeats=8",
        "optimizer.warmup_steps=2",
        "eval.num_prompts=64",
        "eval.interval=15",
        "seed=0",
    )
    accuracy = column(table, "eval/accuracy")
    assert accuracy[-1] > accuracy[0] + 0.1
    assert column(table, "train/tokens_generated") == column(table, "train/tokens_trained")
