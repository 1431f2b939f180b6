"""Tiny causal models of many families, built with plain transformers; see ``test_model_zoo.py``."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
import yaml

_ZOO = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FAMILIES = _ZOO["families"]
_SIZES = _ZOO["shared"]["sizes"]
VOCAB = _SIZES["vocab_size"]


def build(name, *, seed=0, **settings):
    """The model of a family, random weights, in eval mode."""
    class_name, own, *alone = FAMILIES[name]
    own = {**({} if alone else _SIZES), **own, **settings}
    torch.manual_seed(seed)
    config = getattr(transformers, class_name)(**own)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are zeros and ones otherwise
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
