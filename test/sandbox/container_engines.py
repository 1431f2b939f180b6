"""Real container engines for the tests, and an image that needs no registry.

The image is made of this machine's own Python, ``sh`` and ``cp``, and the libraries that they need.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

IMAGE = "localhost/torchrl-llm-test:1"
PYTHON = "/usr/bin/python3"
PROGRAMS = ("sh", "cp", "cat", "sleep")
# Where two generations of control groups are mounted at once, as only the second one's is hidden.
HIDE_SECOND = """#!/bin/sh
exec unshare --mount --propagation=private sh -c '
umount /sys/fs/cgroup/unified && exec podman "$@"' podman "$@"
"""


def output(*words, **kwargs):
    """What a program says; ``None`` where it fails."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=120, **kwargs)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode() if done.returncode == 0 else None


def libraries(paths):
    """The shared libraries that some programs and modules load."""
    words = (output("ldd", *paths) or "").split()
    return sorted({word for word in words if word.startswith("/") and not word.endswith(":")})


def make_image(engine, image):
    """Have an engine make the image; whether it has it."""
    if output(engine, "image", "inspect", image) is not None:
        return True
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    stdlib = (output(PYTHON, "-I", "-c", code) or "").strip()
    if not stdlib:
        return False
    python = os.path.realpath(PYTHON)
    programs = [path for path in map(shutil.which, PROGRAMS) if path]
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder, "image.tar")
        with tarfile.open(tar, "w", dereference=True) as archive:

            def keep(member):
                parts = Path(member.name).parts
                skip = {"test", "__pycache__", "idlelib", "dist-packages", "config"}
                return None if skip & set(parts) or member.name.endswith(".a") else member

            archive.add(stdlib, filter=keep)
            archive.add(python, "usr/bin/python3")
            for program in programs:
                archive.add(program, f"bin/{os.path.basename(program)}")
            modules = map(str, Path(stdlib, "lib-dynload").glob("*.so"))
            for library in libraries([python, *programs, *modules]):
                archive.add(library, library)
            for name in ("tmp", "proc", "dev", "sys", "etc", "run"):
                place = tarfile.TarInfo(name)
                place.type, place.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(place)
        change = 'ENTRYPOINT ["/bin/cat", "/nowhere"]'  # an image's own program is not in the way
        return output(engine, "import", "--change", change, str(tar), image) is not None


@functools.cache
def real_engine(folder, image=IMAGE):
    """An engine that runs containers here, the image in it; ``None`` where there is none.

    Args:
        folder: where a script may lie.
        image: its name; tests that may run at once have one each.
    """
    script = Path(folder, "podman-of-first-control-groups")
    script.write_text(HIDE_SECOND)
    script.chmod(0o755)
    for engine in ("podman", "docker", str(script)):
        if output(engine, "info") is None or not make_image(engine, image):
            continue
        words = ("--network=none", "--memory=67108864", "--ulimit=nproc=4096:4096")
        words += ("--ulimit=nofile=256:256", "--entrypoint=")
        if output(engine, "run", "--rm", *words, image, PYTHON, "-c", "") is not None:
            return engine
    return None
