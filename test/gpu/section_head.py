"""The head alone: 8,192 tokens x 151,936 entries x 1,536 channels, forward and backward.

Sides: ours, ours with the weight's gradient added in place, log-softmax of all logits, that under
``torch.compile``, and the head of TRL's trainers. Each computes log-probs of given targets, and the
gradients of states and weight. Memory is what a call adds, its gradients included.

Who holds all logits makes three products; ours and TRL's compute them again, and make four.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from results import Section
from shapes import VOCABULARY, matrix_peak, side
from torch import Tensor
from torch.nn import functional as F

from torchrl_llm.functional import chunked_log_probs


class Inputs:
    """States, weight, targets and what comes from above.

    Attributes:
        states: ``[N, D]``, so scaled that logits have a deviation of two.
        weight: ``[V, D]``.
        targets: int64 ``[N]``.
        upstream: float32 ``[N]``.
    """

    def __init__(self, run: Section) -> None:
        tokens, entries, width = (64, 1000, 32) if run.tiny else (8192, VOCABULARY, 1536)
        on = {"device": run.device}
        kind = torch.bfloat16 if run.device.type == "cuda" else torch.float32
        self.states = (2.0 * torch.randn(tokens, width, **on)).to(kind).requires_grad_()
        self.weight = (torch.randn(entries, width, **on) / width**0.5).to(kind).requires_grad_()
        self.targets = torch.randint(0, entries, (tokens,), **on)
        self.upstream = torch.randn(tokens, **on) / tokens

    def clear(self) -> None:
        """Drop the gradients."""
        self.states.grad = self.weight.grad = None

    def work(self, log_probs: Callable[[], Tensor]) -> Callable[[], None]:
        """Forward and backward without gradients that were there before."""

        def step() -> None:
            self.clear()
            (log_probs() * self.upstream).sum().backward()

        return step


def naive(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probs from all logits at once."""
    return F.linear(states, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def trl_head(given: Inputs) -> Callable[[], Tensor]:
    """The head that TRL 1.16 puts into the model of each trainer."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    settings = (None, given.targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs",))
    return lambda: ChunkedLogProbFunction.apply(given.states, given.weight, *settings)[0]


@torch.no_grad()
def exact(given: Inputs, rows: int) -> Tensor:
    """Log-probs of the first rows in float32 or more; TF32 is off by default."""
    wide = torch.float64 if given.states.device.type == "cpu" else torch.float32
    states, weight = given.states[:rows].to(wide), given.weight.to(wide)
    return naive(states, weight, given.targets[:rows]).double()


def main(run: Section) -> None:
    given = Inputs(run)
    (tokens, width), entries = given.states.shape, given.weight.shape[0]
    run.fact("shape", f"{tokens} tokens, {entries} entries, {width} channels, {given.states.dtype}")
    plain = given.states, given.weight, given.targets
    gradient = given.weight.numel() * given.weight.element_size()
    run.fact("bytes of the weight's gradient", gradient)

    def measure(name: str, log_probs: Callable[[], Tensor]) -> float:
        seconds, peak = run.measure(given.work(log_probs))
        given.clear()
        run.add(f"{name}: seconds", seconds, "s")
        run.add(f"{name}: memory added", peak, "bytes")
        if name == "ours" and peak is not None:
            ratio = peak / gradient
            run.aim("ours: memory / weight's gradient", ratio, "ratio", at_most=1.15)
        return seconds

    others = {}
    with side(run, "ours"):
        ours = measure("ours", lambda: chunked_log_probs(*plain).log_probs)
    with side(run, "TRL"):
        others["TRL"] = measure("TRL", trl_head(given))
    with side(run, "naive"):
        others["naive"] = measure("naive", lambda: naive(*plain))
    with side(run, "ours, in place"):
        settings = {"in_place_head_grad": True}
        measure("ours, in place", lambda: chunked_log_probs(*plain, **settings).log_probs)
    given.clear()
    with side(run, "value check"):
        check_values(run, given)
    with side(run, "peak"):
        products = 6.0 * tokens * entries * width
        peak = matrix_peak(run)
        run.add("matrix peak of the card", peak / 1e12, "TFLOP/s")
        run.add("ours: three products", products / ours / 1e12, "TFLOP/s")
        # Logits that were not kept are computed twice.
        run.add("ours: the four products that it makes", products / 0.75 / ours / 1e12, "TFLOP/s")
        run.add("ours: share of the peak", products / 0.75 / ours / peak, "ratio")
    with side(run, "tiles"):
        sweep(run, given)
    name = "torch.compile of naive"
    if run.tiny or run.seconds_left < 15:
        run.fact(name, "left out: compiling takes too long")
    else:
        with side(run, name):
            compiled = torch.compile(naive)
            others[name] = measure(name, lambda: compiled(*plain))
    with side(run, "time"):
        for name, seconds in others.items():
            run.add(f"ours: time / {name}", ours / seconds, "ratio")
        fastest = min(others, key=others.get)
        run.fact("fastest other side", fastest)
        run.aim("ours: time / fastest other side", ours / others[fastest], "ratio", at_most=1.1)


def ours_of(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Our log-probs."""
    return chunked_log_probs(states, weight, targets).log_probs


def check_values(run: Section, given: Inputs) -> None:
    """Errors of log-probs and gradients against float32, of ours and of all logits at once."""
    rows = min(512, given.states.shape[0])
    expected = exact(given, rows)
    states, weight = given.states.detach()[:rows], given.weight.detach()
    targets, found = given.targets[:rows], {}
    for name, function in (("ours", ours_of), ("naive", naive), ("exact", naive)):
        leaves = [x.float() if name == "exact" else x.clone() for x in (states, weight)]
        leaves = [x.requires_grad_() for x in leaves]
        log_probs = function(*leaves, targets)
        if name != "exact":
            error = (log_probs.detach().double() - expected).abs().max().item()
            run.add(f"{name}: largest error of a log-prob", error, "nats")
        total = (log_probs * given.upstream[:rows]).sum()
        found[name] = [x.float() for x in torch.autograd.grad(total, leaves)]
    for name in ("ours", "naive"):
        for k, what in enumerate(("states", "weight")):
            right = found["exact"][k]
            error = ((found[name][k] - right).norm() / right.norm()).item()
            run.add(f"{name}: relative error of the gradient of the {what}", error, "ratio")


def sweep(run: Section, given: Inputs) -> None:
    """Our head with tiles of other sizes, to choose the default by."""
    for power in (10, 12) if run.tiny else (22, 23, 25, 26):
        if run.seconds_left < 5:
            return
        work = given.work(
            lambda size=1 << power: (
                chunked_log_probs(
                    given.states, given.weight, given.targets, chunk_size=size
                ).log_probs
            )
        )
        seconds, peak = run.measure(work, repeats=3, warmup=1)
        run.add(f"ours, tiles of 2^{power} logits: seconds", seconds, "s")
        run.add(f"ours, tiles of 2^{power} logits: memory added", peak, "bytes")
        given.clear()


if __name__ == "__main__":
    main(Section.from_command_line())
