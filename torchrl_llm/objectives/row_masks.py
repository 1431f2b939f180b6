"""Which tokens of rows are meant: the assistant's, those after the prompt, those that are trained.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``L`` tokens of all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.enums import MaskReason, Source
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import DataError
from torchrl_llm.objectives.flat_columns import RowKeys, flatten, optional_column, positions


class RowMasks:
    """Masks over the ``L`` tokens of all rows.

    Args:
        td: the rows.
        keys: where their columns are.
        ids: ``B`` int64 tensors ``[T_b]``, without padding.
        stored: tokens of each row as it is stored, padding included.
        kept: see :func:`~torchrl_llm.objectives.flat_columns.kept_positions`.

    Raises:
        DataError: by each method, when a column it needs is missing or misaligned.
    """

    def __init__(
        self, td: Any, keys: RowKeys, ids: list[Tensor], stored: list[int], kept: Tensor | None
    ) -> None:
        self.td, self.keys, self.ids, self.stored, self.kept = td, keys, ids, stored, kept

    def _read(self, key: NestedKey) -> Tensor | None:
        values = optional_column(self.td, key)
        return None if values is None else flatten(values, self.stored, self.kept, key)

    def with_prefix(self) -> Tensor:
        """All but the first token of each row; bool ``[L]``, as all of these."""
        return positions([row.shape[0] for row in self.ids]) > 0

    def assistant(self) -> Tensor:
        """Those of the assistant mask."""
        mask = self._read(self.keys.assistant_mask)
        if mask is None:
            raise DataError(
                f"the rows have no {self.keys.assistant_mask!r}; every policy writes it"
            )
        return mask.bool()

    def after_prompt(self) -> Tensor:
        """Those after the row's prompt."""
        prompts = read_rows(self.td, self.keys.prompt, None)
        if prompts is None:
            raise DataError(f"masking_strategy='sft' needs {self.keys.prompt!r}")
        lengths = [row.shape[0] for row in self.ids]
        starts = [prompt.shape[0] for prompt in prompts]
        if all(start <= length for start, length in zip(starts, lengths, strict=True)):
            limits = torch.repeat_interleave(torch.tensor(starts), torch.tensor(lengths))
            mask = positions(lengths) >= limits
            if torch.equal(torch.cat(self.ids)[~mask], torch.cat(prompts)):
                return mask
        return self._last_turn()

    def _last_turn(self) -> Tensor:
        """The last sampled turn, by the trace: where the prompts are padded."""
        turn = self.keys.trace and self._read(_under(self.keys.trace, "turn"))
        if turn is None:
            raise DataError(
                f"{self.keys.prompt!r} is no prefix of {self.keys.action!r} (it is padded), and "
                "there is no trace that tells where the response begins; use ragged rows or "
                "masking_strategy='rlhf'"
            )
        parts = turn.split([row.shape[0] for row in self.ids])
        return torch.cat([(part == part.max()) & (part >= 0) for part in parts])

    def trained(self) -> Tensor | None:
        """Sampled tokens that nothing has masked; ``None`` without a trace."""
        if self.keys.trace is None:
            return None
        source = self._read(_under(self.keys.trace, "source"))
        if source is None:
            return None
        mask = source == Source.SAMPLED
        reason = self._read(_under(self.keys.trace, "mask_reason"))
        return mask if reason is None else mask & (reason == MaskReason.TRAINED)


def _under(node: NestedKey, name: str) -> NestedKey:
    return (*((node,) if isinstance(node, str) else node), name)
