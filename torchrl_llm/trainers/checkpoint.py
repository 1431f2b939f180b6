"""Checkpoints: complete or absent, loadable by Hugging Face, and exact on resume.

A checkpoint is a folder ``step_<N>`` that ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer.from_pretrained`` open, with a folder ``trainer_state`` in it: JSON and safetensors,
which run no code when they are read, and the checksums of all files. It is written under a
temporary name and renamed when it is complete, so a full disk or a killed process leaves the
previous checkpoint as it was. This module handles folders and states; the caller decides what
belongs to a state.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import socket
import warnings
import zlib
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from torchrl_llm._checked import Ge, checked
from torchrl_llm._files import plain_file
from torchrl_llm._progress import no_weight_bars
from torchrl_llm.data.safe_state import PlainState, state_from_plain, state_to_plain
from torchrl_llm.errors import CheckpointError, DamagedCheckpointError
from torchrl_llm.modules.weight_files import (
    LazyTensor,
    holds_whole,
    published_weights,
    size_in_bytes,
    whole,
    write_tensors,
    write_weights,
)
from torchrl_llm.trainers.ranks import ALONE, Ranks
from torchrl_llm.trainers.run_folder import checkpoint_path, checkpoint_steps

_STATE = "trainer_state"
_MANIFEST = "manifest.json"
_SPREAD = "spread"
_OLD_STATE_FILE = "trainer_state.pt"
_FORMAT = 1
_CHUNK_BYTES = 1 << 24
# While it is written, a file of a rank's shards is in memory twice.
_SPREAD_BYTES, _MOST_FILES = 1 << 26, 64


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        folder: folder of the checkpoints; it is made when the first one is written.
        keep_last: number of newest checkpoints to keep; ``None`` keeps all.
        ranks: the processes that save together.
        spare: names of optional files: a checkpoint without them is still whole; see
            :meth:`is_whole`.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(tempfile.mkdtemp(), keep_last=1)
        >>> for step in (1, 2):
        ...     path = store.save(step, {"step": step})
        >>> store.steps(), store.load()["step"]
        ([2], 2)
    """

    @checked
    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: Annotated[int, Ge(1)] | None = None,
        ranks: Ranks = ALONE,
        spare: Collection[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self.keep_last, self.ranks, self.spare = keep_last, ranks, spare

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return checkpoint_path(self.folder, step)

    def sweep(self) -> None:
        """Delete incomplete checkpoints of a killed process.

        Call this only in the process that writes the checkpoints.
        """
        for replaced in self.folder.glob(".replaced_*"):
            final = replaced.with_name(replaced.name.removeprefix(".replaced_"))
            if not final.exists():  # killed between two renames
                os.replace(replaced, final)
        for pattern in (".partial_*", ".deleted_*", ".replaced_*"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        own: Mapping[str, Any] | None = None,
        write_model: Callable[[Path], Mapping[str, int] | None] | None = None,
    ) -> Path:
        """Write a checkpoint, rename it to its final name, and delete old checkpoints.

        All ranks have to call it.

        Args:
            step: the training step that it follows.
            state: nested dicts of tensors, plain values and rows
                (:mod:`torchrl_llm.data.safe_state`), for :meth:`load`. It is the same in all ranks,
                except for their shards of spread tensors.
            own: state that only this rank has.
            write_model: writes model and tokenizer files into the given folder, and may return the
                CRC-32 of some of them by name; the others are read once to compute it.

        Returns:
            The folder.

        Raises:
            CheckpointError: it could not be written, or holds an object that has no plain form;
                earlier checkpoints are untouched.
        """
        plain, own_plain = state_to_plain(dict(state)), state_to_plain(dict(own or {}))
        final = self.path(step)
        partial = self.folder / f".partial_{final.name}"
        try:
            if self.ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / _STATE).mkdir(parents=True)
            self.ranks.barrier()
            checksums = dict((write_model and write_model(partial)) or {})
            if self.ranks.is_main:
                checksums |= _write_state(partial, "state", plain)
            checksums |= _write_state(partial, f"rank_{self.ranks.rank}", own_plain)
            checksums |= self._write_spread(partial, plain)
            every = self.ranks.gather(checksums)
            if self.ranks.is_main:
                self._complete(final, partial, dict(ChainMap(*every)))
            self.ranks.barrier()
        # safetensors and torch report a full disk by their own exception types.
        except Exception as error:
            if self.ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._failure(step, error)) from error
        return final

    def _complete(self, final: Path, partial: Path, checksums: Mapping[str, int]) -> None:
        files = {f.relative_to(partial).as_posix(): f for f in partial.rglob("*") if f.is_file()}
        checksums = {n: _checksum(f) for n, f in files.items() if n not in checksums} | checksums
        manifest = {"format": _FORMAT, "ranks": self.ranks.world, "checksums": checksums}
        (partial / _STATE / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        _flush(partial)
        # A step that is saved twice (resumed, then stopped at once) replaces its earlier
        # checkpoint.
        replaced = _set_aside(final, "replaced") if final.exists() else None
        os.replace(partial, final)
        _flush_one(self.folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        for old in self.steps()[: -self.keep_last] if self.keep_last else []:
            # Rename first: an interrupted deletion must not leave half a checkpoint.
            shutil.rmtree(_set_aside(self.path(old), "deleted"), ignore_errors=True)

    def _write_spread(self, partial: Path, state: PlainState) -> dict[str, int]:
        """Write this rank's shards of spread tensors; returns the CRC-32 of its files."""
        if not state.spread:
            return {}
        sizes = {name: tensor.to_local().nbytes for name, tensor in state.spread.items()}
        of_file, size, files = max(_SPREAD_BYTES, sum(sizes.values()) // _MOST_FILES), 0, {}
        for name, own_size in sizes.items():
            files[name] = 1 + size // of_file
            size += own_size
        folder = partial / _STATE / _SPREAD
        writer = HuggingFaceStorageWriter(
            str(folder), fqn_to_index_mapping=files, save_distributed=True
        )
        dcp.save(dict(state.spread), storage_writer=writer)
        own = folder.glob(f"shard-{self.ranks.rank + 1:05d}-*")
        return {f"{_STATE}/{_SPREAD}/{file.name}": _checksum(file) for file in own}

    def load(self, step: int | None = None, *, check: bool = True) -> dict[str, Any]:
        """Load the state of a checkpoint, after a check of the checksums of all its files.

        Loading runs no code, even from a malicious file.

        Args:
            step: the step; ``None`` for the newest.
            check: verify the checksums.

        Returns:
            The state; the separate states of the ranks are under ``"ranks"``.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or changed.
            CheckpointError: there is no checkpoint, or it is of a different version.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.folder}")
        path = self.path(steps[-1] if step is None else step)
        if (path / _OLD_STATE_FILE).is_file():
            raise CheckpointError(
                f"{path} was written by an earlier version of torchrl_llm ({_OLD_STATE_FILE}): "
                f"resume with that version, or start a new run from its model, model.name={path}"
            )
        try:
            num_ranks = _check_files(path, check, self.spare)
            state = _read_state(path, "state")
            return {**state, "ranks": [_read_state(path, f"rank_{n}") for n in range(num_ranks)]}
        except CheckpointError:
            raise
        # A damaged file can raise any error.
        except Exception as error:
            raise DamagedCheckpointError(f"cannot read the checkpoint {path}: {error}") from error

    def is_whole(self, step: int, name: str) -> bool | None:
        """Whether a file is unchanged; ``None`` if an earlier version stored no checksum.

        Args:
            step: training step of the checkpoint.
            name: name of the file in it.
        """
        checksum = _manifest(self.path(step))["checksums"].get(name)
        file = self.path(step) / name
        return None if checksum is None else file.is_file() and _checksum(file) == checksum

    def read_spread(self, step: int, wanted: dict[str, Tensor]) -> None:
        """Fill tensors that any number of ranks has written together.

        All ranks have to call it.

        Args:
            step: training step of the checkpoint.
            wanted: tensors by name, see :class:`~torchrl_llm.data.safe_state.Spread`.

        Raises:
            DamagedCheckpointError: the files cannot be read.
        """
        if not wanted:
            return
        folder = self.path(step) / _STATE / _SPREAD
        try:
            reader = HuggingFaceStorageReader(str(folder))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(wanted, storage_reader=reader, no_dist=self.ranks.world == 1)
        except Exception as error:
            raise DamagedCheckpointError(f"cannot read {folder}: {error}") from error

    def load_newest_whole(
        self, look: Callable[[int, dict[str, Any]], None] = lambda step, state: None
    ) -> tuple[int, dict[str, Any], list[str]]:
        """Load the newest undamaged checkpoint; damaged ones are renamed ``damaged_step_N``.

        Call this only in the process that writes the checkpoints.

        Args:
            look: function of a step and its state that raises a ``DamagedCheckpointError`` if the
                state is invalid.

        Returns:
            Its step, its state, and a line for each damaged one.

        Raises:
            CheckpointError: there is none, or one is of a different version.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                look(step, state := self.load(step))
                return step, state, damaged
            except DamagedCheckpointError as error:
                aside = self.path(step).with_name(f"damaged_{self.path(step).name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.path(step), aside)
                damaged.append(f"{error}; it is now {aside}")
        raise CheckpointError(
            "; ".join([f"no whole checkpoint in {self.folder}", *damaged])
            + "; the same command starts the run again"
        )

    def _failure(self, step: int, error: Exception) -> str:
        steps = self.steps()
        try:
            free = f"{shutil.disk_usage(self.folder).free / 2**20:.0f} MiB free there"
        except OSError:
            free = "free space unknown"
        earlier = (
            f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier one"
        )
        return (
            f"the checkpoint of step {step} could not be written to {self.folder} "
            f"({type(error).__name__}: {error}; {free}); {earlier}. Make room and run the same "
            "command again with checkpoint.resume=auto"
        )


def save_pretrained(
    path: Path,
    model: nn.Module,
    tokenizer: Any,
    *,
    max_shard_size: str | int = "5GB",
    is_main: bool = True,
) -> dict[str, int]:
    """Write a Hugging Face model with merged adapters, and its tokenizer.

    A PEFT model is written as the plain model with its LoRA weights added, so that it opens without
    PEFT and without the base model; the adapter alone goes to ``adapter/``. If adapters give tied
    weights different values, ``config.json`` marks them as untied. For a quantized model, the
    folder holds only the adapter, with the name of its base model.

    Args:
        path: an existing folder.
        model: a ``PreTrainedModel`` or a ``PeftModel`` over one; other modules are written by their
            own ``save_pretrained``.
        tokenizer: its tokenizer.
        max_shard_size: most bytes of weights per file, such as ``"5GB"``; larger models are written
            as shards with ``model.safetensors.index.json``.
        is_main: whether this process writes. A model that is spread over ranks is gathered tensor
            by tensor: all ranks have to call this function, and one writes.

    Returns:
        CRC-32 of each file of weights, by its name.

    Raises:
        CheckpointError: an adapter that cannot be merged into weights, such as a learned prompt; or
            a quantized model without an adapter.
    """
    checksums: dict[str, int] = {}
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    with no_weight_bars():
        if is_whole := holds_whole(model):
            weights = published_weights(model)
            if is_main:
                base.save_pretrained(path, state_dict={})  # all but the weights
                (path / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
                if weights.keys() & base.all_tied_weights_keys.keys():
                    _untie(path / CONFIG_NAME)
            checksums = write_weights(
                path if is_main else None, weights, max_shard_size=size_in_bytes(max_shard_size)
            )
        if base is not model:
            every = model.named_parameters(remove_duplicate=False)  # PEFT needs both tied names
            adapter = {n: whole(p) for n, p in every if p.requires_grad}
            if is_main:
                folder = path / "adapter" if is_whole else path
                chosen = [model.active_adapter]
                model.save_pretrained(folder, state_dict=adapter, selected_adapters=chosen)
        elif is_main and not is_whole:
            model.save_pretrained(path)
    if is_main:
        tokenizer.save_pretrained(path)
    return checksums


def _untie(file: Path) -> None:
    """Mark in a configuration that an adapter gave the head separate weights."""
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def rng_state() -> dict[str, Any]:
    """States of the random generators of Python, NumPy and torch (CUDA's too when there is one)."""
    import numpy

    kind, keys, *rest = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def load_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random generators to an earlier :func:`rng_state`.

    Args:
        state: result of :func:`rng_state`; CUDA's part is used if the devices match.
    """
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def lock_folder(folder: Path) -> IO[str]:
    """Lock a folder for training by this process, until it ends or closes the file.

    Args:
        folder: made if missing.

    Raises:
        CheckpointError: another process trains there, or the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be the folder of a run: {error.strerror}; choose another "
            "hydra.run.dir, or make it writable"
        ) from error
    try:
        # A lock of the process: children do not inherit it, and the kernel releases it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise CheckpointError(
            f"another run is at work in {folder} ({file.read().strip()}); wait for its end, or "
            "choose another hydra.run.dir"
        ) from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _write_state(folder: Path, name: str, state: PlainState) -> dict[str, int]:
    """Write a state; returns the CRC-32 of each file by its path in the checkpoint."""
    text, tensors = f"{_STATE}/{name}.json", f"{_STATE}/{name}.safetensors"
    written = json.dumps(state.plain, separators=(",", ":")).encode()
    (folder / text).write_bytes(written)
    parts = {name: LazyTensor.of(tensor) for name, tensor in state.tensors.items()}
    return {text: zlib.crc32(written), tensors: write_tensors(folder / tensors, parts)}


def _read_state(folder: Path, name: str) -> dict[str, Any]:
    plain = json.loads((folder / _STATE / f"{name}.json").read_bytes())
    with safe_open(folder / _STATE / f"{name}.safetensors", framework="pt") as file:
        # Copied: a tensor that is mapped from a file must not change with the file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    state = state_from_plain(plain, tensors)
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"the state in {folder} is a {type(state).__name__}")
    return state


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads(plain_file(folder / _STATE / _MANIFEST).read_text(encoding="utf-8"))


def _check_files(folder: Path, checksums: bool, spare: Collection[str]) -> int:
    """Check a checkpoint against its manifest; returns the number of ranks that wrote it."""
    manifest = _manifest(folder)
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{folder} is of format {manifest['format']!r}, and this version of torchrl_llm reads "
            f"{_FORMAT}; resume with the version that wrote it"
        )
    for name, checksum in manifest["checksums"].items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            raise DamagedCheckpointError(f"{folder} names {name!r}, which is not in it")
        if checksums and name not in spare and _checksum(folder / place) != checksum:
            raise DamagedCheckpointError(f"the checksum of {folder / place} is wrong")
    if f"{_STATE}/rank_{manifest['ranks']}.json" in manifest["checksums"]:
        raise DamagedCheckpointError(f"{folder} is of more ranks than {manifest['ranks']}")
    return int(manifest["ranks"])


def _checksum(path: Path) -> int:
    checksum = 0
    with plain_file(path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _flush(folder: Path) -> None:
    # A rename may reach the disk before the contents do; after a power cut that would leave a
    # checkpoint with the right name and empty files.
    for path in folder.rglob("*"):
        _flush_one(path)
    _flush_one(folder)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _set_aside(path: Path, name: str) -> Path:
    aside = path.with_name(f".{name}_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return aside
