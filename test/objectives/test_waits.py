"""No loss makes the host wait for a GPU: a model on the meta device stands for one on a GPU.

A meta tensor has no values, so whatever would read one (``item``, ``bool``, a boolean index) fails.
Copies of the rows' columns must not wait either.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.modules.backends import attention
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    CISPOLoss,
    Correction,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    SFTLoss,
)


class WaitingCopies(TorchDispatchMode):
    """Copies from the CPU to the device for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kinds = [x.device.type for x in args if isinstance(x, torch.Tensor)]
        name = func.overloadpacket
        made = name is torch.ops.aten._to_copy and kinds == ["cpu"]
        made = made and torch.device(kwargs.get("device") or "cpu").type == "meta"
        filled = name is torch.ops.aten.copy_ and kinds == ["meta", "cpu"]
        waits = not (kwargs.get("non_blocking") or (filled and args[2:] and args[2]))
        if (made or filled) and waits:
            self.found.append(func)
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def model():
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


@pytest.fixture
def on_meta(monkeypatch):
    """A model on the meta device is packed without trying it out; autocast does not know meta."""
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(attention, "why_not_packed", lambda model: None)
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda kind=None: kind != "meta" and enabled(kind or "cpu")
    )


def make_rows():
    rows = []
    for number in range(6):
        size, group = 8 + 3 * number, number // 3
        ids = torch.randint(3, 300, (size,))
        ids[:4] = torch.arange(4) + group
        column = torch.full((size,), -6.0)
        rows.append(
            TensorDict(
                tokens=TensorDict(full=ids, prompt=ids[:4], temperature=torch.tensor(0.7)),
                log_probs=TensorDict(full=column),
                prox_log_probs=TensorDict(full=column),
                next=TensorDict(ref_log_probs=TensorDict(full=column)),
                masks=TensorDict(all_assistant_mask=torch.arange(size) >= 4),
                advantage=torch.tensor([[1.0 - number % 2]]),
                group_id=torch.tensor(group),
            )
        )
    return lazy_rows(rows)


LOSSES = {
    "GRPO": GRPOLoss,
    "to the reference": lambda actor: GRPOLoss(actor, kl_to_ref_coeff=0.1, entropy_coeff=0.1),
    "prompt mean": lambda actor: GRPOLoss(actor, aggregation="prompt_mean"),
    "sequence mean": lambda actor: GRPOLoss(actor, aggregation="sequence_mean"),
    "correction": lambda actor: GRPOLoss(actor, correction=Correction()),
    "GSPO": GSPOLoss,
    "GMPO": GMPOLoss,
    "CISPO": CISPOLoss,
    "SFT": SFTLoss,
}


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward_do_not_wait_for_the_device(model, on_meta, name, layout):
    # Tiles of the head smaller than all logits.
    loss_module = LOSSES[name](CausalScorer(model, layout=layout, chunk_size=2000))
    rows = make_rows()
    with WaitingCopies() as copies:
        loss_module(rows).total_loss().backward()
    assert copies.found == []


def test_a_copy_that_waits_is_found():
    with WaitingCopies() as copies:
        torch.ones(2).to("meta", non_blocking=True)
        assert copies.found == []
        torch.ones(2).to("meta")
    assert len(copies.found) == 1
