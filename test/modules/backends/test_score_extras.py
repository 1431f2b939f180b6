"""What a scorer gives beside log-probs: values, states, divergence from one or more teachers."""

from __future__ import annotations

import pytest
import torch
from modules.backends.model_zoo import build

from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import divergence_from_logits
from torchrl_llm.modules import TransformersBackend, TransformersWrapper, ValueHead
from torchrl_llm.modules.backends import CausalScorer

IDS = [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8]), torch.tensor([9, 3, 1])]
SELECT = [
    torch.tensor([False, False, True, True]),
    torch.tensor([False, False]),
    torch.tensor([False, True, True]),
]
# Row and position of the states that predict the selected tokens.
BEFORE = [(0, 1), (0, 2), (2, 0), (2, 1)]


def ask(scorer, **extras):
    return scorer.token_scores(IDS, SELECT, extras=ScoreExtras(**extras))


def picked(model, temperature=1.0):
    """Logits that predict the selected tokens, one row at a time."""
    rows = [model(ids[None]).logits[0] / temperature for ids in IDS]
    return torch.stack([rows[row][position] for row, position in BEFORE])


def test_a_fresh_value_head_says_zero_and_learns():
    model = build("llama")
    head = ValueHead.for_model(model)
    values = ask(CausalScorer(model, value_head=head), values=True).values
    assert values.tolist() == [0.0] * 4
    values.sum().backward()
    assert head.linear.bias.grad.item() == 4.0
    assert head.linear.weight.grad.any()


def test_values_are_those_of_the_state_before_the_token():
    model = build("llama")
    head = ValueHead.for_model(model)
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(1))
    values = ask(CausalScorer(model, value_head=head), values=True).values
    rows = [model.model(ids[None])[0][0] for ids in IDS]
    states = torch.stack([rows[row][position] for row, position in BEFORE])
    expected = states @ head.linear.weight[0] + head.linear.bias
    torch.testing.assert_close(values, expected)


def test_a_detached_value_head_keeps_its_gradient_out_of_the_body():
    model = build("llama")
    for detach in (True, False):
        head = ValueHead.for_model(model, detach=detach)
        torch.nn.init.ones_(head.linear.weight)
        model.zero_grad()
        ask(CausalScorer(model, value_head=head), values=True).values.sum().backward()
        grads = [p.grad is not None and bool(p.grad.any()) for p in model.parameters()]
        assert any(grads) is not detach


def test_values_are_float32_under_autocast():
    model = build("llama")
    scorer = CausalScorer(model, value_head=ValueHead.for_model(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ask(scorer, values=True).values.dtype is torch.float32


def test_a_policy_owns_its_value_head_and_the_model_does_not():
    model = build("llama")
    head = ValueHead.for_model(model)
    policy = TransformersWrapper(
        TransformersBackend(model, value_head=head, eos_token_ids=(2,)), input_mode="tokens"
    )
    owned = dict(policy.named_parameters())
    assert owned["value_head.linear.weight"] is head.linear.weight
    assert "value_head.linear.bias" in policy.state_dict()
    assert not any("value_head" in name for name, _ in model.named_parameters())
    assert len(owned) == len(list(model.parameters())) + 2
    assert policy.get_new_version(generate=False).value_head is head


def test_values_without_a_value_head_are_refused():
    with pytest.raises(ConfigError, match=r"ValueHead\.for_model"):
        ask(CausalScorer(build("llama")), values=True)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_from_a_teacher_is_that_of_the_logits(direction, temperature):
    student, teacher = build("llama"), build("llama", seed=1, hidden_size=16)
    states = ask(CausalScorer(teacher), states=True).states
    assert not states.hidden.requires_grad
    scores = CausalScorer(student).token_scores(
        IDS,
        SELECT,
        temperature=temperature,
        extras=ScoreExtras(teachers=(states,), divergence=direction),
    )
    expected = divergence_from_logits(
        picked(student, temperature), picked(teacher, temperature), direction=direction
    )
    torch.testing.assert_close(scores.divergence, expected)
    parameters = [p for p in student.parameters() if p.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(scores.divergence.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        atol=1e-5,
        rtol=1e-5,
    )
    assert all(p.grad is None for p in teacher.parameters())


def test_each_token_is_compared_with_its_own_teacher_and_some_with_none():
    student, teachers = build("llama"), [build("llama", seed=1), build("llama", seed=2)]
    index = torch.tensor([1, 0, -1, 1])
    given = []
    for number, teacher in enumerate(teachers):
        states = ask(CausalScorer(teacher), states=True).states
        given.append(states._replace(hidden=states.hidden[index == number]))
    temperature = torch.tensor([0.5, 1.0, 2.0])
    scores = CausalScorer(student).token_scores(
        IDS,
        SELECT,
        temperature=temperature,
        extras=ScoreExtras(teachers=tuple(given), teacher_index=index),
    )
    factor = torch.tensor([0.5, 0.5, 2.0, 2.0])[:, None]
    logits = [picked(model) / factor for model in teachers]
    each = [divergence_from_logits(picked(student) / factor, other) for other in logits]
    expected = torch.stack([each[1][0], each[0][1], torch.zeros(()), each[1][3]])
    torch.testing.assert_close(scores.divergence, expected)
    scores.divergence.sum().backward()


def test_a_teacher_with_padding_behind_its_vocabulary_is_cut_and_one_with_fewer_ids_refused():
    student, teacher = build("llama"), build("llama", seed=1, vocab_size=80)
    states = ask(CausalScorer(teacher), states=True).states
    got = ask(CausalScorer(student), teachers=(states,)).divergence
    torch.testing.assert_close(
        got, divergence_from_logits(picked(student), picked(teacher)[:, :61])
    )
    small = ask(CausalScorer(student), states=True).states
    with pytest.raises(ConfigError, match="different vocabularies"):
        ask(CausalScorer(teacher), teachers=(small,))


def test_adapters_on_the_heads_of_student_and_teacher_take_part():
    peft = pytest.importorskip("peft")
    models = []
    for seed in (0, 1):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
        model = peft.get_peft_model(build("llama", seed=seed), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        models.append(model.eval())
    student, teacher = models
    states = ask(CausalScorer(teacher), states=True).states
    assert states.low_rank is not None
    got = ask(CausalScorer(student), teachers=(states,)).divergence
    expected = divergence_from_logits(picked(student), picked(teacher))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    parameters = [p for p in student.parameters() if p.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        atol=1e-4,
        rtol=1e-4,
    )
    with teacher.disable_adapter():
        assert ask(CausalScorer(teacher), states=True).states.low_rank is None


@pytest.mark.parametrize("backend", [CausalScorer, TransformersBackend])
def test_greedy_says_which_tokens_are_the_most_likely_ones(backend):
    model = build("llama")
    best = picked(model).argmax(-1)
    ids = [each.clone() for each in IDS]
    ids[0][2], ids[2][2] = best[0], (best[3] + 1) % 32  # one that is, and one that is not
    scores = backend(model).token_scores(ids, SELECT, extras=ScoreExtras(greedy=True))
    logits = torch.stack([model(ids[row][None]).logits[0, at] for row, at in BEFORE])
    chosen = torch.stack([ids[row][at + 1] for row, at in BEFORE])
    assert scores.greedy.tolist() == (logits.argmax(-1) == chosen).tolist()
    assert scores.greedy[0]
    assert not scores.greedy.all()
    assert ask(backend(model)).greedy is None
