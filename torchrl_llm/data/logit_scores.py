"""Computes scores of given tokens from logits, for scorers that have their model's logits.

:class:`ModuleScorer` makes a scorer from any module that returns logits or a distribution.

Shape legend: ``B`` rows, ``T`` tokens of the longest row, ``V`` vocabulary, ``N`` scored tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import unravel_key
from torch import Tensor, nn

from torchrl_llm._log import tell_once
from torchrl_llm.data.ragged import pad_rows
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer, TokenScores
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import entropy_from_logits, restrict_logits, selective_log_softmax


def only_support(extras: ScoreExtras | None, why: str, *, has_logits: bool = True) -> ScoreExtras:
    """Check the extras requested from a scorer with only logits, and return them.

    Args:
        extras: as requested.
        why: reason for the limit, for the error.
        has_logits: whether the scorer has logits of the whole vocabulary, and so the greedy token.

    Raises:
        ConfigError: a request is neither the support nor, with ``has_logits``, the greedy token.
    """
    extras = ScoreExtras() if extras is None else extras
    if replace(extras, support=None, greedy=extras.greedy and not has_logits) != ScoreExtras():
        raise ConfigError(f"{why}, so it cannot give {extras}")
    return extras


def score_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    extras: ScoreExtras,
) -> TokenScores:
    """Compute scores of tokens from the logits that predict them.

    Args:
        logits_NV: float32 ``[N, V]``.
        targets_N: int64 ``[N]``.
        temperature: a number, or float32 ``[N]``.
        entropy: also return the entropy of each distribution.
        extras: the support that restricts the distributions, and whether the greedy token is
            requested.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0, 9.0]])
        >>> score_logits(logits, torch.tensor([0]), extras=ScoreExtras()).log_probs.shape
        torch.Size([1])
    """
    heat = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    logits_NV = logits_NV / heat
    if extras.support is not None:
        logits_NV = restrict_logits(logits_NV, *extras.support.to(logits_NV.device))
    log_probs = selective_log_softmax(logits_NV, targets_N)
    return TokenScores(
        log_probs,
        entropy_from_logits(logits_NV) if entropy else None,
        greedy=logits_NV.argmax(-1) == targets_N if extras.greedy else None,
    )


class ModuleScorer(TokenScorer):
    """Scores tokens with any module that returns logits or a distribution, ``[B, T, V]`` at once.

    The rows are padded on the right. The module receives

    - as a ``TensorDictModule``: ``("tokens", "full")`` and ``"input_ids"``, int64 ``[B, T]``,
      ``("masks", "all_attention_mask")``, bool, and ``"attention_mask"``, int64. It writes a key
      whose last part is ``"logits"``: at each position the logits of the next token, as models do;
    - if it has ``get_dist``: the same inputs. The distribution at each position is that of the
      token *at* this position, as in TorchRL's losses;
    - as any other module: ``input_ids=`` and ``attention_mask=``. It returns logits of the next
      token, or an object with the attribute ``logits``.

    Args:
        module: the module; it is not changed.

    Raises:
        ConfigError: for a module that reads other keys, or writes no logits.

    Example:
        >>> class Uniform(nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return torch.zeros(*input_ids.shape, 4)
        >>> select = [torch.tensor([False, True])]
        >>> scores = ModuleScorer(Uniform()).token_scores([torch.tensor([3, 1])], select)
        >>> scores.log_probs.exp()
        tensor([0.2500])
    """

    _GIVEN = (("tokens", "full"), ("masks", "all_attention_mask"), "input_ids", "attention_mask")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tokenizer = getattr(module, "tokenizer", None)
        self._has_dist = callable(getattr(module, "get_dist", None))
        self._logits_key: Any = None
        if not isinstance(module, TensorDictModuleBase):
            if not (self._has_dist or _takes_ids(module)):
                raise ConfigError(
                    "the scorer of tokens must be a TokenScorer (a policy wrapper or a "
                    "CausalScorer), have get_dist, or be a module that takes input_ids and "
                    f"attention_mask and returns logits, got {type(module).__name__}"
                )
            return
        strange = [key for key in map(unravel_key, module.in_keys) if key not in self._GIVEN]
        if strange:
            raise ConfigError(
                f"an actor is given {', '.join(map(repr, self._GIVEN))}, and this "
                f"{type(module).__name__} reads {strange[0]!r}; set its in_keys to those"
            )
        if not self._has_dist:
            keys = [k for k in map(unravel_key, module.out_keys) if _last(k) == "logits"]
            if len(keys) != 1:
                raise ConfigError(
                    "an actor must be a TokenScorer (a policy wrapper or a CausalScorer), have "
                    "get_dist, or write one key named 'logits'; this "
                    f"{type(module).__name__} writes {list(module.out_keys)}"
                )
            self._logits_key = keys[0]

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
            ConfigError: extras other than the support are requested; a temperature or support is
                given for a distribution without logits; or the logits have a different shape.
        """
        extras = only_support(extras, f"{type(self.module).__name__} gives logits alone")
        weight = next(self.module.parameters(), None)
        device = sequences[0].device if weight is None else weight.device
        ids_BT = pad_rows(sequences, 0).to(device)
        mask_BT = pad_rows([torch.ones_like(ids, dtype=torch.bool) for ids in sequences], False)
        select_BT = pad_rows(select, False).to(device)
        if isinstance(temperature, Tensor):
            row_N = select_BT.nonzero()[:, 0]
            temperature = temperature.to(device)[row_N]
        given = self._given(ids_BT, mask_BT.to(device))
        if self._has_dist:
            dist = self.module.get_dist(given)
            logits_BTV = getattr(dist, "logits", None)
            if logits_BTV is None:
                return _of_distribution(dist, ids_BT, select_BT, temperature, entropy, extras)
            predicting_BT = select_BT
        else:
            logits_BTV = self._logits(given)
            predicting_BT = select_BT.roll(-1, 1)  # nothing is selected at position 0
        if logits_BTV.ndim != 3 or logits_BTV.shape[:2] != ids_BT.shape:
            raise ConfigError(
                f"the logits of {type(self.module).__name__} must be [B, T, V] with [B, T] = "
                f"{tuple(ids_BT.shape)}, got {tuple(logits_BTV.shape)}"
            )
        return score_logits(
            logits_BTV[predicting_BT].float(),
            ids_BT[select_BT],
            temperature=temperature,
            entropy=entropy,
            extras=extras,
        )

    def _given(self, ids_BT: Tensor, mask_BT: Tensor) -> TensorDict:
        return TensorDict(
            tokens={"full": ids_BT},
            masks={"all_attention_mask": mask_BT},
            input_ids=ids_BT,
            attention_mask=mask_BT.long(),
            batch_size=[ids_BT.shape[0]],
        )

    def _logits(self, given: TensorDict) -> Tensor:
        if self._logits_key is not None:
            return self.module(given)[self._logits_key]
        out = self.module(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        return out if isinstance(out, Tensor) else out.logits


def _takes_ids(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return anything or {"input_ids", "attention_mask"} <= parameters.keys()


def _last(key: Any) -> str:
    return key if isinstance(key, str) else key[-1]


def _of_distribution(
    dist: Any,
    ids_BT: Tensor,
    select_BT: Tensor,
    temperature: float | Tensor,
    entropy: bool,
    extras: ScoreExtras,
) -> TokenScores:
    """Compute scores from a distribution that does not expose logits."""
    plain = bool((torch.as_tensor(temperature) == 1.0).all())
    if not plain or extras.support is not None or extras.greedy:
        raise ConfigError(
            "greedy tokens, and scores of rows that were sampled at a temperature or with top-k, "
            f"top-p or min-p, need logits, which a {type(dist).__name__} does not have"
        )
    log_probs = dist.log_prob(ids_BT)[select_BT].float()
    return TokenScores(log_probs, dist.entropy()[select_BT].float() if entropy else None)


def as_scorer(actor: Any) -> TokenScorer:
    """Return an actor's scorer: the actor itself, or a scorer of its logits (logged once).

    Args:
        actor: a :class:`~torchrl_llm.data.scoring.TokenScorer`, or a module for
            :class:`ModuleScorer`.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(actor, TokenScorer):
        return actor
    if not isinstance(actor, nn.Module):
        raise ConfigError(
            "the scorer of tokens must be a TokenScorer (a policy wrapper or a CausalScorer), or a "
            f"module that returns logits or a distribution, got {type(actor).__name__}"
        )
    scorer = ModuleScorer(actor)
    tell_once(
        f"a {type(actor).__name__} is scored by its logits, [B, T, V] at once; a policy wrapper or "
        "CausalScorer computes only the needed logits, in pieces"
    )
    return scorer
