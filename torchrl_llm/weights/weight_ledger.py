"""Which weights a version was: the learner's book, against which batches are checked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torchrl_llm.errors import WeightUpdateError


class WeightLedger:
    """Version to digest of the weights that were proven to have arrived.

    Updaters of engines record into it; whoever takes batches checks what they claim. A version that
    was never proven, or that somebody sampled with other weights, is refused. Threads may share it.

    Args:
        keep: versions that are remembered, the newest.

    Example:
        >>> ledger = WeightLedger()
        >>> ledger.record(1, "aa")
        >>> ledger.check({1: "aa"})
        >>> ledger.check({1: "ab"})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.WeightUpdateError: rows claim version 1 of the weights with the digest \
'ab'; that version is 'aa'
    """

    def __init__(self, keep: int = 1024) -> None:
        self._keep = keep
        self._digests: dict[int, str] = {}
        self._lock = threading.Lock()

    def record(self, version: int, digest: str) -> None:
        """Write down what a version is.

        Args:
            version: number of the weights.
            digest: of them.

        Raises:
            WeightUpdateError: the version is known, with another digest.
        """
        with self._lock:
            known = self._digests.get(version, digest)
            if known != digest:
                raise WeightUpdateError(
                    f"version {version} of the weights is {known!r} and was sent again as "
                    f"{digest!r}; a version has one value"
                )
            self._digests[version] = digest
            for old in sorted(self._digests)[: -self._keep]:
                del self._digests[old]

    def digest(self, version: int) -> str | None:
        """That of a version; ``None`` when it was not proven, or is forgotten."""
        return self._digests.get(version)

    def check(
        self,
        digests: Mapping[int, str],
        versions: Iterable[int] = (),
        *,
        proven: bool = True,
    ) -> None:
        """Refuse rows that do not hold what they claim.

        Args:
            digests: version to digest, as the sampler had them
                (:attr:`~torchrl_llm.collectors.transport.channel.Delivery.digests`).
            versions: of the sampled tokens; each needs a digest.
            proven: refuse versions that are not in the book; without it they pass, as where nobody
                hashed the first weights.

        Raises:
            WeightUpdateError: names the first version that is wrong, and why.
        """
        bare = sorted(set(versions) - set(digests))
        if bare:
            raise WeightUpdateError(
                f"rows hold tokens of version {bare[0]}, and their sampler gave no digest of it; "
                f"it gave {sorted(digests)}"
            )
        for version, claimed in sorted(digests.items()):
            known = self.digest(version)
            if known is None and not proven:
                continue
            if known is None:
                raise WeightUpdateError(
                    f"rows claim version {version} of the weights, which was never proven to have "
                    "arrived anywhere, or is forgotten"
                )
            if known != claimed:
                raise WeightUpdateError(
                    f"rows claim version {version} of the weights with the digest {claimed!r}; "
                    f"that version is {known!r}"
                )

    def state_dict(self) -> dict[str, Any]:
        """The digests, for a checkpoint."""
        with self._lock:
            return {"digests": dict(self._digests)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        with self._lock:
            self._digests = {int(key): value for key, value in state_dict["digests"].items()}

    def __len__(self) -> int:
        return len(self._digests)
