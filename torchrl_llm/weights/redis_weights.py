"""Weights through Redis, for models that are small compared with its memory and the network.

The learner's :class:`RedisWeightWriter` writes each version in chunks under its own keys, and then
announces the version. A :class:`RedisWeightReader` finds the newest version and returns its source.
A version is kept until two newer ones exist, so there is time to read it. The digest of the
received weights must equal the sender's. For large models use Redis only for rows, and a shared
disk for weights (:mod:`torchrl_llm.weights.shared_files`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm._redis import RECONNECT_S, RedisLink
from torchrl_llm.data.safe_bytes import from_bytes, to_bytes
from torchrl_llm.errors import DataError, WeightUpdateError
from torchrl_llm.weights.canary_rule import CanaryTarget
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_names import Weights, engine_weights
from torchrl_llm.weights.weight_source import WeightSource

_MOST_BYTES = 500 << 20
_KEPT_S = 3600
_FIELDS = {"version": int, "digest": str, "upload": str, "chunks": int}


def _key(name: str, part: str) -> str:
    # The braces keep all keys of a run on one node of a cluster.
    return f"{{{name}}}:weights:{part}"


class RedisWeightWriter:
    """The learner's end: writes versions of the weights to Redis.

    Args:
        url: URL of the Redis.
        name: name of the run; readers use the same.
        chunk_bytes: most bytes per value, unless a single tensor is larger.
        keep: number of versions to keep, so that a reader can finish while newer ones arrive.
        reconnect_s: most seconds that the server may be unreachable.
        dtype: dtype of the sent weights, see :func:`engine_weights`.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: a size below 1, or an invalid URL.
    """

    @checked
    def __init__(
        self,
        url: str,
        name: str,
        *,
        chunk_bytes: Annotated[int, Ge(1)] = 32 << 20,
        keep: Annotated[int, Ge(1)] = 3,
        reconnect_s: float = RECONNECT_S,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._link = RedisLink(url, feature="RedisWeightWriter", reconnect_s=reconnect_s)
        self._name, self._chunk_bytes, self._keep = name, chunk_bytes, keep
        self._dtype = dtype
        self._uploads: list[tuple[str, int]] = []
        self._last: tuple[dict[str, Any], list[bytes]] | None = None

    def publish(self, weights: Weights, version: int, *, canary: CanaryTarget | None = None) -> str:
        """Write a version; called by :class:`~torchrl_llm.collectors.ChannelCollector`.

        Args:
            weights: the trained module, its state dict, or a tensordict of its weights.
            version: their number.
            canary: expected log-probs, for readers to check.

        Returns:
            Their digest.

        Raises:
            WeightUpdateError: a tensor is too large for Redis.
            WorkerError: the server is unreachable.
            ResourceError: the server is out of memory.
        """
        named = engine_weights(weights, dtype=self._dtype)
        chunks = list(self._chunks(named))
        head = {
            "version": version,
            "digest": weights_digest(named),
            "upload": uuid.uuid4().hex,
            "chunks": len(chunks),
            "canary": None if canary is None else canary.to_json(),
        }
        self._send(head, chunks)
        return head["digest"]

    def refresh(self) -> None:
        """Write the last version again if the server has lost it."""
        if self._last is None:
            return
        head, chunks = self._last
        keys = [_key(self._name, f"{head['upload']}:{i}") for i in range(len(chunks))]
        newest = _key(self._name, "newest")
        there, named = self._link.read(lambda pipe: (pipe.exists(*keys), pipe.get(newest)))
        if there < len(keys) or named != json.dumps(head).encode():
            self._send(head, chunks)

    def _chunks(self, weights: Mapping[str, Tensor]) -> Iterator[bytes]:
        names: list[str] = []
        size = 0
        for name, tensor in weights.items():
            if tensor.nbytes > _MOST_BYTES:
                raise WeightUpdateError(
                    f"{name!r} has {tensor.nbytes >> 20} MiB, more than a Redis takes at once; "
                    "bring the weights over a shared disc (FileWriter)"
                )
            if names and size + tensor.nbytes > self._chunk_bytes:
                yield to_bytes(None, {n: weights[n] for n in names})
                names, size = [], 0
            names.append(name)
            size += tensor.nbytes
        if names:
            yield to_bytes(None, {n: weights[n] for n in names})

    def _send(self, head: dict[str, Any], chunks: list[bytes]) -> None:
        client = self._link.client
        for i, chunk in enumerate(chunks):
            key = _key(self._name, f"{head['upload']}:{i}")
            self._link.call(lambda again, key=key, chunk=chunk: client.set(key, chunk))
        # Announced after everything is written, so that no reader finds half of a version.
        newest = json.dumps(head)
        self._link.call(lambda again: client.set(_key(self._name, "newest"), newest))
        self._last = (head, chunks)
        if (head["upload"], len(chunks)) not in self._uploads:
            self._uploads.append((head["upload"], len(chunks)))
        while len(self._uploads) > self._keep:
            upload, number = self._uploads.pop(0)
            old = [_key(self._name, f"{upload}:{i}") for i in range(number)]
            self._link.call(lambda again, old=old: client.delete(*old))

    def close(self) -> None:
        """Set the weights to expire: the server deletes them after an hour."""
        keys = [_key(self._name, "newest")]
        keys += [_key(self._name, f"{u}:{i}") for u, number in self._uploads for i in range(number)]
        for key in keys:
            self._link.call(lambda again, key=key: self._link.client.expire(key, _KEPT_S))
        self._link.close()


class RedisWeightSource(WeightSource):
    """The source of one version of the weights in a Redis; picklable.

    Args:
        link: connection to the server.
        name: of the run.
        version: of the weights.
        digest: of the weights.
        upload: key of their chunks.
        chunks: number of chunks.

    Attributes:
        version: as given.
    """

    def __init__(
        self, link: RedisLink, name: str, *, version: int, digest: str, upload: str, chunks: int
    ) -> None:
        self._link, self._name, self._upload, self._chunks = link, name, upload, chunks
        self.version, self.digest = version, digest

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`."""
        for i in range(self._chunks):
            key = _key(self._name, f"{self._upload}:{i}")
            (data,) = self._link.read(lambda pipe, key=key: pipe.get(key))
            if data is None:
                raise WeightUpdateError(
                    f"version {self.version} of the weights is no longer in the Redis: newer ones "
                    "took its place, or it was restarted"
                )
            try:
                tensors = from_bytes(data).tensors
            except DataError as error:
                raise WeightUpdateError(
                    f"chunk {i} of version {self.version} of the weights is damaged: {error}"
                ) from None
            yield from tensors.items()


class RedisWeightReader:
    """The workers' end: finds the newest version.

    Args:
        url: of the Redis.
        name: of the run.
        reconnect_s: most seconds that the server may be unreachable.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: an invalid URL.
    """

    def __init__(self, url: str, name: str, *, reconnect_s: float = RECONNECT_S) -> None:
        self._link = RedisLink(url, feature="RedisWeightReader", reconnect_s=reconnect_s)
        self._name = name

    def newest(self) -> tuple[int, RedisWeightSource] | None:
        """Return the newest version and its source; ``None`` before the first.

        Raises:
            WeightUpdateError: the stored value is malformed.
            WorkerError: the server is unreachable.
        """
        (found,) = self._link.read(lambda pipe: pipe.get(_key(self._name, "newest")))
        if found is None:
            return None
        try:
            head = json.loads(found)
            wrong = [name for name, kind in _FIELDS.items() if type(head[name]) is not kind]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            wrong = [str(error)]
        if wrong or not (0 <= head["chunks"] <= 1 << 20 and 0 <= head["version"] < 1 << 60):
            raise WeightUpdateError(f"what the Redis names as newest weights is malformed: {wrong}")
        fields = {name: head[name] for name in _FIELDS}
        source = RedisWeightSource(self._link, self._name, **fields)
        if head.get("canary") is not None:
            source.canary = CanaryTarget.from_json(head["canary"])
        return head["version"], source
