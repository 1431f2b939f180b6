"""The teaching recipe: its task, its rollouts, and its equality with GRPOLoss."""

import copy
import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from recipes.script import read_metrics

from torchrl_llm.data import Source
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.functional import group_advantages
from torchrl_llm.modules import load_model, load_tokenizer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import GRPOLoss

PATH = Path(__file__).parents[2] / "sota-implementations" / "pico" / "train.py"


@pytest.fixture(scope="module")
def pico():
    spec = importlib.util.spec_from_file_location("pico_train", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pico_train"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pico_train"]


@pytest.fixture(scope="module")
def formatter():
    return ChatFormatter(load_tokenizer(), on_rewrite="error")


# -- the task --------------------------------------------------------------------------------------


def test_environments_of_one_seed_pose_the_same_problems(pico):
    one, same, other = (pico.LetterCounting(seed=seed) for seed in (3, 3, 4))
    first = [one.reset() for _ in range(3)]
    assert first == [same.reset() for _ in range(3)]
    assert first != [other.reset() for _ in range(3)]
    assert len({chat[0]["content"] for chat in first}) == 3


def test_a_difficulty_is_clamped_and_an_answer_is_scored(pico):
    assert pico.LetterCounting(difficulty=99).difficulty == 10
    assert pico.LetterCounting(difficulty=-1).difficulty == 1
    env = pico.LetterCounting()
    env.reset()
    (count,) = env.problem.counts.values()
    for answer, reward in ((count, 1.0), (count + 1, 0.1), ("many", 0.0)):
        assert env.step(f"<answer>{answer}</answer>") is None
        assert env.reward() == reward


# -- rollouts --------------------------------------------------------------------------------------


class Guess:
    """Three methods, several turns: guess a number that grows until it is over."""

    def __init__(self, turns):
        self.turns, self.turn, self.seen = turns, 0, []

    def reset(self):
        return [{"role": "user", "content": "Guess."}]

    def step(self, response):
        self.turn += 1
        self.seen.append(response)
        return {"role": "user", "content": "Again."} if self.turn < self.turns else None

    def reward(self):
        return float(self.turn)


def scripted(formatter, text):
    from torchrl_llm.modules.backends import FakeBackend, SamplingParams

    backend = FakeBackend(text, tokenizer=formatter.tokenizer)
    params = SamplingParams(max_new_tokens=8, stop_token_ids=formatter.stop_token_ids)
    return lambda prompts: [group[0] for group in backend.generate(prompts, params)]


def test_rollouts_come_in_order_with_their_groups_and_summed_rewards(pico, formatter):
    env_fns = [partial(Guess, 1), partial(Guess, 3), partial(Guess, 9)]
    records, rewards, groups = pico.collect_rollouts(
        env_fns, scripted(formatter, "7"), formatter, k=2, max_turns=4
    )
    assert groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert rewards.tolist() == [1, 1, 1 + 2 + 3, 6, 1 + 2 + 3 + 4, 10]
    assert [record.num_turns for record in records] == [1, 1, 3, 3, 4, 4]
    text = formatter.decode(records[2].token_ids)
    assert text.count("7<|im_end|>") == 3
    assert text.count("Again.") == 2
    sampled = records[2].token_ids[records[2].source == Source.SAMPLED]
    assert formatter.decode(sampled) == "7<|im_end|>" * 3


# -- the loss --------------------------------------------------------------------------------------


def rows_of(records, advantages):
    """The rows that a policy would have written for the same rollouts."""
    from tensordict import TensorDict

    sampled = [record.source == Source.SAMPLED for record in records]
    fields = ("source", "turn", "policy_version")
    return TensorDict(
        tokens=ragged_rows({"full": [record.token_ids for record in records]}),
        log_probs=ragged_rows({"full": [record.log_probs for record in records]}),
        masks=ragged_rows({"all_assistant_mask": sampled}),
        trace=ragged_rows({name: [getattr(r, name) for r in records] for name in fields}),
        advantage=advantages.reshape(-1, 1, 1),
        batch_size=[len(records)],
    )


def rollouts_of(pico, model, formatter, seed, *, tasks=2, k=4):
    """On-policy rollouts under the model's own weights, whatever was sampled before."""
    torch.manual_seed(seed)
    generate = pico.sampler(model, formatter.tokenizer, formatter, max_new_tokens=12)
    env_fns = [partial(pico.LetterCounting, seed=100 * seed + task) for task in range(tasks)]
    records, _, groups = pico.collect_rollouts(env_fns, generate, formatter, k=k)
    # The embedded model does not know the task; the parity of a token makes rewards that differ.
    rewards = torch.tensor([float((r.token_ids % 5).sum() % 7) / 7 for r in records])
    return records, group_advantages(rewards, groups, normalize="none")


def test_the_gradient_is_that_of_grpo_loss_with_sequence_sum_and_no_std(pico, formatter):
    model = load_model()
    records, advantages = rollouts_of(pico, model, formatter, 0)
    assert advantages.abs().max() > 0.05
    pico.backward_grpo(model, records, advantages, minibatch=len(records))
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    pico.backward_grpo(model, records, advantages, minibatch=3)
    cut = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = GRPOLoss(CausalScorer(model), aggregation="sequence_sum", masking_strategy="rlhf")
    output = loss(rows_of(records, advantages))
    output.total_loss().backward()
    assert output.kl_approx.abs() < 1e-6
    for a, b, parameter in zip(mine, cut, model.parameters(), strict=True):
        scale = a.abs().max()
        assert scale > 0
        torch.testing.assert_close(parameter.grad, a, atol=1e-5 * float(scale), rtol=1e-4)
        torch.testing.assert_close(b, a, atol=1e-5 * float(scale), rtol=1e-4)


def test_weights_are_equal_after_twenty_on_policy_steps(pico, formatter):
    mine = load_model()
    theirs, start = copy.deepcopy(mine), copy.deepcopy(mine.state_dict())
    loss = GRPOLoss(CausalScorer(theirs), aggregation="sequence_sum", masking_strategy="rlhf")
    # AdamW divides by the size of the gradient: where that is below eps, and so only rounding, a
    # difference in the last bit would be a whole step.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, eps=1e-6) for m in (mine, theirs)]
    for step in range(20):
        # Each samples from its own weights.
        pico.backward_grpo(mine, *rollouts_of(pico, mine, formatter, step), minibatch=6)
        loss(rows_of(*rollouts_of(pico, theirs, formatter, step))).total_loss().backward()
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = theirs.state_dict()
    moved = max((start[name] - value).abs().max() for name, value in found.items())
    assert moved > 1e-3
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


# -- the script ------------------------------------------------------------------------------------


def test_a_short_run_writes_a_model_and_says_what_it_did(pico, tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        numbers = pico.main(
            ["steps=2", "tasks=2", "k=4", "warmup=2", "eval_problems=8", "max_new_tokens=8"]
            + [f"folder={tmp_path}"]
        )
    finally:
        torch.set_num_threads(threads)
    assert set(numbers) == {"before", "after", "reward_before", "reward_after", "seconds"}
    assert 0 <= numbers["before"] <= numbers["reward_before"] <= 1
    changed = load_model(tmp_path / "model").state_dict()
    assert any(not torch.equal(changed[k], v) for k, v in load_model().state_dict().items())
    rows = read_metrics(tmp_path)
    assert [row["train/step"] for row in rows] == ["0", "1", "2"]
    assert float(rows[2]["eval/reward"]) == numbers["reward_after"]
    said = capsys.readouterr()
    assert "pico: GRPO, model embedded" in said.err
    assert "step 2/2, reward" in said.err
    assert f"torchrl-llm chat {tmp_path}" in said.out
    assert "\x1b" not in said.out + said.err


def test_settings_that_would_train_nothing_are_refused(pico, capsys):
    for argument, message in (
        ("k=1", "k must be at least 2"),
        ("minibatch=0", "minibatch must be at least 1"),
        ("difficulty=11", "difficulty must be"),
        ("stpes=3", "did you mean 'steps'?"),
    ):
        with pytest.raises(SystemExit):
            pico.main([argument])
        assert message in capsys.readouterr().err


def test_the_help_shows_each_key(pico, capsys):
    with pytest.raises(SystemExit):
        pico.main(["--help"])
    shown = capsys.readouterr().out
    assert "eval_problems=256" in shown
    assert "# tokens of an answer." in shown


@pytest.mark.full
@pytest.mark.slow
def test_twelve_steps_raise_the_reward_on_held_out_words(pico, tmp_path):
    threads = torch.get_num_threads()
    try:
        numbers = pico.main(["steps=12", "eval_problems=64", f"folder={tmp_path}"])
    finally:
        torch.set_num_threads(threads)
    # From random counts (0.15) to the most probable one (0.64).
    assert numbers["reward_after"] > numbers["reward_before"] + 0.2
