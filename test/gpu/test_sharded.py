"""FSDP2 on one rank, NCCL on CUDA, against the model as it is: loss, gradients, a step."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from gpu.exactness import assert_all_near, distance
from gpu.models import small_model
from objectives.every_loss import full_rows
from torch.distributed.tensor import DTensor

from torchrl_llm.modules import TransformersBackend
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import GRPOLoss, SFTLoss
from torchrl_llm.trainers import make_optimizer, optimize
from torchrl_llm.trainers.gathered_model import GatheredModel
from torchrl_llm.trainers.ranks import ALONE, leave_group, shard

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rank(device):
    """One rank of one, over a store in this process, so that no port is needed."""
    backend = "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine without a network has no other
    if device.type == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_group()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pair(device, **settings):
    """Two scorers of equal models, the second one sharded."""
    model = small_model(device, **settings)
    plain, spread = CausalScorer(model), CausalScorer(copy.deepcopy(model))
    shard(spread, spread.model, device=device)
    assert all(isinstance(p, DTensor) for p in spread.model.parameters())
    return plain, spread


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [GRPOLoss, SFTLoss])
def test_a_sharded_model_has_the_loss_and_gradients_of_the_whole_one(device, rank, kind, tied):
    rows, results = full_rows(), []
    for scorer in pair(device, tie_word_embeddings=tied):
        output = kind(scorer)(rows)
        output.total_loss().backward()
        grads = {name: whole(p.grad) for name, p in scorer.model.named_parameters()}
        results.append((output.total_loss(), grads))
    (expected, expected_grads), (got, grads) = results
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert_all_near(grads, expected_grads, 1e-5)


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_an_update_of_shards_is_that_of_the_whole_model(device, rank, layout):
    rows, results = full_rows(), []
    for scorer in pair(device):
        # A sharded model cannot be tried out, so it is padded unless it was tried out before.
        scorer.layout = layout
        before = {n: whole(p).detach().clone() for n, p in scorer.model.named_parameters()}
        optimizer = make_optimizer(scorer.parameters(), name="AdamW", lr=1e-3, eps=1e-3)
        metrics = optimize(GRPOLoss(scorer), [rows], optimizer, max_norm=1.0, budget=12)
        moved = {n: whole(p).detach() - before[n] for n, p in scorer.model.named_parameters()}
        results.append((metrics, moved))
    (expected, expected_moved), (metrics, moved) = results
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_all_near(moved, expected_moved, 1e-3)


def test_autocast_over_shards_gives_gradients_in_float32(device, rank):
    rows, results = full_rows(), []
    for scorer in pair(device):
        with torch.autocast(device.type, torch.bfloat16):
            output = GRPOLoss(scorer)(rows)
        output.total_loss().backward()
        grads = [whole(p.grad) for p in scorer.model.parameters()]
        assert all(g.dtype is torch.float32 for g in grads)
        results.append(torch.cat([g.flatten() for g in grads]))
    assert distance(results[1], results[0]) < 1e-2


@pytest.mark.parametrize("gathers", ["layer", "model"])
def test_a_gathered_model_samples_and_scores_as_the_whole_one(device, rank, gathers):
    plain = TransformersBackend(small_model(device).requires_grad_(False))
    spread = TransformersBackend(copy.deepcopy(plain.model))
    GatheredModel(spread.scorer, spread.model, gathers=gathers)
    prompts = [torch.arange(3, 3 + n) for n in (9, 4)]
    select = [torch.arange(len(ids)) > 0 for ids in prompts]
    greedy = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    for _ in range(2):  # what a CUDA graph has recorded is recorded anew where ranks have met
        answers = [
            [c.token_ids.tolist() for [c] in each.generate(prompts, greedy)]
            for each in (plain, spread)
        ]
        assert answers[0] == answers[1]
        scores = [each.token_scores(prompts, select).log_probs for each in (plain, spread)]
        torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=1e-5)
        ALONE.barrier()
    weight = spread.model.model.layers[0].mlp.up_proj.weight
    assert weight.untyped_storage().nbytes() < weight.nbytes
