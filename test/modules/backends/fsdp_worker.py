"""One of two ranks that shard a scorer, as test_token_scorer.py runs them.

Both ranks hold the same rows, so that the mean of their gradients is the gradient of one process.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from models_helper import make_tiny_model as _make_tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.modules import ValueHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer

IDS = [torch.tensor([3, 9, 4, 4, 17, 6]), torch.tensor([8, 2, 30])]
SELECT = [torch.tensor([0, 1, 0, 1, 1, 1]).bool(), torch.tensor([0, 0, 1]).bool()]


def make_scorer(**settings) -> CausalScorer:
    model = _make_tiny_model(**settings)
    head = ValueHead.for_model(model)
    torch.nn.init.ones_(head.linear.weight)
    return CausalScorer(model, chunk_size=64, value_head=head)


def run(scorer: CausalScorer) -> torch.Tensor:
    teacher = CausalScorer(_make_tiny_model(seed=1))
    with torch.no_grad():
        states = teacher.token_scores(IDS, SELECT, extras=ScoreExtras(states=True)).states
    extras = ScoreExtras(values=True, teachers=(states,))
    scores = scorer.token_scores(IDS, SELECT, entropy=True, extras=extras)
    terms = (scores.log_probs, 0.1 * scores.entropy, 0.1 * scores.values, scores.divergence)
    torch.cat(terms).sum().backward()
    return torch.cat(terms).detach()


def relative_errors(tied: bool) -> list[float]:
    single = make_scorer(tie_word_embeddings=tied)
    expected = run(single)
    scorer = make_scorer(tie_word_embeddings=tied)
    mesh = init_device_mesh("cpu", (2,))
    for layer in scorer.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(scorer, mesh=mesh)
    errors = [((run(scorer) - expected).abs().max() / expected.abs().max()).item()]
    for sharded, whole in zip(scorer.parameters(), single.parameters(), strict=True):
        difference = sharded.grad.full_tensor() - whole.grad
        errors.append((difference.abs().max() / whole.grad.abs().max()).item())
    return errors


def main() -> None:
    dist.init_process_group("gloo")
    try:
        errors = [*relative_errors(tied=True), *relative_errors(tied=False)]
        dist.barrier()  # gloo may abort where the other rank has left already
    finally:
        dist.destroy_process_group()
    sys.stdout.write(f"largest relative error: {max(errors)}\n")


if __name__ == "__main__":
    main()
