"""Size and shape of the package: code lines, imports, circles, small and long files.

It only reads the source; nothing of the package is imported.

    python test/benchmarks/measure_house.py [--json] [FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "torchrl_llm"
SMALL = 60  # raw lines; a file below this needs more than one importer
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
KINDS = ("top", "function", "typing")
LEAVES = (
    *("langmarl/", "compat/", "envs/games/", "envs/libs/", "tools/browser", "recipes/doctor/"),
    *("evaluation/report/", "gateway/adapters/"),
)
"""What nothing but the command line imports; a reader of the core never opens it."""
CORE = ("compat/mixins/",)
"""Parts of a leaf that the core takes."""
BESIDE = {".pyi", ".txt", ".jinja", ".lua", ".json", ".yaml", ".js", ".css", ".html", ".md"}
"""Files of other kinds, whose lines are no lines of code and are read all the same."""


@dataclass
class File:
    """One source file: its lines of code and the package's files that it imports, by kind."""

    name: str  # dotted module name
    path: str  # relative to the package
    raw: int
    code: int
    import_lines: int
    imports: dict[str, set[str]] = field(default_factory=lambda: {kind: set() for kind in KINDS})


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings that hold nothing else."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        value = first.value if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Line numbers that hold a token which is no comment, docstring, blank or line break.

    Every line of a string of several lines counts, as long as it is no docstring.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - _docstring_lines(tree)


def _imports(tree: ast.Module) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    """Every import statement with its kind: ``top``, ``function`` or ``typing``."""

    def walk(nodes: list[ast.stmt], kind: str) -> Iterator:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield kind, node
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.body, "typing")
                yield from walk(node.orelse, kind)
            else:
                inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                    yield from walk(getattr(node, name, []), "function" if inside else kind)

    return walk(tree.body, "top")


def _targets(
    node: ast.Import | ast.ImportFrom, module: str, is_package: bool, known: set[str]
) -> set[str]:
    """Modules of the package that one import statement names, the deepest that exists."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parts, *([base] if base else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found - {module}


def read(package: Path = PACKAGE) -> dict[str, File]:
    """All files of the package by module name, with their imports resolved to modules."""
    sources = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path
    files = {}
    for name, path in sources.items():
        source = path.read_text()
        tree = ast.parse(source)
        code = code_lines(source, tree)
        import_lines: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                import_lines.update(range(node.lineno, node.end_lineno + 1))
        file = File(
            name=name,
            path=path.relative_to(package).as_posix(),
            raw=len(source.splitlines()),
            code=len(code),
            import_lines=len(import_lines & code),
        )
        for kind, node in _imports(tree):
            is_package = path.name == "__init__.py"
            file.imports[kind] |= _targets(node, name, is_package, set(sources))
        files[name] = file
    return files


def recipes(package: Path, known: set[str]) -> dict[str, File]:
    """The recipes' pages, with what they import of each other and of the package."""
    folder = package.parent / "sota-implementations"
    pages = {path.stem: path for path in sorted(folder.rglob("*.py"))}
    files = {}
    for name, path in pages.items():
        file = files[name] = File(name, path.name, 0, 0, 0)
        for kind, node in _imports(ast.parse(path.read_text())):
            file.imports[kind] |= _targets(node, name, False, known | set(pages))
    return files


def is_core(path: str) -> bool:
    """Whether a file, relative to the package, is one that a default run may walk through."""
    return path.startswith(CORE) or not path.startswith(LEAVES)


def _raw_lines(paths: Iterator[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, each one as a shortest walk round.

    Tarjan's algorithm; the walk names one circle of the component, others may be in it.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = set()
            while node not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted((_shortest_walk(graph, one) for one in found), key=lambda walk: walk[0])


def _shortest_walk(graph: dict[str, set[str]], component: set[str]) -> list[str]:
    best: list[str] = []
    for start in sorted(component):
        came: dict[str, str] = {}
        queue = [start]
        while queue:
            node = queue.pop(0)
            if start in graph[node]:
                walk = [node]
                while node != start:
                    node = came[node]
                    walk.append(node)
                walk.reverse()
                if not best or len(walk) < len(best):
                    best = walk
                break
            for other in sorted(graph[node] & component):
                if other not in came and other != start:
                    came[other] = node
                    queue.append(other)
    extra = sorted(component - set(best))
    return [*best, best[0], *(f"(also {name})" for name in extra)]


def _graph(files: dict[str, File], kinds: tuple[str, ...]) -> dict[str, set[str]]:
    return {
        name: set().union(*(file.imports[kind] for kind in kinds)) for name, file in files.items()
    }


def _new_circles(files: dict[str, File], kinds: tuple[str, ...], known: set) -> list[list[str]]:
    """Circles of these kinds whose members do not form one of the circles already known."""
    result = []
    for walk in circles(_graph(files, kinds)):
        members = frozenset(walk)
        if members not in known:
            known.add(members)
            result.append(walk)
    return result


def measure(package: Path = PACKAGE) -> dict:
    """All figures of the package as plain numbers, lists and dicts."""
    files = read(package)
    code = sum(file.code for file in files.values())
    import_lines = sum(file.import_lines for file in files.values())
    importers: dict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        if not file.path.endswith(("__init__.py", "__main__.py")):
            for other in set().union(*file.imports.values()):
                importers[other].add(name)
    for file in files.values():  # a recipe finds by name what registers itself
        if "\n@register(" in (package / file.path).read_text(encoding="utf-8"):
            importers[file.name].add("the registry")
    counted = [f for f in files.values() if not f.path.endswith(("__init__.py", "__main__.py"))]
    names = Counter(Path(file.path).name for file in counted)
    rooms: Counter[str] = Counter()
    for file in files.values():
        room = file.path.split("/")[0] if "/" in file.path else "(top)"
        rooms[room] += file.code
    known: set = set()
    tests = package.parent / "test"
    test_rooms: Counter[str] = Counter()
    for path in tests.rglob("*.py"):
        parts = path.relative_to(tests).parts
        test_rooms[parts[0] if len(parts) > 1 else "(top)"] += _raw_lines([path])
    beside = [p for p in package.rglob("*") if p.suffix in BESIDE and "embedded" not in p.parts]
    number = len(files)
    files |= recipes(package, set(files))
    return {
        "code_lines": code,
        "core_lines": sum(file.code for file in files.values() if is_core(file.path)),
        "beside_lines": _raw_lines(beside),
        "test_lines": sum(test_rooms.values()),
        "test_rooms": dict(test_rooms.most_common()),
        "files": number,
        "import_lines": import_lines,
        "import_percent": round(100 * import_lines / code, 2),
        "circles_top": _new_circles(files, ("top",), known),
        "circles_function": _new_circles(files, ("top", "function"), known),
        "circles_typing": _new_circles(files, KINDS, known),
        "envs_raw_lines": sum(f.raw for f in files.values() if f.path.startswith("envs/")),
        "small_with_one_importer": sorted(
            [file.path, file.raw, *importers[file.name]]
            for file in counted
            if file.raw < SMALL and len(importers[file.name]) == 1
        ),
        "repeated_names": {name: n for name, n in names.most_common() if n > 1},
        "longest": [
            [file.path, file.raw, file.code]
            for file in sorted(files.values(), key=lambda file: -file.raw)[:10]
        ],
        "rooms": dict(rooms.most_common()),
    }


def _print(figures: dict) -> None:
    loops = sum(len(figures[f"circles_{kind}"]) for kind in KINDS)
    small = figures["small_with_one_importer"]
    rows = [
        ("code lines", f"{figures['code_lines']:,}", "at most 53,000"),
        ("code lines of the core, without leaves", f"{figures['core_lines']:,}", "at most 44,000"),
        ("lines of stubs, tables and templates", f"{figures['beside_lines']:,}", ""),
        ("raw lines of tests", f"{figures['test_lines']:,}", "at most 80,000"),
        ("files", f"{figures['files']}", ""),
        ("lines of imports", f"{figures['import_percent']:.1f} %", "at most 8.5 %"),
        ("circles of imports", f"{loops}", "0"),
        ("raw lines of envs/", f"{figures['envs_raw_lines']:,}", "at most 10,000"),
        (f"files under {SMALL} lines with one importer", f"{len(small)}", "0"),
        ("file names that occur more than once", f"{len(figures['repeated_names'])}", ""),
    ]
    for name, value, aim in rows:
        print(f"{name:<44} {value:>8}   {'aim ' + aim if aim else ''}".rstrip())
    titles = {
        "top": "circles of top-level imports",
        "function": "circles that need an import inside a function",
        "typing": "circles that need an import under TYPE_CHECKING",
    }
    for kind, title in titles.items():
        print(f"\n{title}: {len(figures[f'circles_{kind}'])}")
        for walk in figures[f"circles_{kind}"]:
            print("  " + " -> ".join(n for n in walk if not n.startswith("(")))
            for also in (n for n in walk if n.startswith("(")):
                print("    " + also)
    print(f"\nfiles under {SMALL} lines with one importer")
    for path, raw, importer in small:
        print(f"  {raw:>4}  {path}  <- {importer}")
    print("\nfile names that occur more than once")
    for name, count in figures["repeated_names"].items():
        print(f"  {count:>4}  {name}")
    print("\nlongest files (raw lines, code lines)")
    for path, raw, code in figures["longest"]:
        print(f"  {raw:>4}  {code:>4}  {path}")
    print("\ncode lines per room")
    for room, code in figures["rooms"].items():
        print(f"  {code:>6,}  {room}")
    print("\nraw lines of tests per room")
    for room, raw in figures["test_rooms"].items():
        print(f"  {raw:>6,}  {room}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = measure(options.folder.resolve())
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)


if __name__ == "__main__":
    main()
