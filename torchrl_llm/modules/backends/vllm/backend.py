"""Backend with a vLLM engine in this process.

The backend samples and scores with the engine's own weights, which have no gradients. For engines
in other processes, use AsyncVLLM or the backend for a server's URL.

Shape legend: ``B`` prompts, ``S`` samples per prompt, ``T`` tokens, ``V`` vocabulary, ``N`` scored
positions.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.data.logit_scores import only_support, score_logits
from torchrl_llm.data.scoring import ScoreExtras, TokenScores
from torchrl_llm.errors import BackendError, ConfigError, OverlongError
from torchrl_llm.modules.backends.backend_port import (
    Backend,
    Cancelled,
    Completion,
    EngineStatus,
    SamplingParams,
)
from torchrl_llm.modules.backends.vllm.build import build_engine
from torchrl_llm.modules.backends.vllm.engine_loop import EngineRequest, InFlight
from torchrl_llm.modules.backends.vllm.local_engine import LocalEngine
from torchrl_llm.modules.backends.vllm.requests import (
    NATIVE_ARGUMENTS,
    completion_of,
    full_log_probs,
    prompt_log_probs,
    sampling_arguments,
    scoring_arguments,
)
from torchrl_llm.modules.model_loading import known_eos, load_tokenizer, rotary_limit
from torchrl_llm.weights.vllm_loading import check_engine, load_weights
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource, open_source

_HERE: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def share_within_process(thing: Any, *_: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Use as ``__reduce__``: unpickling in this process returns the same object.

    Args:
        thing: object to pickle; must support weak references.
    """
    key = thing.__dict__.setdefault("_shared_key", secrets.token_hex(8))
    _HERE[key] = thing
    return _find, (key, os.getpid(), type(thing).__name__)


def _find(key: str, process: int, kind: str) -> Any:
    thing = _HERE.get(key)
    if thing is None or os.getpid() != process:
        raise ConfigError(
            f"a {kind} lives in the process that built it (pid {process}) and cannot be sent to "
            "a different one; share engines between processes with AsyncVLLM"
        )
    return thing


_SCORING_TRIES = 5


@register("backends", "vllm")
class VLLMBackend(Backend):
    """Samples and scores with a ``vllm.LLM``.

    Any number of threads may call the backend at the same time; the engine batches their requests
    in each step (``EngineLoop``). Copies and pickles of a backend share its engine, but only within
    the process.

    Args:
        engine: a ``vllm.LLM``, or the name or folder of a model, for which an engine is built;
            ``None`` for the embedded model.
        tokenizer: defines the end-of-sequence id, and is the tokenizer of policies; by default the
            engine's. It may be ``None`` for an engine built with ``skip_tokenizer_init``.
        eos_token_ids: ids that end a response; by default those of tokenizer and model together.
        max_length: most tokens of prompt and response; by default the engine's limit minus one, so
            that every row can also be scored.
        seeded: give every response a seed from torch's global generator. Sampling is then
            repeatable, independent of other requests. Otherwise the engine draws from its own
            generator.
        in_flight: what a weight update does with running responses. ``"wait"`` lets them finish.
            ``"keep"`` continues them with the new weights: their cache is recomputed, and each
            token carries its version. ``"abort"`` ends them, and callers get the tokens so far.
        version: version of the engine's current weights, if no version was set before.
        timeout_s: most seconds that a caller waits while the engine makes no progress.
        **engine_options: see
            :func:`~torchrl_llm.modules.backends.vllm.build.engine_arguments`; only with a name.

    Attributes:
        engine: the ``vllm.LLM``.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: an unsupported engine or option.
        ResourceError: model or cache do not fit.

    Example:
        >>> backend = VLLMBackend(max_model_len=256)  # doctest: +SKIP
        >>> [[done]] = backend.generate([torch.tensor([5])], SamplingParams(max_new_tokens=9))
        ... # doctest: +SKIP
    """

    native_arguments = NATIVE_ARGUMENTS
    records_support = True
    begins_to_count = True

    def __init__(
        self,
        engine: Any = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        max_length: int | None = None,
        seeded: bool = True,
        in_flight: InFlight = "wait",
        version: int = 0,
        timeout_s: float = 600.0,
        **engine_options: Any,
    ) -> None:
        if engine is None or isinstance(engine, (str, os.PathLike)):
            engine = build_engine(engine, **engine_options)
        elif engine_options:
            raise ConfigError(
                f"{sorted(engine_options)} have no effect on an engine that exists; pass them to "
                "vllm.LLM, or pass the model's name"
            )
        _check_engine(engine)
        self.engine = engine
        self._config = engine.llm_engine.model_config
        self.tokenizer = _tokenizer(engine) if tokenizer is None else tokenizer
        if isinstance(self.tokenizer, str):
            self.tokenizer = load_tokenizer(self.tokenizer)
        self._eos = tuple(eos_token_ids) if eos_token_ids else _known_eos(engine, self.tokenizer)
        limit = self._config.max_model_len - 1
        if max_length is not None and max_length > limit:
            raise ConfigError(
                f"max_length={max_length} needs an engine with max_model_len={max_length + 1} or "
                f"more; this one has {limit + 1}"
            )
        self._max_length = limit if max_length is None else max_length
        most = self._config.max_logprobs
        self._max_logprobs = self.vocab_size if most == -1 else min(most, self.vocab_size)
        self.seeded = seeded
        self.in_flight: InFlight = in_flight
        self.timeout_s = timeout_s
        self._local = LocalEngine.of(engine)
        if not self._local.versions:
            self._local.version = version

    __reduce__ = share_within_process

    def __deepcopy__(self, memo: dict[int, Any]) -> VLLMBackend:
        return self

    @property
    def vocab_size(self) -> int:
        """Number of ids in the model's config, without the padding rows of the engine."""
        return self._config.get_vocab_size()

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response."""
        return self._max_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of tokenizer and model."""
        return self._eos

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting responses."""
        return self._local.loop.num_unfinished

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        return self._local.version

    @property
    def counts_versions(self) -> bool:
        """Whether a version was set; each token then carries its version."""
        return bool(self._local.versions)

    def status(self) -> EngineStatus:
        """See :meth:`Backend.status`."""
        return self._local.status

    def exclusive(self, in_flight: InFlight | None = None) -> AbstractContextManager[Any]:
        """Return a context in which other threads neither sample nor score.

        Args:
            in_flight: what happens to running responses; the backend's setting by default.
        """
        rule = self.in_flight if in_flight is None else in_flight
        return self._local.loop.exclusive(rule, timeout_s=self.timeout_s)

    def abort(self) -> None:
        """See :meth:`Backend.abort`; between two steps of the engine."""
        with self.exclusive("abort"):
            pass

    # -- sampling ---------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Tensor], params: SamplingParams) -> list[list[Completion]]:
        """See :meth:`Backend.generate`.

        Raises:
            BackendError: the engine failed.
            WorkerError: the engine made no progress within the time limit.
        """
        return self.generate_cancellable(prompts, params, ())

    def generate_cancellable(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[list[Completion]]:
        """See :meth:`Backend.generate_cancellable`; raises the errors of :meth:`generate`."""
        self.check_prompts(prompts)
        if params.stop and _tokenizer(self.engine) is None:
            raise ConfigError(
                "stop strings need a tokenizer in the engine; build it without "
                "skip_tokenizer_init, or use stop_token_ids"
            )
        seeds = iter(self._seeds(len(prompts) * params.num_samples, params))
        requests = []
        for prompt in prompts:
            ids = prompt.tolist()
            most = min(params.max_new_tokens, self._max_length - len(ids))
            for _ in range(params.num_samples):
                arguments = sampling_arguments(
                    params,
                    eos_token_ids=self._eos,
                    max_tokens=most,
                    seed=next(seeds),
                    max_logprobs=self._max_logprobs,
                )
                requests.append(self._request(ids, arguments))
        outputs = self._run(requests, [ask for ask in cancelled for _ in range(params.num_samples)])
        flat = [
            completion_of(output, params, self._local.versions, vocab_size=self.vocab_size)
            for output in outputs
        ]
        if params.greedy and (params.repetition_penalty != 1 or params.native):
            flat = self._unpenalized(prompts, flat, params.num_samples)
        size = params.num_samples
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def _seeds(self, count: int, params: SamplingParams) -> list[int | None]:
        if params.greedy or (params.seed is None and not self.seeded):
            return [None] * count
        generator = None
        if params.seed is not None:
            generator = torch.Generator().manual_seed(params.seed)
        return torch.randint(2**62, (count,), generator=generator).tolist()

    def _unpenalized(
        self, prompts: Sequence[Tensor], flat: list[Completion], samples: int
    ) -> list[Completion]:
        """Give greedy responses the model's log-probs, without the effect of penalties."""
        whole, select = [], []
        for row, completion in enumerate(flat):
            prompt = prompts[row // samples]
            whole.append(torch.cat([prompt, completion.token_ids]))
            select.append(torch.arange(len(whole[-1])) >= len(prompt))
        sizes = [len(completion.token_ids) for completion in flat]
        scores = self.token_scores(whole, select).log_probs.split(sizes)
        return [
            done._replace(log_probs=one.clone()) for done, one in zip(flat, scores, strict=True)
        ]

    def _run(self, requests: list[EngineRequest], cancelled: Cancelled = ()) -> list[Any]:
        return self._local.loop.run(requests, cancelled=cancelled, timeout_s=self.timeout_s)

    def _request(self, ids: list[int], arguments: dict[str, Any]) -> EngineRequest:
        from vllm import SamplingParams as NativeParams
        from vllm.sampling_params import RequestOutputKind

        try:
            # Outputs after each step are not needed, and would cost as much as the step.
            native = NativeParams(
                output_kind=RequestOutputKind.FINAL_ONLY, **_with_grammar(arguments)
            )
        except ConfigError:
            raise
        except Exception as error:  # the constructor raises its own types and pydantic's
            raise ConfigError(f"vLLM rejected generation arguments: {error}") from error
        return EngineRequest({"type": "token", "prompt_token_ids": ids}, native)

    # -- scoring ----------------------------------------------------------------------------------

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`TokenScorer.token_scores`; without gradients.

        Log-probs at temperature 1 cost one pass over the rows. Other temperatures, the entropy and
        a support need the log-probs of the whole vocabulary for every token. Such scoring runs row
        by row, and the engine needs a large enough ``max_logprobs``.

        Raises:
            ConfigError: for extras other than the support, or if the engine does not return the
                whole vocabulary.
            OverlongError: for a row longer than the engine's limit.
        """
        extras = only_support(extras, "a vLLM engine gives no hidden states", has_logits=False)
        self.check_scoring(sequences, select)
        # Tokens after the last selected one are not needed.
        rows = [ids[: _last(mask) + 1] for ids, mask in zip(sequences, select, strict=True)]
        for row, ids in enumerate(rows):
            if len(ids) >= self._config.max_model_len:
                raise OverlongError(
                    f"row {row} has {len(ids)} tokens to score and the engine reads at most "
                    f"{self._config.max_model_len - 1}"
                )
        if isinstance(temperature, Tensor):
            temperatures = temperature.tolist()
        else:
            temperatures = [float(temperature)] * len(rows)
        if extras.support is None and not entropy and all(t == 1 for t in temperatures):
            return TokenScores(self._own_log_probs(rows, select))
        return self._whole_scores(rows, select, temperatures, entropy, extras)

    def _own_log_probs(self, rows: list[Tensor], select: Sequence[Tensor]) -> Tensor:
        scored = [row for row, ids in enumerate(rows) if len(ids) > 1]
        requests = [self._request(rows[row].tolist(), scoring_arguments()) for row in scored]
        parts = [torch.zeros(0)]
        for row, output in zip(scored, self._scored(requests), strict=True):
            found = prompt_log_probs(output)
            parts.append(found[select[row][: len(found)]])
        return torch.cat(parts)

    def _whole_scores(
        self,
        rows: list[Tensor],
        select: Sequence[Tensor],
        temperatures: list[float],
        entropy: bool,
        extras: ScoreExtras,
    ) -> TokenScores:
        parts = []
        asked = zip(rows, select, temperatures, extras.of_rows(select), strict=True)
        for ids, mask, temperature, own in asked:
            at = mask.nonzero().squeeze(-1)
            if len(at):
                logits_NV = self._whole_log_probs(ids)[at - 1]
                how = {"temperature": temperature, "entropy": entropy, "extras": own}
                parts.append(score_logits(logits_NV, ids[at], **how))
        return TokenScores.join(parts, entropy=entropy)

    def _whole_log_probs(self, ids: Tensor) -> Tensor:
        if self._max_logprobs < self.vocab_size:
            raise ConfigError(
                "a temperature other than 1, the entropy and kept ids need the log-probs of all "
                f"{self.vocab_size} ids, and the engine gives {self._max_logprobs}: build it with "
                "max_logprobs=-1, or score with the trainer's model"
            )
        arguments = scoring_arguments(vocab_size=self.vocab_size)
        [output] = self._scored([self._request(ids.tolist(), arguments)])
        return full_log_probs(output, self.vocab_size)

    def _scored(self, requests: list[EngineRequest]) -> list[Any]:
        """Run scoring requests; score rows again that a weight update has aborted."""
        outputs: dict[int, Any] = {}
        for _ in range(_SCORING_TRIES):
            left = [at for at in range(len(requests)) if at not in outputs]
            found = self._run([requests[at] for at in left])
            whole = zip(left, found, strict=True)
            outputs |= {at: o for at, o in whole if o.outputs[0].finish_reason != "abort"}
            if len(outputs) == len(requests):
                return [outputs[at] for at in range(len(requests))]
        raise BackendError(
            f"weight updates aborted {len(requests) - len(outputs)} rows that were being "
            f"scored {_SCORING_TRIES} times; use in_flight='wait' or 'keep'"
        )

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.logits`; they are normalised (log-probs at temperature 1)."""
        self.check_ids(sequences)
        rows = [self._whole_log_probs(ids) for ids in sequences]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    # -- weights ----------------------------------------------------------------------------------

    def check_updates(self) -> None:
        """See :meth:`Backend.check_updates`."""
        check_engine(self.engine)

    def update_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """See :meth:`Backend.update_weights`; between two steps of the engine."""
        # The engine continues to sample until the weights have arrived.
        incoming = open_source(source, version=version)
        with self.exclusive():
            self._local.sleep.check_weights()
            receipt = load_weights(self.engine, incoming, version=version)
            self.weights_changed(version)
            if source.kind == "full":
                self._local.sleep.filled()
        return [receipt]

    def weights_changed(self, version: int) -> None:
        """Record that the weights were changed in place, and drop caches of the old weights.

        Call this method inside :meth:`exclusive`, after changing the weights. The backend then
        counts versions: completions carry the version of each token.

        Args:
            version: version of the engine's current weights.

        Raises:
            BackendError: the engine sleeps.
        """
        with self.exclusive():
            self._local.weights_changed(version)

    def reset_prefix_cache(self) -> None:
        """Drop the cache of all prompts; running responses recompute their cache."""
        with self.exclusive("keep"):
            self._local.forget_cache()

    # -- sleep ------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Wait for running requests, then free the engine's memory; no sampling until it wakes.

        On the CPU, sleep frees no memory; otherwise it works in the same way.

        Args:
            level: 1 keeps the weights in the CPU's memory; 2 drops them, and the engine needs full
                weights before it samples again.

        Raises:
            BackendError: the engine already sleeps.
            ConfigError: a different level, a GPU engine built without ``enable_sleep_mode=True``,
                or an engine that shares its weights with a trainer.
        """
        with self.exclusive("wait"):
            self._local.sleep.fall(level)

    def release_cache(self) -> None:
        """Free the cache's memory until :meth:`wake`, and keep the weights in place.

        Until :meth:`wake`, sampling and scoring are impossible, but the weights may be changed.
        After it, the cache is empty.

        Raises:
            BackendError: the engine already sleeps.
            ConfigError: a GPU engine built without ``enable_sleep_mode=True``.
        """
        with self.exclusive("wait"):
            self._local.sleep.release_cache()

    def wake(self, *, weights_only: bool = False) -> None:
        """Allocate the memory again.

        Args:
            weights_only: do not allocate the cache yet, so that there is room to load new weights.

        Raises:
            BackendError: the engine does not sleep.
            Exception: an exception of the waiting action, see :meth:`when_awake`.
        """
        with self.exclusive("wait"):
            self._local.sleep.wake(weights_only=weights_only)
        action = self._local.sleep.take_waiting()
        if action is not None:
            action()

    def when_awake(self, action: Callable[[], Any]) -> None:
        """See :meth:`Backend.when_awake`."""
        if not self._local.sleep.wait(action):
            action()


def _last(mask: Tensor) -> int:
    at = mask.nonzero()
    return int(at[-1]) if len(at) else 0


def _with_grammar(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert dictionaries (from a configuration file, for example) to vLLM's objects."""
    detection = arguments.get("repetition_detection")
    if isinstance(detection, dict):
        from vllm.sampling_params import RepetitionDetectionParams

        arguments = {**arguments, "repetition_detection": RepetitionDetectionParams(**detection)}
    given = arguments.get("structured_outputs")
    if not isinstance(given, dict):
        return arguments
    from vllm.sampling_params import StructuredOutputsParams

    known = {one.name for one in dataclasses.fields(StructuredOutputsParams) if one.init}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"structured_outputs has no {unknown}; it has {sorted(known)}")
    return {**arguments, "structured_outputs": StructuredOutputsParams(**given)}


def _check_engine(engine: Any) -> None:
    inner = getattr(engine, "llm_engine", None)
    if inner is None or not hasattr(inner, "add_request"):
        raise ConfigError(
            f"VLLMBackend takes a vllm.LLM or a model's name, got {type(engine).__name__}"
        )
    config = inner.model_config
    if config.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            f"the engine reports {config.logprobs_mode!r}, not the log-probs of the sampled "
            "distribution; build it with logprobs_mode='processed_logprobs'"
        )
    if config.generation_config != "vllm":
        raise ConfigError(
            "the engine takes sampling defaults from the model's generation config; build it with "
            "generation_config='vllm'"
        )
    limit = rotary_limit(config.hf_config)
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"vLLM would use this model's rotary angles for rows longer than {limit} "
            f"tokens, and a trainer those for its own rows; build the engine with "
            f"max_model_len={limit}"
        )


def _tokenizer(engine: Any) -> Any:
    return engine.llm_engine.tokenizer


def _known_eos(engine: Any, tokenizer: Any) -> tuple[int, ...]:
    config = engine.llm_engine.model_config
    generation = SimpleNamespace(**(config.try_get_generation_config() or {}))
    return known_eos(tokenizer, config.hf_text_config, generation)
