"""Body and chunked head of a causal model as one module: token ids in, log-probs out.

This module's ``forward`` is the only way to a differentiable log-prob. It is the root that FSDP2,
``torch.compile`` and autocast wrap: a head whose weight were read outside of the sharded root's
forward would silently get wrong gradients.

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
    """Whether a model tells its output embeddings."""
    find = getattr(heads.causal_model(model), "get_output_embeddings", None)
    return find is not None and find() is not None


class CausalScorer(nn.Module, TokenScorer):
    """Scores selected tokens under a Hugging Face causal model, without ``[B, T, V]`` logits.

    Only hidden states that predict a selected token reach the head, and tokens that no selected one
    depends on are not run at all.

    Args:
        model: a Hugging Face causal model, in PEFT or not. It is kept as ``model``; its weights are
            not copied.
        chunk_size: the most logits alive at once; chosen by device when ``None``.
        full_logits: let the model make its own logits, for heads that the chunked one does not
            know. So it is, and the log says it, for a model that shows no output embeddings.
        in_place_head_grad: add the gradient of the head's weight in place, which saves a tensor of
            its size; for one process without gradient hooks.
        value_head: estimates values from the states that the head sees.
        layout: how rows of different length are laid out, see
            ``torchrl_llm.modules.backends.layouts``: ``"padded"``, ``"bucketed"``, ``"packed"``,
            ``"shared"``, or ``"auto"`` for what is cheapest for the rows of each call. Scores and
            gradients are the same to rounding. Where dropout is on, ``"shared"`` draws it once for
            a shared prompt. Flash attention knows no ``"shared"``.

    Attributes:
        why_not_packed: why ``"packed"`` and ``"shared"`` are out of reach for this model; ``None``
            when they are not. It was tried out on a few tokens at construction.

    Raises:
        ConfigError: when the head is not known (see
            ``LMHead``), the layout is out of reach, or
            the model's attention cannot run on its device.

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
                f"{type(heads.causal_model(model)).__name__} shows no output embeddings: it makes "
                "its own logits, [B, T, V] at once, as with full_logits=True"
            )
            chunk_size, in_place_head_grad = None, False
        if full_logits and value_head is not None:
            raise ValueError("a value head needs hidden states, which full_logits does not show")
        self.model = model
        self.value_head = value_head
        self.chunk_size = chunk_size
        self.in_place_head_grad = in_place_head_grad
        self.head = None if full_logits else heads.LMHead.from_model(model)
        self._settle(model, layout)

    def _settle(self, model: nn.Module, layout: str) -> None:
        """Find out how rows can be laid out; the head is known."""
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
        """What is called: the model, or its body."""
        return self.model if self.head is None else heads.model_body(self.model)

    @property
    def _kernel(self) -> str:
        return heads.attention_name(self.model)

    @property
    def layouts(self) -> tuple[str, ...]:
        """What ``layout`` may be for this model."""
        return ("auto", "padded", "bucketed", *self._one_call)

    @property
    def layout(self) -> str:
        """How rows are laid out; may be set to another of ``layouts``."""
        return self._layout

    @layout.setter
    def layout(self, layout: str) -> None:
        check("layout", layout, Literal[("auto", *LAYOUTS)])
        if layout not in self.layouts:
            reason = self.why_not_packed or "flash attention cannot show a row a shared prompt"
            raise ConfigError(
                f"layout={layout!r} is out of reach: {reason}; use one of {', '.join(self.layouts)}"
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
        """Score the selected tokens of rows that are laid out; :meth:`token_scores` lays them out.

        Args:
            stream: the rows, on the model's device.
            temperature: a number, or float32 ``[N]``, one per selected token.
            entropy: also return the entropy of the distribution that each token is scored under.
            extras: what else is wanted.

        Returns:
            The scores of the ``N`` selected tokens in row-major order.

        Raises:
            ConfigError: for extras that are out of reach.
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
        """Hidden states of the whole stream ``[S, D]``, or its logits ``[S, V]``."""
        heads.check_kernel(self.model)
        run, ids = self._run, stream.input_ids
        if stream.one_call:
            apart = attention.stream_arguments(self.model, stream.blocks, ids.device)
            positions = stream.position_ids[None]
            return run(input_ids=ids[None], position_ids=positions, use_cache=False, **apart)[0][0]
        # A causal model does not look ahead: the padding after a row cannot reach its tokens.
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
            ConfigError: also for rows longer than the attention window of a model whose ``layout``
                is set to ``"packed"`` or ``"shared"``, or than ``rotary_limit`` says.
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
        """Padded rows and the model's own logits; ``None`` where that is what this scorer does."""
        if self.head is None:
            return None
        return CausalScorer(self.model, full_logits=True, layout="padded")

    def _in_one_kernel(self, device: torch.device) -> tuple[str, ...]:
        """The layouts of which one kernel attends all blocks."""
        if self._kernel not in ("sdpa", "eager"):
            return self._one_call
        config = heads.causal_model(self.model).config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        dtype = attention.compute_dtype(device, heads.causal_model(self.model).dtype)
        has_kernel = attention.has_row_kernel(device, dtype, head_dim)
        return ("packed",) if self._kernel == "sdpa" and has_kernel else ()

    def _choice(self, rows: Rows) -> tuple[str, ...]:
        """The layouts that these rows may have."""
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
        """Whether the ranks that share the weights have to call the model equally often.

        Then one call of the scorer is one of the model: who wants buckets cuts the rows himself, as
        ``torchrl_llm.trainers.optimize`` does.
        """
        return isinstance(next(self.model.parameters()), DTensor)

    def _automatic(self, plain: bool) -> tuple[str, ...]:
        # Eager attention would write a mask over the whole stream and compare all its pairs.
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
    """Score the tokens that hidden states predict.

    Args:
        head: the language-model head.
        hidden_ND: ``[N, D]``.
        targets_N: int64 ``[N]``.
        temperature: a number, or float32 ``[N]``.
        entropy: also return the entropy of each distribution.
        extras: what else is wanted.
        value_head: estimates the values that ``extras`` may ask for.
        chunk_size: the most logits alive at once; chosen by device when ``None``.
        in_place_head_grad: add the gradient of the head's weight in place.

    Raises:
        ConfigError: for extras that are out of reach.
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
                "values were asked of a model without value head: build it with "
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
    """Divergence of each token from its teacher, 0 where it has none."""
    settings = {"direction": extras.divergence, "chunk_size": chunk_size}
    if extras.teacher_index is None:
        (teacher,) = extras.teachers
        return head.divergence(hidden_ND, teacher, temperature=temperature, **settings)
    whole = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=torch.float32)
    for number, teacher in enumerate(extras.teachers):
        # Indices rather than a mask: tokens are picked once and put back once.
        index = (extras.teacher_index == number).nonzero()[:, 0]
        index = index.to(hidden_ND.device, non_blocking=True)
        own = temperature[index] if isinstance(temperature, Tensor) else temperature
        values = head.divergence(hidden_ND[index], teacher, temperature=own, **settings)
        whole = whole.to(values.dtype).index_put((index,), values)
    return whole
