"""What one rank of a gathered model does, in a module that a process of its own can import."""

import signal
from contextlib import suppress

import torch
import torch.distributed as dist
from models_helper import make_tiny_model

from torchrl_llm.modules import TransformersBackend, ValueHead
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.trainers import Ranks, gathered_model
from torchrl_llm.trainers.gathered_model import GatheredModel, whole_weights
from torchrl_llm.trainers.progress import Cut, StopRequest
from torchrl_llm.trainers.ranks import ALONE, leave_group

ROWS = [torch.arange(3, 3 + n) for n in (9, 4, 6)]
EVERY = [torch.arange(len(row)) > 0 for row in ROWS]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


def make_backend():
    torch.manual_seed(7)
    model = make_tiny_model(initializer_range=0.05).requires_grad_(False)
    return TransformersBackend(model, value_head=ValueHead.for_model(model))


def used(backend, rows):
    """What a rank samples and scores."""
    answers = [c.token_ids.tolist() for [c] in backend.generate(ROWS[:rows], GREEDY)]
    scores = [
        backend.token_scores([ids], [on]).log_probs
        for ids, on in zip(ROWS[:rows], EVERY[:rows], strict=True)
    ]
    return answers, [each.tolist() for each in scores]


def rank_uses(rank, folder, gathers):
    """Each rank makes another number of calls: what it found, and what was held between them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks = Ranks(rank=rank, world=2)
    plain, backend = make_backend(), make_backend()
    expected = {rows: used(plain, rows) for rows in (1, 2, 3)}
    weights, own = ([b.model.model.layers[0].mlp.up_proj.weight] for b in (backend, plain))
    weights.append(backend.model.get_input_embeddings().weight)
    GatheredModel(backend.scorer, backend.model, gathers=gathers)
    found = {"at first": held(*weights)}
    ALONE.barrier()  # a rank that talks to itself meets nobody
    found["results"] = used(backend, rank + 1) == expected[rank + 1]
    found["then"] = held(*weights)
    ranks.barrier()
    found["where ranks meet"] = held(*weights)
    if rank == 1:  # the other one waits
        with whole_weights(backend.scorer):
            found["whole"] = held(*weights), torch.equal(weights[0], own[0])
    found["after"] = (
        held(*weights),
        bool(weights[0].isnan().all()),
        weights[0].shape == own[0].shape,
    )
    ranks.barrier()
    with StopRequest() as stop, suppress(Cut), stop.at_once():
        if rank == 0:  # it is told to stop in the middle of a layer that the other one waits for
            gathered_model.whole_tensor = interrupted(gathered_model.whole_tensor)
        used(backend, 3)
        found["cut"] = False
    found.setdefault("cut", True)
    ranks.barrier()
    found["again"] = used(backend, 3 - rank) == expected[3 - rank]
    leave_group()
    torch.save(found, f"{folder}/{rank}.pt")


def interrupted(gather):
    """The same function, which raises a signal the third time that it is called."""
    calls = []

    def gather_again(value):
        calls.append(value)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return gather(value)

    return gather_again


def held(*weights):
    """Whether each is in memory: of a layer, and of the embedding."""
    return [weight.untyped_storage().nbytes() >= weight.nbytes for weight in weights]
