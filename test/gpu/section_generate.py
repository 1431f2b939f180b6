"""Section `generate`: tokens a second of sampling, against transformers and the memory's bandwidth.

64 prompts of about 128 tokens and 512 new ones each, at the shape of Qwen2.5-0.5B with random
weights. No side may end a row early, so all make the same number of tokens.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from results import Section
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen2Config,
)

from torchrl_llm.modules import SamplingParams, TransformersBackend

SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
BLOCK = 256


class Generation:
    """The work that all sides do.

    Args:
        run: the section.
    """

    def __init__(self, run: Section) -> None:
        self.run = run
        self.shape = TINY if run.tiny else SHAPE
        self.num_rows, self.num_new, typical = (4, 24, 12) if run.tiny else (64, 512, 128)
        lengths = torch.randint(typical * 3 // 4, typical * 5 // 4 + 1, (self.num_rows,)).tolist()
        self.prompts = [torch.randint(10, self.shape["vocab_size"], (n,)) for n in lengths]
        self.model = self.make_model(torch.bfloat16)
        self.speeds: dict[str, float] = {}
        run.fact("rows", self.num_rows)
        run.fact("new tokens a row", self.num_new)
        run.fact("prompt tokens", sum(lengths))

    def make_model(self, dtype: torch.dtype) -> Any:
        """A model with random weights, made on the device."""
        config = Qwen2Config(
            **self.shape, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0
        )
        with self.run.device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        return model.eval().requires_grad_(False)

    def side(self, name: str, work: Callable[[int], int], num_new: int) -> None:
        """Measure one side and write its figures; what fails costs only this side.

        Args:
            name: of the side.
            work: makes this many tokens a row, and returns how many it made in all.
            num_new: tokens a row.
        """
        try:
            work(4)
            made: list[int] = []
            seconds, peak = self.run.measure(
                lambda: made.append(work(num_new)), repeats=1, warmup=0
            )
            if made[-1] != self.num_rows * num_new:
                raise RuntimeError(f"{made[-1]} tokens instead of {self.num_rows * num_new}")
            self.speeds[name] = made[-1] / seconds
            self.run.add(f"{name}, tokens a second", self.speeds[name], "tokens/s")
            self.run.add(f"{name}, seconds of the call", seconds, "s")
            self.run.add(f"{name}, peak memory above the model", peak, "bytes")
        except Exception as error:
            self.run.fact(name, f"failed: {type(error).__name__}: {error}"[:500])
        self.run.free()

    def compare(self, name: str, with_: str, at_least: float) -> None:
        """Write the ratio of two sides' speeds, where both were measured."""
        if name in self.speeds and with_ in self.speeds:
            ratio = self.speeds[name] / self.speeds[with_]
            self.run.aim(f"{name} / {with_}", ratio, "ratio", at_least=at_least)


def ours(generation: Generation, decode: str) -> Callable[[int], int]:
    """Our backend."""
    backend = TransformersBackend(generation.model, eos_token_ids=(2,), decode=decode)

    def work(num_new: int) -> int:
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=1)
        groups = backend.generate(generation.prompts, params)
        if decode == "graph" and generation.run.device.type == "cuda":
            recorded = backend._decoders._can_record
            generation.run.fact("ours, a CUDA graph", recorded or "failed, see the log")
        return sum(len(group[0].token_ids) for group in groups)

    return work


def transformers_generate(generation: Generation) -> Callable[[int], int]:
    """``generate`` with its defaults for speed: dynamic cache, no scores, no end to look for."""
    longest = max(len(p) for p in generation.prompts)
    ids = torch.zeros(generation.num_rows, longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(generation.prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    ids, mask = ids.to(generation.run.device), mask.to(generation.run.device)

    def work(num_new: int) -> int:
        with torch.no_grad():
            made = generation.model.generate(
                ids, attention_mask=mask, generation_config=sampling(num_new)
            )
        return made[:, longest:].numel()

    return work


def sampling(num_new: int) -> GenerationConfig:
    """Plain sampling of exactly this many tokens."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
    )


def continuous_batching(generation: Generation, graphs: bool | None) -> Callable[[int], int]:
    """``generate_batch`` with room for all rows at once; ``graphs=None`` is its own choice."""
    longest = max(len(p) for p in generation.prompts)
    inputs = [prompt.tolist() for prompt in generation.prompts]
    per_row = math.ceil((longest + generation.num_new) / BLOCK) + 1

    def work(num_new: int) -> int:
        config = ContinuousBatchingConfig(
            block_size=BLOCK,
            num_blocks=generation.num_rows * per_row,
            max_batch_tokens=4096,
            max_requests_per_batch=generation.num_rows,
            allow_block_sharing=False,
            use_cuda_graph=graphs,
        )
        model = generation.model
        # Said aloud, or it looks for flash attention on the network.
        model.set_attn_implementation("paged|sdpa")
        try:
            with torch.no_grad():
                results = model.generate_batch(
                    inputs,
                    generation_config=sampling(num_new),
                    continuous_batching_config=config,
                )
        finally:
            model.set_attn_implementation("sdpa")
        return sum(len(result.generated_tokens) for result in results.values())

    return work


def bound(generation: Generation) -> None:
    """Tokens a second if a step did nothing but read the weights and the filled cache once."""
    run, model = generation.run, generation.model
    source = torch.empty(2**20 if run.tiny else 2**30, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    seconds, _ = run.measure(lambda: target.copy_(source), repeats=5)
    bandwidth = 2 * source.nbytes / seconds
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    prompts = sum(len(p) for p in generation.prompts)
    cache = per_token * (prompts + generation.num_rows * generation.num_new / 2)
    weights = sum(p.nbytes for p in model.parameters())
    speed = generation.num_rows * bandwidth / (weights + cache)
    run.add("copy on the device, read and written", bandwidth / 1e12, "TB/s")
    run.add("bound of memory bandwidth, tokens a second", speed, "tokens/s")
    if "ours" in generation.speeds:
        run.add("ours / bound of memory bandwidth", generation.speeds["ours"] / speed, "ratio")


def recorded_log_probs(generation: Generation) -> None:
    """Sampled log-probs against those of scoring, in bfloat16."""
    run = generation.run
    backend = TransformersBackend(generation.model, eos_token_ids=(2,), decode="graph")
    prompts = generation.prompts[: 2 if run.tiny else 16]
    num_new = 16 if run.tiny else 128
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=2)
    completions = [group[0] for group in backend.generate(prompts, params)]
    rows = [torch.cat([p, c.token_ids]) for p, c in zip(prompts, completions, strict=True)]
    select = [torch.arange(len(row)) >= len(row) - num_new for row in rows]
    with torch.no_grad():
        scores = backend.token_scores(rows, select).log_probs.cpu()
    apart = (scores - torch.cat([c.log_probs for c in completions])).abs()
    run.add("sampled log-probs against scores in bfloat16, largest", float(apart.max()), "nats")
    run.add("sampled log-probs against scores in bfloat16, mean", float(apart.mean()), "nats")


def same_tokens(generation: Generation) -> None:
    """Greedy tokens and their log-probs of the graph and of the plain decoder, in float32."""
    run = generation.run
    model = generation.make_model(torch.float32)
    prompts = generation.prompts[: 2 if run.tiny else 16]
    params = SamplingParams(max_new_tokens=16 if run.tiny else 64, temperature=0.0, ignore_eos=True)
    graph, plain = (
        TransformersBackend(model, eos_token_ids=(2,), decode=decode).generate(prompts, params)
        for decode in ("graph", "plain")
    )
    different = rows = 0
    apart = [0.0]
    for [left], [right] in zip(graph, plain, strict=True):
        differs = left.token_ids != right.token_ids
        different += int(differs.sum())
        rows += int(differs.any())
        # What follows another token is another text.
        same = int(differs.int().argmax()) if differs.any() else len(differs)
        apart.append(float((left.log_probs - right.log_probs)[:same].abs().max()) if same else 0.0)
    run.fact("graph and plain, greedy in float32: rows with other tokens", rows)
    run.fact("graph and plain, greedy in float32: other tokens", different)
    run.add("graph and plain, log-probs in float32, largest", max(apart), "nats")


def main(run: Section) -> None:
    """All sides, the most valuable first."""
    generation = Generation(run)
    generation.side("ours", ours(generation, "graph"), generation.num_new)
    generation.side("generate", transformers_generate(generation), generation.num_new)
    generation.compare("ours", "generate", at_least=2.0)
    checks = {"same tokens": same_tokens, "log-probs": recorded_log_probs, "bound": bound}
    for name, check in checks.items():
        try:
            check(generation)
        except Exception as error:
            run.fact(name, f"failed: {type(error).__name__}: {error}"[:500])
        run.free()
    # Seconds that are to be left, and new tokens; fewer tokens are in favour of the other side.
    sides = {
        "generate_batch": (25, 256, lambda: continuous_batching(generation, None)),
        "generate_batch with graphs": (18, 128, lambda: continuous_batching(generation, True)),
        "ours, plain": (12, 128, lambda: ours(generation, "plain")),
    }
    for name, (needed, num_new, make) in sides.items():
        if run.device.type == "cpu" and name.endswith("graphs"):
            run.fact(name, "needs a GPU")
        elif not run.tiny and run.seconds_left < needed:
            run.fact(name, f"left out: {run.seconds_left:.0f} s were left")
        else:
            num_new = min(num_new, generation.num_new)
            run.fact(f"{name}, new tokens a row", num_new)
            generation.side(name, make(), num_new)
            generation.compare("ours", name, at_least=1.0)


if __name__ == "__main__":
    main(Section.from_command_line())
