"""Models and rows of the sections that measure a loss: Qwen2.5's shapes with random weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from results import Section
from torch import Tensor, nn

# For conftest.py, and for the package where it is not installed.
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

VOCABULARY = 151_936


class Shape(NamedTuple):
    """Sizes of a Qwen2 model with a tied head."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = VOCABULARY

    @property
    def body_weights(self) -> int:
        """Weights of the matrix products of the layers."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * head_dim)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


QWEN_05B = Shape("0.5B", 896, 24, 14, 2, 4864)
QWEN_15B = Shape("1.5B", 1536, 28, 12, 2, 8960)
TINY = Shape("tiny", 64, 2, 4, 2, 128, 1000)


def make_model(shape: Shape, run: Section) -> nn.Module:
    """A model in bfloat16 (float32 on a CPU) whose gradients are there, so that none is counted."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(run.device):
        model = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16 if run.device.type == "cuda" else torch.float32).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


class Row(NamedTuple):
    """One answer: int64 ids on the CPU, and its advantage."""

    prompt: Tensor
    response: Tensor
    advantage: float

    @property
    def ids(self) -> Tensor:
        """Prompt and response."""
        return torch.cat([self.prompt, self.response])


def make_rows(shape: Shape, *, groups: int = 8, samples: int = 8, tiny: bool = False) -> list[Row]:
    """Rows of groups that share a prompt: prompts of 64 to 192 tokens, rows of at most 2,048.

    Responses are log-normal with a median of 320 tokens and a deviation of 0.7 of the logarithm.
    """
    draw = torch.Generator().manual_seed(0)
    shortest, longest, most, median = (4, 9, 64, 12) if tiny else (64, 193, 2048, 320)
    rows = []
    for _ in range(groups):
        size = int(torch.randint(shortest, longest, (), generator=draw))
        prompt = torch.randint(3, shape.vocabulary, (size,), generator=draw)
        for sample in range(samples):
            length = median * math.exp(0.7 * float(torch.randn((), generator=draw)))
            length = max(2, min(round(length), most - size))
            response = torch.randint(3, shape.vocabulary, (length,), generator=draw)
            rows.append(Row(prompt, response, 1.0 - 2.0 * (sample % 2)))
    return rows


def to_tensordicts(rows: list[Row]) -> Any:
    """A lazy stack that our losses and TorchRL's read."""
    from tensordict import TensorDict, lazy_stack

    parts = []
    for number, row in enumerate(rows):
        size = len(row.ids)
        ones = torch.ones(size, dtype=torch.bool)
        parts.append(
            TensorDict(
                tokens=TensorDict(full=row.ids, prompt=row.prompt, response=row.response),
                log_probs=TensorDict(full=torch.full((size,), -12.0)),
                masks=TensorDict(all_attention_mask=ones, all_assistant_mask=ones),
                advantage=torch.tensor([[row.advantage]]),
                group_id=torch.tensor(number // 8),
            )
        )
    return lazy_stack(parts)


def step_flops(shape: Shape, rows: list[Row]) -> float:
    """Operations of one forward and backward of rows, padding and recomputation left out.

    Six a weight and token, the head's at response tokens only; attention compares a token with all
    before it, twelve operations a channel and pair.
    """
    lengths = [len(row.ids) for row in rows]
    responses = sum(len(row.response) for row in rows)
    pairs = sum(length**2 / 2 for length in lengths)
    products = shape.body_weights * sum(lengths) + shape.hidden * shape.vocabulary * responses
    return 6.0 * products + 12.0 * shape.layers * shape.hidden * pairs


def matrix_peak(run: Section) -> float:
    """Operations a second of a square product: bfloat16 with 8,192 rows; small on a CPU."""
    size, dtype = (8192, torch.bfloat16) if run.device.type == "cuda" else (256, torch.float32)
    left = torch.randn(size, size, dtype=dtype, device=run.device)
    result = torch.empty_like(left)
    seconds, _ = run.measure(lambda: torch.mm(left, left, out=result), repeats=10, warmup=3)
    return 2.0 * size**3 / seconds


@contextmanager
def side(run: Section, name: str) -> Iterator[None]:
    """A side of a comparison: what it raises is written down and costs only itself."""
    try:
        yield
    except ImportError as error:
        run.fact(name, f"left out: {error}")
    except Exception as error:
        run.fact(name, f"failed: {type(error).__name__}: {str(error)[:300]}")
    finally:
        run.free()


def largest_that_fits(
    run: Section,
    make: Callable[[int], Callable[[], object]],
    rows: int,
    clear: Callable[[], object],
) -> tuple[Callable[[], object], int]:
    """The work with as many rows a call as the device holds, at most ``rows``.

    Args:
        run: the section.
        make: gives the work for a number of rows a call.
        rows: where to begin; halved while memory does not suffice.
        clear: called after a failure.
    """
    while True:
        work = make(rows)
        try:
            work()
            run.synchronize()
            return work, rows
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        del work
        clear()
        run.free()
        rows //= 2
