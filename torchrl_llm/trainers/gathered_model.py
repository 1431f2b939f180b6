"""A sharded model that every rank runs at its own pace.

FSDP2 gathers the weights of a layer when all ranks run it, equally often. In training, all ranks do
this (:mod:`torchrl_llm.trainers.optim`). But a rank samples until its own answers end, and scores
only its own rows. So a model that samples or scores is a :class:`GatheredModel`: the weights of one
layer at a time are gathered, while that layer runs. The next layer to gather is the one with the
lowest number that any rank requests. A rank that requests no layer helps the others to gather while
it waits for them in :class:`~torchrl_llm.trainers.Ranks`, until all ranks wait.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchrl_llm.trainers.progress import uncut
from torchrl_llm.trainers.ranks import between_calls, blocks_of
from torchrl_llm.weights.weight_names import whole_tensor
from torchrl_llm.weights.weight_updater import WeightUpdater

Gathers = Literal["layer", "model"]

# Request of a rank that needs no layer.
_NOTHING = torch.iinfo(torch.int64).max
_models: weakref.WeakKeyDictionary[nn.Module, GatheredModel] = weakref.WeakKeyDictionary()


class GatheredModel:
    """Makes the weights of a module whole while they are used, and releases them afterwards.

    At other times, except in :meth:`whole`, the weights are NaN and take no memory. Weights outside
    the layers (embeddings, head) stay whole from their first use to the next collective call of the
    ranks. All ranks have to make their gathered models of the same modules in the same order.

    Args:
        module: the module to run; it holds ``model``, and may hold a value head.
        model: a Hugging Face model, in PEFT or not.
        sources: the sharded parameters that are trained, in the order of the parameters of
            ``module``. By default shards of the parameters of ``module``, which are then frozen.
        gathers: ``"layer"``, or ``"model"`` to keep all used weights until the next collective
            call, so that ranks do not wait at each layer.
        timeout_s: most seconds that a rank waits for another.
    """

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        *,
        sources: Sequence[Tensor] | None = None,
        gathers: Gathers = "layer",
        timeout_s: float = 1800.0,
    ) -> None:
        parameters = list(module.parameters())
        if sources is None:
            mesh = init_device_mesh(parameters[0].device.type, (dist.get_world_size(),))
            sources = [
                distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
                for p in parameters
            ]
        source_of = dict(zip(parameters, sources, strict=True))
        self._pace, self._keeps = _pace(timeout_s), gathers == "model"
        # Weights outside the layers come first: they are requested before any layer.
        blocks = blocks_of(model)
        in_layers = {p for block in blocks for p in block.parameters()}
        rest = self._layer([p for p in parameters if p not in in_layers], source_of)
        inside = {part for block in blocks for part in block.modules()}
        for part in module.modules():
            if part not in inside:
                part.register_forward_pre_hook(lambda *_: self._bring(rest), prepend=True)
        self._numbers = [rest]
        for block in blocks:
            self._wrap(block, self._layer(list(block.parameters()), source_of))
        _models[model] = self
        weakref.finalize(model, self._pace.forget, self._numbers)

    def _layer(self, parameters: list[nn.Parameter], source_of: Mapping[Any, Tensor]) -> int:
        self._pace.layers.append(_Layer({p: source_of[p] for p in parameters}))
        return len(self._pace.layers) - 1

    def _wrap(self, block: nn.Module, number: int) -> None:
        self._numbers.append(number)
        block.register_forward_pre_hook(lambda *_: self._bring(number), prepend=True)
        if not self._keeps:
            drop = self._pace.layers[number].drop
            block.register_forward_hook(lambda *_: drop(), always_call=True)

    def _bring(self, number: int) -> None:
        if not self._pace.layers[number].is_whole:
            for each in self._numbers if self._keeps else (number,):
                self._pace.bring(each)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights on this rank; other ranks may do different work meanwhile."""
        try:
            for number in self._numbers:
                self._pace.bring(number)
                self._pace.layers[number].is_needed = True
            yield
        finally:
            for number in self._numbers:
                self._pace.layers[number].is_needed = False
                self._pace.layers[number].drop()


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Make weights whole on this rank while they are read without running the module.

    Args:
        module: holds the model of a :class:`GatheredModel`, or has whole weights anyway.
    """
    found = next((_models[part] for part in module.modules() if part in _models), None)
    if found is None:
        yield
        return
    with found.whole():
        yield


class GatheredWeights(WeightUpdater):
    """Weight updater that makes its source whole while a different updater reads it.

    Args:
        source: a :class:`GatheredModel` in any wrapping.
        then: the updater that pushes its weights.
    """

    def __init__(self, source: nn.Module, then: Any) -> None:
        self._source, self._then = source, then

    def register_collector(self, collector: Any) -> None:
        """Bind this updater and the inner one to a collector."""
        super().register_collector(collector)
        self._then.register_collector(collector)

    @property
    def canary(self) -> Any:
        """Canary of the inner updater; ``None`` if it has none."""
        return getattr(self._then, "canary", None)

    def sleep(self) -> None:
        """Let engines release their memory until the next push, if they can."""
        self._then.sleep()

    def push_weights(self, policy_or_weights: Any = None) -> None:
        """Push the trained weights.

        Args:
            policy_or_weights: not used: the weights come from the source.
        """
        with whole_weights(self._source):
            self._then.push_weights()


class _Layer:
    """Weights that are gathered together.

    Args:
        sources: shards of each parameter.
    """

    def __init__(self, sources: dict[nn.Parameter, Tensor]) -> None:
        self._sources = sources
        # They have the parameter's shape and device, and take the memory of one number.
        self._away = {p: p.new_full((), torch.nan).expand(p.shape) for p in sources}
        self.is_whole, self.is_needed = True, False
        self.drop()

    @torch.no_grad()
    def gather(self, wanted: bool) -> None:
        """Take part in gathering, and keep the weights if this rank needs them."""
        for parameter, source in self._sources.items():
            whole = whole_tensor(source.detach())
            if wanted:
                parameter.data = whole
        self.is_whole = self.is_whole or wanted

    def drop(self) -> None:
        """Release the whole weights, unless the whole model is needed."""
        if self.is_whole and not self.is_needed:
            for parameter, away in self._away.items():
                parameter.data = away
            self.is_whole = False


class _Pace:
    """The layers of all models of this process, and the group in which ranks request them.

    Args:
        timeout_s: most seconds that a rank waits for another.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.layers: list[_Layer] = []
        self._lock = threading.RLock()

    def forget(self, numbers: Sequence[int]) -> None:
        """Release the shards of a deleted model; other layers keep their numbers."""
        for number in numbers:
            self.layers[number] = _Layer({})

    def bring(self, number: int) -> None:
        """Wait until the weights of a layer are whole in this process."""
        with self._lock:
            while not self.layers[number].is_whole:
                self._gather_next(number)

    def meet(self, world: int) -> None:
        """Take part in gathering for other ranks, until no rank requests anything.

        Args:
            world: number of ranks that meet; the method does nothing if it is not the whole group.
        """
        if world != dist.get_world_size():
            return
        with self._lock:
            for layer in self.layers:
                layer.drop()
            while self._gather_next(_NOTHING) != _NOTHING:
                pass

    def _gather_next(self, wanted: int) -> int:
        asked = torch.tensor(wanted)
        with uncut():
            dist.all_reduce(asked, op=dist.ReduceOp.MIN, group=self._group)
            number = int(asked)
            if number != _NOTHING:
                self.layers[number].gather(number == wanted)
        return number


def _pace(timeout_s: float) -> _Pace:
    """The pace of the present group of ranks."""
    if not between_calls:
        between_calls.append(_Pace(timeout_s))
    pace: _Pace = between_calls[0]
    return pace
