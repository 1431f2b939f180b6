"""RolloutFromModel: log-probs, rewards and flags of answers, worked by hand or by a naive loop."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from torchrl_llm.data import AdaptiveKLController, PromptData, RolloutFromModel
from torchrl_llm.errors import ConfigError, DataError, RewardError

EOS = 2


def batch(*prompts, width=6):
    """Prompts followed by the label 9, padded with 2, which is the end of sequence too."""
    rows = [[*prompt, 9] + [EOS] * (width - len(prompt) - 1) for prompt in prompts]
    masks = [[1] * (len(p) + 1) + [0] * (width - len(p) - 1) for p in prompts]
    return PromptData(
        input_ids=torch.tensor(rows),
        attention_mask=torch.tensor(masks),
        prompt_rindex=torch.tensor([len(p) - 1 for p in prompts]),
        batch_size=[len(prompts)],
    )


class Scripted(torch.nn.Module):
    """Continues with the given tokens; its logits are those of the model inside."""

    def __init__(self, model, *answers):
        super().__init__()
        self.inner, self.config, self.device = model, model.config, model.device
        self.answers = torch.tensor(answers)

    def generate(self, input_ids, attention_mask, generation_config):
        self.seen = (input_ids, attention_mask, generation_config)
        return torch.cat([input_ids, self.answers], 1)

    def forward(self, **inputs):
        return self.inner(**inputs)


def zero(input_ids, attention_mask):
    return torch.zeros(len(input_ids))


def length(input_ids, attention_mask):
    return attention_mask.sum(1).float()


@pytest.fixture
def reference(make_tiny_model):
    return make_tiny_model(seed=1)


def rollout_of(model, reference, *answers, reward=zero, **options):
    options = {"max_new_tokens": len(answers[0]), **options}
    return RolloutFromModel(Scripted(model, *answers), reference, reward, **options)


def naive(model, tokens):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    return torch.log_softmax(logits[-1], -1)[tokens[-1]].item()


def test_prompts_are_generated_from_with_padding_on_the_left(tiny_model, reference):
    rollout = rollout_of(tiny_model, reference, [7, 8], [7, 8])
    generated = rollout.generate(batch([3, 4, 5], [6])).token_ids
    ids, mask, _ = rollout.model.seen
    assert ids[:, -3:].tolist() == [[3, 4, 5], [0, 0, 6]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert generated[:, :5].tolist() == [[3, 4, 5, 7, 8], [6, 7, 8, 0, 0]]
    assert generated.shape == (2, 8)


def test_log_probs_are_those_of_a_naive_loop_and_zero_behind_the_end(tiny_model, reference):
    rollout = rollout_of(tiny_model, reference, [7, EOS, EOS], [8, 9, 10])
    out = rollout.generate(batch([3, 4, 5], [6]))
    rows = [([3, 4, 5], [7, EOS]), ([6], [8, 9, 10])]
    for row, (prompt, answer) in enumerate(rows):
        for t in range(3):
            if t >= len(answer):
                assert out.log_probs[row, t].item() == out.log_ratio[row, t].item() == 0.0
                continue
            tokens = [*prompt, *answer[: t + 1]]
            mine = naive(tiny_model, tokens)
            assert out.log_probs[row, t].item() == pytest.approx(mine, abs=1e-4)
            ratio = mine - naive(reference, tokens)
            assert out.log_ratio[row, t].item() == pytest.approx(ratio, abs=1e-4)


def test_values_do_not_depend_on_the_rows_beside_them(tiny_model, reference):
    both = rollout_of(tiny_model, reference, [7, 8, EOS], [8, EOS, EOS])
    alone = rollout_of(tiny_model, reference, [8, EOS, EOS])
    together = both.rollout_from_data(batch([3, 4, 5, 6], [6]))[1]
    single = alone.rollout_from_data(batch([6]))[0]
    for key in ("action", "sample_log_prob", ("next", "reward"), ("next", "done"), "input_ids"):
        assert torch.allclose(together[key].float(), single[key].float(), atol=1e-4)


def test_an_answer_ends_with_its_first_end_of_sequence_or_is_cut(tiny_model, reference):
    rollout = rollout_of(tiny_model, reference, [7, EOS, EOS], [8, 9, 10], [8, 9, EOS])
    td = rollout.rollout_from_data(batch([3], [4], [5]))
    assert td["mask"].tolist() == [[True, True, False], [True] * 3, [True] * 3]
    done = td["next", "done"].squeeze(-1)
    assert done.tolist() == [[False, True, False], [False, False, True], [False, False, True]]
    assert td["next", "terminated"].squeeze(-1).sum(1).tolist() == [1, 0, 1]
    assert td["next", "truncated"].squeeze(-1).sum(1).tolist() == [0, 1, 0]
    assert td["action"].tolist() == [[7, EOS, 0], [8, 9, 10], [8, 9, EOS]]


def test_each_step_holds_its_prefix_and_the_end_of_sequence_is_attended(tiny_model, reference):
    td = rollout_of(tiny_model, reference, [7, EOS]).rollout_from_data(batch([3, 4], width=4))
    assert td["input_ids"][0, :, :4].tolist() == [[3, 4, 0, 0], [3, 4, 7, 0]]
    assert td["next", "input_ids"][0, :, :4].tolist() == [[3, 4, 7, 0], [3, 4, 7, EOS]]
    assert td["attention_mask"][0].sum(1).tolist() == [2, 3]
    assert td["next", "attention_mask"][0].sum(1).tolist() == [3, 4]
    assert td.names == [None, "time"]


def test_the_last_token_gets_the_clipped_score_less_that_of_the_label(tiny_model):
    # same model as reference: no divergence. Lengths: 1 + 2 against 1 + 1; 1 + 3 against 1 + 1.
    rollout = rollout_of(
        tiny_model, tiny_model, [7, EOS, EOS], [8, 9, 10], reward=length, score_clip=1.5
    )
    reward = rollout.rollout_from_data(batch([3], [4]))["next", "reward"].squeeze(-1)
    assert torch.allclose(reward, torch.tensor([[0, 1, 0], [0, 0, 1.5]]), atol=1e-5)


def test_the_divergence_costs_at_every_token_of_the_answer(tiny_model, reference):
    rollout = rollout_of(tiny_model, reference, [7, EOS, EOS], reward=length, kl_coef=0.5)
    prompts = batch([3])
    out = rollout.generate(prompts)
    td = rollout.create_rollout_td(prompts, *out)
    expected = -0.5 * out.log_ratio[0]
    assert torch.equal(td["next", "reward_kl"][0, :, 0], expected)
    assert expected[2] == 0.0
    assert expected[:2].abs().min() > 0
    total = td["next", "reward_raw"] + td["next", "reward_kl"]
    assert torch.equal(td["next", "reward"], total)


def test_the_scheduler_sees_divergences_of_whole_answers(tiny_model, reference):
    scheduler = AdaptiveKLController(init_kl_coef=0.2, target=1.0, horizon=10)
    twin = AdaptiveKLController(init_kl_coef=0.2, target=1.0, horizon=10)
    rollout = rollout_of(
        tiny_model, reference, [7, 8], [9, EOS], kl_scheduler=scheduler, num_steps=2
    )
    assert rollout.kl_coef == 0.2
    outs = [rollout.rollout_from_data(batch(*prompts)) for prompts in ([[3], [4]],) * 3]
    kl = (outs[0]["next", "reward_kl"].squeeze(-1).sum(1) / -0.2).tolist()
    assert rollout.step_scheduler() == pytest.approx(twin.update(kl * 2))  # of three, the last two
    assert rollout.kl_coef == scheduler.coef
    assert rollout.step_scheduler() == scheduler.coef  # nothing new


def test_sampling_is_plain_whatever_the_models_own_settings_say(make_tiny_model):
    model = make_tiny_model(initializer_range=0.02)  # nearly uniform
    model.generation_config = GenerationConfig(
        do_sample=False, top_k=1, temperature=0.01, repetition_penalty=9.0, eos_token_id=EOS
    )
    rollout = RolloutFromModel(model, model, zero, max_new_tokens=12)
    torch.manual_seed(0)
    actions = rollout.generate(batch([3], [3], [3], [3])).token_ids[:, 1:13]
    assert len({tuple(row) for row in actions.tolist()}) == 4


def test_models_run_without_dropout_and_keep_their_mode(make_tiny_model):
    model = make_tiny_model(attention_dropout=0.5)
    model.train()
    rollout = rollout_of(model, copy.deepcopy(model), [7, 8])
    out = rollout.generate(batch([3]))
    assert out.log_ratio.abs().max() < 1e-5
    assert model.training


@pytest.mark.parametrize(
    "form",
    [
        lambda scores: scores,
        lambda scores: scores.unsqueeze(1),
        lambda scores: (torch.zeros(1, 8), scores),
        lambda scores: SimpleNamespace(logits=scores.unsqueeze(1)),
    ],
)
def test_a_score_may_come_in_several_forms(form, tiny_model):
    rollout = rollout_of(
        tiny_model,
        tiny_model,
        [7, 8],
        reward=lambda input_ids, attention_mask: form(attention_mask.sum(1).float()),
    )
    td = rollout.rollout_from_data(batch([3]))
    assert td["next", "reward_raw"].sum().item() == 1.0


@pytest.mark.parametrize("bad", [None, "3", torch.zeros(3), torch.zeros(1, 4), (1, 2, 3)])
def test_what_is_no_score_is_refused(bad, tiny_model):
    rollout = rollout_of(tiny_model, tiny_model, [7, 8], reward=lambda **_: bad)
    with pytest.raises(RewardError, match="one score a row"):
        rollout.rollout_from_data(batch([3]))


def test_an_invalid_score_stays_one(tiny_model):
    nan = lambda input_ids, attention_mask: torch.full((len(input_ids),), float("nan"))  # noqa: E731
    td = rollout_of(tiny_model, tiny_model, [7, 8], reward=nan).rollout_from_data(batch([3]))
    assert td["next", "reward"].squeeze().isnan().tolist() == [False, True]


def test_rows_without_a_prompt_are_refused(tiny_model):
    rollout = rollout_of(tiny_model, tiny_model, [7, 8])
    with pytest.raises(DataError, match="row 0 has no prompt"):
        rollout.generate(batch([]))


def test_a_configuration_that_cuts_answers_short_is_refused(tiny_model):
    rollout = rollout_of(tiny_model, tiny_model, [7, 8], max_new_tokens=5)
    with pytest.raises(ConfigError, match="after 2 tokens"):
        rollout.generate(batch([3]))


def test_impossible_settings_are_refused(tiny_model, make_tiny_model):
    for options in (
        {"max_new_tokens": 0},
        {"score_clip": 0.0},
        {"kl_coef": -1.0},
        {"num_steps": 0},
    ):
        with pytest.raises(ConfigError):
            RolloutFromModel(tiny_model, tiny_model, zero, **options)
    endless = make_tiny_model(eos_token_id=None)
    with pytest.raises(ConfigError, match="eos_token_id"):
        RolloutFromModel(endless, endless, zero)
    assert RolloutFromModel(endless, endless, zero, eos_token_id=5).eos_token_ids == (5,)
    with pytest.raises(ConfigError, match="no kl_scheduler"):
        RolloutFromModel(tiny_model, tiny_model, zero).step_scheduler()
