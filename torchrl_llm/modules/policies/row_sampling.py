"""Sampling parameters that a row sets, which override the policy's.

Calls of programs (:mod:`torchrl_llm.gateway`) set their own temperature or length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tensordict import TensorDictBase

from torchrl_llm.modules.backends.backend_port import SamplingParams
from torchrl_llm.modules.policies import row_blocks

SAMPLING_KEY = "sampling"
"""A column of dicts: the fields of :class:`~torchrl_llm.modules.SamplingParams` that a row sets."""


def params_of_rows(
    blocks: Sequence[TensorDictBase], params: SamplingParams
) -> list[SamplingParams]:
    """Return the sampling parameters of each row.

    Args:
        blocks: the rows.
        params: parameters of the policy, including the end ids that its template adds.
    """
    wanted = row_blocks.object_rows(blocks, (SAMPLING_KEY,))
    if wanted is None:
        return [params] * sum(block.batch_size[0] for block in blocks)
    return [own_params(params, own) for own in wanted]


def own_params(params: SamplingParams, own: dict) -> SamplingParams:
    """Return sampling parameters with some changes; end ids are added to the policy's.

    Args:
        params: parameters of the policy.
        own: fields by name.
    """
    if not own:
        return params
    ends = {*params.stop_token_ids, *own.get("stop_token_ids", ())}
    return replace(params, **{**own, "stop_token_ids": tuple(sorted(ends))})


def alike(
    rows: Iterable[int], params: Sequence[SamplingParams]
) -> list[tuple[SamplingParams, list[int]]]:
    """Group rows that can be sampled in one call; a row with a seed is in a group of its own.

    Args:
        rows: indices of the rows.
        params: parameters of all rows.
    """
    found: list[tuple[SamplingParams, list[int]]] = []
    for row in rows:
        own = params[row]
        same = next((g for known, g in found if known is own or known == own), None)
        if same is None or (own.seed is not None and own is not params[same[0]]):
            found.append((own, [row]))
        else:
            same.append(row)
    return found
