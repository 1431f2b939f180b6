"""Optimizers by name: of torch or other packages, Muon for the matrices, or on the CPU.

Next: :mod:`torchrl_llm.trainers.optim` takes steps with them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from torchrl_llm._registry import import_named
from torchrl_llm.errors import ConfigError
from torchrl_llm.trainers.ranks import blocks_of

_UNUSABLE = {
    "LBFGS": "it calls the loss several times a step",
    "SparseAdam": "gradients are not sparse",
}
# Arguments of Muon's AdamW half; other arguments belong to the matrices.
_ADAMW_ONLY = ("betas", "eps")


def check_optimizer(name: str, arguments: Iterable[str] = ()) -> type[torch.optim.Optimizer]:
    """Class of an optimizer; rejects unusable classes and unknown arguments.

    Args:
        name: class name in ``torch.optim``, or ``"module:Class"`` of another package or your own.
        arguments: names of its arguments besides parameters and learning rate.

    Raises:
        ConfigError: with the nearest name, or the reason why the class cannot be used.
    """
    if ":" in name:
        kind = import_named(name)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(f"optimizer.name: {name} is no torch.optim.Optimizer")
    else:
        kinds = dict(inspect.getmembers(torch.optim, inspect.isclass))
        names = [key for key, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)]
        names = [key for key in names if key not in _UNUSABLE and key != "Optimizer"]
        if name not in names:
            alike = [key for key in names if key.lower() == name.lower()]
            nearest = (alike or difflib.get_close_matches(name, names, 1, 0.0))[0]
            raise ConfigError(
                f"optimizer.name: torch.optim has no usable {name!r}; "
                + _UNUSABLE.get(name, f"nearest: {nearest!r}")
                + "; one of another package is named 'module:Class'"
            )
        kind = kinds[name]
    accepted = dict(inspect.signature(kind).parameters)
    if "lr" not in accepted:
        raise ConfigError(f"optimizer.name: {name} takes no learning rate (lr)")
    if kind is torch.optim.Muon:
        accepted |= dict.fromkeys(_ADAMW_ONLY)
    takes_any = any(p is not None and p.kind is p.VAR_KEYWORD for p in accepted.values())
    for key in arguments:
        if key not in accepted and not takes_any:
            raise ConfigError(
                f"optimizer.{key} has no effect: {name} does not take it (null leaves it out)"
            )
    return kind


def make_optimizer(
    parameters: nn.Module | Iterable[nn.Parameter],
    *,
    name: str,
    lr: float,
    on_cpu: bool = False,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Make the optimizer with this name for the trained parameters.

    ``"Muon"`` is one optimizer of two groups: ``torch.optim.Muon`` has the matrices of the layers,
    ``AdamW`` all other parameters (embeddings, head, norms, a value head). One learning rate serves
    both, by ``adjust_lr_fn="match_rms_adamw"`` (arXiv:2502.16982).

    Args:
        parameters: a module, or parameters; those without ``requires_grad`` are left out. Without
            their module, Muon takes all matrices.
        name: class name in ``torch.optim``, as ``"AdamW"``, or ``"module:Class"``.
        lr: learning rate.
        on_cpu: keep the states on the CPU and step there, see ``OptimizerOnCpu``.
        **arguments: further arguments of that class; ``None`` means the default of the class. An
            unknown argument is rejected.

    Raises:
        ConfigError: no such optimizer, an unknown argument, or nothing to train.

    Example:
        >>> make_optimizer(nn.Linear(2, 2).parameters(), name="SGD", lr=0.1, momentum=0.9).defaults[
        ...     "momentum"
        ... ]
        0.9
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    kind = check_optimizer(name, given)
    every = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [parameter for parameter in every if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter requires a gradient: there is nothing to optimize")
    fits = (p.is_floating_point() and p.numel() and not p.is_meta for p in trained)
    # Among the fused kernels, only Adam's support shards.
    knows_shards = name in ("Adam", "AdamW") or not any(isinstance(p, DTensor) for p in trained)
    if "fused" in inspect.signature(kind).parameters and knows_shards and all(fits):
        # One kernel for all parameters: on small models a plain loop takes longer than the
        # backward.
        given.setdefault("fused", True)
    hidden = _matrices(parameters, trained) if kind is torch.optim.Muon else set()

    def make(own: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        if kind is not torch.optim.Muon:
            return kind(own, lr=lr, **given)
        split = [p for p, like in zip(own, trained, strict=True) if id(like) in hidden]
        others = [p for p, like in zip(own, trained, strict=True) if id(like) not in hidden]
        return MuonWithAdamW(split, others, lr=lr, **given)

    try:
        made = OptimizerOnCpu(trained, make) if on_cpu else make(trained)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.name={name} with {given | {'lr': lr}}: {error}") from error
    if ":" in name and (odd := _unknown_states(make)):
        raise ConfigError(
            f"optimizer.name={name} keeps its states as {odd}, which no checkpoint can hold; "
            "choose another, bitsandbytes.optim:AdamW8bit for states of eight bits"
        )
    return made


def _unknown_states(make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> str | None:
    """The kind of an optimizer's states, if they are not plain tensors."""
    weight = nn.Parameter(torch.zeros(64, 64))  # smaller ones are kept in full
    weight.grad = torch.zeros_like(weight)
    try:
        optimizer = make([weight])
        with in_training(optimizer):
            optimizer.step()
    except Exception:  # needs a GPU or a closure: its first step raises the error
        return None
    states = (value for state in optimizer.state.values() for value in state.values())
    kinds = (type(value) for value in states if isinstance(value, Tensor))
    return next((kind.__name__ for kind in kinds if kind not in (Tensor, nn.Parameter)), None)


def _matrices(parameters: Any, trained: Sequence[nn.Parameter]) -> set[int]:
    """The ``id`` of each matrix in a layer; of all matrices if no layers are known."""
    parts = parameters.modules() if isinstance(parameters, nn.Module) else ()
    layers = [
        layer for part in parts if isinstance(part, PreTrainedModel) for layer in blocks_of(part)
    ]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    return {id(p) for p in trained if p.ndim == 2 and (not layers or id(p) in inside)}


@contextmanager
def in_training(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a schedule-free optimizer (arXiv:2405.15682) train; then set the weights to its average.

    Such an optimizer has ``train`` and ``eval``. Outside of this context the weights are the
    average; with this average the model samples, is evaluated and is saved. Other optimizers are
    not changed.

    Args:
        optimizer: any.
    """
    switch = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    if None in switch:
        yield
        return
    train, end = switch
    train()
    try:
        yield
    finally:
        end()


class MuonWithAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` over matrices and ``torch.optim.AdamW`` over the rest, as one.

    Args:
        matrices: parameters of Muon; may be empty.
        others: parameters of AdamW; may be empty.
        lr: learning rate of both.
        weight_decay: weight decay of both; if not given, each has its own default.
        **arguments: ``betas`` and ``eps`` are passed to AdamW, all others to Muon.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> both = MuonWithAdamW([layer.weight], [layer.bias], lr=0.1)
        >>> ["momentum" in group for group in both.param_groups]
        [True, False]
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        *,
        lr: float,
        **arguments: Any,
    ) -> None:
        muon = {"adjust_lr_fn": "match_rms_adamw"}
        muon |= {key: value for key, value in arguments.items() if key not in _ADAMW_ONLY}
        names = ("weight_decay", *_ADAMW_ONLY)
        adamw = {key: value for key, value in arguments.items() if key in names}
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=lr, **muon))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, **adamw))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step both optimizers.

        Args:
            closure: not supported.
        """
        assert closure is None
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Loading a state replaces groups and state; a schedule writes into the groups.
            part.param_groups, part.state = [group], self.state
            part.step()


class OptimizerOnCpu(torch.optim.Optimizer):
    """An optimizer whose states and steps are on the CPU.

    At each step parameters and gradients are copied to the CPU, and parameters back.

    Args:
        parameters: parameters on any device.
        make: makes the optimizer for their copies.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> optimizer = OptimizerOnCpu([weight], lambda copies: torch.optim.SGD(copies, lr=0.5))
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        copies = [nn.Parameter(torch.empty_like(p, device="cpu")) for p in parameters]
        self._inner = make(copies)
        if hasattr(self._inner, "train") and hasattr(self._inner, "eval"):
            raise ConfigError(
                f"optimizer.on_cpu=true does not go with {type(self._inner).__name__}: a "
                "schedule-free optimizer changes the weights between steps too"
            )
        self._pairs = list(zip(parameters, copies, strict=True))
        own = {id(copy): parameter for parameter, copy in self._pairs}
        groups = [
            {**group, "params": [own[id(copy)] for copy in group["params"]]}
            for group in self._inner.param_groups
        ]
        super().__init__(groups, self._inner.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Copy, step on the CPU, copy back.

        Args:
            closure: not supported.
        """
        assert closure is None
        for own, copy in self._pairs:
            copy.copy_(own)
            copy.grad = None if own.grad is None else own.grad.to("cpu")
        _copy_settings(self.param_groups, self._inner.param_groups)
        self._inner.step()
        for own, copy in self._pairs:
            own.copy_(copy)
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer on the CPU."""
        _copy_settings(self.param_groups, self._inner.param_groups)
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of an optimizer, on the CPU or not.

        Args:
            state_dict: the saved state.
        """
        self._inner.load_state_dict(state_dict)
        _copy_settings(self._inner.param_groups, self.param_groups)


def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy the settings of groups, because a schedule writes learning rates into them."""
    for given, group in zip(source, target, strict=True):
        settings: Mapping[str, Any] = {key: v for key, v in given.items() if key != "params"}
        group.update(settings)
