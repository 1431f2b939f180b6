"""Backend over a Hugging Face causal language model.

Sampling runs in a loop of our own (:mod:`~torchrl_llm.modules.backends.decoding`): ``generate``
would take unset fields from the model's generation config (its ``top_k`` of 50), and returns
log-probs only by keeping the logits of every step. Scoring goes through
:class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`, which trains.

Shape legend: ``U`` different prompts, ``B`` rows to decode, ``P`` tokens of the longest prompt,
``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessorList
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process as lp

from torchrl_llm._registry import register
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Completion, SamplingParams
from torchrl_llm.modules.backends.decoding import StopStrings, decode
from torchrl_llm.modules.backends.head import ValueHead, causal_model, sampling_mode
from torchrl_llm.modules.backends.local_backend import LocalBackend
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.modules.model_loading import known_eos

# Tokens that a cache has room for beyond those that it holds.
_MOST_ROOM = 64


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
"""Further names that the Transformers backend takes, spelled as in ``generate``."""


def native_processors(
    arguments: Mapping[str, Any],
    prompt_length: int,
    end_ids: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """Processors for the arguments given, in transformers' own order.

    They see logits before temperature and truncation.

    Args:
        arguments: names of :data:`NATIVE_ARGUMENTS` and their values.
        prompt_length: tokens of the longest (padded) prompt.
        end_ids: ids that end a response.
        device: of the logits.

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
        model: the model, where it is and in the dtype that it has; PEFT models too.
        tokenizer: decodes stop strings and names one more end-of-sequence id; may be ``None``.
        eos_token_ids: ids that end a response; by default those of tokenizer and model together.
        max_length: context of the model in tokens; by default what its config says.
        layout: how rows of different length are laid out for scoring, see
            :class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`; that of the scorer by
            default. May be set later.
        scorer: computes log-probs; built for the model by default.
        chunk_size: the most logits alive at once when a scorer is built; ``None`` chooses.
        full_logits: when a scorer is built, let the model make its own logits (for heads that the
            chunked one does not know).
        value_head: when a scorer is built, its value head (PPO); trained with the model.

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
        value_head: ValueHead | None = None,
    ) -> None:
        if scorer is None:
            scorer = CausalScorer(
                model, chunk_size=chunk_size, full_logits=full_logits, value_head=value_head
            )
        base = causal_model(model)
        self._config = config = base.config.get_text_config(decoder=True)
        super().__init__(
            vocab_size=base.get_input_embeddings().weight.shape[0],
            max_length=max_length or getattr(config, "max_position_embeddings", None),
            eos_token_ids=eos_token_ids
            or known_eos(tokenizer, base.config, getattr(base, "generation_config", None)),
        )
        self.model, self.tokenizer, self.scorer = model, tokenizer, scorer
        if layout is not None:
            scorer.layout = layout
        self._takes = frozenset(inspect.signature(base.forward).parameters)
        if "past_key_values" not in self._takes:
            raise ConfigError(
                f"{type(base).__name__} has no key-value cache that decoding could use; "
                "only attention models (and hybrids of them) are supported"
            )

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.model

    @property
    def layouts(self) -> tuple[str, ...]:
        """What ``layout`` may be, see :class:`TokenScorer`."""
        return self.scorer.layouts

    @property
    def layout(self) -> str | None:
        """That of the scorer."""
        return self.scorer.layout

    @layout.setter
    def layout(self, layout: str) -> None:
        self.scorer.layout = layout

    @property
    def value_head(self) -> ValueHead | None:
        """The scorer's value head, where it has one."""
        return getattr(self.scorer, "value_head", None)

    def _sample(self, prompts: Sequence[Tensor], params: SamplingParams) -> list[Completion]:
        """The model reads equal prompts once."""
        unique: dict[bytes, int] = {}
        owners = [unique.setdefault(p.numpy().tobytes(), len(unique)) for p in prompts]
        owners = [owner for owner in owners for _ in range(params.num_samples)]
        distinct = [torch.frombuffer(bytearray(key), dtype=torch.int64) for key in unique]
        rows = [distinct[owner] for owner in owners]
        longest = max(p.shape[0] for p in distinct)
        device = causal_model(self.model).get_input_embeddings().weight.device
        with sampling_mode(self.model):
            decoder = _CausalDecoder(
                self.model, distinct, self.max_length, params.max_new_tokens, takes=self._takes
            )
            return decode(
                decoder,
                decoder.prefill(torch.tensor(owners)),
                rows,
                params,
                max_tokens=torch.tensor([self._room(p, params) for p in rows]),
                end_ids=self._ends(params),
                stop_strings=StopStrings(self.tokenizer, params.stop),
                processors=native_processors(params.native, longest, self.eos_token_ids, device),
                pad_id=getattr(self._config, "pad_token_id", None) or 0,
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

        Without gradients the model runs as for sampling (no dropout), else in the mode that the
        trainer put it in.
        """
        self.check_scoring(sequences, select)
        score = partial(self.scorer.token_scores, sequences, select)
        settings = {"temperature": temperature, "entropy": entropy, "extras": extras}
        if torch.is_grad_enabled():
            return score(**settings)
        with self._lock, sampling_mode(self.model):
            return score(**settings)

    def naive_scorer(self) -> TokenScorer | None:
        """See :meth:`TokenScorer.naive_scorer`."""
        return self.scorer.naive_scorer()

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.logits`; always padded, in the module's present mode."""
        self.check_ids(sequences)
        device = causal_model(self.model).get_input_embeddings().weight.device
        input_ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(device)
        return self.model(input_ids=input_ids, use_cache=False).logits


class _CausalDecoder:
    """A causal model with its cache in the middle of a batch; see ``decoding.Decoder``."""

    def __init__(
        self,
        model: nn.Module,
        prompts: list[Tensor],
        max_length: int | None,
        max_new_tokens: int,
        *,
        takes: frozenset[str],
    ) -> None:
        device = causal_model(model).get_input_embeddings().weight.device
        self._model = model
        self._cache = make_cache(causal_model(model), max_new_tokens)
        self._takes = takes
        self._last_position = max_length - 1 if max_length else None
        lengths = torch.tensor([p.shape[0] for p in prompts])
        self._held = int(lengths.max())
        ids_UP = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
        self._ids = ids_UP.to(device)
        mask = torch.arange(self._held) >= (self._held - lengths)[:, None]
        # Without a pad anywhere no mask is needed, and attention takes its fast path.
        self._mask = None if bool(mask.all()) else mask.to(device)
        self._next = lengths.to(device)

    def prefill(self, owners: Tensor) -> Tensor:
        """Read the prompts once; ``owners`` gives the prompt of each row, logits are ``[B, V]``."""
        if self._mask is None:
            positions = torch.arange(self._held, device=self._ids.device).expand_as(self._ids)
        else:
            positions = (self._mask.long().cumsum(-1) - 1).clamp_min_(0)
        logits = self._forward(self._ids, positions)
        if owners.tolist() != list(range(self._ids.shape[0])):
            owners = owners.to(logits.device)
            self.keep(owners)
            logits = logits[owners]
        return logits

    def advance(self, token_ids: Tensor) -> Tensor:
        positions = self._next[:, None]
        if self._last_position is not None:
            # Rows that are full have ended, but stay in the batch until it is compacted.
            positions = positions.clamp_max(self._last_position)
        self._next = self._next + 1
        self._held += 1
        if self._mask is not None and self._mask.shape[1] < self._held:
            self._mask = torch.nn.functional.pad(self._mask, (0, 64), value=True)
        return self._forward(token_ids[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._next = self._next[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        # By keyword always: the second positional argument is not the mask in every model.
        wanted = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: value for name, value in wanted.items() if name in self._takes}
        output = self._model(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, : self._held],
            past_key_values=self._cache,
            use_cache=True,
            **extra,
        )
        return output.logits[:, -1]


class _BlockLayer(DynamicLayer):
    """A full-attention layer whose tensors have room for more tokens than they hold.

    transformers' own layer concatenates, which copies the whole cache at each token.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states ``[B, heads, T, dim]`` and return views of all that is held."""
        end = self._length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states.new_empty(_with_length(key_states, end + self._room))
            self.values = value_states.new_empty(_with_length(value_states, end + self._room))
        elif end > self.keys.shape[-2]:
            room = max(end, self.keys.shape[-2] * 3 // 2) + self._room
            self.keys = self._moved(self.keys, room)
            self.values = self._moved(self.values, room)
        self.keys[..., self._length : end, :] = key_states
        self.values[..., self._length : end, :] = value_states
        self._length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _moved(self, old: Tensor, room: int) -> Tensor:
        new = old.new_empty(_with_length(old, room))
        new[..., : self._length, :] = old[..., : self._length, :]
        return new

    def get_seq_length(self) -> int:
        """Tokens held, which is less than the tensors have room for."""
        return self._length


def _with_length(states: Tensor, length: int) -> torch.Size:
    return states.shape[:-2] + (length, states.shape[-1])


def make_cache(model: Any, max_new_tokens: int) -> DynamicCache:
    """An empty cache for a model; sliding-window and recurrent layers keep transformers' classes.

    Args:
        model: a transformers causal language model.
        max_new_tokens: tokens that will follow the first ones, of which room is made for some.
    """
    room = min(max_new_tokens, _MOST_ROOM)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [_BlockLayer(room) if type(l) is DynamicLayer else l for l in cache.layers]
    return cache
