"""Atomic replacement of files: readers see either the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a draft next to a file, then replace the file; an error removes the draft.

    The draft's name begins with a dot.

    Args:
        path: path of the file, which need not exist yet.

    Raises:
        OSError: the draft cannot replace the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "text"
        >>> with replacing(path) as draft:
        ...     _ = draft.write_text("whole")
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('whole', 1)
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def plain_file(path: Path) -> Path:
    """Check that a path is a plain file: no folder, pipe or device, whose reading may never end.

    Args:
        path: path of the file.

    Raises:
        OSError: the path is not a plain file.

    Example:
        >>> plain_file(Path("/dev/null"))
        Traceback (most recent call last):
        OSError: [Errno 22] it is no plain file: '/dev/null'
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return path


def remove_drafts(folder: Path, name: str | None = None) -> None:
    """Remove drafts of :func:`replacing` that killed processes left behind.

    Args:
        folder: searched with its subfolders; no process may be writing these files.
        name: name of the file of the drafts; any file if not given.
    """
    for draft in folder.rglob(f".{glob.escape(name) if name else '*'}.{'[0-9a-f]' * 8}"):
        draft.unlink(missing_ok=True)
