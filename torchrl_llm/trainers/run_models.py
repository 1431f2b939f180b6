"""Models and parts of a run in its checkpoints: saving and loading.

A checkpoint holds the weights of a model once, in its Hugging Face folder, if this folder holds
them unchanged. The state holds the other trained parameters: adapters (which the folder has only
merged, or in a different type), and parameters of models that are not from Hugging Face.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.envs import Transform

from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.modules.weight_files import WeightFolder, holds_whole, published_weights, whole
from torchrl_llm.trainers.checkpoint import save_pretrained
from torchrl_llm.trainers.optimizer_state import load_module, load_named_state, named_state
from torchrl_llm.trainers.ranks import sharded_like

_SHARED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, nn.Module)
_NAME = re.compile(r"(?!adapter$|trainer_state$)[A-Za-z0-9][\w-]*")


def _rounded(number: int) -> str:
    """A count as ``532``, ``8.1M`` or ``1.5B``."""
    power = min((len(str(number)) - 1) // 3, 4)
    return f"{number / 1000**power:.{int(power > 0)}f}{' KMBT'[power]}".rstrip()


class RunModels:
    """The models of a run, by name, each with its tokenizer.

    Args:
        models: name to model and tokenizer; a name is the name of the folder in a checkpoint. A
            single model without a name, ``""``, is in the checkpoint's own folder.

    Raises:
        ConfigError: no model, or an invalid name of a folder.
    """

    def __init__(self, models: Mapping[str, tuple[nn.Module, Any]]) -> None:
        self._models = dict(models)
        wrong = [name for name in models if not _NAME.fullmatch(name) and list(models) != [""]]
        if not models or wrong:
            raise ConfigError(
                "the models of a run are named by letters, digits, - and _, and not adapter or "
                f"trainer_state; got {wrong or 'none'}"
            )

    def describe(self) -> Iterator[str]:
        """Describe each model: its size, share of trained parameters, device and type."""
        for name, (model, _) in self._models.items():
            sizes = [(p, p.numel() << (p.dtype is torch.uint8)) for p in model.parameters()]
            total = sum(size for _, size in sizes)
            trained = sum(size for parameter, size in sizes if parameter.requires_grad)
            yield f"{name}: " * bool(name) + f"{_rounded(total)} parameters"
            if trained < total:
                yield f"{_rounded(trained)} of them trained"
            for first, _ in sizes[:1]:
                yield f"{first.device}, {str(first.dtype).removeprefix('torch.')}"

    def state(self) -> dict[str, Any]:
        """For each model, the trained names, and the whole parameters that its folder lacks.

        Every rank has to call it.
        """
        state = {}
        for name, (model, _) in self._models.items():
            held = published_weights(model) if holds_whole(model) else {}
            parameters = _trained(model)
            apart = {
                n: whole(p) for n, p in parameters.items() if n not in held or held[n].like is not p
            }
            state[name] = {"trained": list(parameters), "apart": apart}
        return state

    def write(
        self, path: Path, *, max_shard_size: str | int, is_main: bool = True
    ) -> dict[str, int]:
        """Write each model into its folder; every rank has to call it.

        Args:
            path: folder of the checkpoint.
            max_shard_size: as for :func:`~torchrl_llm.trainers.save_pretrained`.
            is_main: as for :func:`~torchrl_llm.trainers.save_pretrained`.

        Returns:
            CRC-32 of each file of weights, by its path in the checkpoint.
        """
        checksums = {}
        for name, (model, tokenizer) in self._models.items():
            folder = path / name
            if is_main:
                folder.mkdir(exist_ok=True)
            written = save_pretrained(
                folder, model, tokenizer, max_shard_size=max_shard_size, is_main=is_main
            )
            checksums |= {(f"{name}/" if name else "") + k: v for k, v in written.items()}
        return checksums

    def load(self, path: Path, state: Mapping[str, Any]) -> None:
        """Load the weights of a checkpoint into the models.

        Args:
            path: folder of the checkpoint.
            state: result of :meth:`state` when the checkpoint was written.

        Raises:
            CheckpointError: the checkpoint is of different models.
        """
        if state.keys() != self._models.keys():
            raise CheckpointError(
                f"{path} holds {_called(state)}, and this run trains {_called(self._models)}"
            )
        for name, (model, _) in self._models.items():
            parameters, saved = _trained(model), state[name]
            if parameters.keys() != set(saved["trained"]):
                raise CheckpointError(
                    f"{path / name} was written by another model: it trains "
                    f"{sorted(parameters.keys() ^ set(saved['trained']))[:4]} differently"
                )
            weights = None
            for key, parameter in parameters.items():
                value = saved["apart"].get(key)
                if value is None:
                    weights = weights or WeightFolder(path / name)
                    value = weights.read(key)
                _copy(parameter, value, f"{path / name}: {key}")


def split_parts(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the parts of a run into parts that all ranks share, and parts of this rank.

    Args:
        parts: parts of the run by name.
    """
    # A transform is a module, but belongs to the rank whose rows it has seen.
    shared = {
        name: part
        for name, part in parts.items()
        if isinstance(part, _SHARED) and not isinstance(part, Transform)
    }
    return shared, {name: part for name, part in parts.items() if name not in shared}


def part_states(parts: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """State of each part of a run; the state of an optimizer is by the names of its parameters.

    Args:
        parts: objects with ``state_dict``, by name.
        names: result of :func:`names_of_parameters`.
    """
    return {
        name: named_state(part, names) if _is_optimizer(part) else part.state_dict()
        for name, part in parts.items()
    }


def load_part_states(
    parts: Mapping[str, Any],
    states: Mapping[str, Any],
    names: Mapping[int, str],
    *,
    read: Callable[[dict[str, Tensor]], None],
) -> None:
    """Load the result of :func:`part_states`.

    Args:
        parts: as for :func:`part_states`.
        states: result of :func:`part_states`.
        names: as for :func:`part_states`.
        read: as for :func:`~torchrl_llm.trainers.optimizer_state.load_named_state`.

    Raises:
        CheckpointError: the checkpoint has different parts.
    """
    if parts.keys() != states.keys():
        raise CheckpointError(
            f"the checkpoint is of a run of other parts: it has {', '.join(sorted(states))}, and "
            f"this run {', '.join(sorted(parts))}"
        )
    for name, part in parts.items():
        if _is_optimizer(part):
            load_named_state(part, states[name], names, read=read)
        elif isinstance(part, nn.Module):
            load_module(part, states[name], read=read)
        else:
            part.load_state_dict(states[name])


def names_of_parameters(
    models: Mapping[str, tuple[nn.Module, Any]], parts: Mapping[str, Any]
) -> dict[int, str]:
    """Name of each parameter of the models and parts of a run, by its ``id``.

    Args:
        models: as for :class:`RunModels`; parameters of a model without a name have no prefix.
        parts: parts of the run; parts that are modules have parameters.
    """
    modules = [(name, part) for name, part in parts.items() if isinstance(part, nn.Module)]
    modules += [(name, model) for name, (model, _) in models.items()]
    named = ((prefix, n, p) for prefix, m in modules for n, p in m.named_parameters())
    return {id(p): f"{prefix}.{n}" if prefix else n for prefix, n, p in named}


def _is_optimizer(part: Any) -> bool:
    return isinstance(part, torch.optim.Optimizer)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _called(models: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(models))
    return f"the models {names}" if names else "one model without a name"


@torch.no_grad()
def _copy(parameter: nn.Parameter, value: Tensor, where: str) -> None:
    if value.shape != parameter.shape:
        raise CheckpointError(
            f"{where} has the shape {tuple(value.shape)}, and that of this run's model is "
            f"{tuple(parameter.shape)}: it was written by another model"
        )
    parameter.copy_(sharded_like(value, parameter))
