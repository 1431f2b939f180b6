"""The ledger of tokens closes with every advantage estimator."""

import pytest
import torch
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement
from trainers.test_batch_source import row

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer, drop_incomplete
from torchrl_llm.objectives import (
    BatchNormalizedReturn,
    ConstantCredit,
    EpisodicReturn,
    HybridNormalizedReturn,
    LeaveOneOutAdvantage,
    MCAdvantage,
    MonteCarloReturn,
    PerStepReward,
    SPOAdvantage,
)
from torchrl_llm.trainers.batch_source import BatchSource

RULES = {
    "group": lambda: MCAdvantage(4, keep_zero_variance=False),
    "candidates": lambda: MCAdvantage(2, candidate_group_size=4, keep_return_bounds=(0, 1)),
    "leave_one_out": lambda: LeaveOneOutAdvantage(4, selectors=[drop_incomplete]),
    "hybrid": lambda: HybridNormalizedReturn(4, keep_zero_variance=False),
    "hybrid_batches": lambda: HybridNormalizedReturn(4, batch_size=12),
    "batch": lambda: BatchNormalizedReturn(4, baseline="group"),
    "batch_of_rows": lambda: BatchNormalizedReturn(positive_only=True, keep_zero_advantage=False),
    "monte_carlo": lambda: MonteCarloReturn(0.9, keep_zero_advantage=False),
    "per_step": PerStepReward,
    "episodic": EpisodicReturn,
    "constant": ConstantCredit,
    "spo": lambda: SPOAdvantage(prompt_key="group_id", batch_size=10),
}


def _batches(count, size=16, group=4):
    """Groups, some of equal rewards, some of whose members are cut or invalid."""
    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        draws = torch.rand(size, 3, generator=generator).tolist()
        yield lazy_rows(
            [
                row(
                    float("nan") if draw[1] < 0.15 else float(draw[0] < 0.4),
                    step * size + i // group,
                    length=1 + int(5 * draw[2]),
                    cut=draw[1] > 0.85,
                )
                for i, draw in enumerate(draws)
            ]
        )


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_token_of_every_step_is_accounted_for(rule, truncated):
    credit = rule()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    buffer.append_transform(JoinTurns())
    buffer.append_transform(credit)
    source = BatchSource(
        _batches(6), buffer, credit=credit, num_rows=8, truncated=truncated, max_resamples=1
    )
    generated = trained = 0
    for _ in range(3):
        source.fill()  # raises when the ledger does not close
        generated += source.ledger.totals["generated"]
        trained += source.ledger.totals["trained"]
    assert 0 < trained < generated
