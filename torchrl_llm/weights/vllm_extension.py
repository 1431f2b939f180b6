"""Worker extension of vLLM: loads weights inside a server, or an engine over several devices.

Start a server with ``--worker-extension-cls torchrl_llm.weights.vllm_extension.WeightReceiver``;
vLLM then adds the methods of that class to its worker class. The methods return plain data. They
also return errors as data, because a server does not pass the text of an exception to its client.

:mod:`torchrl_llm.modules.backends.server` and :mod:`torchrl_llm.weights.vllm_loading` call these
methods.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from typing import Any

from safetensors.torch import load, load_file
from torch import Tensor

from torchrl_llm.errors import TorchRLLLMError, WeightUpdateError
from torchrl_llm.modules.backends.vllm.build import keep_weights_unpacked
from torchrl_llm.weights.vllm_loading import agree, load_into_vllm_model
from torchrl_llm.weights.weight_source import UNHASHED, DeltaSource, TensorSource, WeightSource

with contextlib.suppress(ModuleNotFoundError):
    # The worker imports this module before it loads the model; after that, this setting has no
    # effect.
    keep_weights_unpacked()


class WeightReceiver:
    """Extension of vLLM's worker; never instantiated directly.

    The method names have a prefix, because vLLM rejects an extension that hides a name of the
    worker.
    """

    def torchrl_llm_chunk(self, transfer: str, start: str, chunk: str) -> dict[str, Any]:
        """Store a piece of a safetensors file.

        Args:
            transfer: name of the file.
            start: start of the piece in bytes.
            chunk: base64.
        """
        pieces = self.__dict__.setdefault("_torchrl_llm_transfers", {})
        content = pieces.setdefault(transfer, bytearray())
        # A piece is sent again if its answer was lost.
        content[int(start) :] = base64.b64decode(chunk)
        return {"received": len(content)}

    def torchrl_llm_forget(self, transfer: str) -> dict[str, Any]:
        """Drop the pieces of a file.

        Args:
            transfer: name of the file.
        """
        self.__dict__.get("_torchrl_llm_transfers", {}).pop(transfer, None)
        return {}

    def torchrl_llm_load(self, order: str) -> dict[str, Any]:
        """Load received weights, all or none of them.

        Args:
            order: JSON of :attr:`~torchrl_llm.weights.weight_source.Incoming.order`, and
                ``path`` or ``transfer``.

        Returns:
            The fields of a receipt, or ``error``.
        """
        said = json.loads(order)
        done, receipt = self.__dict__.get("_torchrl_llm_done", (None, None))
        if done == order:
            # The answer was lost and the order was repeated; a delta can be applied only once.
            return receipt._asdict()
        # The runner's attribute is the model even if CUDA graphs wrap it.
        model, failure = self.model_runner.get_model(), None
        try:
            source = _source(said, self.__dict__.get("_torchrl_llm_transfers", {}))
        except (TorchRLLLMError, OSError) as error:
            failure = error
        try:
            agree(model, failure)
            receipt = load_into_vllm_model(model, source, said["version"])
        except (TorchRLLLMError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self.__dict__["_torchrl_llm_done"] = order, receipt
        return receipt._asdict()


def _source(said: dict[str, Any], transfers: dict[str, bytearray]) -> WeightSource:
    if "path" in said:
        if not os.path.exists(said["path"]):
            raise WeightUpdateError(
                f"there is no {said['path']} where the server runs; exchange_dir must be a folder "
                "that client and server both see"
            )
        weights = _tensors(path=said["path"])
    elif said["transfer"] in transfers:
        weights = _tensors(content=bytes(transfers[said["transfer"]]))
    else:
        raise WeightUpdateError(f"no piece of {said['transfer']} arrived")
    source = TensorSource(weights, kind=said["kind"])
    if "base" in said:
        source = DeltaSource(weights, base=said["base"], result=said["result"])
    source.counter, source.recounted = said["counter"], said["recounted"]
    if said["digest"].startswith(UNHASHED):
        source.hashed = False
    else:
        source.digest = said["digest"]
    return source


def _tensors(*, path: str | None = None, content: bytes = b"") -> dict[str, Tensor]:
    try:
        return load(content) if path is None else load_file(path)
    except Exception as error:
        # A broken file raises an exception of the format, which has no common base class.
        raise WeightUpdateError(f"this is no safetensors file: {error}") from error
