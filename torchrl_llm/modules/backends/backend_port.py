"""Port between policies and models: token ids in, token ids and their log-probs out.

A backend does not depend on text, chat or tensordicts: :mod:`torchrl_llm.modules.policies` handles
rows, masks and views. ``test/conformance`` has the tests that every backend must pass.

Shape legend: ``B`` prompts, ``S`` samples per prompt, ``R`` sampled tokens, ``T`` tokens of a
sequence, ``N`` scored positions of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_llm._checked import Ge, Gt, In, checked
from torchrl_llm.data.record import Completion
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError, DataError, OverlongError, TokenizerError
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource


@checked
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """All sampling settings. Each is explicit; none comes from a model's generation config.

    Args:
        max_new_tokens: most tokens a response may have, at least 1.
        temperature: number that divides the logits; 0 decodes greedily.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        top_k: keep the most probable tokens; 0 keeps all.
        min_p: drop tokens less probable than this times the most probable; 0.0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that already
            occur in prompt or response (arXiv:1909.05858); 1.0 is off.
        stop: strings that end a response. All sampled tokens are kept, including the tokens of the
            string.
        stop_token_ids: ids that end a response, in addition to the model's own.
        num_samples: responses per prompt.
        seed: seed of this call's own generator; ``None`` samples from torch's global generator.
        ignore_eos: only ``stop``, ``stop_token_ids`` and the length end a response.
        record_support: record the ids that top-k, top-p and min-p kept for each sampled token, so
            that a loss can score on these ids. Each id costs 4 bytes; a high top-p keeps many ids.
            On a GPU, recording waits for the device at each step.
        native: arguments specific to this backend, see ``Backend.native_arguments``.

    Raises:
        ConfigError: for a value outside its range, or ``record_support`` with a repetition penalty
            or native arguments, which change the logits themselves.

    Example:
        >>> SamplingParams(max_new_tokens=8, top_k=50).truncates_support
        True
        >>> SamplingParams(max_new_tokens=8, top_k=50, record_support=True).truncates_support
        False
    """

    max_new_tokens: Annotated[int, Ge(1)]
    temperature: Annotated[float, Ge(0)] = 1.0
    top_p: Annotated[float, In("(0, 1]")] = 1.0
    top_k: Annotated[int, Ge(0)] = 0
    min_p: Annotated[float, In("[0, 1)")] = 0.0
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_samples: Annotated[int, Ge(1)] = 1
    seed: Annotated[int, In("[-9223372036854775808, 9223372036854775808)")] | None = None
    ignore_eos: bool = False
    record_support: bool = False
    native: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(self.stop):
            raise ConfigError(f"stop must not contain empty strings, got {self.stop!r}")
        if self.record_support and (self.repetition_penalty != 1 or self.native):
            changes = ["repetition_penalty"] if self.repetition_penalty != 1 else []
            raise ConfigError(
                f"record_support records which ids could be drawn, but {[*changes, *self.native]} "
                "change their probabilities, so no loss could score samples; remove one of them"
            )

    @property
    def greedy(self) -> bool:
        """Whether decoding takes the most probable token instead of drawing one."""
        return self.temperature == 0

    @property
    def scoring_temperature(self) -> float:
        """Temperature of the distribution that the log-probs belong to; 1.0 for greedy."""
        return 1.0 if self.greedy else float(self.temperature)

    @property
    def truncates_support(self) -> bool:
        """Whether the sampled distribution cannot be rebuilt from the recorded values."""
        changed = self.repetition_penalty != 1 or bool(self.native)
        return not self.greedy and (changed or (self._cuts and not self.record_support))

    @property
    def keeps_ids(self) -> bool:
        """Whether to record kept ids: sampling drops ids, and ``record_support`` is set."""
        return self.record_support and not self.greedy and self._cuts

    @property
    def _cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


Cancelled = Sequence[Callable[[], bool]]
"""One function per response, which returns whether it is cancelled; or an empty sequence.

Any thread may call a function. After it has returned ``True``, it must always return ``True``."""


class EngineStatus(NamedTuple):
    """Current state of a backend.

    Attributes:
        cache_usage: share of its key-value cache in use, 0 to 1; ``None`` if unknown.
        steps: a number that increases while the backend works, also within one long request; 0 if
            unknown.
        broken: the reason why the backend cannot answer requests and must be restarted; ``None`` if
            it can answer.
    """

    cache_usage: float | None = None
    steps: int = 0
    broken: str | None = None


class Backend(TokenScorer):
    """A model that samples and scores token ids.

    Subclasses implement the abstract members and pass ``BackendConformance``.
    """

    native_arguments: frozenset[str] = frozenset()
    """Names that ``SamplingParams.native`` may contain."""

    records_support: bool = False
    """Whether the backend supports ``SamplingParams.record_support``."""

    num_copies: int = 1
    """Number of copies of the weights. Each copy opens the source of an update once."""

    counts_versions: bool = False
    """Whether weights may change during sampling; completions then carry versions."""

    begins_to_count: bool = False
    """Whether ``counts_versions`` becomes true with the first update of its weights."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids must lie in ``[0, vocab_size)``."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Most tokens of prompt and response together; ``None`` without a limit."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response unless ``ignore_eos`` is set."""

    @property
    def module(self) -> nn.Module | None:
        """The module with the weights, if it is in this process."""
        return None

    def status(self) -> EngineStatus:
        """Return the current state, also while other threads sample."""
        return EngineStatus()

    def exclusive(self) -> AbstractContextManager[Any]:
        """Return a context in which no other thread samples or scores; empty by default."""
        return nullcontext()

    def when_awake(self, action: Callable[[], Any]) -> None:
        """Run an action that samples or scores, now or as soon as a sleeping engine wakes.

        Args:
            action: function without arguments. If several actions wait, only the last one runs.
        """
        action()

    def check_updates(self) -> None:
        """Raise an error early if :meth:`update_weights` would reject every source.

        Raises:
            ConfigError: the weights of this backend cannot be replaced.
        """

    def abort(self) -> None:
        """End all running responses now; their callers get the tokens so far.

        A backend that cannot abort does nothing, and its calls end as usual.
        """
        return

    def update_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """Load new weights, drop caches of the old ones, and return receipts.

        Args:
            source: source of the weights.
            version: version of these weights; later completions carry it.

        Returns:
            One receipt for each copy of the weights (a pool of engines has several).

        Raises:
            ConfigError: this backend receives its weights in a different way.
            WeightUpdateError: the weights did not arrive, or arrived changed; the old weights stay.
        """
        raise ConfigError(f"{type(self).__name__} cannot load weights from a source")

    @abstractmethod
    def generate(self, prompts: Sequence[Tensor], params: SamplingParams) -> list[list[Completion]]:
        """Sample ``params.num_samples`` responses to each prompt.

        Args:
            prompts: ``B`` int64 tensors ``[T_b]`` on the CPU, none empty.
            params: how to sample.

        Returns:
            ``B`` lists of ``S`` completions.

        Raises:
            DataError: for an empty prompt, or a prompt that is not int64 ``[T]``.
            TokenizerError: for ids outside the vocabulary.
            OverlongError: for a prompt that leaves no room for one token.
        """

    def generate_cancellable(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[list[Completion]]:
        """:meth:`generate` whose prompts can be cancelled one by one during sampling.

        The responses to a cancelled prompt end at the next step or a few steps later, with
        ``FinishReason.ABORT`` and the tokens so far. With a seed, cancelling a prompt does not
        change the ids of the other responses.

        This default implementation samples all responses to their ends. Backends that can cancel
        override it.

        Args:
            prompts: see :meth:`generate`.
            params: see :meth:`generate`.
            cancelled: one function per prompt, see ``Cancelled``.
        """
        return self.generate(prompts, params)

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """Return the logits after every token, padded on the right, ``[B, T, V]``; for inspection.

        Args:
            sequences: ``B`` int64 tensors ``[T_b]``.

        Raises:
            ConfigError: the model's logits are not available.
        """
        raise ConfigError(f"{type(self).__name__} gives no access to its logits")

    def check_prompts(self, prompts: Sequence[Tensor]) -> None:
        """Raise the errors of :meth:`generate` for invalid prompts."""
        self.check_ids(prompts)
        limit = self.max_length
        for row, prompt in enumerate(prompts):
            if prompt.shape[0] == 0:
                raise DataError(f"prompt {row} is empty; a model needs at least one token")
            if limit is not None and prompt.shape[0] >= limit:
                raise OverlongError(
                    f"prompt {row} has {prompt.shape[0]} tokens and the model's context holds "
                    f"{limit}, of which a response needs at least one"
                )

    def check_ids(self, sequences: Sequence[Tensor]) -> None:
        """Check that a row contains only ids of the vocabulary.

        Raises:
            DataError: for a type or shape other than int64 ``[T]``.
            TokenizerError: for ids outside the vocabulary.
        """
        for row, ids in enumerate(sequences):
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.ndim != 1:
                found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids)
                raise DataError(f"row {row} must be a tensor of int64 ids [T], got {found}")
        flat = torch.cat(list(sequences)) if sequences else torch.empty(0, dtype=torch.int64)
        if flat.numel() == 0 or (int(flat.min()) >= 0 and int(flat.max()) < self.vocab_size):
            return
        for row, ids in enumerate(sequences):
            bad = ids[(ids < 0) | (ids >= self.vocab_size)]
            if bad.numel():
                raise TokenizerError(
                    f"row {row} holds the token id {int(bad[0])}, but the model's vocabulary has "
                    f"ids 0 to {self.vocab_size - 1}; tokenizer and model do not belong together"
                )

    def check_scoring(self, sequences: Sequence[Tensor], select: Sequence[Tensor]) -> None:
        """Check the arguments of :meth:`token_scores`.

        Raises:
            DataError: for an empty row, a mask whose shape differs from its row, or a selected
                first token.
            TokenizerError: for ids outside the vocabulary.
        """
        if len(sequences) != len(select):
            raise DataError(f"{len(sequences)} sequences came with {len(select)} masks")
        self.check_ids(sequences)
        for row, (ids, mask) in enumerate(zip(sequences, select, strict=True)):
            if ids.shape != mask.shape or mask.dtype != torch.bool:
                raise DataError(
                    f"row {row} has {ids.shape[0]} tokens and a mask {mask.dtype} of shape "
                    f"{tuple(mask.shape)}; expected bool of the same length"
                )
            if ids.shape[0] == 0:
                raise DataError(f"row {row} is empty; there is nothing to score")
            if bool(mask[:1].any()):
                raise DataError(f"row {row} selects its first token, which has no prefix to score")
