"""Policy over any backend: takes rows of a tensordict and returns answered or scored rows.

:meth:`LLMWrapperBase.forward` reads rows (:mod:`~torchrl_llm.modules.policies.row_readers`), calls
the backend, writes columns (:mod:`~torchrl_llm.modules.policies.outputs`) and pads once if
requested.

Shape legend: ``B`` rows, ``n`` samples per prompt, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.compat.mixins.policy_attributes import WrapperAttributes
from torchrl_llm.compat.mixins.policy_distributions import WrapperDistributions
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.record import TokenRecord, respond_records
from torchrl_llm.data.scoring import ScoreExtras, Support, TokenScorer, TokenScores
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.token_facts import added_facts, node_dtypes
from torchrl_llm.data.views import TokenSupport
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend, Completion, SamplingParams
from torchrl_llm.modules.policies import outputs, row_blocks, row_readers, row_sampling, scored_rows
from torchrl_llm.modules.policies.batching import make_batcher
from torchrl_llm.modules.policies.context_limit import fit_context, longest_prompt
from torchrl_llm.modules.policies.policy_arguments import (
    COMMON_NAMES,
    InputMode,
    PolicyOptions,
    common_names,
    override_generation,
    parse_generate_kwargs,
    settle_generation,
    take_options,
)

_READERS: dict[InputMode, type[row_readers.RowReader]] = {
    "history": row_readers.HistoryRows,
    "text": row_readers.TextRows,
    "tokens": row_readers.TokensRows,
}


class LLMWrapperBase(WrapperAttributes, WrapperDistributions, TensorDictModuleBase, TokenScorer):
    """A policy over any :class:`~torchrl_llm.modules.backends.backend_port.Backend`.

    With ``generate=True`` it answers ``(input_mode, "prompt")``. It writes prompt, response and the
    full text or conversation of its mode, ``tokens``, ``log_probs``, ``masks``, ``trace``, and the
    facts that were registered before it was built (:mod:`torchrl_llm.data.token_facts`). With
    ``generate=False`` it scores ``(input_mode, "full")``, each row at its recorded temperature and
    on its recorded kept ids. It writes ``log_probs.full``, ``tokens.full`` and ``masks``. Columns
    are ragged (one tensor per row), unless ``pad_output`` is set.

    Subclasses only build the backend.

    Args:
        backend: samples and scores token ids.
        tokenizer: a fast tokenizer; optional in tokens mode.
        **options: see :class:`~torchrl_llm.modules.policies.PolicyOptions`.

    Attributes:
        backend: as given.
        options: as given.
        policy_version: set by the weight updater.
        overlong_counts: prompts dropped and truncated so far.

    Raises:
        ConfigError: for arguments that contradict each other or would have no effect.
        TypeError: for an unknown argument, with the nearest name.
    """

    COMMON_GENERATION_PARAMS: ClassVar[set[str]] = COMMON_NAMES
    """Names of generation arguments that every backend accepts."""

    @take_options
    def __init__(self, backend: Backend, *, tokenizer: Any = None, **options: Any) -> None:
        super().__init__()
        self.options = chosen = PolicyOptions(**options)
        mode, self.generate = chosen.input_mode, chosen.generate
        if tokenizer is None and mode != "tokens":
            raise ConfigError(f"input_mode={mode!r} needs a tokenizer: pass tokenizer=...")
        self.backend = backend
        if backend.module is not None:
            self.model = backend.module
        self.tokenizer = tokenizer
        self.vocab_size = backend.vocab_size
        self.input_mode, self.pad_output = mode, chosen.pad_output
        self.policy_version = chosen.policy_version
        self.on_overlong, self.max_prompt_length = chosen.on_overlong, chosen.max_prompt_length
        self.overlong_counts = {"dropped": 0, "truncated": 0}
        self.names = row_readers.KeyNames.of(chosen)
        self._generate_kwargs = common_names(chosen.generate_kwargs or {}, backend)
        self._arguments = settle_generation(
            self._generate_kwargs,
            backend,
            self.generate,
            chosen.num_samples,
            chosen.return_log_probs,
        )
        self.num_samples = self._arguments.num_samples
        self.return_log_probs = self._arguments.log_probs
        if chosen.inplace and self.generate and self.num_samples is not None:
            raise ConfigError(
                "num_samples adds a dimension, so the output cannot go in place; got "
                f"inplace={chosen.inplace!r}"
            )
        self.inplace = self.num_samples is None if chosen.inplace is None else chosen.inplace
        self.batcher = make_batcher(
            chosen.batching, chosen.min_batch_size, chosen.max_batch_size, chosen.batching_timeout
        )
        codec = formatter = None
        if tokenizer is not None:
            codec = row_readers.TextCodec(
                tokenizer,
                tokenizer_kwargs=chosen.tokenizer_kwargs,
                skip_special_tokens=self._arguments.skip_special_tokens,
            )
        if mode == "history":
            formatter = ChatFormatter(
                tokenizer,
                chat_template=chosen.chat_template,
                chat_template_name=chosen.chat_template_name,
                on_rewrite=chosen.on_rewrite,
                tools=chosen.tools,
                template_kwargs=chosen.template_kwargs,
            )
        self.formatter = formatter
        key = chosen.input_key
        if key is None:
            key = (getattr(self.names, mode), "prompt" if self.generate else "full")
        self.reader = _READERS[mode](
            (key,) if isinstance(key, str) else tuple(key),
            self.names,
            formatter=formatter,
            codec=codec,
            prefer_tokens=chosen.prefer_tokens,
        )
        self.in_keys = [key]
        self.out_keys = self._out_keys()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__init__" in vars(cls):
            cls.__init__ = take_options(cls.__init__)

    # -- construction -----------------------------------------------------------------------------

    def _out_keys(self) -> list[NestedKey]:
        names = self.names
        masks = [(names.masks, f"all_{kind}_mask") for kind in ("attention", "assistant")]
        if not self.generate:
            scored = [(names.tokens, "full"), (names.log_probs, "full")]
            return [*self.reader.scored_view_keys, *scored, *masks]
        tokens = ("prompt", "response", "full", "finish_reason", "temperature", "truncated_support")
        keys = [*self.reader.view_keys, *((names.tokens, name) for name in tokens), *masks]
        keys += [(names.trace, name) for name in node_dtypes("trace")]
        if self.return_log_probs:
            keys += [(names.log_probs, part) for part in ("response", "full")]
        if self._arguments.params.record_support:
            keys += [(names.support, name) for name in TokenSupport._dtypes]
        for fact in added_facts():
            keys += [(fact.key[0], "response"), fact.key] if fact.parts else [fact.key]
        return keys

    def get_new_version(self, **changes: Any) -> Self:
        """Return this policy with changed arguments; model, tokenizer and backend are shared.

        Keys that were derived from the mode are derived again. With ``generate=False``, arguments
        without effect on scoring are dropped.

        Args:
            changes: constructor arguments.

        Example:
            >>> from torchrl_llm.modules import FakeWrapper
            >>> policy = FakeWrapper(input_mode="tokens", vocab_size=8, eos_token_ids=(2,))
            >>> policy.get_new_version(generate=False).in_keys
            [('tokens', 'full')]
        """
        model = next(iter(inspect.signature(type(self)).parameters))
        own = {model: self.backend, "tokenizer": self.tokenizer}
        changes = {"policy_version": self.policy_version, **changes}
        return type(self)(**{**own, **self.options.changed(changes)})

    @property
    def sampling_defaults(self) -> SamplingParams:
        """Sampling parameters unless a call or row overrides them; for policies that sample."""
        return self._with_closers(self._arguments.params)

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt, limited by the context and by ``max_prompt_length``."""
        return longest_prompt(self.backend.max_length, self.max_prompt_length)

    # -- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Answer or score the rows; rows that an environment will not step get an empty answer.

        Args:
            tensordict: batch size ``[]``, ``[B]`` or more dimensions; ``"_step"``, if present,
                flags the rows to answer.
            tensordict_out: tensordict to write into, instead of the output chosen by ``inplace``.
            generate_kwargs: override the arguments of the constructor, for this call and this
                caller only. With ``generate=False`` they are checked but have no effect.

        Returns:
            The output chosen by ``inplace``; with ``num_samples`` a new tensordict of batch size
            ``[B, n]``.

        Raises:
            ConfigError: for wrong arguments, and for ``num_samples`` inside an environment.
            DataError: for a missing column or an empty prompt.
            OverlongError: for a prompt that does not fit, unless ``on_overlong`` allows it.
        """
        blocks = row_blocks.flat_blocks(tensordict)
        arguments = self._arguments
        if generate_kwargs:
            merged = {**self._generate_kwargs, **common_names(generate_kwargs, self.backend)}
            if self.generate:
                arguments = override_generation(merged, self.backend, arguments)
            else:
                parse_generate_kwargs(merged, self.backend)
        if not self.generate:
            return self._deliver(tensordict, self._score_rows(blocks), tensordict_out)
        if self.num_samples is not None and "done" in tensordict.keys():
            raise ConfigError(
                f"num_samples={self.num_samples} gives each row several answers, which an "
                "environment cannot step; use DataLoadingPrimer(repeats=n) to start each prompt "
                "several times instead"
            )
        return self._deliver(tensordict, self._answer(blocks, arguments.params), tensordict_out)

    def _answer(self, blocks: Sequence[TensorDictBase], params: SamplingParams) -> TensorDict:
        samples = self.num_samples
        params = self._with_closers(replace(params, num_samples=samples or 1))
        prompts = self.reader.read_prompts(blocks)
        limits = (self.backend.max_length, self.max_prompt_length)
        steps = row_blocks.tensor_rows(blocks, "_step")
        fitted = fit_context(
            prompts.records,
            *limits,
            params.max_new_tokens,
            self.on_overlong,
            None if steps is None else [bool(step.any()) for step in steps],
        )
        if any(fitted.overlong):
            kind = "dropped" if self.on_overlong == "drop" else "truncated"
            self.overlong_counts[kind] += sum(fitted.overlong)
        own = row_sampling.params_of_rows(blocks, params)
        completions = self._complete(fitted.records, fitted.answered, own)
        prompts = prompts._replace(records=fitted.records).repeat(params.num_samples)
        messages = self.reader.parse(prompts, completions)
        if messages is not None:
            completions = outputs.with_tool_calls(completions, messages)
        records = respond_records(prompts.records, completions, self.policy_version)
        flat = outputs.answered_columns(
            prompts.records,
            completions,
            records,
            [params for params in own for _ in range(params.num_samples)],
            self.names,
            unscored=prompts.unscored,
            overlong=[flag for flag in fitted.overlong for _ in range(params.num_samples)],
            log_probs=self.return_log_probs,
        )
        for name, node in self.reader.view(prompts, records, messages).items():
            flat.set(name, node)
        group = None if samples is None else row_blocks.tensor_rows(blocks, "group_id")
        if group is not None:
            flat.set("group_id", torch.stack(group).repeat_interleave(samples, 0))
        return flat

    def _with_closers(self, params: SamplingParams) -> SamplingParams:
        """Add the chat template's end-of-turn ids to the ids that end a response."""
        if self.formatter is None or params.ignore_eos:
            return params
        ends = {*params.stop_token_ids, *self.formatter.stop_token_ids}
        return replace(params, stop_token_ids=tuple(sorted(ends)))

    def _complete(
        self,
        records: Sequence[TokenRecord],
        answered: Sequence[bool],
        params: Sequence[SamplingParams],
    ) -> list[Completion]:
        """Return ``num_samples`` completions of each row, empty ones for unanswered rows."""
        none = Completion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), FinishReason.ABORT)
        found = [[none] * own.num_samples for own in params]
        rows = [row for row, yes in enumerate(answered) if yes]
        for own, places in row_sampling.alike(rows, params):
            groups = self._generate([records[row].token_ids for row in places], own)
            for row, completions in zip(places, groups, strict=True):
                found[row] = completions
        return [completion for group in found for completion in group]

    def _generate(self, asked: list[Tensor], params: SamplingParams) -> list[list[Completion]]:
        # A seed belongs to one call: in a merged call, its draws would depend on other requests.
        if self.batcher is None or params.seed is not None:
            return self.backend.generate(asked, params)
        self.backend.check_prompts(asked)
        return self.batcher.submit(asked, key=params, run=self.backend.generate)

    def _deliver(
        self, given: TensorDictBase, flat: TensorDict, out: TensorDictBase | None
    ) -> TensorDictBase:
        if self.pad_output:
            places = None
            if not self.generate:
                ids = read_rows(flat, (self.names.tokens, "full"))
                places = self.reader.read_places(row_blocks.flat_blocks(given), ids, "left")
            flat = outputs.pad_columns(flat, self.pad_token_id, self.names, places)
        if self.num_samples is not None and self.generate:
            if out is not None:
                raise ConfigError("num_samples adds a dimension: tensordict_out cannot hold it")
            return row_blocks.nest(flat, torch.Size([*given.batch_size, self.num_samples]))
        if out is None and self.inplace is False:
            return row_blocks.nest(flat, given.batch_size)
        target = out if out is not None else given.empty() if self.inplace == "empty" else given
        row_blocks.deliver(target, flat, merge=not self.generate)
        return target

    @property
    def pad_token_id(self) -> int:
        """Id that fills padded columns (the tokenizer's pad id, else its eos id, else 0)."""
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(self.tokenizer, name, None)
            if value is not None:
                return value
        return 0

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
        """See :meth:`torchrl_llm.data.scoring.TokenScorer.token_scores`; losses call this."""
        return self.backend.token_scores(
            sequences, select, temperature=temperature, entropy=entropy, extras=extras
        )

    def naive_scorer(self) -> TokenScorer | None:
        """See :meth:`torchrl_llm.data.scoring.TokenScorer.naive_scorer`."""
        return self.backend.naive_scorer()

    def _whole_rows(
        self, tensordict: TensorDictBase, mask_key: NestedKey | None, side: str = "right"
    ) -> scored_rows.WholeRows:
        """Return ids, tokens to score, temperature and kept ids of whole rows."""
        reader = self.reader
        if self.generate:
            reader = copy.copy(reader)
            reader.key = (getattr(self.names, self.input_mode), "full")
        blocks = row_blocks.flat_blocks(tensordict)
        sequences = reader.read_sequences(blocks)
        ids = sequences.token_ids
        known = {
            (self.names.masks, "all_attention_mask"): [torch.ones_like(row).bool() for row in ids],
            (self.names.masks, "all_assistant_mask"): sequences.assistant,
        }
        return scored_rows.WholeRows(
            token_ids=ids,
            select=scored_rows.select_tokens(reader, blocks, ids, mask_key, known),
            temperature=scored_rows.temperatures(blocks, self.names),
            supports=reader.read_support(blocks, ids),
            places=reader.read_places(blocks, ids, side),
        )

    def _score_rows(self, blocks: Sequence[TensorDictBase]) -> TensorDict:
        """Return the output for rows with ``generate=False``: a dense root with ragged nodes.

        Requests of several threads are scored together if there is a batcher and no gradients are
        needed.
        """
        sequences = self.reader.read_sequences(blocks)
        ids = sequences.token_ids
        supports = self.reader.read_support(blocks, ids)
        temperature = scored_rows.temperatures(blocks, self.names)
        if self.batcher is None or torch.is_grad_enabled():
            log_probs = self._all_scores(ids, temperature, supports)
        else:
            self.backend.check_ids(ids)
            if not isinstance(temperature, Tensor):
                temperature = torch.full((len(ids),), temperature)
            items = list(zip(ids, temperature, supports or [None] * len(ids), strict=True))
            log_probs = torch.cat(self.batcher.submit(items, key="score", run=self._score_items))
        flat = outputs.scored_columns(ids, sequences.assistant, log_probs, self.names)
        for name, node in self.reader.scored_view(sequences, blocks).items():
            flat.set(name, node)
        return flat

    def _all_scores(
        self,
        token_ids: Sequence[Tensor],
        temperature: float | Tensor,
        supports: Sequence[Support] | None,
    ) -> Tensor:
        """Return the log-probs of all tokens but the first of each row, on the CPU."""
        select = [torch.arange(ids.shape[0]) > 0 for ids in token_ids]
        extras = scored_rows.support_extras(supports, select)
        scores = self.token_scores(token_ids, select, temperature=temperature, extras=extras)
        return scores.log_probs.cpu()

    @torch.no_grad()
    def _score_items(
        self, items: list[tuple[Tensor, Tensor, Support | None]], key: str
    ) -> list[Tensor]:
        token_ids, temperature, known = zip(*items, strict=True)
        supports = None
        if any(support is not None for support in known):
            supports = [
                Support.whole(ids.shape[0]) if support is None else support
                for ids, support in zip(token_ids, known, strict=True)
            ]
        scores = self._all_scores(token_ids, torch.stack(temperature), supports)
        return list(scores.split([max(ids.shape[0] - 1, 0) for ids in token_ids]))

    # -- batching ---------------------------------------------------------------------------------

    def cleanup_batching(self, flush: bool = False) -> None:
        """Empty the request queue.

        Args:
            flush: answer the queued requests; otherwise their callers get an error.
        """
        if self.batcher is not None:
            self.batcher.cleanup(flush=flush)

    def get_batching_state(self) -> dict[str, Any]:
        """Return whether requests are batched, the settings, and the queued and running requests.

        The result also has TorchRL's names (``batching_enabled``, ``queue_size``, ``timeout``,
        ...).
        """
        if self.batcher is None:
            return {"batching": False, "batching_enabled": False}
        state = self.batcher.state()
        busy = state["running_items"] > 0
        return {
            "batching": True,
            **state,
            "batching_enabled": True,
            "queue_size": state["queued_items"],
            "pending_futures": state["queued_requests"],
            "timeout": state["timeout_s"],
            "processing": busy,
            "lock_state": "locked" if busy else "unlocked",
        }
