"""Files that are replaced as a whole: readers see the old one or the new one, nothing between."""

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
    """A draft beside a file, whose place it takes at the end; after an error nothing is left of it.

    Its name begins with a dot.

    Args:
        path: of the file, which need not be there yet.

    Raises:
        OSError: the draft cannot take the place of the file.

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
    """A path that is to be read: no folder, and no pipe or device, which may never end.

    Args:
        path: of the file.

    Raises:
        OSError: it is one of these.

    Example:
        >>> plain_file(Path("/dev/null"))
        Traceback (most recent call last):
        OSError: [Errno 22] it is no plain file: '/dev/null'
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return path


def remove_drafts(folder: Path, name: str | None = None) -> None:
    """Remove drafts of :func:`replacing` that killed processes have left.

    Args:
        folder: where they lie, or below; nobody writes these files now.
        name: of the file that they are drafts of; any if not given.
    """
    for draft in folder.rglob(f".{glob.escape(name) if name else '*'}.{'[0-9a-f]' * 8}"):
        draft.unlink(missing_ok=True)
