"""Gradient checkpointing, adapters, compilation and autocast against the plain twin."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from gpu.exactness import ROUNDING, assert_all_as_exact, assert_all_near, distance
from gpu.models import expected, gradients, small_model
from modules.backends.test_layouts import ragged_group
from modules.backends.test_token_scorer import IDS, SELECT, grads

from torchrl_llm.functional import chunked_divergence, chunked_log_probs, ppo_clip
from torchrl_llm.modules.backends.token_scorer import CausalScorer

pytestmark = pytest.mark.gpu


def scored(scorer, rows, layout, **settings):
    scorer.layout = layout
    scores = scorer.token_scores(*rows, entropy=True, **settings)
    got = gradients(scorer.model, scores.log_probs, scores.entropy)
    return [scores.log_probs, scores.entropy, *got.values()], ["log_probs", "entropy", *got]


def as_lists(twins):
    """Scores and gradients of the plain twin and of float64, each as one list."""
    return [[*scores, *grads.values()] for scores, grads in twins]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_gradient_checkpointing_changes_nothing(device, dtype, layout, reentrant):
    rows, model = ragged_group(), small_model(device, dtype).train()
    without = scored(CausalScorer(model), rows, layout)[0]
    other = copy.deepcopy(model)
    other.enable_input_require_grads()
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with_it, names = scored(CausalScorer(other), rows, layout)
    for ours, theirs in zip(with_it[:2], without[:2], strict=True):
        assert distance(ours, theirs) < ROUNDING[dtype]
    # The same kernels on the same numbers; what is added up by atomics may differ.
    ours, theirs = (dict(zip(names[2:], each[2:], strict=True)) for each in (with_it, without))
    assert_all_near(ours, theirs, ROUNDING[dtype])


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "down_proj", "lm_head"]])
def test_an_adapter_scores_and_learns_as_the_plain_model_does(device, dtype, targets):
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    model = small_model(device, dtype, lora=targets, tie_word_embeddings=False)
    rows, scorer = ragged_group(), CausalScorer(model)
    slow, exact = as_lists(expected(model, rows))
    for layout in ("padded", "shared"):
        fast, names = scored(scorer, rows, layout)
        assert any("lora" in name for name in names)
        assert_all_as_exact(fast, slow, exact, dtype, names=names)


def test_autocast_over_float32_masters_is_float32_to_the_rounding_of_bfloat16(device):
    rows, scorer = ragged_group(), CausalScorer(small_model(device))
    exact, names = scored(scorer, rows, "auto")
    slow = as_lists(expected(scorer.model, rows, autocast=True))[0]
    scorer.layout = "auto"
    with torch.autocast(device.type, torch.bfloat16):
        scores = scorer.token_scores(*rows, entropy=True)
    got = gradients(scorer.model, scores.log_probs, scores.entropy)
    fast = [scores.log_probs, scores.entropy, *got.values()]
    assert all(x.dtype is torch.float32 for x in fast)
    assert_all_as_exact(fast, slow, exact, torch.bfloat16, names=names)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_device_gives_the_scores_and_gradients_of_the_cpu(device, make_tiny_model, autocast):
    expected = grads(make_tiny_model(initializer_range=0.02))
    model = make_tiny_model(initializer_range=0.02).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        got = grads(model, chunk_size=64)
    got, expected = (dict(enumerate(each)) for each in (got, expected))
    assert_all_near(got, expected, 5e-2 if autocast else 1e-3)


# -- compiled -------------------------------------------------------------------------------------


@pytest.fixture
def backend(device):
    """The default compiler on CUDA; in a rehearsal only its tracing, which takes seconds less."""
    torch.compiler.reset()
    if device.type == "cpu":
        return "aot_eager"
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("needs a C compiler: triton builds its launcher with it")
    return "inductor"


def head_inputs(device, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((65, 32), (311, 32), (65, 16), (311, 16))
    drawn = [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]
    targets = torch.randint(0, 311, (65,), generator=generator).to(device)
    return [x.requires_grad_() for x in drawn[:2]], targets, drawn[2:]


def values_and_gradients(function, leaves):
    values = function(*leaves)
    return [values.detach(), *torch.autograd.grad(values.sum(), leaves)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["scores", "reverse", "forward"])
def test_a_compiled_head_is_the_eager_one(device, dtype, backend, what):
    leaves, targets, teacher = head_inputs(device, dtype)

    def function(hidden, weight):
        if what == "scores":
            scores = chunked_log_probs(hidden, weight, targets, entropy=True)
            return scores.log_probs + 0.3 * scores.entropy
        return chunked_divergence(hidden, weight, *teacher, direction=what)

    eager = values_and_gradients(function, leaves)
    compiled = values_and_gradients(torch.compile(function, backend=backend), leaves)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert distance(ours, theirs) < ROUNDING[dtype]


@pytest.mark.timeout(120)
def test_a_compiled_objective_is_the_eager_one(device, backend):
    generator = torch.Generator().manual_seed(1)
    log_ratio = (0.3 * torch.randn(500, generator=generator)).to(device).requires_grad_()
    advantage = torch.randn(500, generator=generator).to(device)

    def function(log_ratio):
        return ppo_clip(log_ratio, advantage, 0.2, 0.28)[0]

    eager = values_and_gradients(function, [log_ratio])
    compiled = values_and_gradients(torch.compile(function, backend=backend), [log_ratio])
    for ours, theirs in zip(compiled, eager, strict=True):
        assert distance(ours, theirs) < 1e-5


@pytest.mark.timeout(120)
def test_a_scorer_with_a_compiled_model_scores_as_the_eager_one(device, dtype, backend):
    model = small_model(device, dtype)
    rows = IDS, SELECT
    slow, exact = as_lists(expected(model, rows))
    model.model.compile(backend=backend)
    fast, names = scored(CausalScorer(model), rows, "padded")
    assert_all_as_exact(fast, slow, exact, dtype, names=names)
