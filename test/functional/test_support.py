"""Log-probs on the kept ids: by hand, against masked logits, and in every gradient."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import kept_ids, restrict_logits, support_log_probs, take_support

V, D, R = 11, 6, 2


def make_case(counts, *, dtype=torch.float64, seed=0):
    """States, head, targets inside random supports of these sizes."""
    torch.manual_seed(seed)
    n = len(counts)
    hidden = torch.randn(n, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    low = torch.randn(n, R, dtype=dtype, requires_grad=True)
    columns = torch.randn(V, R, dtype=dtype, requires_grad=True)
    ids, targets = [], []
    for count in counts:
        own = torch.randperm(V)[:count].sort().values
        ids.append(own)
        targets.append(own[torch.randint(count, ())] if count else torch.randint(V, ()))
    support = torch.cat(ids), torch.tensor(counts)
    return (hidden, weight, bias, low, columns), torch.stack(targets), support


def naive(inputs, targets, support, *, scale=1.0, softcap=None, temperature=1.0):
    hidden, weight, bias, low, columns = inputs
    logits = scale * (hidden @ weight.T + low @ columns.T + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[:, None]
    log_p = restrict_logits(logits / temperature, *support).log_softmax(-1)
    picked = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1)
    return picked, entropy


def test_the_log_prob_is_the_softmax_over_the_kept_ids_by_hand():
    # Logits 0, ln 2, ln 5, 100 and kept ids 0, 1, 2 of which 2 was drawn: 5 / (1 + 2 + 5).
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)], [100.0]], dtype=torch.float64)
    weight.requires_grad_()
    hidden = torch.ones(1, 1, dtype=torch.float64)
    scores = support_log_probs(
        hidden, weight, torch.tensor([2]), torch.tensor([0, 1, 2]), torch.tensor([3]), entropy=True
    )
    p = [1 / 8, 2 / 8, 5 / 8]
    assert scores.log_probs.item() == pytest.approx(math.log(5 / 8), abs=1e-12)
    assert scores.entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-12)
    scores.log_probs.sum().backward()
    # d log p / d z = 1[v = 2] - p_v on the kept ids, nothing elsewhere.
    wanted = torch.tensor([[-1 / 8], [-2 / 8], [3 / 8], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(weight.grad, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("counts", "chunk_size"),
    [([3, 1, 5, 11, 2], size) for size in (None, 1, 4, 7)]
    + [([4], None), ([0, 3, 0, 1], None), ([0, 0], None)],
)
def test_values_and_all_gradients_are_those_of_masked_logits(counts, chunk_size):
    for per_token in [False, True]:
        inputs, targets, support = make_case(counts)
        settings = {"scale": 0.7, "softcap": 5.0, "temperature": 1.3}
        if per_token:
            settings["temperature"] = torch.linspace(0.5, 2.0, len(counts), dtype=torch.float64)
        wanted = naive(inputs, targets, support, **settings)
        hidden, weight, bias, low, columns = inputs
        got = support_log_probs(
            hidden,
            weight,
            targets,
            *support,
            bias=bias,
            low_rank=(low, columns),
            entropy=True,
            chunk_size=chunk_size,
            **settings,
        )
        upstream = torch.randn(2, len(counts), dtype=torch.float64)
        grads = []
        for scores in (wanted, got):
            total = (scores[0] * upstream[0]).sum() + (scores[1] * upstream[1]).sum()
            grads.append(torch.autograd.grad(total, inputs))
        for a, b in zip((*wanted, *grads[0]), (*got, *grads[1]), strict=True):
            torch.testing.assert_close(b, a, atol=1e-10, rtol=0)


def test_gradients_pass_gradcheck_in_float64():
    (hidden, weight, *_), targets, support = make_case([3, 2])

    def scores(h, w):
        return tuple(support_log_probs(h, w, targets, *support, entropy=True))

    assert torch.autograd.gradcheck(scores, (hidden, weight))


def test_float32_agrees_to_1e_5():
    inputs, targets, support = make_case([3, 1, 5])
    wanted, _ = naive(inputs, targets, support)
    hidden, weight, bias, low, columns = (x.float() for x in inputs)
    got = support_log_probs(hidden, weight, targets, *support, bias=bias, low_rank=(low, columns))
    assert got.log_probs.dtype == torch.float32
    torch.testing.assert_close(got.log_probs.double(), wanted, atol=1e-5, rtol=1e-5)


def test_factors_in_bfloat16_are_summed_in_float32():
    inputs, targets, support = make_case([3, 5])
    hidden, weight = (x.detach().bfloat16() for x in inputs[:2])
    got = support_log_probs(hidden, weight, targets, *support).log_probs
    assert got.dtype == torch.float32
    exact = hidden.double() @ weight.double().T
    wanted = restrict_logits(exact, *support).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_support_of_the_whole_vocabulary_is_the_plain_log_softmax():
    (hidden, weight, *_), targets, support = make_case([V, V])
    got = support_log_probs(hidden, weight, targets, *support).log_probs
    wanted = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_one_kept_id_has_probability_one_and_no_gradient():
    (hidden, weight, *_), targets, support = make_case([1, 1])
    scores = support_log_probs(hidden, weight, targets, *support, entropy=True)
    assert scores.log_probs.tolist() == scores.entropy.tolist() == [0.0, 0.0]
    (scores.log_probs + scores.entropy).sum().backward()
    assert weight.grad.abs().max() == hidden.grad.abs().max() == 0


def test_a_target_that_was_not_kept_is_impossible():
    (hidden, weight, *_), _, _ = make_case([1])
    ids, counts = torch.tensor([3, 4]), torch.tensor([2])
    assert support_log_probs(hidden, weight, torch.tensor([5]), ids, counts).log_probs == -math.inf


def test_frozen_parts_get_no_gradient():
    (hidden, weight, *_), targets, support = make_case([3, 2])
    frozen = weight.detach()
    support_log_probs(hidden, frozen, targets, *support).log_probs.sum().backward()
    assert frozen.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("counts", [[2], [1, 1, 1]])
def test_ids_and_counts_that_do_not_belong_together_are_refused(counts):
    (hidden, weight, *_), targets, _ = make_case([3, 2])
    with pytest.raises(ValueError, match="a count per target"):
        support_log_probs(hidden, weight, targets, torch.tensor([1]), torch.tensor(counts))


def test_taking_tokens_takes_their_ids_in_the_new_order():
    ids, counts = torch.tensor([4, 5, 6, 7]), torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    taken = take_support(ids, counts, torch.tensor([3, 1, 0, 0]))
    assert taken[0].tolist() == [7, 4, 5, 4, 5]
    assert taken[1].tolist() == [1, 0, 2, 2]
    by_mask = take_support(ids, counts, torch.tensor([False, True, True, False]))
    assert [x.tolist() for x in by_mask] == [[6], [0, 1]]
    assert take_support(ids, counts, torch.zeros(4, dtype=torch.bool))[0].shape == (0,)


def test_kept_ids_of_an_untouched_distribution_are_none():
    ids, counts = kept_ids(torch.zeros(2, 5).log_softmax(-1))
    assert ids.dtype == counts.dtype == torch.int32
    assert (ids.tolist(), counts.tolist()) == ([], [0, 0])


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [2, 0, 5, V]])
def test_temperatures_stored_in_float32_are_exact_in_float64(counts):
    for softcap in [None, 3.0]:
        # As rows hold them. 1 / 0.7 is another number when it is taken in float32.
        inputs, targets, support = make_case(counts)
        stored = torch.tensor([0.7, 0.9, 1.3, 0.3])
        settings = {"scale": 0.7, "softcap": softcap}
        got = support_log_probs(
            inputs[0],
            inputs[1],
            targets,
            *support,
            bias=inputs[2],
            low_rank=inputs[3:],
            temperature=stored,
            **settings,
        )
        wanted = naive(inputs, targets, support, temperature=stored.double(), **settings)[0]
        torch.testing.assert_close(got.log_probs, wanted, rtol=0, atol=1e-12)
        gradients = [torch.autograd.grad(x.sum(), inputs) for x in (got.log_probs, wanted)]
        for own, naively in zip(*gradients, strict=True):
            torch.testing.assert_close(own, naively, rtol=0, atol=1e-12)
