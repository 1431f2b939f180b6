"""Losses, updates and sampling on the pretended device: ``test_waits.py`` runs this file.

Its arguments are names of losses. Prints a JSON object: of each piece of work its result, that of
the CPU, and what waited.
"""

from __future__ import annotations

import json
import os
import sys

import pretend_device
import torch
from models_helper import make_tiny_model as _make_tiny_model
from models_helper import make_tokenizer as _make_tokenizer
from objectives.every_loss import full_rows, make_actor, make_loss
from pretend_device import OnDevice, move, waits

from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.modules.backends import SamplingParams, TransformersBackend
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.trainers import make_optimizer, optimize

PROMPTS = [torch.tensor(ids) for ids in ([5, 9, 23, 8], [11], [4, 4, 17])]


def of_loss(name, layout):
    rows, results = full_rows(), []
    for place in (lambda actor: actor, move):
        actor = place(make_actor(_make_tiny_model(initializer_range=0.05)))
        actor.layout = layout
        loss = make_loss(name, actor)
        # A batch that is cut is counted before.
        normalizer = loss.normalizer(rows)
        waits.clear()
        output = loss(rows, normalizer=normalizer).total_loss()
        output.backward()
        found = dict(waits)
        grad = actor.model.get_input_embeddings().weight.grad
        results.append([output.item(), grad.norm().item()])
    return {"cpu": results[0], "device": results[1], "waits": found}


def of_update():
    rows, results = full_rows(), []
    for place in (lambda actor: actor, move):
        actor = place(make_actor(_make_tiny_model(initializer_range=0.05)))
        optimizer = make_optimizer(actor.parameters(), name="SGD", lr=0.1, fused=False)
        metrics = optimize(GRPOLoss(actor), [rows], optimizer, max_norm=1.0, budget=12)
        weight = actor.model.get_input_embeddings().weight.detach()
        results.append([metrics["train/grad_norm"], weight.norm().item()])
    return {"cpu": results[0], "device": results[1], "waits": {}}


def of_divergence():
    actor = make_actor(_make_tiny_model())
    torch.nn.init.constant_(actor.model.model.norm.weight, torch.nan)
    optimizer = make_optimizer(move(actor).parameters(), name="SGD", lr=0.1, fused=False)
    optimize(GRPOLoss(actor), [full_rows()], optimizer, budget=12)


def of_sampling(**settings):
    """Greedy, so that both devices take the same tokens."""
    params = SamplingParams(max_new_tokens=9, temperature=0.0, **settings)
    results = []
    for place in (lambda model: model, move):
        model = place(_make_tiny_model())
        backend = TransformersBackend(model, tokenizer=_make_tokenizer(), eos_token_ids=(2,))
        answers = [one for [one] in backend.generate(PROMPTS, params)]
        results.append([id_ for one in answers for id_ in one.token_ids.tolist()])
    return {"cpu": results[0], "device": results[1], "waits": {}}


def of_drawing(**settings):
    """Draws differ, and so does what is scored; the scores repeat what was recorded."""
    model = move(_make_tiny_model())
    backend = TransformersBackend(model, eos_token_ids=(2,))
    params = SamplingParams(max_new_tokens=9, record_support=True, **settings)
    answers = [one for [one] in backend.generate(PROMPTS, params)]
    rows = [torch.cat([p, a.token_ids]) for p, a in zip(PROMPTS, answers, strict=True)]
    select = [torch.arange(len(r)) >= len(p) for r, p in zip(rows, PROMPTS, strict=True)]
    support = type(answers[0].support).join([a.support for a in answers])
    temperature = torch.full((len(rows),), params.temperature)
    extras = ScoreExtras(support=support, greedy=True)
    scores = backend.token_scores(rows, select, temperature=temperature, extras=extras)
    recorded = torch.cat([a.log_probs for a in answers])
    return {"cpu": recorded.tolist(), "device": scores.log_probs.tolist(), "waits": {}}


def main():
    torch.set_num_threads(1)
    pretend_device.install()
    native = {"min_new_tokens": 3, "suppress_tokens": [3], "no_repeat_ngram_size": 2}
    native |= {"begin_suppress_tokens": [7], "typical_p": 0.9, "eta_cutoff": 1e-4}
    work = {f"{name} {layout}": (of_loss, (name, layout), {}) for name in sys.argv[1:]
            for layout in ("padded", "shared")}  # fmt: skip
    work["update"] = of_update, (), {}
    work["diverged"] = of_divergence, (), {}
    work["greedy"] = of_sampling, (), {}
    work["native"] = of_sampling, (), {"native": native}
    work["penalty"] = of_sampling, (), {"repetition_penalty": 1.3, "stop": ("e",)}
    work["draws"] = of_drawing, (), {"temperature": 0.7}
    work["cut draws"] = of_drawing, (), {"top_k": 9, "top_p": 0.9, "temperature": 1.2}
    found = {}
    with OnDevice():
        for name, (function, args, settings) in work.items():
            try:
                found[name] = function(*args, **settings)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch's end aborts where such a device was made
