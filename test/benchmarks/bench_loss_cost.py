"""What each loss costs over the bare forward and backward of the tokens it trains.

The bare side scores the tokens that count with the same scorer and calls ``backward`` on the sum of
their log-probs: no entropy, no ratio, no checks, no tensordict. One step takes a second or more; 20
interleaved pairs for each loss, CPU time, the median of the pairwise ratios. Losses that need a
second model's states in the forward (PPO's value head, the full-vocabulary distillation) are
compared with the bare step too, so their figure contains that work.

    python test/benchmarks/bench_loss_cost.py [pairs [name ...]]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from harness import Ratio, report
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    DAPO,
    CISPOLoss,
    CompositeLoss,
    Correction,
    DistillationLoss,
    DrGRPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    OnPolicyDistillationLoss,
    PPOLoss,
    ReinforceLoss,
    ReinforcePlusPlusLoss,
    SAPOLoss,
    SFTLoss,
    TOPRLoss,
)

VOCABULARY, ROWS, PROMPT, LENGTH = 16_384, 8, 8, 64


def make_model() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def make_rows() -> LazyStackedTensorDict:
    """Rows with every column that one of the losses reads; groups of four."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(ROWS):
        length = LENGTH - index % 4
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        near = -9.7 + 0.01 * torch.randn(length, generator=generator)
        ones = torch.ones(length, dtype=torch.bool)
        rows.append(
            TensorDict(
                tokens=TensorDict(full=ids, prompt=ids[:PROMPT], response=ids[PROMPT:]),
                log_probs=TensorDict(full=near),
                prox_log_probs=TensorDict(full=near),
                teacher_log_probs=TensorDict(full=near),
                values=TensorDict(full=torch.zeros(length)),
                value_target=TensorDict(full=torch.ones(length)),
                masks=TensorDict(
                    all_attention_mask=ones, all_assistant_mask=torch.arange(length) >= PROMPT
                ),
                next=TensorDict(
                    ref_log_probs=TensorDict(full=near), teacher_log_probs=TensorDict(full=near)
                ),
                advantage=torch.tensor([[1.0 - 2.0 * (index % 2)]]),
                group_id=torch.tensor(index // 4),
            )
        )
    return lazy_rows(rows)


def losses(scorer: TokenScorer, teacher: CausalScorer | None) -> dict[str, torch.nn.Module]:
    """Every loss, with what is usually asked of it."""
    found = {
        "GRPO": GRPOLoss(scorer),
        "GRPO with KL to the reference": GRPOLoss(scorer, kl_to_ref_coeff=0.01),
        "GRPO with TIS": GRPOLoss(scorer, correction=Correction(type="tis")),
        "DAPO": DAPO(scorer),
        "Dr. GRPO": DrGRPOLoss(scorer, constant_length=64),
        "GSPO": GSPOLoss(scorer),
        "GSPO, token": GSPOTokenLoss(scorer),
        "GMPO": GMPOLoss(scorer),
        "CISPO": CISPOLoss(scorer),
        "SAPO": SAPOLoss(scorer),
        "REINFORCE": ReinforceLoss(scorer),
        "REINFORCE++": ReinforcePlusPlusLoss(scorer),
        "TOPR": TOPRLoss(scorer),
        "PPO": PPOLoss(scorer),
        "SFT": SFTLoss(scorer),
        "distillation, stored": DistillationLoss(scorer),
        "on-policy distillation": OnPolicyDistillationLoss(scorer),
        "composite: GRPO + CISPO": CompositeLoss(
            {"grpo": (1.0, GRPOLoss(scorer)), "cispo": (0.5, CISPOLoss(scorer))}
        ),
    }
    if teacher is not None:
        found["distillation, full vocabulary"] = OnPolicyDistillationLoss(
            scorer, estimator="full_vocabulary", teachers=teacher
        )
    return found


def step(loss: torch.nn.Module, rows: LazyStackedTensorDict) -> Callable[[], object]:
    return lambda: loss(rows).total_loss().backward()


def bare_step(loss: torch.nn.Module, rows: LazyStackedTensorDict) -> Callable[[], object]:
    """Forward and backward of what the loss selects, known beforehand."""
    chosen = loss.select(rows)
    actor, sequences, select = loss.actor_network, chosen.sequences, chosen.select
    return lambda: actor.token_scores(sequences, select).log_probs.sum().backward()


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def ratios(seconds: dict[str, list[tuple[float, float]]]) -> list[Ratio]:
    results = []
    for name, times in seconds.items():
        middle = [statistics.median(column) for column in zip(*times, strict=True)]
        ratio = statistics.median(ours / other for ours, other in times)
        results.append(Ratio(name, *middle, ratio, "1.05"))
    return results


class Recorded(torch.nn.Module, TokenScorer):
    """Gives scores that were computed before: what is left of a loss's step is the loss."""

    def __init__(self, scores: TokenScores) -> None:
        super().__init__()
        self.scores = scores
        self.leaf = scores.log_probs.clone().requires_grad_()

    def token_scores(self, sequences, select, *, temperature=1.0, entropy=False, extras=None):
        return self.scores._replace(log_probs=self.leaf * 1.0, values=self.leaf * 0.5)


def own_cost(scorer: CausalScorer, rows: LazyStackedTensorDict, bare_s: float) -> None:
    """Print what each loss takes without the model: the best of 30 forwards and backwards."""
    chosen = GRPOLoss(scorer).select(rows)
    with torch.no_grad():
        scores = scorer.token_scores(chosen.sequences, chosen.select, entropy=True)
    print("forward and backward of the loss alone, on scores that are given")
    for name, loss in losses(Recorded(scores), None).items():
        work = step(loss, rows)
        best_s = min(cpu_seconds(work) for _ in range(30))
        print(f"{name:<58} {best_s * 1e3:9.2f} ms   {best_s / bare_s:8.4f} of the bare step")


def main() -> None:
    from torchrl_llm.modules.backends.head import ValueHead

    torch.set_num_threads(1)
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    model = make_model()
    scorer = CausalScorer(model, value_head=ValueHead.for_model(model))
    teacher = CausalScorer(make_model().requires_grad_(False))
    rows = make_rows()
    chosen = {
        name: loss
        for name, loss in losses(scorer, teacher).items()
        if not sys.argv[2:] or name in sys.argv[2:]
    }
    works = {name: step(loss, rows) for name, loss in chosen.items()}
    bare = bare_step(next(iter(chosen.values())), rows)
    for work in (bare, *works.values()):
        work()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    gc.collect()
    gc.freeze()
    for pair in range(pairs):
        # Every loss stands beside a bare step of its own time: two share the one between them.
        for index, (name, work) in enumerate(works.items()):
            if index % 2 == 0:
                reference = cpu_seconds(bare)
            seconds[name].append((cpu_seconds(work), reference))
        print(f"pair {pair + 1} of {pairs}", file=sys.stderr)
        print(*ratios(seconds), sep="\n", file=sys.stderr, flush=True)
    report(ratios(seconds))
    own_cost(scorer, rows, min(other for times in seconds.values() for _, other in times))


if __name__ == "__main__":
    main()
