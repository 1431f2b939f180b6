"""Writes a model's weights to a folder in shards, and reads Hugging Face's formats.

Reading never runs code. Tensors are written one by one, so that writing needs memory only for the
largest tensor. A tensor that is on a different device, is spread over ranks (a DTensor) or needs an
adapter added is made only when it is written. Every rank makes the tensors, and one rank writes
them.

:func:`~torchrl_llm.trainers.save_pretrained` adds the other files of such a folder.
"""

from __future__ import annotations

import copy
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict, str_to_torch_dtype
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from torchrl_llm.errors import CheckpointError, ConfigError, DamagedCheckpointError
from torchrl_llm.modules.quantization import is_quantized

PICKLED_NAME = "pytorch_model.pt"
"""Ludic's name for weights in one file; ``from_pretrained`` does not read it."""
_FORMS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_FORMS += (PICKLED_NAME,)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DTYPES = {dtype: name for name, dtype in str_to_torch_dtype.items()} | {torch.complex64: "C64"}


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written.

    Attributes:
        like: a tensor with its shape and dtype; the tensor itself if it is written unchanged.
        make: function that makes the whole tensor, on any device. For a tensor that is spread over
            ranks, it is a collective call.
    """

    like: Tensor
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is written unchanged.

        Args:
            tensor: on any device; a DTensor is gathered when it is written.
        """
        return cls(tensor, lambda: whole(tensor))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor in a file."""
        return self.like.numel() * self.like.element_size()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient, gathered if it is spread over ranks.

    Args:
        tensor: any tensor; for a DTensor, the function is a collective call.
    """
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def size_in_bytes(size: str | int) -> int:
    """Convert a size in Hugging Face's notation to bytes.

    Args:
        size: a number of bytes, or a text like ``"5GB"`` (``KB``, ``MB``, ``GB``, ``TB``: powers of
            1000).

    Raises:
        ConfigError: the value is not a size, or not above 0.

    Example:
        >>> size_in_bytes("5GB"), size_in_bytes("1.5MB"), size_in_bytes(100)
        (5000000000, 1500000, 100)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B)?", str(size))
    num_bytes = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if num_bytes < 1:
        raise ConfigError(f"a size is a number above 0 as '5GB' or '500MB', got {size!r}")
    return num_bytes


def write_tensors(file: Path | None, tensors: Mapping[str, LazyTensor]) -> int:
    """Write a safetensors file, tensor by tensor.

    Args:
        file: its path; ``None`` makes the tensors and writes nothing, for other ranks.
        tensors: by name.

    Returns:
        The CRC-32 of the file.

    Raises:
        CheckpointError: the file format does not support the dtype of a tensor.
    """
    # Larger elements first, so that each tensor starts at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].like.element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        like = tensors[name].like
        if like.dtype not in _DTYPES or like.layout != torch.strided:
            raise CheckpointError(f"{name}: a {like.layout} tensor of {like.dtype} is not written")
        begin, end = end, end + tensors[name].num_bytes
        shape = list(like.shape)
        header[name] = {"dtype": _DTYPES[like.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with nullcontext() if file is None else file.open("wb") as out:
        for part in _parts(len(text).to_bytes(8, "little") + text, map(tensors.get, names)):
            if out is not None:
                checksum = zlib.crc32(part, checksum)
                out.write(part)
    return checksum


def _parts(header: bytes, tensors: Iterator[LazyTensor]) -> Iterator[Any]:
    yield header
    for each in tensors:
        made = each.make()
        if made.shape != each.like.shape or made.dtype != each.like.dtype:
            raise CheckpointError(f"a {made.dtype} tensor of shape {tuple(made.shape)} is no copy")
        if made.numel():
            flat = made.detach().cpu().contiguous().reshape(-1)
            yield memoryview(flat.view(torch.uint8).numpy())


def write_weights(
    folder: Path | None, tensors: Mapping[str, LazyTensor], *, max_shard_size: int
) -> dict[str, int]:
    """Write weights as ``model.safetensors``, or as shards with an index.

    Args:
        folder: folder to write; ``None`` makes the tensors and writes nothing, for other ranks.
        tensors: tensors by name, with the names that ``from_pretrained`` expects.
        max_shard_size: most bytes of tensors in a file; a larger tensor gets a separate file.

    Returns:
        CRC-32 of each file of tensors, by its name.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    checksums = {}
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        checksums[file] = write_tensors(None if folder is None else folder / file, shard)
    if split.is_sharded and folder is not None:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))
    return checksums


def holds_whole(model: nn.Module) -> bool:
    """Return whether a checkpoint contains a model's whole weights, with adapters added.

    If not, it contains only the adapter (for quantized weights), or the files of a module that
    writes its own.

    Args:
        model: as in :func:`published_weights`.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return isinstance(base, PreTrainedModel) and (base is model or not is_quantized(base))


def published_weights(model: nn.Module) -> dict[str, LazyTensor]:
    """Return the weights of a model under the names that ``from_pretrained`` expects.

    Tied weights appear once. LoRA adapters are added to the weights that they adapt, when each
    weight is written. The model in memory is not changed (merging and unmerging in place would
    round its weights).

    Args:
        model: a ``PreTrainedModel`` or a ``PeftModel`` over one.

    Raises:
        CheckpointError: an adapter cannot be merged into weights (a learned prompt, for example),
            or the weights are quantized and would be rounded again.
    """
    if is_quantized(model):
        raise CheckpointError(
            "an adapter is not merged into quantized weights, which would round it away: save the "
            "adapter alone, and merge it into the base model in full (peft's merge_and_unload)"
        )
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning or config.is_adaption_prompt:
            kind = config.peft_type.value
            raise CheckpointError(f"{name} ({kind}) cannot be merged into weights")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    state = base.state_dict(keep_vars=True)
    adapted = {}
    if base is not model:
        others = set(_names_of_adapters(base))
        state = {_plain_name(n): v for n, v in state.items() if n not in others}
        adapted = dict(_adapted(base))
    published = _published(base, state)
    kept, used = {id(v) for v in published.values()}, Counter(map(id, state.values()))
    if any(id(state[name]) not in kept or used[id(state[name])] > 1 for name in adapted):
        # transformers splits or joins these weights, or they are tied to a weight that is not
        # adapted. Both need the final values.
        merged = {n: v.make() for n, v in adapted.items()}
        return {n: LazyTensor.of(v) for n, v in _published(base, {**state, **merged}).items()}
    lazy = {id(state[name]): value for name, value in adapted.items()}
    return {n: lazy.get(id(v)) or LazyTensor.of(v) for n, v in published.items()}


def _published(base: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    left_out = base._keys_to_ignore_on_save or ()
    # transformers detects tied weights by their memory address, which an empty shard does not have.
    places: dict[int, Tensor] = {}
    lie = {n: places.setdefault(id(v), torch.empty(1)) for n, v in state.items()}
    kept = remove_tied_weights_from_state_dict(lie, base)
    state = {name: state[name] for name in kept if name not in left_out}
    return revert_weight_conversion(base, state)


def _names_of_adapters(base: nn.Module) -> Iterator[str]:
    """Return names of weights that PEFT has added to the model, or keeps unused."""
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            parts = module.state_dict(keep_vars=True)
            yield from (f"{name}.{part}" for part in parts if not part.startswith("base_layer."))
        if hasattr(module, "original_module"):
            # Copies of a layer: one, and a further one for each adapter.
            kept = [f"modules_to_save.{adapter}." for adapter in module.active_adapters]
            kept += ["token_adapter."]
            parts = module.state_dict(keep_vars=True)
            yield from (f"{name}.{part}" for part in parts if not part.startswith(tuple(kept)))


def _plain_name(name: str) -> str:
    """Return the name of a weight without PEFT's additions."""
    return re.sub(r"\.(modules_to_save\.[^.]+|token_adapter|base_layer)(?=\.)", "", name)


def _adapted(base: nn.Module) -> Iterator[tuple[str, LazyTensor]]:
    for name, module in base.named_modules():
        adapters = getattr(module, "active_adapters", None)
        if not hasattr(module, "base_layer") or adapters is None:
            continue
        if not hasattr(module, "merge"):
            raise CheckpointError(f"{name}: {type(module).__name__} cannot be merged into weights")
        if all(_is_plain(module, adapter) for adapter in adapters):
            yield f"{name}.weight", LazyTensor(module.base_layer.weight, _merged(module, adapters))
            continue
        for part, value in module.base_layer.named_parameters():
            yield (
                _plain_name(f"{name}.{part}"),
                LazyTensor(value, _merged_copy(module, adapters, part)),
            )


def _is_plain(module: nn.Module, adapter: str) -> bool:
    """Return whether an adapter only adds a product of two matrices to the weight."""
    if not hasattr(module, "lora_B"):
        return False
    bias = getattr(module.lora_B[adapter], "bias", None) if adapter in module.lora_B else None
    return adapter not in getattr(module, "lora_variant", ()) and bias is None


def _merged_copy(module: nn.Module, adapters: list[str], part: str) -> Callable[[], Tensor]:
    """Merge DoRA and other adapters as PEFT does, but not in place."""

    def make() -> Tensor:
        layer = copy.deepcopy(module)
        layer.merge(adapter_names=list(adapters))
        return whole(layer.base_layer.get_parameter(part))

    return make


def _merged(module: nn.Module, adapters: list[str]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        weight = module.base_layer.weight.detach()
        for adapter in adapters:
            weight = weight + module.get_delta_weight(adapter).detach().to(weight.dtype)
        return whole(weight)

    return make


class WeightFolder:
    """The weights in a folder, by name, in any format that ``from_pretrained`` or Ludic reads.

    The class looks for these files, in this order: ``model.safetensors``,
    ``model.safetensors.index.json`` with shards, ``pytorch_model.bin``,
    ``pytorch_model.bin.index.json`` with shards, ``pytorch_model.pt``.

    Args:
        folder: folder of a model.

    Attributes:
        names: names of the weights.
        form: name of the file that contains them, or of their index.

    Raises:
        DamagedCheckpointError: there are no weights, a shard is missing, or a file cannot be read.

    Example:
        >>> from torchrl_llm.assets import embedded_model_path
        >>> weights = WeightFolder(embedded_model_path())
        >>> tuple(weights.read("model.norm.weight").shape)
        (128,)
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self._open: dict[Path, Any] = {}
        found = next((folder / name for name in _FORMS if (folder / name).is_file()), None)
        if found is None:
            raise DamagedCheckpointError(f"{folder} holds no weights: none of {', '.join(_FORMS)}")
        self.form = found.name
        if found.suffix == ".json":
            self._where = _read_index(found)
        else:
            self._where = dict.fromkeys(self._opened(found).keys(), found)
        self.names = self._where.keys()
        for file in set(self._where.values()):
            named = {name for name, where in self._where.items() if where == file}
            if lacking := named.difference(self._opened(file).keys()):
                raise DamagedCheckpointError(f"{file} lacks {', '.join(sorted(lacking)[:4])}")

    def read(self, name: str) -> Tensor:
        """Read a weight, on the CPU. It is mapped from the file, so it takes memory only when used.

        Args:
            name: one of ``names``.
        """
        opened = self._opened(self._where[name])
        return opened[name] if isinstance(opened, dict) else opened.get_tensor(name)

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            try:
                if file.suffix == ".safetensors":
                    self._open[file] = safe_open(file, framework="pt")
                else:
                    mapped = zipfile.is_zipfile(file)  # not in the format before torch 1.6
                    self._open[file] = torch.load(file, weights_only=True, mmap=mapped)
            # A damaged pickle can raise any error.
            except Exception as error:
                raise DamagedCheckpointError(f"cannot read the weights {file}: {error}") from error
        return self._open[file]


def _read_index(index: Path) -> dict[str, Path]:
    """Map the name of each weight to its file."""
    try:
        where = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{index} is no index of weights: {error}") from error
    if not isinstance(where, dict) or not where:
        raise DamagedCheckpointError(
            f"{index} is no index of weights: it lacks weight_map, of each weight's file"
        )
    for file in sorted(set(map(str, where.values()))):
        if Path(file).name != file:
            raise DamagedCheckpointError(f"{index} names {file!r}, which is no file beside it")
        if not (index.parent / file).is_file():
            raise DamagedCheckpointError(f"{index.parent} lacks the shard {file} of {index.name}")
    return {str(name): index.parent / file for name, file in where.items()}
