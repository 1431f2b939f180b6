"""Fake backend: scripted answers, or draws from a tiny bigram model.

The log-probs come from a real distribution (the bigram model), so sampling and scoring agree
exactly, and a loss has gradients. The backend is for tests, examples and dry runs.

Shape legend: ``B`` rows, ``V`` vocabulary, ``H`` hidden size, ``N`` scored positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.logit_scores import only_support, score_logits
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Cancelled, Completion, SamplingParams
from torchrl_llm.modules.backends.decoding import StopStrings, decode
from torchrl_llm.modules.backends.local_backend import LocalBackend

_HIDDEN = 8


class BigramModel(nn.Module):
    """Computes the logits of the next token from the last token alone, with a low-rank table.

    Args:
        vocab_size: number of ids.
        seed: seed of its weights.
    """

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.embedding = nn.Parameter(torch.randn(vocab_size, _HIDDEN, generator=generator))
        self.head = nn.Parameter(torch.randn(vocab_size, _HIDDEN, generator=generator) * 0.5)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` after each id, int64 ``[...]``."""
        return self.embedding[token_ids] @ self.head.T


@dataclass(frozen=True)
class Answer:
    """One scripted response.

    Args:
        content: text (which requires a tokenizer), or token ids.
        finish_reason: ``STOP`` appends the end-of-sequence id if it is missing; ``LENGTH`` and
            ``ABORT`` change nothing.
    """

    content: str | Sequence[int]
    finish_reason: FinishReason = FinishReason.STOP


Script = str | Sequence[int] | Answer | Sequence["str | Answer | Sequence[int]"]
Rule = Callable[[Any], "str | Sequence[int] | Answer"]


class FakeBackend(LocalBackend):
    """Answers by script, by rule, or by sampling from a ``BigramModel``.

    Args:
        answers: ``None`` samples. A string or an :class:`Answer` is the answer to every prompt. A
            list of answers is used in order, and starts again after its end. A callable gets the
            prompt (text with a tokenizer, else a list of ids) and returns an answer.
        tokenizer: encodes answers and decodes prompts; required if either is text.
        vocab_size: number of ids; by default the tokenizer's.
        eos_token_ids: ids that end a response; by default the tokenizer's.
        max_length: most tokens of prompt and response.
        seed: seed of the bigram model's weights.

    Example:
        >>> backend = FakeBackend(Answer([7, 8]), vocab_size=16, eos_token_ids=(2,))
        >>> [[completion]] = backend.generate([torch.tensor([5])], SamplingParams(max_new_tokens=9))
        >>> completion.token_ids.tolist(), completion.finish_reason.name
        ([7, 8, 2], 'STOP')
    """

    def __init__(
        self,
        answers: Script | Rule | None = None,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_length: int | None = 4096,
        seed: int = 0,
    ) -> None:
        if tokenizer is None and (vocab_size is None or eos_token_ids is None):
            raise ConfigError("without a tokenizer pass vocab_size= and eos_token_ids=")
        super().__init__(
            vocab_size=vocab_size or len(tokenizer),
            max_length=max_length,
            eos_token_ids=[tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids,
        )
        self.tokenizer = tokenizer
        self._model = BigramModel(self.vocab_size, seed=seed)
        self._answers, self._position = answers, 0

    @property
    def module(self) -> nn.Module:
        """The bigram model."""
        return self._model

    def _sample(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[Completion]:
        rows = [prompt for prompt in prompts for _ in range(params.num_samples)]
        if self._answers is not None:
            return [self._scripted(prompt, params) for prompt in rows]
        return decode(
            _BigramDecoder(self._model),
            self._model(torch.stack([prompt[-1] for prompt in rows])),
            rows,
            params,
            max_tokens=torch.tensor([self._room(p, params) for p in rows]),
            end_ids=self._ends(params),
            stop_strings=StopStrings(self.tokenizer, params.stop),
            cancelled=cancelled,
        )

    def _scripted(self, prompt: Tensor, params: SamplingParams) -> Completion:
        answer = self._next_answer(prompt)
        ids = self._encode(answer.content)
        reason = answer.finish_reason
        ends = {*self.eos_token_ids, *params.stop_token_ids}
        if reason == FinishReason.STOP and (not ids or ids[-1] not in ends):
            ids.append(self.eos_token_ids[0])
        room = self._room(prompt, params)
        stops = StopStrings(self.tokenizer, params.stop)
        ends = (n for n in range(1, len(ids) + 1) if stops and stops.ended(torch.tensor([ids[:n]])))
        ended_at = next(ends, None)
        if ended_at is not None and ended_at <= room:
            ids, reason = ids[:ended_at], FinishReason.STOP
        elif len(ids) > room:
            ids, reason = ids[:room], FinishReason.LENGTH
        response = torch.tensor(ids, dtype=torch.int64)
        self.check_ids([response])
        whole = torch.cat([prompt[-1:], response])
        select = torch.arange(len(whole)) > 0
        scores = self.token_scores([whole], [select], temperature=params.scoring_temperature)
        # The distribution of a scripted answer is not truncated, so each id was possible.
        support = Support.whole(len(response)) if params.record_support else None
        return Completion(response, scores.log_probs, reason, support)

    def _next_answer(self, prompt: Tensor) -> Answer:
        script = self._answers
        if callable(script):
            shown = prompt.tolist()
            answer = script(self.tokenizer.decode(shown) if self.tokenizer else shown)
        elif isinstance(script, (str, Answer)) or all(isinstance(x, int) for x in script):
            answer = script
        else:
            answer = script[self._position % len(script)]
            self._position += 1
        return answer if isinstance(answer, Answer) else Answer(answer)

    def _encode(self, content: str | Sequence[int]) -> list[int]:
        if not isinstance(content, str):
            return [int(token_id) for token_id in content]
        if self.tokenizer is None:
            raise ConfigError(f"the answer {content!r} is text, which needs a tokenizer")
        return list(self.tokenizer(content, add_special_tokens=False)["input_ids"])

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`TokenScorer.token_scores`; the only extra is the support."""
        extras = only_support(extras, "FakeBackend has no hidden states")
        self.check_scoring(sequences, select)
        positions = [mask.nonzero().squeeze(-1) for mask in select]
        previous = torch.cat([ids[at - 1] for ids, at in zip(sequences, positions, strict=True)])
        targets = torch.cat([ids[at] for ids, at in zip(sequences, positions, strict=True)])
        if isinstance(temperature, Tensor):
            counts = torch.tensor([at.numel() for at in positions])
            temperature = temperature.repeat_interleave(counts)
        logits_NV = self._model(previous).float()
        return score_logits(
            logits_NV, targets, temperature=temperature, entropy=entropy, extras=extras
        )

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.logits`."""
        self.check_ids(sequences)
        return self._model(torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True))


class _BigramDecoder:
    """See ``decoding.Decoder``; its only state is the last id."""

    def __init__(self, model: BigramModel) -> None:
        self._model = model

    def advance(self, token_ids: Tensor) -> Tensor:
        return self._model(token_ids)

    def keep(self, rows: Tensor) -> None:
        pass
