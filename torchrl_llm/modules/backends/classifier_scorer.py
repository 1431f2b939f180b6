"""Scorer over a sequence classifier with one output: one number per state.

Rows are laid out as in :class:`~torchrl_llm.modules.backends.token_scorer.CausalScorer`.
:func:`torchrl_llm.data.scoring.last_values` reads the score of whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm.data.scoring import ScoreExtras, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends import head as heads
from torchrl_llm.modules.backends.attention import tolerance
from torchrl_llm.modules.backends.layouts import RowStream
from torchrl_llm.modules.backends.token_scorer import CausalScorer


class ClassifierScorer(CausalScorer):
    """Computes the values of states with the head of a classifier, and no other scores.

    Args:
        model: a Hugging Face ``...ForSequenceClassification`` over a causal body, with
            ``num_labels=1``, in PEFT or not.
        layout: see ``CausalScorer``.

    Attributes:
        pad_id: the padding id, by which the model finds the end of a row.

    Raises:
        ConfigError: an unsupported head, or a classifier that uses its body in a different way.

    Example:
        >>> from torchrl_llm.data.scoring import last_values
        >>> from torchrl_llm.modules import load_reward_model
        >>> scorer = ClassifierScorer(load_reward_model())
        >>> last_values(scorer, [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]).shape
        torch.Size([2])
    """

    def __init__(self, model: nn.Module, *, layout: str = "auto") -> None:
        nn.Module.__init__(self)
        heads.refuse_learned_prompts(model)
        causal = heads.causal_model(model)
        head = getattr(causal, "score", None)
        if head is None or causal.config.num_labels != 1:
            raise ConfigError(
                f"{type(causal).__name__} with {causal.config.num_labels} labels is no reward "
                "model: it must be a classifier over a causal model, of one label"
            )
        self.model, self.head, self.value_head = model, head, None
        self.pad_id: int | None = causal.config.get_text_config(decoder=True).pad_token_id
        self.chunk_size, self.in_place_head_grad = None, False
        if heads.can_be_tried(model):
            self._verify()
        self._settle(model, layout)

    def forward(
        self,
        stream: RowStream,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """Return the values of the states before the selected tokens.

        Args:
            stream: the rows, on the model's device.
            temperature: without effect on values.
            entropy: not supported.
            extras: must request only values.

        Raises:
            ConfigError: anything else is requested.
        """
        if entropy or extras != ScoreExtras(values=True, log_probs=False):
            raise ConfigError("a classifier returns values of rows, not log-probs of tokens")
        states = self._states(stream).index_select(0, stream.index)
        return TokenScores(states.new_zeros(0, dtype=torch.float32), values=self._values(states))

    def naive_scorer(self) -> None:
        """Not available: ``None``."""

    def _values(self, states: Tensor) -> Tensor:
        weight = next(self.head.parameters())
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.to(weight.dtype)).squeeze(-1).float()

    def _verify(self) -> None:
        """Check that the model scores a row by its last token's state, whatever follows it."""
        causal = heads.causal_model(self.model)
        size = causal.get_input_embeddings().weight.shape[0]
        ids = [id for id in range(1, min(size, 8)) if id != self.pad_id][:5]
        row = torch.tensor([ids], device=causal.get_input_embeddings().weight.device)
        with heads.evaluating(self.model) as rounding:
            expected = self.model(input_ids=row[:, :3], use_cache=False).logits[0].float()
            got = self._values(self._run(input_ids=row, use_cache=False)[0][0, 2:3])
        error = (expected - got).abs().max() / expected.abs().max().clamp_min(1e-6)
        if expected.shape != got.shape or error > max(tolerance(rounding), 1e-3):
            raise ConfigError(
                f"{type(causal).__name__} does not score a row by the state of its last token, "
                "which is the only supported way"
            )
