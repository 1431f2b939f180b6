"""How old the weights may be that sampled what is trained on, where loops look for it.

See :mod:`torchrl_llm.collectors.staleness`, which stands lower so that collectors pace themselves
by the same rule.
"""

from __future__ import annotations

from torchrl_llm.collectors.staleness import (
    Pacer,
    StalenessRule,
    age_histogram,
    age_metrics,
    sampled_versions,
)

__all__ = ["Pacer", "StalenessRule", "age_histogram", "age_metrics", "sampled_versions"]
