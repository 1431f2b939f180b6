"""Converts sampling parameters to vLLM's, and vLLM's outputs to completions.

Shape legend: ``R`` sampled tokens, ``T`` tokens of a prompt, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm._settings import convert
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.scoring import Support
from torchrl_llm.errors import BackendError, ConfigError, DataError
from torchrl_llm.modules.backends.backend_port import Completion, SamplingParams

# A mapping with these keys may replace an object of the named vLLM class.
_OBJECTS = {
    "repetition_detection": (
        "RepetitionDetectionParams",
        {"max_pattern_size", "min_pattern_size", "min_count"},
    ),
    "structured_outputs": ("StructuredOutputsParams", None),
}
_NATIVE: dict[str, Any] = {
    **dict.fromkeys(_OBJECTS, Any),
    "bad_words": list[str] | None,
    "logit_bias": dict[int, float] | None,
    "allowed_token_ids": list[int] | None,
    "min_tokens": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "thinking_token_budget": int,
    "extra_args": dict,
}
NATIVE_ARGUMENTS = frozenset(_NATIVE)
"""Names of ``vllm.SamplingParams`` that the vLLM backend accepts besides the common ones."""

_COOLEST, _HOTTEST = 0.01, 2.0
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "repetition": FinishReason.STOP,
}


def sampling_arguments(
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    max_tokens: int,
    seed: int | None,
    max_logprobs: int,
) -> dict[str, Any]:
    """Return arguments of ``vllm.SamplingParams`` for one response, with all fields explicit.

    All ids that end a response are passed as stop ids. This turns off vLLM's own end-of-sequence
    id, which it would read from generation config and tokenizer.

    Args:
        params: how to sample.
        eos_token_ids: end-of-sequence ids of the backend.
        max_tokens: most tokens of this response.
        seed: seed of this response; ``None`` for the engine's generator.
        max_logprobs: most log-probs per token that the engine returns.

    Raises:
        ConfigError: for settings that vLLM does not support.

    Example:
        >>> found = sampling_arguments(SamplingParams(max_new_tokens=9), eos_token_ids=(2,),
        ...     max_tokens=5, seed=7, max_logprobs=20)
        >>> found["stop_token_ids"], found["ignore_eos"], found["max_tokens"], found["top_p"]
        ([2], True, 5, 1.0)
    """
    if not params.greedy and not _COOLEST <= params.temperature <= _HOTTEST:
        raise ConfigError(
            f"vLLM samples at temperatures from {_COOLEST} to {_HOTTEST} (and 0, greedy), got "
            f"{params.temperature}"
        )
    ends = () if params.ignore_eos else tuple(eos_token_ids)
    native = dict(params.native)
    _check_native(native)
    if params.greedy:
        top_k, top_p, min_p = 0, 1.0, 0.0
    else:
        top_k, top_p, min_p = params.top_k, float(params.top_p), float(params.min_p)
    return {
        "n": 1,
        "temperature": float(params.temperature),
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": float(params.repetition_penalty),
        "presence_penalty": float(native.pop("presence_penalty", 0.0)),
        "frequency_penalty": float(native.pop("frequency_penalty", 0.0)),
        "seed": None if params.greedy else seed,
        "max_tokens": max_tokens,
        "min_tokens": min(native.pop("min_tokens", 0), max_tokens),
        "ignore_eos": True,
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        # Stop strings may contain special tokens, as for every other backend.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "detokenize": bool(params.stop),
        "logprobs": _num_log_probs(params, max_logprobs),
        "flat_logprobs": True,
        **native,
    }


def _check_native(native: Mapping[str, Any]) -> None:
    """Reject values of a wrong type, because some of them make vLLM fail in a step and die.

    Raises:
        ConfigError: for such a value.
    """
    for name, value in native.items():
        convert(value, _NATIVE.get(name, Any), name)
    if any(map(math.isnan, (native.get("logit_bias") or {}).values())):
        raise ConfigError(f"logit_bias must contain numbers, got {native['logit_bias']!r}")
    for name, (kind, keys) in _OBJECTS.items():
        value = native.get(name)
        if value is None or type(value).__name__ == kind:
            continue
        if not isinstance(value, dict) or (keys is not None and not value.keys() <= keys):
            of = f" of {sorted(keys)}" if keys else ""
            raise ConfigError(f"{name} must be a dictionary{of} or vLLM's {kind}, got {value!r}")


def _num_log_probs(params: SamplingParams, limit: int) -> int:
    """Return the number of ids to request, enough to show that all kept ids are included."""
    if not params.keeps_ids:
        return 0
    # Top-k also keeps ids with the same probability as its last one.
    return limit if params.top_k == 0 else min(2 * params.top_k + 8, limit)


def scoring_arguments(*, vocab_size: int | None = None) -> dict[str, Any]:
    """Return arguments of ``vllm.SamplingParams`` that read the log-probs of a prompt.

    Args:
        vocab_size: size of the vocabulary, to request all log-probs at each token; by default only
            the tokens' own.
    """
    return {
        "n": 1,
        "temperature": 0.0,
        "max_tokens": 1,
        "ignore_eos": True,
        "detokenize": False,
        "prompt_logprobs": vocab_size or 0,
        "logprobs": vocab_size,
        "flat_logprobs": True,
    }


def completion_of(
    output: Any, params: SamplingParams, versions: Mapping[str, int], *, vocab_size: int
) -> Completion:
    """Convert a finished request of :func:`sampling_arguments` to a completion.

    Args:
        output: vLLM's ``RequestOutput``.
        params: as requested.
        versions: version of each weight label of the engine; may be empty.
        vocab_size: number of ids of the model.

    Raises:
        BackendError: the engine reports that the request failed, or its log-probs are not finite.
        DataError: the engine may have kept more ids than it returned.
    """
    [answer] = output.outputs
    reason = _REASONS.get(str(answer.finish_reason))
    if reason is None:
        raise BackendError(f"vLLM ended a response with {answer.finish_reason!r}")
    flat = answer.logprobs
    starts = flat.start_indices if len(answer.token_ids) else []
    ids = torch.tensor(list(answer.token_ids), dtype=torch.int64)
    log_probs = torch.tensor([flat.logprobs[at] for at in starts], dtype=torch.float32)
    if not bool(torch.isfinite(log_probs).all()):
        raise BackendError(
            "the engine's log-probs are not finite numbers; its weights or its dtype are broken"
        )
    support = None
    if params.keeps_ids:
        support = _support(flat, vocab_size)
    elif params.record_support:
        support = Support.whole(len(ids))
    return Completion(ids, log_probs, reason, support, _versions(answer, versions))


def _support(flat: Any, vocab_size: int) -> Support:
    ids, counts = [], []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        # The sampled id comes first, and again at its rank if that is high enough; keep it once.
        given = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        kept = [token_id for token_id, value in given.items() if value != -math.inf]
        if len(kept) == len(given) < vocab_size:
            raise DataError(
                f"truncation may have kept more than the {len(kept)} ids whose log-probs the "
                "engine returns per token: sample with a smaller top_k, or build the engine with "
                "max_logprobs=-1"
            )
        ids.extend(kept)
        counts.append(len(kept))
    return Support(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))


def _versions(answer: Any, versions: Mapping[str, int]) -> Tensor | None:
    if not versions:
        return None
    found = torch.full((len(answer.token_ids),), -1, dtype=torch.int32)
    for span in answer.weight_versions or ():
        found[span.start : span.end] = versions[span.version]
    return found


def prompt_log_probs(output: Any) -> Tensor:
    """Return log-probs of the tokens of a prompt, float32 ``[T]`` in nats, 0.0 at index 0.

    Args:
        output: output of a request with :func:`scoring_arguments`.
    """
    flat = output.prompt_logprobs
    values = [flat.logprobs[at] for at in flat.start_indices[1:]]
    return torch.tensor([0.0, *values], dtype=torch.float32)


def full_log_probs(output: Any, vocab_size: int) -> Tensor:
    """Log-probs of the whole vocabulary after each token of a prompt, float32 ``[T, V]`` in nats.

    Args:
        output: output of a request with :func:`scoring_arguments` and ``vocab_size``.
        vocab_size: ``V``.
    """
    rows = []
    for flat in (output.prompt_logprobs, output.outputs[0].logprobs):
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
            if end == start:  # the first token of a prompt has no prefix
                continue
            row = torch.full((vocab_size,), -torch.inf)
            ids = torch.tensor(flat.token_ids[start:end])
            row[ids] = torch.tensor(flat.logprobs[start:end], dtype=torch.float32)
            rows.append(row)
    return torch.stack(rows)
