"""Port between policies and models: token ids in, token ids and their log-probs out.

A backend knows no text, no chat and no tensordict: :mod:`torchrl_llm.modules.policies` knows rows,
masks and views. ``test/conformance`` holds the tests that every backend must pass.

Shape legend: ``B`` prompts, ``S`` samples a prompt, ``R`` sampled tokens, ``T`` tokens of a
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
    """Every field that shapes sampling, explicit; nothing comes from a model's generation config.

    Args:
        max_new_tokens: most tokens a response may have, at least 1.
        temperature: divides the logits; 0 decodes greedily.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        top_k: keep the most probable tokens; 0 keeps all.
        min_p: drop tokens less probable than this times the most probable; 0.0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that already
            occur in prompt or response (arXiv:1909.05858); 1.0 is off.
        stop: strings that end a response. The sampled tokens are kept, those of the string too.
        stop_token_ids: further ids that end a response, next to the model's own.
        num_samples: responses a prompt.
        seed: seed of this call's own generator; ``None`` samples from torch's global generator.
        ignore_eos: only ``stop``, ``stop_token_ids`` and the length end a response.
        record_support: keep the ids that top-k, top-p and min-p left for each sampled token, so
            that a loss can score on them. They cost 4 bytes each; a wide top-p keeps many. A GPU
            waits for them at each step.
        native: arguments that only this backend knows, see ``Backend.native_arguments``.

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
            raise ConfigError(f"stop must be without empty strings, got {self.stop!r}")
        if self.record_support and (self.repetition_penalty != 1 or self.native):
            changes = ["repetition_penalty"] if self.repetition_penalty != 1 else []
            raise ConfigError(
                f"record_support keeps which ids could be drawn, and {[*changes, *self.native]} "
                "change how probable they are; no loss could score what was sampled. Take one away"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature == 0

    @property
    def scoring_temperature(self) -> float:
        """Temperature of the distribution that the log-probs belong to; 1.0 for greedy."""
        return 1.0 if self.greedy else float(self.temperature)

    @property
    def truncates_support(self) -> bool:
        """Whether what is recorded does not reproduce the distribution that was sampled."""
        changed = self.repetition_penalty != 1 or bool(self.native)
        return not self.greedy and (changed or (self._cuts and not self.record_support))

    @property
    def keeps_ids(self) -> bool:
        """Whether there are kept ids to record, because the support is cut and wanted."""
        return self.record_support and not self.greedy and self._cuts

    @property
    def _cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


Cancelled = Sequence[Callable[[], bool]]
"""Whether nobody waits for a response any more: a question for each, asked from any thread, whose
answer remains once it is ``True``; or none at all."""


class EngineStatus(NamedTuple):
    """Present work of a backend.

    Attributes:
        cache_usage: share of its key-value cache in use, 0 to 1; ``None`` where it cannot tell.
        steps: counts up while it works, also within one long request; 0 where it cannot tell.
        broken: why it will answer no more requests and must be restarted; ``None`` when it will.
    """

    cache_usage: float | None = None
    steps: int = 0
    broken: str | None = None


class Backend(TokenScorer):
    """A model that samples and scores token ids.

    Subclasses implement the abstract members and pass ``BackendConformance``.
    """

    native_arguments: frozenset[str] = frozenset()
    """Names that ``SamplingParams.native`` may hold."""

    records_support: bool = False
    """Whether it can do what ``SamplingParams.record_support`` asks for."""

    num_copies: int = 1
    """Copies of the weights behind it, each of which opens the source of an update once."""

    counts_versions: bool = False
    """Whether its weights may change while it samples; its completions then carry the versions."""

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
        """The module that holds the weights, where there is one in this process."""
        return None

    def status(self) -> EngineStatus:
        """What it does at the moment; must answer while other threads sample."""
        return EngineStatus()

    def exclusive(self) -> AbstractContextManager[Any]:
        """A context in which other threads neither sample nor score; nothing to wait for here."""
        return nullcontext()

    def when_awake(self, action: Callable[[], Any]) -> None:
        """Do what samples or scores: at once, or where the engine sleeps as soon as it wakes.

        Args:
            action: is called without arguments; of several that wait, the last alone.
        """
        action()

    def check_updates(self) -> None:
        """Refuse at once what :meth:`update_weights` would refuse whatever it was given.

        Raises:
            ConfigError: the weights of this backend cannot be replaced.
        """

    def abort(self) -> None:
        """End the responses that are being sampled where they are; callers get what there is.

        Nothing to do for a backend that cannot: its calls end by themselves.
        """
        return

    def update_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """Take new weights, forget what was computed with the old ones, and say what arrived.

        Args:
            source: where the weights are.
            version: number of these weights; later completions carry it.

        Returns:
            One receipt for each copy of the weights (a pool of engines has several).

        Raises:
            ConfigError: this backend takes its weights in another way.
            WeightUpdateError: they did not arrive, or not as they were sent; the old ones stay.
        """
        raise ConfigError(f"{type(self).__name__} does not take weights from a source")

    @abstractmethod
    def generate(self, prompts: Sequence[Tensor], params: SamplingParams) -> list[list[Completion]]:
        """Sample ``params.num_samples`` responses to each prompt.

        Args:
            prompts: ``B`` int64 tensors ``[T_b]`` on the CPU, none empty.
            params: how to sample.

        Returns:
            ``B`` lists of ``S`` completions.

        Raises:
            DataError: for an empty prompt, or one that is no row of int64.
            TokenizerError: for ids outside the vocabulary.
            OverlongError: for a prompt that leaves no room for one token.
        """

    def generate_cancellable(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[list[Completion]]:
        """:meth:`generate`, of which single prompts can be cancelled while they are sampled.

        The responses to a cancelled prompt end at the next step or a few later, with
        ``FinishReason.ABORT`` and the tokens so far. With a seed, the others have the ids that they
        have without the cancellation.

        This method of the base samples all responses to their ends; backends that can cancel have
        their own.

        Args:
            prompts: see :meth:`generate`.
            params: see :meth:`generate`.
            cancelled: a question for each prompt, see ``Cancelled``.
        """
        return self.generate(prompts, params)

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """Logits after every token, padded on the right, ``[B, T, V]``; for inspection only.

        Args:
            sequences: ``B`` int64 tensors ``[T_b]``.

        Raises:
            ConfigError: when the model's logits are out of reach.
        """
        raise ConfigError(f"{type(self).__name__} gives no access to its logits")

    def check_prompts(self, prompts: Sequence[Tensor]) -> None:
        """Raise what :meth:`generate` promises for prompts that it cannot take."""
        self.check_ids(prompts)
        limit = self.max_length
        for row, prompt in enumerate(prompts):
            if prompt.shape[0] == 0:
                raise DataError(f"prompt {row} is empty; a model needs at least one token to go on")
            if limit is not None and prompt.shape[0] >= limit:
                raise OverlongError(
                    f"prompt {row} has {prompt.shape[0]} tokens and the model's context holds "
                    f"{limit}, of which a response needs at least one"
                )

    def check_ids(self, sequences: Sequence[Tensor]) -> None:
        """Raise for what is not a row of ids of the vocabulary.

        Raises:
            DataError: for another type or shape than int64 ``[T]``.
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
        """Raise for arguments that :meth:`token_scores` cannot take.

        Raises:
            DataError: for an empty row, a mask of another shape than its row, or a selected first
                token.
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
