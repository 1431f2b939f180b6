"""Canary: verifies that an engine computes with the trained weights.

A digest proves that the bytes of the weights arrived. But engines then fuse, pad, cast and repack
weights, and some wrong loads raise no error. So the canary compares the log-probs of engine and
trainer on fixed rows of tokens. :mod:`torchrl_llm.weights.canary_rule` judges the differences.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_llm._checked import Gt, checked
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend, SamplingParams
from torchrl_llm.weights.canary_rule import FAR, CanaryJudge, CanaryReport, CanaryTarget, score_rows

# Sampled rows begin with this many random tokens, which are not scored.
_PREFIX = 4
# In a case of doubt, further rows are scored: this many times the first number.
_MORE = 3
# Float32 kernels sum in different orders. This is the size of the effect, relative to the rounding
# to bfloat16.
_FLOAT32_OF_BFLOAT16 = 2.0**-14
_LOW = (torch.bfloat16, torch.float16)


class CanaryCheck:
    """Compares log-probs of an engine and the trainer on fixed rows.

    The rows are sampled from the trainer, because rounding changes log-probs of likely tokens only
    a little. The effect of rounding is measured on each token, by scoring with the trainer at two
    precisions; see :class:`~torchrl_llm.weights.CanaryJudge` for the rule.

    Args:
        reference: the trainer's scorer, e.g. a
            :class:`~torchrl_llm.modules.backends.TransformersBackend` over the trained model.
        prompts: rows of token ids, int64 ``[T]`` with at least 2 tokens; all but the first token
            are scored. By default the reference samples ``num_prompts`` rows, and three times as
            many for cases of doubt. If it cannot sample, the ids are random.
        dtype: dtype of the engine; by default that of the reference.
        tolerance: median difference in nats that is always accepted.
        num_prompts: number of rows to sample, if no prompts are given.
        num_tokens: tokens per row.
        seed: seed of the rows.

    Attributes:
        prompts: the rows that are scored first.
        report: report of the last check; ``None`` before the first.

    Raises:
        ConfigError: for a tolerance that is not positive, a row without a token to score, or
            missing prompts with a reference of unknown vocabulary.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> other = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1)
        >>> canary = CanaryCheck(trained)
        >>> canary.check(trained).difference
        0.0
        >>> canary.check(other)
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.WeightUpdateError: ...
    """

    @checked
    def __init__(
        self,
        reference: TokenScorer,
        prompts: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
        tolerance: Annotated[float, Gt(0)] = 5e-6,
        num_prompts: int = 4,
        num_tokens: int = 16,
        seed: int = 0,
    ) -> None:
        self._reference, self._dtype, self._tolerance = reference, dtype, tolerance
        self._start = 1
        # Autocast to bfloat16 shows nothing for layers that already compute in it.
        self._probe = torch.float16 if _computes_in_bfloat16(reference) else torch.bfloat16
        if prompts is None:
            rows = self._draw(num_prompts * (1 + _MORE), num_tokens, seed)
        else:
            rows, num_prompts = list(prompts), len(prompts)
        short = [row for row, ids in enumerate(rows) if len(ids) <= self._start]
        if short or not rows:
            raise ConfigError(f"canary rows need 2 tokens or more each; these have less: {short}")
        rows = [ids.to("cpu", torch.int64) for ids in rows]
        self.prompts = rows[:num_prompts]
        self._rows = tuple(tuple(ids.tolist()) for ids in rows)
        self.report: CanaryReport | None = None
        self._judges: WeakKeyDictionary[Hashable, CanaryJudge] = WeakKeyDictionary()

    def _draw(self, number: int, tokens: int, seed: int) -> list[Tensor]:
        """Return rows of likely tokens if the reference can sample, else of random tokens."""
        vocabulary = self._reference.vocab_size
        if vocabulary is None:
            raise ConfigError("pass prompts=: the reference does not know its vocabulary")
        generator = torch.Generator().manual_seed(seed)
        sampler = getattr(self._reference, "backend", self._reference)
        if not isinstance(sampler, Backend):
            shape = (number, tokens)
            return list(torch.randint(vocabulary, shape, generator=generator).unbind())
        self._start = _PREFIX
        shape = (number, _PREFIX)
        begun = list(torch.randint(vocabulary, shape, generator=generator).unbind())
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=seed)
        with _precision(self._dtype):
            sampled = sampler.generate(begun, params)
        return [
            torch.cat([ids, done.token_ids]) for ids, [done] in zip(begun, sampled, strict=True)
        ]

    def scores(self, scorer: TokenScorer) -> Tensor:
        """Return the log-probs of the tokens in the first rows.

        Args:
            scorer: an engine, or the reference.

        Returns:
            Float32 ``[N]`` on the CPU, row after row.
        """
        return score_rows(scorer, self._rows[: len(self.prompts)], self._start)

    def target(self) -> CanaryTarget:
        """Return the log-probs that an engine should compute with the reference's current weights.

        The target is small. It can be sent with the weights, so that a worker checks it next to the
        engine.
        """
        exact = self._score(None)
        low = self._dtype in _LOW
        rounded = self._score(self._dtype) if low else exact
        spread = (rounded - exact).abs()
        if not low or not spread.any() or self._probe is torch.float16:
            spread = spread.maximum(self._rounding(exact))
        floor = torch.tensor(self._tolerance / FAR)
        return CanaryTarget(
            self._rows, self._start, len(self.prompts), exact, rounded, spread.maximum(floor)
        )

    def _score(self, dtype: torch.dtype | None) -> Tensor:
        with _precision(dtype):
            return score_rows(self._reference, self._rows, self._start)

    def _rounding(self, exact: Tensor) -> Tensor:
        """Return the effect of rounding on a reference with the engine's precision."""
        try:
            spread = (self._score(self._probe) - exact).abs()
        except RuntimeError as error:
            if self._probe is torch.bfloat16 or "autocast" not in str(error):
                raise
            # Layers that always compute in bfloat16 (quantized ones) do not mix with autocast.
            spread = exact.new_full(exact.shape, torch.inf)
        if not spread.any() and self._probe is torch.bfloat16:
            # The reference itself rounds to bfloat16.
            self._probe = torch.float16
            return self._rounding(exact)
        if self._probe is torch.bfloat16:
            spread = spread * _FLOAT32_OF_BFLOAT16
        # Float16 overflows in some models; then use the rounding of the log-prob itself.
        return spread.where(spread.isfinite(), torch.finfo(torch.bfloat16).eps * (1 + exact.abs()))

    def check(
        self, engine: TokenScorer, *, version: int | None = None, target: CanaryTarget | None = None
    ) -> CanaryReport:
        """Compare an engine with the trainer; raise if it has different weights.

        Args:
            engine: the engine that received the weights.
            version: their version, for the message.
            target: expected log-probs; by default the trainer's current ones.

        Raises:
            WeightUpdateError: the engine does not compute with these weights.
        """
        target = self.target() if target is None else target
        judge = self._judges.setdefault(engine, CanaryJudge())
        self.report = judge.check(engine, target, version=version)
        return self.report


def _computes_in_bfloat16(reference: TokenScorer) -> bool:
    """Whether the base model of a reference has bfloat16 weights."""
    found = (getattr(reference, name, None) for name in ("model", "module"))
    model = next((each for each in found if isinstance(each, nn.Module)), None)
    return model is not None and any(p.dtype is torch.bfloat16 for p in model.parameters())


@contextmanager
def _precision(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to a 16-bit dtype, or no autocast, independent of the outer setting."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in {"cpu"} | ({accelerator.type} if accelerator is not None else set()):
            low = dtype in _LOW
            kept = dtype if low else torch.bfloat16
            # Gathered weights exist only for a moment; autocast's cache would keep a copy of each.
            cast = torch.autocast(kind, dtype=kept, enabled=low, cache_enabled=False)
            stack.enter_context(cast)
        yield
