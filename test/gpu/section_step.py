"""Loss and backward of one batch at 0.5B and 1.5B: 64 rows in 8 groups, bfloat16, random weights.

Sides: ours (``GRPOLoss`` over ``CausalScorer``, layout ``auto``, micro-batches by tokens as the
recipe cuts them), a bare packed loop, the loss of TRL's ``GRPOTrainer`` and TorchRL's ``GRPOLoss``.
All see the same rows and add their gradients up; none keeps activations back. TRL gets eight padded
rows a call, its default, in a shuffled order as its trainer hands them on; TorchRL as many as fit.
Memory is what a step adds to model and gradients.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from results import Section
from shapes import (
    QWEN_05B,
    QWEN_15B,
    TINY,
    Row,
    Shape,
    largest_that_fits,
    make_model,
    make_rows,
    matrix_peak,
    side,
    step_flops,
    to_tensordicts,
)
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_llm.functional import AttentionBlock
from torchrl_llm.modules.backends import attention
from torchrl_llm.modules.backends.layouts import RowStream
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import GRPOLoss
from torchrl_llm.trainers import micro_batches

BUDGET = 8192  # tokens of a micro-batch, of ours and of the bare loop
Work = Callable[[], object]


def our_step(model: nn.Module, rows: list[Row], budget: int, layout: str = "auto") -> Work:
    """Forward and backward of all micro-batches, as ``optimize`` does them."""
    loss_module = GRPOLoss(CausalScorer(model, layout=layout))
    batch = to_tensordicts(rows)

    def step() -> None:
        normalizer = loss_module.normalizer(batch)
        for piece in micro_batches(batch, budget=budget, layout=layout):
            loss_module(piece, normalizer=normalizer).total_loss().backward()

    return step


def by_tokens(rows: list[Row], budget: int) -> list[list[Row]]:
    """Rows in the order they come in, cut where the next one would pass the budget."""
    pieces, held = [], budget + 1
    for row in rows:
        if held + len(row.ids) > budget:
            pieces.append([])
            held = 0
        pieces[-1].append(row)
        held += len(row.ids)
    return pieces


def row_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention of packed rows: torch's variable-length kernel, or row by row on a CPU."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    lengths = kwargs["lengths"]
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        parts = [x[0].transpose(0, 1) for x in (query, key, value)]
        ends, most = kwargs["ends"], max(lengths)
        out = varlen_attn(*parts, ends, ends, most, most, scale=scaling, window_size=(-1, 0))
        return out[None], None
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    out = [F.scaled_dot_product_attention(*p, is_causal=True, scale=scaling) for p in parts]
    return torch.cat(out, 2).transpose(1, 2), None


def bare_step(model: nn.Module, rows: list[Row], budget: int) -> Work:
    """What a careful person writes for one model: rows packed, logits of 2,048 tokens at once."""
    from transformers import AttentionInterface

    AttentionInterface.register("rows", row_attention)
    device, total = next(model.parameters()).device, sum(len(row.response) for row in rows)

    def step() -> None:
        for piece in by_tokens(rows, budget):
            lengths = [len(row.ids) for row in piece]
            ends = torch.tensor([0, *lengths]).cumsum(0)
            counts = torch.tensor([len(row.response) for row in piece])
            ids = torch.cat([row.ids for row in piece])
            positions = torch.cat([torch.arange(n) for n in lengths])
            # The state before a token predicts it.
            index = torch.cat(
                [torch.arange(e - len(r.response), e) for e, r in zip(ends[1:], piece, strict=True)]
            )
            advantage = torch.tensor([row.advantage for row in piece]).repeat_interleave(counts)
            ids, positions, index, advantage, ends = (
                x.to(device, non_blocking=True)
                for x in (ids, positions, index, advantage, ends.int())
            )
            states = model.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                lengths=lengths,
                ends=ends,
            )[0][0]
            before = states[index - 1]
            log_probs = torch.cat(
                [
                    F.linear(h, model.lm_head.weight).float().log_softmax(-1).gather(1, t[:, None])
                    for h, t in zip(before.split(2048), ids[index].split(2048), strict=True)
                ]
            )[:, 0]
            ratio = (log_probs + 12.0).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            (-gain.sum() / total).backward()

    model.set_attn_implementation("rows")
    return step


def trl_step(model: nn.Module, rows: list[Row], per_call: int, run: Section) -> Work:
    """The loss of TRL's trainer on padded rows."""
    from datasets import Dataset
    from models_helper import make_tokenizer as _make_tokenizer
    from trl import GRPOConfig, GRPOTrainer

    on_cpu = run.device.type == "cpu"
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            num_generations=8,
            use_cpu=on_cpu,
            bf16=not on_cpu,
            gradient_checkpointing=False,
            beta=0.0,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=_make_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = len(rows) // per_call
    mixed = list(rows)
    random.Random(0).shuffle(mixed)
    total = torch.tensor(float(sum(len(row.response) for row in rows)), device=run.device)

    def padded(values: list[Tensor], left: bool) -> Tensor:
        width = max(len(value) for value in values)
        sides = [(width - len(v), 0) if left else (0, width - len(v)) for v in values]
        return torch.stack([F.pad(v, s) for v, s in zip(values, sides, strict=True)])

    def inputs(piece: list[Row]) -> dict[str, Tensor]:
        prompts, responses = [row.prompt for row in piece], [row.response for row in piece]
        mask = padded([torch.ones_like(r) for r in responses], left=False)
        batch = {
            "prompt_ids": padded(prompts, left=True),
            "prompt_mask": padded([torch.ones_like(p) for p in prompts], left=True),
            "completion_ids": padded(responses, left=False),
            "completion_mask": mask,
            "advantages": torch.tensor([row.advantage for row in piece]),
            "old_per_token_logps": torch.full(mask.shape, -12.0),
        }
        batch = {name: value.to(run.device) for name, value in batch.items()}
        return batch | {"num_items_in_batch": total}

    def step() -> None:
        for start in range(0, len(mixed), per_call):
            trainer._compute_loss(model, inputs(mixed[start : start + per_call])).backward()

    return step


def torchrl_step(model: nn.Module, rows: list[Row], per_call: int, run: Section) -> Work:
    """TorchRL's loss on padded rows, rows of like length together."""
    from models_helper import make_tokenizer as _make_tokenizer
    from tensordict import lazy_stack, set_list_to_stack
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss as TorchRLLoss

    set_list_to_stack(True).set()
    policy = TransformersWrapper(
        model, tokenizer=_make_tokenizer(), input_mode="tokens", generate=False
    )
    loss_module = TorchRLLoss(policy, entropy_bonus=False)
    ordered = sorted(rows, key=lambda row: -len(row.ids))
    members = [row.to(run.device) for row in to_tensordicts(ordered).unbind(0)]

    def step() -> None:
        for start in range(0, len(members), per_call):
            piece = lazy_stack(members[start : start + per_call])
            share = len(piece) / len(members)
            (loss_module(piece).loss_objective * share).backward()

    return step


def batch_of(run: Section, shape: Shape) -> tuple[list[Row], int]:
    """Rows of the batch and tokens of a micro-batch."""
    if run.tiny:
        return make_rows(shape, groups=2, samples=4, tiny=True), 128
    return make_rows(shape), BUDGET


def gradient_norm(model: nn.Module) -> float:
    """Norm of all gradients: sides whose averages are the same agree."""
    return torch.stack([p.grad.float().norm() for p in model.parameters()]).norm().item()


def measure_shape(run: Section, shape: Shape, peak: float) -> None:
    """All sides at one size."""
    rows = make_rows(
        shape, tiny=run.tiny, groups=2 if run.tiny else 8, samples=4 if run.tiny else 8
    )
    budget = 128 if run.tiny else BUDGET
    tokens, work = sum(len(row.ids) for row in rows), step_flops(shape, rows)
    name = shape.name
    run.fact(f"{name}: rows", f"{len(rows)} rows, {tokens} tokens, longest {longest(rows)}")
    run.fact(f"{name}: micro-batches", f"{budget} tokens; no gradient checkpointing")
    model = make_model(shape, run)
    plain = model.config._attn_implementation
    results: dict[str, tuple[float, int | None]] = {}

    def measure(who: str, make: Callable[[int], Work], per_call: int) -> None:
        clear = lambda: model.zero_grad(set_to_none=False)  # noqa: E731
        with side(run, f"{name}: {who}"):
            step, fits = largest_that_fits(run, make, per_call, clear)
            if fits != per_call:
                run.fact(f"{name}: {who}, a call", f"{fits}; {per_call} did not fit into memory")
            run.fact(f"{name}: {who}, norm of the gradient", gradient_norm(model))
            seconds, added = run.measure(step, repeats=3, warmup=0)
            results[who] = seconds, added
            run.add(f"{name}, {who}: tokens/s", tokens / seconds, "tokens/s")
            run.add(f"{name}, {who}: memory added", added, "bytes")
            run.add(f"{name}, {who}: share of the matrix peak", work / seconds / peak, "ratio")
        clear()

    measure("ours", lambda size: our_step(model, rows, size), budget)
    with side(run, f"{name}: what auto chose"):
        run.fact(f"{name}: what auto chose", chosen_layouts(model, rows, budget))
    measure("bare loop", lambda size: bare_step(model, rows, size), budget)
    model.set_attn_implementation(plain)
    compare(run, name, results, "bare loop", 0.97)
    for who, make, per_call, factor in (
        ("TRL", trl_step, 8, 1.5),
        ("TorchRL", torchrl_step, 4, 4.0),
    ):
        if run.seconds_left > 8:
            measure(who, lambda size, make=make: make(model, rows, size, run), per_call)
            compare(run, name, results, who, factor)


def longest(rows: Iterable[Row]) -> int:
    """Tokens of the longest row."""
    return max(len(row.ids) for row in rows)


def compare(run: Section, name: str, results: dict, other: str, factor: float) -> None:
    """Write down how much faster ours is, and what memory it takes."""
    if "ours" not in results or other not in results:
        return
    (ours, mine), (theirs, its) = results["ours"], results[other]
    run.aim(f"{name}: ours / {other}, tokens a second", theirs / ours, "ratio", at_least=factor)
    if mine is not None and other == "TRL":
        run.aim(f"{name}: ours / TRL, memory added", mine / its, "ratio", at_most=0.5)
    elif mine is not None:
        run.add(f"{name}: ours / {other}, memory added", mine / its, "ratio")


def chosen_layouts(model: nn.Module, rows: list[Row], budget: int) -> list[str]:
    """What ``auto`` takes for each micro-batch: the layout, its blocks and its tokens."""
    chosen = []

    class Watched(CausalScorer):
        def forward(self, stream, **settings):
            shared = any(block.prefix is not None for block in stream.blocks)
            kind = "shared" if shared else "packed" if stream.one_call else "bucketed or padded"
            chosen.append(f"{kind}: {len(stream.blocks)} blocks, {len(stream.input_ids)} tokens")
            return super().forward(stream, **settings)

    loss_module = GRPOLoss(Watched(model))
    with torch.no_grad():
        for piece in micro_batches(to_tensordicts(rows), budget=budget, layout="auto"):
            loss_module(piece)
    return chosen


def measure_layouts(run: Section, shape: Shape, model: nn.Module) -> None:
    """Seconds of a step in each layout, and with the recipe's own budget."""
    rows, budget = batch_of(run, shape)
    kinds = [(layout, budget) for layout in CausalScorer(model).layouts[1:]]
    for layout, tokens in [*kinds, ("auto", 2 * budget)]:
        if run.seconds_left > 5:
            with side(run, f"layout {layout}"):
                step = our_step(model, rows, tokens, layout)
                seconds, added = run.measure(step, repeats=2, warmup=1)
                name = f"{shape.name}, layout {layout}, {tokens} tokens a micro-batch"
                run.add(f"{name}: seconds", seconds, "s")
                run.add(f"{name}: memory added", added, "bytes")


def measure_costs(run: Section, shape: Shape, model: nn.Module, bandwidth: float) -> None:
    """The four numbers of ``layouts._SECONDS``, as that file defines them.

    A block is one of several: the kernel for rows of all lengths is out of use here.
    """
    scorer, dtype = CausalScorer(model), next(model.parameters()).dtype
    has_kernel = attention.has_row_kernel(run.device, dtype, shape.hidden // shape.heads)
    run.fact("packed rows by torch's kernel for rows of all lengths", has_kernel)
    rows, width = (4, 16) if run.tiny else (64, 128)

    def seconds(*blocks: tuple[int, int]) -> float:
        size = sum(n * w for n, w in blocks)
        ids = torch.randint(3, shape.vocabulary, (size,))
        stream = RowStream(
            ids,
            torch.cat([torch.arange(w).repeat(n) for n, w in blocks]),
            torch.tensor([0]),
            ids[:1],
            tuple(AttentionBlock(n, w) for n, w in blocks),
            True,
        ).to(run.device)
        work = lambda: scorer(stream).log_probs.sum().backward()  # noqa: E731
        with mock.patch.object(attention, "has_row_kernel", return_value=False):
            return run.measure(work, repeats=3, warmup=1)[0]

    whole, half = seconds((rows, width)), seconds((rows // 2, width))
    body = 6 * shape.body_weights * rows * width / 2
    run.add("costs: seconds an operation", (whole - half) / body, "s")
    run.add("costs: seconds a layer and call", seconds((1, 8)) / shape.layers, "s")
    run.add("costs: seconds a weight and call", 12 / bandwidth, "s")
    blocks = seconds(*[(1, width)] * rows)
    run.add("costs: seconds a block and layer", (blocks - whole) / (rows - 1) / shape.layers, "s")


def copy_bandwidth(run: Section) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(1 << (12 if run.tiny else 29), dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    seconds, _ = run.measure(lambda: target.copy_(source), repeats=10, warmup=2)
    return 2 * source.numel() / seconds


def main(run: Section) -> None:
    peak, bandwidth = matrix_peak(run), copy_bandwidth(run)
    run.fact("matrix peak of the card, TFLOP/s", peak / 1e12)
    run.fact("copy bandwidth, GB/s", bandwidth / 1e9)
    first = TINY if run.tiny else QWEN_05B
    measure_shape(run, first, peak)
    run.free()
    if run.tiny or run.seconds_left < 25:
        run.fact("1.5B", "left out: no time left")
    else:
        measure_shape(run, QWEN_15B, peak)
        run.free()
    if run.seconds_left > 5:
        model = make_model(first, run)
        with side(run, "costs"):
            measure_costs(run, first, model, bandwidth)
        with side(run, "layouts"):
            measure_layouts(run, first, model)


if __name__ == "__main__":
    main(Section.from_command_line())
