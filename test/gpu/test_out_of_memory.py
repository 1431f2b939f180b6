"""A device that is really full: the run ends with the keys to lower."""

from __future__ import annotations

import pytest
import torch

from torchrl_llm import GRPO
from torchrl_llm.errors import ResourceError
from torchrl_llm.modules.backends.token_scorer import CausalScorer

pytestmark = pytest.mark.gpu
SMALL = {
    "train": {"max_steps": 1, "prompts_per_batch": 4},
    "env.repeats": 4,
    "eval": {"num_prompts": 0},
    "logging": {"progress": False, "samples": None},
}


@pytest.fixture
def fills(device, monkeypatch):
    """Makes a call of a class ask for more memory than any device has."""

    def fill(owner, name):
        method = getattr(owner, name)

        def hungry(self, *args, **kwargs):
            if device.type == "cpu":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4096.00 GiB.")
            torch.empty(1 << 42, dtype=torch.uint8, device=device)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, hungry)

    return fill


@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("train", "Lower train.micro_token_budget (now 16384)"),
        ("sample", "Lower train.prompts_per_batch (now 4), env.repeats (now 4)"),
    ],
)
def test_a_run_on_a_full_device_says_which_keys_to_lower(device, tmp_path, fills, part, keys):
    from torchrl_llm.modules import TransformersBackend

    if part == "train":
        fills(CausalScorer, "forward")
    else:
        fills(TransformersBackend, "_sample")
    options = {**SMALL, "train": {**SMALL["train"], "device": str(device)}}
    with pytest.raises(ResourceError) as raised:
        GRPO(folder=tmp_path, **options).train()
    said = str(raised.value)
    assert said.startswith("CUDA out of memory. Tried to allocate 4096.00 GiB, in the part")
    assert keys in said
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_share_of_the_card_that_is_too_small_for_the_forward_is_told_too(device, tmp_path):
    """The limit of the process, which leaves the model its memory and training none."""
    if device.type == "cpu":
        pytest.skip("a CPU has no share of memory that torch limits")
    settings = {**SMALL["train"], "device": "cuda", "prompts_per_batch": 64}
    recipe = GRPO(folder=tmp_path, **{**SMALL, "train": settings, "env.repeats": 64})
    forward = CausalScorer.forward
    whole = torch.cuda.get_device_properties(0).total_memory

    def limited(self, *args, **kwargs):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole)
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalScorer, "forward", limited)
        try:
            with pytest.raises(ResourceError, match=r"Lower train\.micro_token_budget"):
                recipe.train()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
