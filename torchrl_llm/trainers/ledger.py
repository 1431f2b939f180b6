"""Sampled tokens of a training step by fate, in columns that have to add up."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.errors import DataError

_FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost")


@dataclass(kw_only=True)
class TokenLedger(SavedState):
    """Sampled tokens of one step by fate.

    Attributes:
        carried: tokens that were pending when the step began.
        generated: new tokens of this step: tokens of the rows that arrived, and lost tokens.
        trained: tokens that entered the loss; each counts once, for any number of epochs.
        stale: tokens sampled by weights that were too old.
        filtered: tokens of groups whose rewards are all equal, or that a filter removed.
        truncated: of responses cut by a length limit, if those are masked or dropped; and tokens
            beyond the maximum length of a row.
        invalid: tokens of rows without a valid reward, or of groups with under two valid members.
        surplus: tokens of complete, valid rows that the step did not need.
        lost: sampled by a worker that died, or in a delivery that did not arrive or was rejected.
        pending: tokens that still wait for their group at the end of the step.

    Example:
        >>> ledger = TokenLedger()
        >>> ledger.count(generated=10, trained=7, filtered=3)
        >>> ledger.close()
        0
        >>> ledger.metrics()["train/tokens_trained"]
        7
    """

    saved = ("carried",)

    carried: int = 0
    generated: int = 0
    trained: int = 0
    stale: int = 0
    filtered: int = 0
    truncated: int = 0
    invalid: int = 0
    surplus: int = 0
    lost: int = 0
    pending: int = 0
    totals: dict[str, int] = field(default_factory=dict, repr=False)

    def count(self, **tokens: int) -> None:
        """Add tokens under their names, ``count(generated=64, trained=60)``.

        Raises:
            AttributeError: for a name that is not a column of the ledger.
        """
        for name, number in tokens.items():
            setattr(self, name, getattr(self, name) + int(number))

    @property
    def spent(self) -> int:
        """Tokens whose fate is decided in this step."""
        return sum(getattr(self, name) for name in _FATES)

    def close(self) -> int:
        """Check the sum and begin the next step.

        Returns:
            Tokens that are pending, carried into the next step.

        Raises:
            DataError: the columns do not add up.
        """
        spent = self.spent
        if self.carried + self.generated != spent + self.pending:
            columns = " + ".join(f"{name} {getattr(self, name)}" for name in (*_FATES, "pending"))
            raise DataError(
                f"the token ledger does not close: carried {self.carried} + generated "
                f"{self.generated} = {self.carried + self.generated} tokens, but {columns} = "
                f"{spent + self.pending}"
            )
        self.totals = {name: getattr(self, name) for name in ("generated", *_FATES, "pending")}
        self.carried = self.pending
        for name in ("generated", *_FATES, "pending"):
            setattr(self, name, 0)
        return self.carried

    def metrics(self) -> dict[str, int]:
        """The columns of the last closed step, named ``train/tokens_<column>``."""
        return {f"train/tokens_{name}": number for name, number in self.totals.items()}
