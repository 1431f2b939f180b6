"""Checkpoints: complete or absent, openable by Hugging Face, and exact to resume from.

A checkpoint is a folder ``step_<N>`` that ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer.from_pretrained`` open, with a file ``trainer_state.pt`` next to the weights. It is
written under another name and renamed when it is whole, so a full disk or a killed process leaves
the previous checkpoint as it was. This file knows folders and states; what belongs to a state is
said by whoever passes it in.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from torchrl_llm.data.safe_wire import names_of_rows
from torchrl_llm.errors import CheckpointError, DamagedCheckpointError
from torchrl_llm.trainers.run_folder import checkpoint_path, checkpoint_steps

_STATE_FILE = "trainer_state.pt"


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        folder: where the checkpoints go; made when the first one is written.
        keep_last: how many of the newest are kept; ``None`` keeps all.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(tempfile.mkdtemp(), keep_last=1)
        >>> for step in (1, 2):
        ...     path = store.save(step, {"step": step})
        >>> store.steps(), store.load()["step"]
        ([2], 2)
    """

    def __init__(self, folder: str | Path, *, keep_last: int | None = None) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 or None, got {keep_last}")
        self.folder = Path(folder)
        self.keep_last = keep_last

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return checkpoint_path(self.folder, step)

    def sweep(self) -> None:
        """Delete what a killed process has half written or half deleted.

        Only for the one process that writes here.
        """
        for pattern in (".partial_*", ".deleted_*"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        write_model: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint, then rename it into place, then delete what is no longer kept.

        Args:
            step: the training step that it follows.
            state: nested dicts of tensors, plain values and packed rows, for :meth:`load`.
            write_model: writes model and tokenizer files into the folder that it is given.

        Returns:
            The folder.

        Raises:
            CheckpointError: it could not be written, or holds an object that :meth:`load` would
                not read; earlier checkpoints are untouched.
        """
        final = self.path(step)
        partial = self.folder / f".partial_{final.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if write_model is not None:
                write_model(partial)
            torch.save(dict(state), partial / _STATE_FILE)
            _refuse_unknown_classes(partial / _STATE_FILE)
            _flush(partial)
            # A step that is saved twice (resumed, then stopped at once) replaces itself.
            replaced = _set_aside(final) if final.exists() else None
            os.replace(partial, final)
            _flush_folder(self.folder)
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)
        # safetensors and torch report a full disk by their own exception types.
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._failure(step, error)) from error
        for old in self.steps()[: -self.keep_last] if self.keep_last else []:
            # Renamed first: a deletion that is cut short must not leave half a checkpoint.
            shutil.rmtree(_set_aside(self.path(old)), ignore_errors=True)
        return final

    def load(self, step: int | None = None) -> dict[str, Any]:
        """State of a checkpoint.

        Reading it runs no code: it holds tensors, plain values and classes that are known here
        (those of rows, and what :func:`torch.serialization.add_safe_globals` was told of).

        Args:
            step: the step; ``None`` for the newest.

        Raises:
            DamagedCheckpointError: the file is missing, cut short, or not what was written.
            CheckpointError: there is no checkpoint, or it holds an unknown class.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.folder}")
        path = self.path(steps[-1] if step is None else step) / _STATE_FILE
        try:
            # torch checks no checksum when it reads.
            with zipfile.ZipFile(path) as file:
                broken = file.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(f"the checksum of {broken} is wrong")
            _refuse_unknown_classes(path)
            with torch.serialization.safe_globals(names_of_rows()):
                return torch.load(path, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        # A damaged file raises whatever its bytes happen to mean.
        except Exception as error:
            raise DamagedCheckpointError(f"cannot read the checkpoint {path}: {error}") from error

    def load_newest_whole(self) -> tuple[int, dict[str, Any], list[str]]:
        """The newest checkpoint that is not damaged; damaged ones are renamed ``damaged_step_N``.

        Only for the one process that writes here.

        Returns:
            Its step, its state, and a line for each damaged one.

        Raises:
            CheckpointError: there is none, or one holds an unknown class.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                return step, self.load(step), damaged
            except DamagedCheckpointError as error:
                aside = self.path(step).with_name(f"damaged_{self.path(step).name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.path(step), aside)
                damaged.append(f"{error}; it is now {aside}")
        raise CheckpointError(
            "; ".join([f"no whole checkpoint in {self.folder}", *damaged])
            + "; the same command begins the run anew"
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


def save_pretrained(path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write a Hugging Face model and its tokenizer, adapters merged.

    A PEFT model is written as the plain model with its LoRA weights added, so that it opens without
    PEFT and without the base model; the adapter alone goes to ``adapter/``. The model in memory is
    not changed (merging and unmerging in place would round its weights).

    Args:
        path: an existing folder.
        model: a ``PreTrainedModel`` or a ``PeftModel`` over one.
        tokenizer: its tokenizer.

    Raises:
        CheckpointError: an adapter that is not LoRA.
    """
    if hasattr(model, "peft_config"):
        model.save_pretrained(path / "adapter")
        base = model.get_base_model()
        base.save_pretrained(path, state_dict=_merged_state(base))
    else:
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _merged_state(base: nn.Module) -> dict[str, torch.Tensor]:
    state = {
        name.replace(".base_layer.", "."): value
        for name, value in base.state_dict().items()
        if ".lora_" not in name
    }
    for name, module in base.named_modules():
        adapters = getattr(module, "active_adapters", None)
        if not hasattr(module, "base_layer") or adapters is None:
            continue
        if not hasattr(module, "get_delta_weight"):
            raise CheckpointError(f"{name}: only LoRA adapters can be merged into a checkpoint")
        for adapter in adapters:
            delta = module.get_delta_weight(adapter)
            state[f"{name}.weight"] = state[f"{name}.weight"] + delta.to(
                state[f"{name}.weight"].dtype
            )
    return {name: value.detach() for name, value in state.items()}


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
        state: what :func:`rng_state` returned; CUDA's part is used where the devices match.
    """
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def lock_folder(folder: Path) -> IO[str]:
    """Make this process the one that trains in a folder, until it ends or closes the file.

    Args:
        folder: an existing folder.

    Raises:
        CheckpointError: another process trains there.
    """
    file = (folder / ".lock").open("a+")
    try:
        # A lock of the process: children do not inherit it, and the kernel lets go of it.
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


def _refuse_unknown_classes(path: Path) -> None:
    with torch.serialization.safe_globals(names_of_rows()):
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unknown:
        raise CheckpointError(
            f"{path} holds objects that are not read from files, as that may run code: "
            f"{', '.join(sorted(unknown))}. Where they are yours, make them plain values and "
            "tensors, or call torch.serialization.add_safe_globals([TheClass]) where the class is "
            "defined"
        )


def _flush(folder: Path) -> None:
    # A rename may reach the disk before the contents do; after a power cut that would leave a
    # checkpoint with the right name and empty files.
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f".deleted_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return aside
