"""Weights through a Redis, for models that are small next to what it and the network can carry.

The learner's :class:`RedisWeightWriter` puts each version there in chunks, under keys of its own,
and then names it; a :class:`RedisWeightReader` finds the newest one and hands out a source that
may be read at leisure: an older version stays until two newer ones are there. What arrives is
checked against the digest of what was sent. For large models let the Redis carry rows only, and
the weights a shared disc (:mod:`torchrl_llm.weights.shared_files`).
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
    """The learner's end: puts versions of the weights into a Redis.

    Args:
        url: of the Redis.
        name: of the run; readers give the same.
        chunk_bytes: most bytes of one value, as long as no single tensor is larger.
        keep: versions that stay, so that whoever is reading one while others come can finish.
        reconnect_s: seconds for which the server may stay away.
        dtype: of the weights that are sent, see :func:`engine_weights`.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: sizes below 1, or a URL that is none.
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
        """Put a version there; what :class:`~torchrl_llm.collectors.ChannelCollector` calls.

        Args:
            weights: the trained module, its state dict, or a tensordict of its weights.
            version: their number.
            canary: what they compute, for readers to check.

        Returns:
            Their digest.

        Raises:
            WeightUpdateError: a tensor larger than what a Redis takes.
            WorkerError: the server stayed away.
            ResourceError: it is out of memory.
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
        """Put the last version there again where the server has lost it."""
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
        # Named when all of it is there, so that nobody ever finds half of a version.
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
        """Let the server forget the weights in an hour."""
        keys = [_key(self._name, "newest")]
        keys += [_key(self._name, f"{u}:{i}") for u, number in self._uploads for i in range(number)]
        for key in keys:
            self._link.call(lambda again, key=key: self._link.client.expire(key, _KEPT_S))
        self._link.close()


class RedisWeightSource(WeightSource):
    """One version of the weights in a Redis; picklable.

    Args:
        link: to the server.
        name: of the run.
        version: of the weights.
        digest: of the weights.
        upload: under which their chunks are.
        chunks: how many.

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
        reconnect_s: seconds for which the server may stay away.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: a URL that is none.
    """

    def __init__(self, url: str, name: str, *, reconnect_s: float = RECONNECT_S) -> None:
        self._link = RedisLink(url, feature="RedisWeightReader", reconnect_s=reconnect_s)
        self._name = name

    def newest(self) -> tuple[int, RedisWeightSource] | None:
        """The newest version and where it is; ``None`` before the first.

        Raises:
            WeightUpdateError: what is there names no version.
            WorkerError: the server stayed away.
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
