"""Module that adds the reward of a Hugging Face reward model to rows of tokens."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensorclass
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_llm.data.ragged import pad_rows, read_rows
from torchrl_llm.errors import DataError, RewardError
from torchrl_llm.modules.model_loading import rotary_limit


class HFRewardModelWrapper(TensorDictModuleBase):
    """Scores rows with a one-output sequence classifier, such as TRL's reward trainer makes.

    Rows may be ragged or padded on any side. Hugging Face's classifiers find the end of a row by
    ``model.config.pad_token_id``, so rows of different length are padded with that id. A model
    without a pad id, or with LongRoPE, scores row by row. (Such a classifier reads the score at the
    last token that is not the pad id, even if a row itself ends with the pad id.)

    Args:
        model: takes ``input_ids`` and ``attention_mask`` and returns ``logits`` or ``rewards``
            ``[B]`` or ``[B, 1]``, as an attribute or as a bare tensor.
        token_key: ids of the rows.
        attention_mask_key: mask of padded rows. ``None`` passes no mask to the model, which
            requires rows of equal length. Ragged rows need no mask.
        reward_key: key of the reward, float32 ``[B]``. For ``("next", "reward")`` the shape is
            ``[B, 1, 1]``, which advantage estimators read.
        inference_mode: score without gradients.

    Raises:
        DataError: rows have no ids, or padded rows have no mask.
        RewardError: the model does not return a finite number per row.

    Example:
        >>> from tensordict import TensorDict
        >>> class Length(nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return attention_mask.sum(-1, keepdim=True).float()
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> rows = ragged_rows({"full": [torch.tensor([1, 2, 3]), torch.tensor([4])]})
        >>> td = TensorDict(tokens=rows, batch_size=[2])
        >>> HFRewardModelWrapper(Length())(td)["reward"]
        tensor([3., 1.])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token_key: NestedKey = ("tokens", "full"),
        attention_mask_key: NestedKey | None = ("masks", "all_attention_mask"),
        reward_key: NestedKey = "reward",
        inference_mode: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.token_key, self.attention_mask_key = token_key, attention_mask_key
        self.reward_key = reward_key
        self.inference_mode = inference_mode
        self.in_keys = [token_key] + ([attention_mask_key] if attention_mask_key else [])
        self.out_keys = [reward_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward.

        Args:
            tensordict: rows ``[B]``, ragged or dense.

        Returns:
            The same rows.
        """
        rewards = self.score(tensordict)
        if self.reward_key == ("next", "reward"):
            rewards = rewards[:, None, None]
        tensordict.set(self.reward_key, rewards)
        return tensordict

    def score(self, tensordict: TensorDictBase) -> Tensor:
        """Compute the rewards of rows.

        Args:
            tensordict: rows ``[B]``.

        Returns:
            float32 ``[B]`` on the model's device.
        """
        rows = read_rows(tensordict, self.token_key, None)
        if rows is None:
            raise DataError(f"the rows have no {self.token_key!r} to score")
        if self.attention_mask_key is None and len({row.shape for row in rows}) > 1:
            raise DataError("rows of different length need an attention mask: attention_mask_key")
        masks = None if self.attention_mask_key is None else self._masks(tensordict, rows)
        if masks is not None:
            # Padding before a row would shift its positions.
            rows = [row[mask] for row, mask in zip(rows, masks, strict=True)]
        rewards = self.score_ids(rows, masked=masks is not None)
        if not bool(rewards.isfinite().all()):
            bad = (~rewards.isfinite()).nonzero()[:, 0].tolist()
            raise RewardError(f"the reward model's output is NaN or infinite for rows {bad[:8]}")
        return rewards

    def score_ids(self, rows: list[Tensor], *, masked: bool = True) -> Tensor:
        """Compute the rewards of rows without padding, finite or not.

        Args:
            rows: ``B`` int64 tensors ``[T_b]``.
            masked: pass a mask to the model.

        Returns:
            float32 ``[B]`` on the model's device; it may be NaN or infinite.
        """
        masks = [torch.ones_like(row, dtype=torch.bool) for row in rows] if masked else None
        config = getattr(self.model, "config", None)
        pad_id = getattr(config, "pad_token_id", None)
        alone = config is not None and (pad_id is None or rotary_limit(config) is not None)
        size = 1 if alone else len(rows)
        cuts = [slice(start, start + size) for start in range(0, len(rows), size)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.inference_mode):
            return torch.cat([self._call(rows[cut], masks and masks[cut], pad_id) for cut in cuts])

    def _call(self, rows: list[Tensor], masks: list[Tensor] | None, pad_id: int | None) -> Tensor:
        device = next((p.device for p in self.model.parameters()), rows[0].device)
        inputs = {"input_ids": pad_rows(rows, pad_id or 0).to(device)}
        if masks is not None:
            mask = pad_rows(masks, False).to(device)
            # Padding in the rows may have a different id than the model's.
            inputs["input_ids"] = inputs["input_ids"].masked_fill(~mask, pad_id or 0)
            inputs["attention_mask"] = mask.long()
        return _one_a_row(self.model(**inputs), len(rows))

    def _masks(self, tensordict: TensorDictBase, rows: list[Tensor]) -> list[Tensor]:
        masks = read_rows(tensordict, self.attention_mask_key, None)
        if masks is None:
            if len({row.shape for row in rows}) == 1 and not _ragged(tensordict, self.token_key):
                raise DataError(
                    f"padded rows need {self.attention_mask_key!r}: padding is never inferred from "
                    "ids; attention_mask_key=None scores rows without any"
                )
            masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
        return [mask.bool() for mask in masks]


def _ragged(tensordict: Any, key: NestedKey) -> bool:
    """Return whether a column has one tensor per row, and so no padding."""
    nodes = [tensordict, tensordict if isinstance(key, str) else tensordict.get(key[:-1], None)]
    nodes = [node._tensordict if is_tensorclass(node) else node for node in nodes]
    return any(isinstance(node, LazyStackedTensorDict) for node in nodes)


def _one_a_row(output: Any, size: int) -> Tensor:
    given = (getattr(output, name, None) for name in ("logits", "rewards"))
    found = next((value for value in given if value is not None), output)
    if not isinstance(found, Tensor):
        raise RewardError(
            f"a reward model must give logits, rewards or a tensor, got {type(output).__name__}"
        )
    if found.shape not in ((size,), (size, 1)):
        raise RewardError(
            f"a reward model must give one number per row, [{size}] or [{size}, 1], got "
            f"{tuple(found.shape)}; load the classifier with num_labels=1"
        )
    return found.reshape(size).float()
