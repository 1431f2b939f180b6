"""Body and chunked head of a causal model as one module: token ids in, log-probs out.

All differentiable log-probs come from the ``forward`` of this module. It is the root module that
FSDP2, ``torch.compile`` and autocast wrap. If code read the head's weight outside of the sharded
root's forward, the gradients would be wrong without an error.

Shape legend: ``B`` rows, ``T`` tokens, ``N`` selected tokens, ``V`` vocabulary, ``D`` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_llm._checked import check
from torchrl_llm._log import tell_once
from torchrl_llm.data.logit_scores import only_support, score_logits
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import HeadScores
from torchrl_llm.modules.backends import attention
from torchrl_llm.modules.backends import head as heads
from torchrl_llm.modules.backends.layouts import LAYOUTS, ModelSize, Rows, RowStream, lay_out
from torchrl_llm.modules.model_loading import check_rotary, rotary_limit


def _shows_head(model: nn.Module) -> bool:
    """Return whether a model exposes its output embeddings."""
    find = getattr(heads.causal_model(model), "get_output_embeddings", None)
    return find is not None and find() is not None


class CausalScorer(nn.Module, TokenScorer):
    """Computes log-probs of selected tokens with a causal model, without ``[B, T, V]`` logits.

    The head only runs on hidden states that predict a selected token. Tokens that no selected token
    depends on are not run at all.

    Args:
        model: a Hugging Face causal model, in PEFT or not. It is kept as ``model``; its weights are
            not copied.
        chunk_size: most logits in memory at the same time; ``None`` chooses by device.
        full_logits: use the model's own logits, for heads that the chunked head does not support.
            This is always used, with a log message, for a model that does not expose its output
            embeddings.
        in_place_head_grad: add the gradient of the head's weight in place, which saves a tensor of
            its size; for one process without gradient hooks.
        value_head: estimates values from the same states as the head.
        layout: how rows of different length are laid out, see
            ``torchrl_llm.modules.backends.layouts``: ``"padded"``, ``"bucketed"``, ``"packed"``,
            ``"shared"``, or ``"auto"``, which chooses the cheapest layout for the rows of each
            call. Scores and gradients of all layouts are equal up to rounding. ``"shared"`` draws
            dropout once for a shared prompt. Flash attention does not support ``"shared"``.

    Attributes:
        why_not_packed: the reason why ``"packed"`` and ``"shared"`` are not available for this
            model; ``None`` if they are available. The constructor tests the model on a few tokens.

    Raises:
        ConfigError: the head is not supported (see ``LMHead``), the layout is not available, or the
            model's attention cannot run on its device.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> scorer = CausalScorer(Qwen2ForCausalLM(config))
        >>> ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
        >>> select = [torch.tensor([False, True, True]), torch.tensor([False, True])]
        >>> scorer.token_scores(ids, select).log_probs.shape
        torch.Size([3])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_size: int | None = None,
        full_logits: bool = False,
        in_place_head_grad: bool = False,
        value_head: heads.ValueHead | None = None,
        layout: str = "auto",
    ) -> None:
        super().__init__()
        heads.refuse_learned_prompts(model)
        if heads.can_be_tried(model):
            heads.tried_once(attention.check_rows_apart, model)
        if full_logits and (chunk_size is not None or in_place_head_grad):
            raise ValueError("chunk_size and in_place_head_grad have no effect with full_logits")
        if not full_logits and not _shows_head(model):
            full_logits = True
            tell_once(
                f"{type(heads.causal_model(model)).__name__} exposes no output embeddings: it uses "
                "its own logits, [B, T, V] at once, as with full_logits=True"
            )
            chunk_size, in_place_head_grad = None, False
        if full_logits and value_head is not None:
            raise ValueError("a value head needs hidden states, which full_logits does not return")
        self.model = model
        self.value_head = value_head
        self.chunk_size = chunk_size
        self.in_place_head_grad = in_place_head_grad
        self.head = None if full_logits else heads.LMHead.from_model(model)
        self._settle(model, layout)

    def _settle(self, model: nn.Module, layout: str) -> None:
        """Determine the available layouts; needs the head."""
        self.why_not_packed = attention.why_not_packed(model, self._run)
        self._one_call: tuple[str, ...] = ()
        if self.why_not_packed is None:
            self._one_call = ("packed",) if heads.uses_flash(model) else ("packed", "shared")
        self._longest_plain_row = attention.longest_plain_row(model)
        self._rotary_limit = rotary_limit(heads.causal_model(model).config)
        self._size = ModelSize.of(model, self._run)
        self.layout = layout

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return heads.causal_model(self.model).get_input_embeddings().weight.shape[0]

    @property
    def _run(self) -> nn.Module:
        """The module that ``forward`` calls: the model or its body."""
        return self.model if self.head is None else heads.model_body(self.model)

    @property
    def _kernel(self) -> str:
        return heads.attention_name(self.model)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Allowed values of ``layout`` for this model."""
        return ("auto", "padded", "bucketed", *self._one_call)

    @property
    def layout(self) -> str:
        """Layout of rows; can be set to any of ``layouts``."""
        return self._layout

    @layout.setter
    def layout(self, layout: str) -> None:
        check("layout", layout, Literal[("auto", *LAYOUTS)])
        if layout not in self.layouts:
            reason = self.why_not_packed or "flash attention cannot show a row a shared prompt"
            raise ConfigError(
                f"layout={layout!r} is not available: {reason}; use one of "
                f"{', '.join(self.layouts)}"
            )
        self._layout = layout

    def forward(
        self,
        stream: RowStream,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """Score the selected tokens of a stream; :meth:`token_scores` creates it from rows.

        Args:
            stream: the rows, on the model's device.
            temperature: a number, or float32 ``[N]``, one per selected token.
            entropy: also return the entropy of the distribution of each token.
            extras: further requested results.

        Returns:
            The scores of the ``N`` selected tokens in row-major order.

        Raises:
            ConfigError: for extras that are not available.
        """
        states = self._states(stream).index_select(0, stream.index)
        settings = {"temperature": temperature, "entropy": entropy}
        if self.head is None:
            extras = only_support(extras, "with full_logits=True a scorer sees no hidden states")
            return score_logits(states.float(), stream.targets, extras=extras, **settings)
        return score_hidden(
            self.head,
            states,
            stream.targets,
            extras=extras,
            value_head=self.value_head,
            chunk_size=self.chunk_size,
            in_place_head_grad=self.in_place_head_grad,
            **settings,
        )

    def _states(self, stream: RowStream) -> Tensor:
        """Return the hidden states of the whole stream ``[S, D]``, or its logits ``[S, V]``."""
        heads.check_kernel(self.model)
        run, ids = self._run, stream.input_ids
        if stream.one_call:
            apart = attention.stream_arguments(self.model, stream.blocks, ids.device)
            positions = stream.position_ids[None]
            return run(input_ids=ids[None], position_ids=positions, use_cache=False, **apart)[0][0]
        # A token of a causal model depends only on earlier tokens, so the padding after a row
        # cannot affect it.
        parts = ids.split([block.rows * block.width for block in stream.blocks])
        states = [
            run(input_ids=part.view(block.rows, block.width), use_cache=False)[0].flatten(0, 1)
            for part, block in zip(parts, stream.blocks, strict=True)
        ]
        return states[0] if len(states) == 1 else torch.cat(states)

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`~torchrl_llm.data.scoring.TokenScorer.token_scores`.

        Raises:
            ConfigError: also for rows longer than ``rotary_limit``, or longer than the attention
                window of a model with ``layout`` set to ``"packed"`` or ``"shared"``.
        """
        device = heads.causal_model(self.model).get_input_embeddings().weight.device
        rows = Rows(sequences, select)
        check_rotary(self._rotary_limit, max(rows.lengths))
        costs = self._size.costs(device)
        stream = lay_out(rows, self._choice(rows), costs, self._in_one_kernel(device))
        if isinstance(temperature, Tensor):
            temperature = temperature.float().to(rows.row.device)[rows.row]
            temperature = temperature.to(device, non_blocking=True)
        return self(stream.to(device), temperature=temperature, entropy=entropy, extras=extras)

    def naive_scorer(self) -> CausalScorer | None:
        """Return a scorer of padded rows with full logits; ``None`` if this is one."""
        if self.head is None:
            return None
        return CausalScorer(self.model, full_logits=True, layout="padded")

    def _in_one_kernel(self, device: torch.device) -> tuple[str, ...]:
        """The layouts with one attention kernel for all blocks."""
        if self._kernel not in ("sdpa", "eager"):
            return self._one_call
        config = heads.causal_model(self.model).config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        dtype = attention.compute_dtype(device, heads.causal_model(self.model).dtype)
        has_kernel = attention.has_row_kernel(device, dtype, head_dim)
        return ("packed",) if self._kernel == "sdpa" and has_kernel else ()

    def _choice(self, rows: Rows) -> tuple[str, ...]:
        """Return the allowed layouts of these rows."""
        plain = max(rows.lengths) <= self._longest_plain_row
        if self._layout == "auto":
            return self._automatic(plain)
        if self._layout in ("packed", "shared") and not plain:
            raise ConfigError(
                f"layout={self._layout!r} packs rows of at most {self._longest_plain_row} tokens, "
                f"the window of its attention, and a row has {max(rows.lengths)}; use 'auto'"
            )
        return ("padded",) if self._layout == "bucketed" and self._is_sharded else (self._layout,)

    @property
    def _is_sharded(self) -> bool:
        """Whether all ranks must call the model equally often, because they share the weights.

        In this case, one call of the scorer is one call of the model. For buckets, the caller must
        split the rows, as in ``torchrl_llm.trainers.optimize``.
        """
        return isinstance(next(self.model.parameters()), DTensor)

    def _automatic(self, plain: bool) -> tuple[str, ...]:
        # Eager attention would materialize a mask over the whole stream and compare all pairs.
        one_call = self._one_call if plain and self._kernel != "eager" else ()
        return ("padded", *one_call) if self._is_sharded else ("padded", "bucketed", *one_call)


def score_hidden(
    head: heads.LMHead,
    hidden_ND: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    extras: ScoreExtras | None = None,
    value_head: heads.ValueHead | None = None,
    chunk_size: int | None = None,
    in_place_head_grad: bool = False,
) -> TokenScores:
    """Compute the scores of the tokens that hidden states predict.

    Args:
        head: the language-model head.
        hidden_ND: ``[N, D]``.
        targets_N: int64 ``[N]``.
        temperature: a number, or float32 ``[N]``.
        entropy: also return the entropy of each distribution.
        extras: further requested results.
        value_head: estimates the values if ``extras`` requests them.
        chunk_size: most logits in memory at the same time; ``None`` chooses by device.
        in_place_head_grad: add the gradient of the head's weight in place.

    Raises:
        ConfigError: for extras that are not available.
    """
    extras = ScoreExtras() if extras is None else extras
    scores = HeadScores(hidden_ND.new_zeros(0, dtype=torch.float32), None)
    if extras.log_probs:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not extras.detach_log_probs):
            scores = head.score(
                hidden_ND,
                targets_N,
                temperature=temperature,
                entropy=entropy,
                support=extras.support,
                chunk_size=chunk_size,
                in_place_head_grad=in_place_head_grad and not extras.detach_log_probs,
            )
    values = divergence = None
    if extras.values:
        if value_head is None:
            raise ConfigError(
                "values were requested, but the model has no value head: build it with "
                "TransformersBackend(model, value_head=ValueHead.for_model(model))"
            )
        values = value_head(hidden_ND)
    if extras.teachers:
        divergence = _divergence(head, hidden_ND, extras, temperature, chunk_size)
    states = head.states(hidden_ND) if extras.states else None
    greedy = head.greedy_ids(hidden_ND, chunk_size) == targets_N if extras.greedy else None
    return TokenScores(*scores, values, divergence, states, greedy)


def _divergence(
    head: heads.LMHead,
    hidden_ND: Tensor,
    extras: ScoreExtras,
    temperature: float | Tensor,
    chunk_size: int | None,
) -> Tensor:
    """Return the divergence of each token from its teacher; 0 for tokens without a teacher."""
    settings = {"direction": extras.divergence, "chunk_size": chunk_size}
    if extras.teacher_index is None:
        (teacher,) = extras.teachers
        return head.divergence(hidden_ND, teacher, temperature=temperature, **settings)
    whole = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=torch.float32)
    for number, teacher in enumerate(extras.teachers):
        # Indices instead of a mask: one gather and one scatter.
        index = (extras.teacher_index == number).nonzero()[:, 0]
        index = index.to(hidden_ND.device, non_blocking=True)
        own = temperature[index] if isinstance(temperature, Tensor) else temperature
        values = head.divergence(hidden_ND[index], teacher, temperature=own, **settings)
        whole = whole.to(values.dtype).index_put((index,), values)
    return whole
