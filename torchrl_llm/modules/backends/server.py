"""Control plane of vLLM's own server: pause, weights, caches, versions, sleep.

The server must be started with ``VLLM_SERVER_DEV_MODE=1``. It must load
:class:`~torchrl_llm.weights.vllm_extension.WeightReceiver`, which receives the weights, as its
worker extension. Neither side uses pickle: weights are sent as safetensors, in a shared file or
inside the requests, and the workers return the digest of the received weights.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchrl_llm._checked import checked
from torchrl_llm._http import HTTPClient
from torchrl_llm._imports import require
from torchrl_llm.errors import (
    BackendError,
    ConfigError,
    TorchRLLLMError,
    WeightUpdateError,
    WorkerError,
)
from torchrl_llm.weights.vllm_loading import EXTENSION
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource, open_source

InFlight = Literal["wait", "keep", "abort"]

# Encoding adds a third to the size; parsing a request of this size takes some ten milliseconds.
_CHUNK_BYTES = 8 << 20


class _Refused(WeightUpdateError):
    """All workers rejected the weights and keep the old ones."""


class VLLMServer:
    """Sends weights to vLLM's server, and pauses, resumes and wakes it.

    Args:
        url: its address, or a client for it.
        api_key: sent as a bearer token; not allowed with a client.
        timeout_s: most seconds for one call.
        in_flight: what happens to running requests while weights are updated. ``"wait"`` lets them
            finish while new requests wait, ``"abort"`` returns their tokens so far, ``"keep"``
            continues them with the new weights.
        exchange_dir: folder shared by client and server; without one, the requests contain the
            weights.

    Raises:
        ConfigError: for a wrong address or an unknown ``in_flight``.
    """

    @checked
    def __init__(
        self,
        url: str | HTTPClient,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        in_flight: InFlight = "wait",
        exchange_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(url, HTTPClient) and api_key is not None:
            raise ConfigError("api_key has no effect: the client has its own")
        self._http = url if isinstance(url, HTTPClient) else HTTPClient(url, api_key=api_key)
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._exchange_dir = None if exchange_dir is None else Path(exchange_dir)

    # -- single calls -----------------------------------------------------------------------------

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine runs."""
        try:
            reply = self._http.call("GET", "/health", timeout_s=self._timeout_s, max_retries=0)
        except WorkerError:
            return False
        return reply.status == 200

    def pause(self, in_flight: InFlight | None = None) -> None:
        """Hold back new requests, and treat running ones according to ``in_flight``."""
        self._call("POST", f"/pause?mode={in_flight or self._in_flight}")

    def resume(self) -> None:
        """Resume after a pause."""
        self._call("POST", "/resume")

    def is_paused(self) -> bool:
        """Whether requests are held back."""
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def sleep(self, level: int = 1) -> None:
        """Free the GPU memory of weights (1: kept on the CPU, 2: dropped) and cache."""
        self._call("POST", f"/sleep?level={level}")

    def wake_up(self) -> None:
        """Allocate the memory again."""
        self._call("POST", "/wake_up")

    def is_sleeping(self) -> bool:
        """Whether the server sleeps."""
        return bool(self._call("GET", "/is_sleeping")["is_sleeping"])

    def weight_version(self) -> int | None:
        """The version that the server reports; ``None`` before the first update."""
        version = str(self._call("GET", "/weight_info")["weight_version"])
        return int(version) if version.removeprefix("-").isdigit() else None

    def world_size(self) -> int:
        """Number of workers of the server; all must answer."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    def collective_rpc(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker.

        Args:
            method: its name.
            args: strings; no other types can be sent.

        Returns:
            The answer of each worker.

        Raises:
            WorkerError: the method raised, or did not answer in time.
            ConfigError: the server has no control plane.
        """
        body = {"method": method, "args": list(args), "timeout": self._timeout_s}
        return self._call("POST", "/collective_rpc", body)["results"]

    def reset_prefix_cache(self) -> None:
        """Drop the cache of old weights, also for running requests.

        Raises:
            BackendError: the cache stays in use.
        """
        # The next step frees the blocks of requests that were just aborted.
        for _ in range(50):
            done = self._call("POST", "/reset_prefix_cache?reset_running_requests=true")
            if done.get("success", False):
                return
            time.sleep(0.1)
        raise BackendError(f"{self._http.url} did not drop its prefix cache")

    # -- weights ----------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, *, version: int) -> list[WeightReceipt]:
        """Send weights to every worker, drop the prefix cache and set the version.

        Args:
            source: all weights or a delta; this method opens it.
            version: version of the weights.

        Returns:
            One receipt per worker.

        Raises:
            ConfigError: the server was not started for weight updates, or the source is an adapter.
            WeightUpdateError: the workers rejected the weights and keep the old ones; or the update
                failed in a different way, after which the server stays paused.
            WorkerError: the server did not answer, and nothing was changed.
        """
        if source.kind == "adapter":
            raise ConfigError(
                "a server accepts all weights or a delta; send the adapter merged "
                "(EngineWeights or DeltaWeights)"
            )
        incoming = open_source(source, version=version)
        order, sent = incoming.order, incoming.receipt
        with self._brought(incoming.weights) as place:
            try:
                self.pause()
            except TorchRLLLMError:
                # The server may still wait for running requests, and pause after they end.
                with contextlib.suppress(TorchRLLLMError):
                    self.resume()
                raise
            try:
                receipts = self._load({**order, **place}, sent.digest)
                self.reset_prefix_cache()
                self._call("POST", "/update_weight_version", {"new_version": str(version)})
            except _Refused:
                self.resume()
                raise
            except TorchRLLLMError as error:
                # The workers may have the old weights, or unverified new ones.
                raise WeightUpdateError(
                    f"{error}. The server stays paused, so that no sample gets a wrong "
                    "version; the next successful update resumes it"
                ) from error
            self.resume()
        return receipts

    def _load(self, order: dict[str, Any], digest: str) -> list[WeightReceipt]:
        answers = self._ask("torchrl_llm_load", json.dumps(order))
        problems = [answer["error"] for answer in answers if "error" in answer]
        if problems:
            kind = _Refused if len(problems) == len(answers) else WeightUpdateError
            raise kind(
                f"{len(problems)} of {len(answers)} workers of {self._http.url} rejected weights: "
                f"{problems[0]}"
            )
        wanted = order.get("result", digest)
        receipts = [WeightReceipt(**answer) for answer in answers]
        for rank, receipt in enumerate(receipts):
            if receipt.digest != wanted or receipt.version != order["version"]:
                raise WeightUpdateError(
                    f"worker {rank} of {self._http.url} has version {receipt.version} as "
                    f"{receipt.digest}, but version {order['version']} was sent as {wanted}"
                )
        return receipts

    @contextlib.contextmanager
    def _brought(self, weights: dict[str, Tensor]) -> Iterator[dict[str, str]]:
        """Provide the weights to the workers within the context, and yield their location."""
        safetensors = require("safetensors.torch", extra="vllm", feature="VLLMServer")
        # Copies weights that share memory, which the format does not support.
        tensors = {
            name: value.detach().cpu().contiguous().clone() for name, value in weights.items()
        }
        name = f"torchrl_llm-{secrets.token_hex(8)}"
        if self._exchange_dir is not None:
            path = self._exchange_dir.absolute() / f"{name}.safetensors"
            try:
                safetensors.save_file(tensors, path)
            except Exception as error:
                # On a full disk, safetensors raises its own exception type without a common base.
                path.unlink(missing_ok=True)
                raise WeightUpdateError(f"could not write {path}: {error}") from error
            try:
                yield {"path": str(path)}
            finally:
                path.unlink(missing_ok=True)
            return
        content = safetensors.save(tensors)
        try:
            for start in range(0, len(content), _CHUNK_BYTES):
                chunk = base64.b64encode(content[start : start + _CHUNK_BYTES]).decode()
                self._ask("torchrl_llm_chunk", name, str(start), chunk)
            yield {"transfer": name}
        finally:
            # An interrupted transfer must not stay in the workers' memory.
            with contextlib.suppress(WorkerError):
                self._ask("torchrl_llm_forget", name)

    def _ask(self, method: str, *args: str) -> list[dict[str, Any]]:
        try:
            answers = self.collective_rpc(method, *args)
        except WorkerError as error:
            raise WorkerError(
                f"{error}; was the server started with --worker-extension-cls {EXTENSION}?"
            ) from None
        for rank, answer in enumerate(answers):
            if not isinstance(answer, dict):
                raise ConfigError(f"worker {rank} of {self._http.url} answered {answer!r}")
        return answers

    # -- requests ---------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the data of the server's answer."""
        reply = self._http.call(method, path, body, timeout_s=self._timeout_s)
        if reply.status in (404, 405):
            raise ConfigError(
                f"{self._http.url} has no {path}: weights, pauses and versions need vLLM's server, "
                "started with VLLM_SERVER_DEV_MODE=1"
            )
        self._http.check(reply, path)
        return reply.data
