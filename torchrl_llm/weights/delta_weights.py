"""Only the weights that changed: for models of which little is trained."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.fingerprint import WeightDigest
from torchrl_llm.weights.weight_names import engine_weights
from torchrl_llm.weights.weight_source import DeltaSource, TensorSource, WeightReceipt
from torchrl_llm.weights.whole_model import EngineWeights, Sender, Weights


@register("weights", "delta")
class DeltaWeights(EngineWeights):
    """Sends the tensors whose digest is another than at the last push.

    Each engine is told which weights the changes are a change of, and refuses them when it holds
    others (it was rebuilt, or missed a version); it is then sent all weights. The first push is
    whole. Hashing reads every weight once, which is cheaper than sending it anywhere.

    Attributes:
        num_sent: tensors of the last push, to the engine that got most.
        num_bytes_sent: of the last push, to all engines together.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1).module
        >>> updater = DeltaWeights(FakeBackend(vocab_size=16, eos_token_ids=(2,)), model=trained)
        >>> updater.push_weights()
        >>> first = updater.num_sent
        >>> _ = next(trained.parameters()).data.mul_(2)
        >>> updater.push_weights()
        >>> first, updater.num_sent
        (2, 1)
    """

    num_sent: int = 0
    num_bytes_sent: int = 0
    _held: WeakKeyDictionary[Backend, dict[str, int]] | None = None

    def _check(self, backend: Backend) -> None:
        super()._check(backend)
        if not self._fingerprint:
            raise ConfigError("DeltaWeights finds what changed by its fingerprint: leave that on")

    def _sender(self, weights: Weights, version: int) -> Sender:
        named = engine_weights(weights, dtype=self._dtype)
        digest = WeightDigest()
        for name, value in named.items():
            digest.update(name, value)
        if self._held is None:
            self._held = WeakKeyDictionary()
        self.num_sent = self.num_bytes_sent = 0

        def send(backend: Backend) -> list[WeightReceipt]:
            receipts = self._send_to(backend, named, digest, version)
            self._held[backend] = digest.parts
            return receipts

        return send

    def _send_to(
        self, backend: Backend, named: dict[str, Tensor], digest: WeightDigest, version: int
    ) -> list[WeightReceipt]:
        parts, held = digest.parts, self._held.pop(backend, {})
        if held.keys() == parts.keys():
            changed = {name: value for name, value in named.items() if held[name] != parts[name]}
            base = WeightDigest.of_parts(held)
            try:
                source = self._counted(DeltaSource(changed, base=base, result=digest.value))
                receipts = backend.update_weights(source, version=version)
            except WeightUpdateError:
                # It holds others than it was sent: built anew, or loaded by somebody else.
                pass
            else:
                self._count_sent(changed)
                return receipts
        self._count_sent(named)
        source = self._counted(TensorSource(named, digest=digest.value))
        return backend.update_weights(source, version=version)

    def _count_sent(self, sent: dict[str, Tensor]) -> None:
        self.num_sent = max(self.num_sent, len(sent))
        self.num_bytes_sent += sum(value.numel() * value.element_size() for value in sent.values())
