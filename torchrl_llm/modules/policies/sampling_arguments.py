"""Generation arguments as users write them, checked, as one :class:`SamplingParams`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 256
"""Length of a response when ``max_new_tokens`` is not given."""

_MODES = ("history", "text", "tokens")
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "n": "num_samples",
    "stop": "stop_sequences",
    "stop_strings": "stop_sequences",
    "return_log_probs": "logprobs",
    "guided_decoding": "structured_outputs",
}
_BEAMS = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
_COMMON = (
    "max_new_tokens",
    "num_samples",
    "num_return_sequences",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "do_sample",
    "stop_sequences",
    "stop_token_ids",
    "seed",
    "ignore_eos",
    "record_support",
    "skip_special_tokens",
    "logprobs",
    *_BEAMS,
)


@dataclass(frozen=True)
class GenerationArguments:
    """What ``generate_kwargs`` said.

    Args:
        params: how to sample; ``num_samples`` is 1 unless it was given.
        skip_special_tokens: leave special tokens out of the text columns.
        log_probs: whether the log-probs are written; ``None`` where nothing was said.
        num_samples: as given, ``None`` where it was not.
    """

    params: SamplingParams
    skip_special_tokens: bool
    log_probs: bool | None
    num_samples: int | None


def parse_generate_kwargs(kwargs: Mapping[str, Any], backend: Backend) -> GenerationArguments:
    """Check generation arguments and make them explicit.

    Common to all backends: ``max_new_tokens``, ``num_samples`` (``num_return_sequences``),
    ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``do_sample``,
    ``stop_sequences``, ``stop_token_ids``, ``seed``, ``ignore_eos``, ``record_support``,
    ``skip_special_tokens``, ``logprobs``; further names are those of ``backend.native_arguments``.

    Args:
        kwargs: names and values.
        backend: says which further names it takes.

    Raises:
        ConfigError: for an unknown name (with the nearest known one), an old name (with the new
            one), beam search, or values that contradict each other.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> fake = FakeBackend(vocab_size=8, eos_token_ids=(2,))
        >>> parse_generate_kwargs({"do_sample": False}, fake).params.greedy
        True
    """
    given = dict(kwargs)
    _check_names(given, backend)
    for name, neutral in _BEAMS.items():
        if given.pop(name, neutral) not in (neutral, None):
            raise ConfigError(
                f"{name} belongs to beam search, which is not sampling: its results have no "
                "log-prob that a loss could use; take it away"
            )
    num_samples = _one_of(given, "num_samples", "num_return_sequences")
    skip_special_tokens = bool(given.pop("skip_special_tokens", False))
    logprobs = given.pop("logprobs", None)
    temperature = _temperature(given.pop("do_sample", None), given.pop("temperature", None))
    stop = given.pop("stop_sequences", None) or ()
    native = {name: given.pop(name) for name in list(given) if name not in _COMMON}
    # None means "not given", as everywhere in transformers.
    given = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(
        max_new_tokens=given.pop("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        temperature=temperature,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.pop("stop_token_ids", ())),
        num_samples=1 if num_samples is None else num_samples,
        native={name: value for name, value in native.items() if value is not None},
        **given,
    )
    if params.record_support and not backend.records_support:
        raise ConfigError(
            f"{type(backend).__name__} cannot tell which ids it kept, so record_support is out of "
            "reach; sample with top_p=1, top_k=0, min_p=0"
        )
    return GenerationArguments(
        params=params,
        skip_special_tokens=skip_special_tokens,
        log_probs=None if logprobs is None else bool(logprobs),
        num_samples=num_samples,
    )


def settle_generation(
    kwargs: Mapping[str, Any],
    backend: Backend,
    generate: bool,
    num_samples: int | None,
    return_log_probs: bool | None,
) -> GenerationArguments:
    """A policy's generation arguments, with those that its constructor takes by name.

    Args:
        kwargs: see :func:`parse_generate_kwargs`.
        backend: see :func:`parse_generate_kwargs`.
        generate: whether the policy samples at all.
        num_samples: the constructor's.
        return_log_probs: the constructor's.

    Raises:
        ConfigError: for two values of one thing, or arguments without effect.
    """
    if not generate and (kwargs or num_samples is not None or return_log_probs is False):
        raise ConfigError(
            "generate_kwargs, num_samples and return_log_probs=False have no effect with "
            "generate=False, which scores what is there"
        )
    arguments = parse_generate_kwargs(kwargs, backend)
    samples = _agree("num_samples", num_samples, arguments.num_samples)
    if samples is not None and samples < 1:
        raise ConfigError(f"num_samples must be at least 1, got {samples}")
    log_probs = _agree("return_log_probs (logprobs)", return_log_probs, arguments.log_probs)
    return replace(
        arguments,
        params=replace(arguments.params, num_samples=samples or 1),
        num_samples=samples,
        log_probs=True if log_probs is None else log_probs,
    )


def override_generation(
    kwargs: Mapping[str, Any], backend: Backend, own: GenerationArguments
) -> GenerationArguments:
    """Generation arguments of one call.

    Args:
        kwargs: those of the constructor, overridden by those of the call.
        backend: see :func:`parse_generate_kwargs`.
        own: what the policy settled at construction.

    Raises:
        ConfigError: for an argument that shapes the output, which is fixed at construction.
    """
    arguments = settle_generation(kwargs, backend, True, own.num_samples, own.log_probs)
    shaping = {
        "num_samples": lambda given: given.num_samples,
        "skip_special_tokens": lambda given: given.skip_special_tokens,
        "record_support": lambda given: given.params.record_support,
    }
    for name, read in shaping.items():
        if read(arguments) != read(own):
            raise ConfigError(
                f"{name} shapes the output and is fixed at construction; use get_new_version(...)"
            )
    return arguments


def _agree(name: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ConfigError(
            f"{name}={first} and generate_kwargs, which say {second}, contradict each other; "
            "what shapes the output is fixed at construction"
        )
    return second if first is None else first


def _check_names(given: Mapping[str, Any], backend: Backend) -> None:
    known = {*_COMMON, *backend.native_arguments}
    for name in given:
        if name in known:
            continue
        if name in _RENAMED:
            raise ConfigError(f"generation argument {name!r} is renamed to {_RENAMED[name]!r}")
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {sorted(known)}"
        raise ConfigError(f"unknown generation argument {name!r}{hint}")


def _one_of(given: dict[str, Any], name: str, other: str) -> Any:
    first, second = given.pop(name, None), given.pop(other, None)
    if first is not None and second is not None and first != second:
        raise ConfigError(f"{name}={first} contradicts {other}={second}; they mean the same")
    return second if first is None else first


def _temperature(do_sample: bool | None, temperature: float | None) -> float:
    if do_sample is False:
        if temperature:
            raise ConfigError(
                f"do_sample=False decodes greedily, which temperature={temperature} contradicts; "
                "pass temperature=0 or leave it out"
            )
        return 0.0
    if do_sample and temperature == 0:
        raise ConfigError("do_sample=True samples, which temperature=0 contradicts")
    return 1.0 if temperature is None else float(temperature)


def check_mode(
    input_mode: str, tokenizer: Any, layout: torch.layout | None, settings: Mapping[str, Any]
) -> None:
    """Check a policy's input mode and refuse arguments that it would not use.

    Args:
        input_mode: of the policy.
        tokenizer: of the policy.
        layout: the constructor's.
        settings: arguments that belong to one mode, by name; ``None`` where not given.

    Raises:
        ConfigError: for an unknown mode, a missing tokenizer, a layout that is not offered, or the
            first argument without effect.
    """
    if input_mode not in _MODES:
        raise ConfigError(f"input_mode must be one of {_MODES}, got {input_mode!r}")
    if tokenizer is None and input_mode != "tokens":
        raise ConfigError(f"input_mode={input_mode!r} needs a tokenizer: pass tokenizer=...")
    if layout not in (None, torch.strided):
        raise ConfigError(
            f"layout must be None or torch.strided, got {layout}: rows are ragged lists or padded, "
            "for jagged tensors can be neither indexed nor stacked"
        )
    for name, value in settings.items():
        wanted = "text" if name == "tokenizer_kwargs" else "history"
        if value is not None and input_mode != wanted:
            raise ConfigError(f"{name} has no effect with input_mode={input_mode!r}")
