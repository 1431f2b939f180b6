"""Backend for a Hugging Face causal language model.

Sampling uses its own loop (:mod:`~torchrl_llm.modules.backends.decoding`). It does not use
``generate`` of transformers, which would read unset fields from the model's generation config (such
as a ``top_k`` of 50), and would keep the logits of every step to return log-probs. Scoring uses
:class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`, which is differentiable.

Shape legend: ``U`` different prompts, ``B`` rows to decode, ``P`` tokens of the longest prompt,
``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from torchrl_llm._registry import register
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends import head as heads
from torchrl_llm.modules.backends.backend_port import Cancelled, Completion, SamplingParams
from torchrl_llm.modules.backends.causal_decoder import CausalDecoder, takes_ragged_prompts
from torchrl_llm.modules.backends.decoding import StopStrings, decode
from torchrl_llm.modules.backends.local_backend import LocalBackend
from torchrl_llm.modules.backends.static_decoder import DecoderChoice
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.modules.model_loading import check_rotary, context_of, known_eos, rotary_limit

_Builder = Callable[[Any, int, tuple[int, ...], torch.device], Any]

_BUILDERS: dict[str, _Builder] = {
    "min_new_tokens": lambda value, prompt, eos, device: lp.MinNewTokensLengthLogitsProcessor(
        prompt, value, list(eos), device=device
    ),
    "no_repeat_ngram_size": lambda value, *_: lp.NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, prompt, eos, _: lp.NoBadWordsLogitsProcessor(value, list(eos)),
    "sequence_bias": lambda value, *_: lp.SequenceBiasLogitsProcessor(value),
    "suppress_tokens": lambda value, prompt, eos, device: lp.SuppressTokensLogitsProcessor(
        value, device=device
    ),
    "begin_suppress_tokens": lambda value, prompt, eos, device: (
        lp.SuppressTokensAtBeginLogitsProcessor(value, prompt, device=device)
    ),
    "typical_p": lambda value, *_: lp.TypicalLogitsWarper(mass=value),
    "epsilon_cutoff": lambda value, *_: lp.EpsilonLogitsWarper(value),
    "eta_cutoff": lambda value, prompt, eos, device: lp.EtaLogitsWarper(value, device=device),
}

NATIVE_ARGUMENTS = frozenset({*_BUILDERS, "logits_processor"})
"""Further arguments of the Transformers backend, named as in ``generate``."""


def native_processors(
    arguments: Mapping[str, Any],
    prompt_length: int,
    end_ids: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """Processors for the given arguments, in transformers' own order.

    The processors run before temperature and truncation.

    Args:
        arguments: names from :data:`NATIVE_ARGUMENTS` and their values.
        prompt_length: number of tokens of the longest (padded) prompt.
        end_ids: ids that end a response.
        device: device of the logits.

    Example:
        >>> [type(p).__name__ for p in native_processors({"suppress_tokens": [3]}, 4, (2,))]
        ['SuppressTokensLogitsProcessor']
    """
    built = [
        build(arguments[name], prompt_length, end_ids, torch.device(device))
        for name, build in _BUILDERS.items()
        if name in arguments
    ]
    return LogitsProcessorList([*built, *arguments.get("logits_processor", ())])


@register("backends", "transformers")
class TransformersBackend(LocalBackend):
    """Samples and scores with a ``transformers`` causal language model.

    Args:
        model: the model; its device and dtype are kept. PEFT models are supported.
        tokenizer: decodes stop strings and adds its end-of-sequence id; may be ``None``.
        eos_token_ids: ids that end a response; by default those of tokenizer and model together.
        max_length: context of the model in tokens; by default the value of its config; for
            LongRoPE, the original training context (``original_max_position_embeddings``).
        layout: how rows of different length are laid out for scoring, see
            :class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`; by default the
            scorer's layout. It can be set later.
        scorer: computes log-probs; built for the model by default.
        chunk_size: most logits in memory at the same time, for the built scorer; ``None`` chooses
            by device.
        full_logits: let the built scorer use the model's own logits, for heads that the chunked
            head does not support.
        value_head: value head (PPO) of the built scorer; trained with the model.
        decode: how a step of sampling runs. ``"plain"`` calls the model. ``"graph"`` uses a cache
            of fixed size, and on a GPU replays the step as a CUDA graph. While the graph is
            recorded, no other thread may wait for the whole device or use dropout. ``"graph"``
            raises an error if the model does not support it, and works like ``"plain"`` if the
            context is longer than a sliding window. ``"auto"`` uses the graph on a GPU, in the main
            thread, for 16 tokens and more. Otherwise it works like ``"plain"``, with a warning if
            the model does not support the graph.

    Attributes:
        scorer: the root module for FSDP2 and ``torch.compile``.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> backend = TransformersBackend(Qwen2ForCausalLM(config), eos_token_ids=(2,))
        >>> params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        >>> [[completion]] = backend.generate([torch.tensor([5, 6])], params)
        >>> completion.token_ids.shape, completion.finish_reason.name
        (torch.Size([3]), 'LENGTH')
    """

    native_arguments = NATIVE_ARGUMENTS

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        max_length: int | None = None,
        layout: str | None = None,
        scorer: nn.Module | None = None,
        chunk_size: int | None = None,
        full_logits: bool = False,
        value_head: heads.ValueHead | None = None,
        decode: Literal["auto", "plain", "graph"] = "auto",
    ) -> None:
        self._decoders = DecoderChoice(decode)
        heads.refuse_learned_prompts(model)
        base = heads.causal_model(model)
        self._takes = frozenset(inspect.signature(base.forward).parameters)
        if "past_key_values" not in self._takes:
            raise ConfigError(
                f"{type(base).__name__} has no key-value cache for decoding; "
                "only attention models (and hybrids of them) are supported"
            )
        self._takes_ragged = True
        if heads.can_be_tried(model):
            self._takes_ragged = heads.tried_once(takes_ragged_prompts, model, self._takes)
        if scorer is None:
            scorer = CausalScorer(
                model, chunk_size=chunk_size, full_logits=full_logits, value_head=value_head
            )
        self._config = base.config.get_text_config(decoder=True)
        check_rotary(rotary_limit(base.config), max_length or 0)
        super().__init__(
            vocab_size=base.get_input_embeddings().weight.shape[0],
            max_length=max_length or context_of(base.config),
            eos_token_ids=eos_token_ids
            or known_eos(tokenizer, base.config, getattr(base, "generation_config", None)),
        )
        self.model, self.tokenizer, self.scorer = model, tokenizer, scorer
        if layout is not None:
            scorer.layout = layout

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.model

    @property
    def layouts(self) -> tuple[str, ...]:
        """Allowed values of ``layout``, see :class:`TokenScorer`."""
        return self.scorer.layouts

    @property
    def layout(self) -> str | None:
        """Layout of the scorer."""
        return self.scorer.layout

    @layout.setter
    def layout(self, layout: str) -> None:
        self.scorer.layout = layout

    @property
    def value_head(self) -> heads.ValueHead | None:
        """The scorer's value head, or ``None``."""
        return getattr(self.scorer, "value_head", None)

    def _sample(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[Completion]:
        """Sample all prompts, in batches of equal length if the model does not support padding."""
        alike: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            alike.setdefault(0 if self._takes_ragged else prompt.shape[0], []).append(row)
        groups: dict[int, list[Completion]] = {}
        for number, members in enumerate(alike.values()):
            # With one seed, all batches would have the same draws.
            seed = None if params.seed is None else params.seed + number
            found = self._sample_batch(
                [prompts[r] for r in members],
                replace(params, seed=seed),
                [cancelled[r] for r in members] if cancelled else (),
            )
            size = params.num_samples
            groups |= {r: found[k * size : (k + 1) * size] for k, r in enumerate(members)}
        return [completion for row in range(len(prompts)) for completion in groups[row]]

    def _sample_batch(
        self, prompts: Sequence[Tensor], params: SamplingParams, cancelled: Cancelled
    ) -> list[Completion]:
        """Sample one batch; the model reads equal prompts once."""
        unique: dict[bytes, int] = {}
        owners = [unique.setdefault(p.numpy().tobytes(), len(unique)) for p in prompts]
        owners = [owner for owner in owners for _ in range(params.num_samples)]
        distinct = [torch.frombuffer(bytearray(key), dtype=torch.int64) for key in unique]
        rows = [distinct[owner] for owner in owners]
        longest = max(p.shape[0] for p in distinct)
        limits = torch.tensor([self._room(p, params) for p in rows])
        device = heads.causal_model(self.model).get_input_embeddings().weight.device
        with heads.sampling_mode(self.model):
            decoder = CausalDecoder(
                self.model, distinct, self.max_length, params.max_new_tokens, takes=self._takes
            )
            logits = decoder.prefill(torch.tensor(owners))
            return decode(
                self._decoders.over(decoder, int(limits.max())),
                logits,
                rows,
                params,
                max_tokens=limits,
                end_ids=self._ends(params),
                stop_strings=StopStrings(self.tokenizer, params.stop),
                processors=native_processors(params.native, longest, self.eos_token_ids, device),
                pad_id=getattr(self._config, "pad_token_id", None) or 0,
                cancelled=cancelled,
            )

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`TokenScorer.token_scores`; differentiable when gradients are enabled.

        Without gradients, the model runs as for sampling (no dropout). With gradients, it runs in
        the trainer's mode.
        """
        self.check_scoring(sequences, select)
        score = partial(self.scorer.token_scores, sequences, select)
        settings = {"temperature": temperature, "entropy": entropy, "extras": extras}
        if torch.is_grad_enabled():
            return score(**settings)
        with self._lock, heads.sampling_mode(self.model):
            return score(**settings)

    def naive_scorer(self) -> TokenScorer | None:
        """See :meth:`TokenScorer.naive_scorer`."""
        return self.scorer.naive_scorer()

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.logits`; always padded, in the module's current mode."""
        self.check_ids(sequences)
        check_rotary(rotary_limit(self._config), max(map(len, sequences), default=0))
        device = heads.causal_model(self.model).get_input_embeddings().weight.device
        input_ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(device)
        return self.model(input_ids=input_ids, use_cache=False).logits
