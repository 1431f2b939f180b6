"""Small models on a device, and their plain twins: each row alone, and all of its logits."""

from __future__ import annotations

import copy

import torch
from models_helper import make_tiny_model


def small_model(device, dtype=torch.float32, *, lora=None, **settings):
    """The tiny Qwen2 with weights that bfloat16 can follow, in eval mode.

    Args:
        lora: target modules of an adapter that is not zero; none by default.
    """
    model = make_tiny_model(**{"initializer_range": 0.05, **settings})
    if lora is not None:
        import peft

        config = peft.LoraConfig(r=4, target_modules=lora, init_lora_weights=False)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = peft.get_peft_model(model, config).eval()
    return model.to(device, dtype)


def in_float64(model):
    """A copy whose weights have the same values."""
    return copy.deepcopy(model).double()


def plain_scores(model, sequences, select, *, temperature=None):
    """Log-probs and entropies of the selected tokens: each row alone through the model's logits."""
    device = next(model.parameters()).device
    log_probs, entropies = [], []
    for row, (ids, mask) in enumerate(zip(sequences, select, strict=True)):
        if not bool(mask.any()):
            continue
        ids, mask = ids.to(device), mask.to(device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][mask[1:]]
        logits = logits if logits.dtype is torch.float64 else logits.float()
        if temperature is not None:
            logits = logits / float(temperature[row])
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, ids[1:][mask[1:], None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model, log_probs, entropies=None):
    """Gradients of all parameters that train, of a weighted sum; by name."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1.0, 1.0, len(log_probs)).to(log_probs)
    total = (log_probs * weights).sum()
    if entropies is not None:
        total = total + 0.1 * entropies.sum()
    total.backward()
    return {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def expected(model, rows, *, autocast=False, **settings):
    """Scores and gradients of the plain twin, in the model's type and in float64."""
    results = []
    for twin in (copy.deepcopy(model), in_float64(model)):
        device = next(twin.parameters()).device
        twin.config._attn_implementation = "sdpa"
        low = autocast and twin.dtype is not torch.float64
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            scores = plain_scores(twin, *rows, **settings)
        results.append((scores, gradients(twin, *scores)))
    return results
