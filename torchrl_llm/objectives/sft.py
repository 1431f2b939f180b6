"""Supervised fine-tuning on conversations: cross-entropy on the assistant's tokens, and MinorSFT.

Shape legend: ``B`` rows, ``T`` tokens of a row, ``N`` tokens of the assistant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from tensordict import TensorClass, TensorDict
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._log import tell_once
from torchrl_llm.data.encoded_rows import encode_rows, row_formatter
from torchrl_llm.data.ragged import read_rows, write_rows
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional import Normalizer, k3, sequence_log_ratio
from torchrl_llm.objectives.flat_columns import key_name, optional_column, sent
from torchrl_llm.objectives.loss_rows import (
    MaskingStrategy,
    RowKeys,
    TokenRows,
    check_one_dimension,
    read_token_rows,
)
from torchrl_llm.objectives.token_loss import LLMLossOutput, TokenLoss, check_scores

Reduction = Literal["mean", "sum", "none"]
SFTReduction = Literal["mean", "sum", "none", "token_mean"]


def sft_loss(summed_log_probs: Tensor, reduction: Reduction) -> Tensor:
    """Compute the negative log-likelihood of responses.

    Args:
        summed_log_probs: ``[B]``, log-prob of each response (or its mean per token), nats.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``[B]``.

    Raises:
        ValueError: for an unknown reduction.

    Example:
        >>> sft_loss(torch.tensor([-1.0, -3.0]), "mean")
        tensor(2.)
    """
    return _reduced(-summed_log_probs, reduction)


def minor_sft_loss(
    log_probs: Tensor, ref_log_probs: Tensor, beta: float, reduction: Reduction
) -> Tensor:
    r"""MinorSFT, :math:`-\log \sigma(\beta (\log \pi - \log \pi_\mathrm{ref}))`.

    arXiv:2408.10642, in TorchRL's form. The gradient is the gradient of the negative log-likelihood
    times :math:`\beta\, \sigma(-\beta (\log \pi - \log \pi_\mathrm{ref}))`. It is smaller for a
    response whose log-prob is above the reference. The paper's gradient, with log-probs of whole
    responses of ``m`` tokens, is :math:`2 / (\beta m)` times as large.

    Args:
        log_probs: ``[B]``, log-prob of each response under the trained policy, nats.
        ref_log_probs: ``[B]``, under the reference.
        beta: slope; larger values keep the policy closer to the reference.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``[B]``.

    Raises:
        ValueError: for shapes that differ or an unknown reduction.

    Example:
        >>> minor_sft_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), 0.1, "mean").exp()
        tensor(2.)
    """
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log-probs and reference log-probs must have one shape, got {tuple(log_probs.shape)} "
            f"and {tuple(ref_log_probs.shape)}"
        )
    return _reduced(-nn.functional.logsigmoid(beta * (log_probs - ref_log_probs)), reduction)


def _reduced(loss_B: Tensor, reduction: Reduction) -> Tensor:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    return loss_B if reduction == "none" else getattr(loss_B, reduction)()


class SFTLossOutput(LLMLossOutput, TensorClass["nocast"]):
    """Output of :class:`SFTLoss`; float32 scalars.

    Attributes:
        loss_sft: the objective; ``[B]`` if the reduction is ``"none"``.
        loss_kl_to_ref: weighted KL to the reference; ``None`` if off.
        kl_to_ref: mean KL over the assistant's tokens, nats.
    """

    loss_sft: Tensor
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None


class SFTLoss(TokenLoss):
    r"""Supervised loss on the assistant's tokens, including the token that ends each turn.

    Rows that have ids and an assistant mask (``("tokens", "full")``, ``("masks",
    "all_assistant_mask")``) are used directly; rows that have only a conversation (``("history",
    "full")``) are encoded first. Only the assistant's positions reach the language-model head.

    The default, as in TorchRL, is the mean over rows of each row's token mean. Ludic's preset sums
    a row's tokens (``normalize_by_seq_length=False``); most other trainers average over all tokens
    (``reduction="token_mean"``).

    Each row may have a weight, ``"loss_weight"``: a finite number, at least 0. A row of weight 0 is
    left out. Means are weighted means,

    .. math:: \frac{\sum_b w_b \ell_b}{\sum_b w_b}
        \quad\text{and}\quad \frac{\sum_b w_b \sum_t \ell_{bt}}{\sum_b w_b n_b}

    over rows, and over tokens for ``"token_mean"`` and the KL term. So equal weights have no
    effect, and a row of weight 2 counts as two rows. ``"sum"`` and ``"none"`` multiply by the
    weight and divide by nothing. (Ludic multiplies by the weight and divides by the number of rows,
    so its weights also scale the loss.)

    Args:
        actor_network: model that scores tokens: a policy wrapper or a ``CausalScorer``.
        tokenizer: encodes conversations; by default the tokenizer of the actor. Not needed for rows
            that have ids.
        tokenizer_kwargs: keyword arguments of :class:`~torchrl_llm.data.text.ChatFormatter`,
            such as ``chat_template`` or ``chat_template_name``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` over rows; ``"token_mean"`` averages over all
            tokens of all rows.
        normalize_by_seq_length: use the mean instead of the sum over a row's tokens. This is the
            default, except for ``"token_mean"``, where it has no meaning.
        kl_to_ref_coeff: weight of the KL to a reference policy (``k3``, a mean over tokens). The
            rows must have the reference's log-probs under ``("next", "ref_log_probs", "full")``.
        loss_function: ``"sft"`` or ``"minor_sft"``; the latter needs the reference's log-probs.
        beta: slope of MinorSFT, 0.1 by default; no effect on ``"sft"``.
        device: device on which the loss is computed from the log-probs; by default the device of
            the log-probs.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from torchrl_llm.modules.backends.token_scorer import CausalScorer
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        >>> from torchrl_llm.data.ragged import write_rows
        >>> rows = TensorDict(batch_size=[2])
        >>> write_rows(rows, ("tokens", "full"), [torch.tensor([3, 4, 5]), torch.tensor([3, 7])])
        >>> masks = [torch.tensor([False, True, True]), torch.tensor([False, True])]
        >>> write_rows(rows, ("masks", "all_assistant_mask"), masks)
        >>> loss = SFTLoss(CausalScorer(Qwen2ForCausalLM(config)))
        >>> loss(rows).total_loss().backward()
    """

    @dataclass
    class _AcceptedKeys(RowKeys):
        """Keys that ``set_keys`` takes, with their defaults."""

        # Only the assistant mask selects tokens, because demonstrations were not sampled.
        trace: NestedKey | None = None
        history: NestedKey = ("history", "full")
        loss_weight: NestedKey = "loss_weight"
        ref_log_prob: NestedKey = ("next", "ref_log_probs", "full")
        # TorchRL's name. This loss gets the log-probs from the actor and does not write them into
        # the rows.
        log_probs: NestedKey = ("log_probs", "full")

    default_keys = _AcceptedKeys
    masking_strategy: MaskingStrategy = "rlhf"

    @checked
    def __init__(
        self,
        actor_network: nn.Module | TokenScorer,
        tokenizer: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        reduction: SFTReduction = "mean",
        normalize_by_seq_length: bool | None = None,
        kl_to_ref_coeff: Annotated[float, Ge(0)] | None = None,
        loss_function: Literal["sft", "minor_sft"] = "sft",
        beta: Annotated[float, Gt(0)] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(actor_network, device=device)
        per_row = normalize_by_seq_length is not None or loss_function != "sft"
        if reduction == "token_mean" and per_row:
            raise ConfigError(
                "token_mean is a mean of the tokens of all rows: normalize_by_seq_length and "
                "minor_sft, which look at rows, have no meaning there"
            )
        if beta is not None and loss_function == "sft":
            tell_once("beta has no effect with loss_function='sft', which has no slope")
        if loss_function == "minor_sft" and kl_to_ref_coeff:
            tell_once(
                "minor_sft holds the policy to the reference already: kl_to_ref_coeff has no effect"
            )
            kl_to_ref_coeff = None
        self.formatter = row_formatter(actor_network, tokenizer, tokenizer_kwargs)
        self.tokenizer = getattr(self.formatter or actor_network, "tokenizer", None)
        self.tokenizer_kwargs = dict(tokenizer_kwargs or {})
        self.reduction = reduction
        self.normalize_by_seq_length = normalize_by_seq_length is not False
        self.kl_to_ref_coeff = float(kl_to_ref_coeff or 0.0)
        self.loss_function = loss_function
        self.beta = 0.1 if beta is None else float(beta)
        self._forward_value_estimator_keys()

    def select(self, tensordict: Any) -> TokenRows:
        """See :meth:`TokenLoss.select`.

        Raises:
            DataError: also when a trained row has no assistant token, or a weight is not a number,
                negative or not finite.
        """
        check_one_dimension(tensordict)
        keys = self.tensor_keys
        has_ids = read_rows(tensordict, keys.action, None) is not None
        tokens = tensordict if has_ids else self._encoded(tensordict)
        weights = self._weights(tensordict)
        trained = None if weights is None else weights > 0
        rows = read_token_rows(tokens, keys, self.masking_strategy, trained)
        silent = [
            row
            for row, count in enumerate(rows.counts)
            if not count and (trained is None or trained[row])
        ]
        if silent:
            raise DataError(
                f"rows {silent[:8]} have no token of the assistant to learn from; drop them"
            )
        return rows

    def check(self, tensordict: Any, rows: TokenRows) -> None:
        """See :meth:`TokenLoss.check`."""
        self._reference(tensordict, rows)

    def count(self, tensordict: Any, rows: TokenRows) -> Normalizer:
        """See :meth:`TokenLoss.count`; sums of weights if rows have weights."""
        weights = self._weights(tensordict)
        if weights is None:
            return rows.normalizer()
        if not bool(weights.any()):
            raise DataError(
                f"all {len(rows.counts)} rows have weight 0: there is nothing to learn from; drop "
                "such batches before the loss"
            )
        pairs = list(zip(weights.tolist(), rows.counts, strict=True))
        return Normalizer(math.fsum(w * n for w, n in pairs), math.fsum(w for w, _ in pairs))

    def from_scores(
        self,
        tensordict: Any,
        rows: TokenRows,
        scores: TokenScores,
        *,
        normalizer: Normalizer | None = None,
    ) -> SFTLossOutput:
        """See :meth:`TokenLoss.from_scores`.

        The means and the KL term use the normalizer.
        """
        normalizer = normalizer or self.count(tensordict, rows)
        log_probs = check_scores(scores.log_probs, rows)
        log_probs = log_probs.to(self.device or log_probs.device)
        reference = self._reference(tensordict, rows)
        if reference is not None:
            reference = sent(reference, log_probs.device)
        weights = self._weights(tensordict)
        fields = {"loss_sft": self._objective(log_probs, reference, rows, normalizer, weights)}
        if self.kl_to_ref_coeff:
            divergence = self._over_tokens(k3(reference - log_probs), rows, normalizer, weights)
            fields["loss_kl_to_ref"] = self.kl_to_ref_coeff * divergence
            fields["kl_to_ref"] = divergence.detach()
        return SFTLossOutput(**fields)

    def _reference(self, tensordict: Any, rows: TokenRows) -> Tensor | None:
        if self.loss_function != "minor_sft" and not self.kl_to_ref_coeff:
            return None
        return self.column(tensordict, rows, "ref_log_prob")

    def _objective(
        self,
        log_probs: Tensor,
        reference: Tensor | None,
        rows: TokenRows,
        normalizer: Normalizer,
        weights: Tensor | None,
    ) -> Tensor:
        if self.loss_function == "sft":
            return self._averaged(-log_probs, rows, normalizer, weights)
        pair = (self._per_row(values, rows) for values in (log_probs, reference))
        return self._over_rows(minor_sft_loss(*pair, self.beta, "none"), normalizer, weights)

    def _averaged(
        self, values_N: Tensor, rows: TokenRows, normalizer: Normalizer, weights: Tensor | None
    ) -> Tensor:
        if self.reduction == "token_mean":
            return self._over_tokens(values_N, rows, normalizer, weights)
        return self._over_rows(self._per_row(values_N, rows), normalizer, weights)

    def _per_row(self, values_N: Tensor, rows: TokenRows) -> Tensor:
        row = sent(rows.row, values_N.device)
        sums = sequence_log_ratio(values_N, row, len(rows.counts))
        if self.normalize_by_seq_length:
            sums = sums / sent(torch.tensor(rows.counts).clamp(min=1), sums.device)
        return sums

    def _over_rows(self, loss_B: Tensor, normalizer: Normalizer, weights: Tensor | None) -> Tensor:
        """Losses of rows, weighted and reduced over rows according to ``reduction``."""
        wide = loss_B.double()
        if weights is not None:
            wide = wide * sent(weights, wide.device)
        if self.reduction != "none":
            wide = wide.sum()
        if self.reduction == "mean":
            wide = wide / normalizer.num_sequences
        return wide.to(loss_B.dtype)

    def _over_tokens(
        self, values_N: Tensor, rows: TokenRows, normalizer: Normalizer, weights: Tensor | None
    ) -> Tensor:
        """The (weighted) mean of values over tokens."""
        wide = values_N.double()
        if weights is not None:
            wide = wide * sent(weights[rows.row], wide.device)
        return (wide.sum() / normalizer.num_tokens).to(values_N.dtype)

    def _weights(self, tensordict: Any) -> Tensor | None:
        """Weight of each row, float64 ``[B]``; ``None`` if rows have none."""
        key = self.tensor_keys.loss_weight
        values = optional_column(tensordict, key)
        if not values:
            return None
        if any(value.numel() != 1 for value in values):
            raise DataError(f"{key_name(key)} must be one number per row")
        weights = torch.stack([value.reshape(()).double() for value in values])
        bad = ~(weights.isfinite() & (weights >= 0))
        if bool(bad.any()):
            raise DataError(
                f"{key_name(key)} must be finite and at least 0, got {weights[bad][0].item()} in "
                f"rows {bad.nonzero()[:8, 0].tolist()}"
            )
        return weights

    def _encoded(self, tensordict: Any) -> TensorDict:
        """Ids and assistant masks of rows that have only conversations."""
        keys = self.tensor_keys
        history = tensordict.get(keys.history, None)
        if history is None:
            raise DataError(f"the rows have neither {keys.action!r} nor {keys.history!r}")
        encoded = encode_rows(history.chats, self.formatter, "SFTLoss")
        td = TensorDict(batch_size=tensordict.batch_size)
        write_rows(td, keys.action, encoded.token_ids)
        masks = encoded.assistant
        own = read_rows(tensordict, keys.assistant_mask, None)
        if own is not None:
            masks = [mask.bool() for mask in own]
            wanted, got = [list(map(len, part)) for part in (encoded.token_ids, masks)]
            if wanted != got:
                raise DataError(
                    f"{keys.assistant_mask!r} must have one value per token: the conversations "
                    f"are encoded as {wanted[:8]} tokens, and the masks have {got[:8]} values"
                )
        write_rows(td, keys.assistant_mask, masks)
        return td

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """Called by ``set_keys`` to update ``in_keys``; there is no value estimator."""
        keys = self.tensor_keys
        self.in_keys = [keys.action, keys.assistant_mask]
        if self.kl_to_ref_coeff or self.loss_function == "minor_sft":
            self.in_keys.append(keys.ref_log_prob)
        self.out_keys = list(SFTLossOutput.__dataclass_fields__)
