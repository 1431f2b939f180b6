"""State of an optimizer by the names of its parameters, not by their positions.

A run that resumes with different parameter groups, or a different number of ranks, finds each state
by its name, and reports missing names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_llm.data.safe_state import Spread
from torchrl_llm.errors import CheckpointError
from torchrl_llm.trainers.ranks import sharded_like


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The content of ``optimizer.state_dict()``, by the names of the parameters.

    Args:
        optimizer: any of torch's.
        names: name of each parameter, by its ``id``; a parameter without a name is named by its
            position.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> named_state(optimizer, {id(layer.weight): "head.weight"})["param_groups"][0]["params"]
        ['head.weight']
    """
    state = optimizer.state_dict()
    called = {place: name for place, (name, _) in enumerate(_parameters(optimizer, names))}
    return {
        "state": {called[place]: values for place, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [called[place] for place in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load_named_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    names: Mapping[int, str],
    *,
    read: Callable[[dict[str, Tensor]], None],
) -> None:
    """Load a state of :func:`named_state`.

    Args:
        optimizer: has parameters of the same names.
        state: the saved state.
        names: as for :func:`named_state`.
        read: fills tensors of a state that was :class:`~torchrl_llm.data.safe_state.Spread`, each
            by its name.

    Raises:
        CheckpointError: the saved optimizer trained different parameters.
    """
    parameters = dict(_parameters(optimizer, names))
    places = {name: place for place, name in enumerate(parameters)}
    saved = {name for group in state["param_groups"] for name in group["params"]}
    if saved != parameters.keys() or len(state["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            "the optimizer of the checkpoint trains other parameters: "
            f"{sorted(saved ^ parameters.keys())[:4] or 'in other groups'}"
        )
    wanted: dict[str, Tensor] = {}
    values = {
        places[name]: {k: _placed(v, parameters[name], wanted) for k, v in each.items()}
        for name, each in state["state"].items()
    }
    read(wanted)
    groups = [
        {**group, "params": [places[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, nn.Parameter]]:
    every = (p for group in optimizer.param_groups for p in group["params"])
    return ((names.get(id(p), f"parameter_{place}"), p) for place, p in enumerate(every))


def load_module(
    module: nn.Module, state: Mapping[str, Any], *, read: Callable[[dict[str, Tensor]], None]
) -> None:
    """Load the ``state_dict()`` of a module, which may now be spread differently over ranks.

    Args:
        module: sharded or not.
        state: the saved state.
        read: as for :func:`load_named_state`.
    """
    wanted: dict[str, Tensor] = {}
    like = module.state_dict()
    values = {n: _placed(v, like[n], wanted) if n in like else v for n, v in state.items()}
    read(wanted)
    module.load_state_dict(values)


def _placed(value: Any, like: Tensor, wanted: dict[str, Tensor]) -> Any:
    """A saved value, sharded like a tensor; values to read later are added to ``wanted``."""
    same_shape = isinstance(value, (Tensor, Spread)) and tuple(value.shape) == tuple(like.shape)
    if isinstance(value, Spread):
        dtype, name = value.dtype, value.name
        if same_shape and isinstance(like, DTensor):
            wanted[name] = torch.empty_like(like, dtype=dtype)
        else:
            wanted[name] = torch.empty(value.shape, dtype=dtype)
        return wanted[name]
    return sharded_like(value, like) if same_shape else value
