"""The laws of the house, read off the syntax trees of the package."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

from without_extras import run_hidden

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_llm"
FILES = sorted(PACKAGE.rglob("*.py"))
# Programs for packages of others, each under a Python that has the package.
ADAPTERS = sorted((PACKAGE / "envs" / "libs" / "adapters").glob("*_program.py"))
OURS = [path for path in FILES if path not in ADAPTERS]
PAGES = sorted((ROOT / "sota-implementations").rglob("*.py"))

FLOORS = {
    "functional": 0,
    "data": 1,
    "modules": 2,
    "weights": 2,
    "sandbox": 2,
    "tools": 2,
    "rewards": 2,
    "envs": 2,
    "collectors": 3,
    "objectives": 3,
    "agents": 3,
    "gateway": 3,
    "trainers": 3,
    "evaluation": 3,
    "algorithms": 4,
    "recipes": 4,
    "langmarl": 4,
    "cli": 4,
    "compat": 4,
}
ROOT_HELPERS = {"errors", "_http", "_imports", "_log", "_moved", "_registry", "_ray", "_redis"}
ROOT_HELPERS |= {
    "__version__",
    "_checked",
    "_chat_server",
    "_files",
    "_masking",
    "_parent",
    "_progress",
    "_run_log",
    "_settings",
    "_threads",
    "assets",
}
# What a room may take from its own floor.
SAME_FLOOR = {
    "tools": {"sandbox"},
    "rewards": {"sandbox", "tools"},
    "envs": {"sandbox", "tools", "rewards"},
    "modules": {"weights"},
    "weights": {"modules"},
    "trainers": {"collectors", "objectives", "evaluation"},
    "agents": {"gateway"},
    "recipes": {"algorithms"},
    "langmarl": {"recipes"},
    "cli": {"recipes"},
    "compat": {"recipes"},
}
# TorchRL's surface of public classes: it imports nothing of ours, and these files take it.
MIXINS = "torchrl_llm.compat.mixins"
TAKE_MIXINS = {"data/history.py", "data/views.py"}
TAKE_MIXINS |= {f"modules/policies/{name}.py" for name in ("__init__", "llm_wrapper")}
EXCEPT = {"objectives": {"data", "functional"}}
# The four base packages, and what torch (jinja2) and transformers (numpy) always install.
ALWAYS_INSTALLED = {"xxhash", "torch", "tensordict", "torchrl", "transformers", "torchrl_llm"}
# torch and transformers install these themselves; huggingface_hub, which transformers needs, brings
# httpx2 since its version 2 (pyproject.toml names it for the versions before).
ALWAYS_INSTALLED |= {"numpy", "jinja2", "tqdm", "httpx2", "safetensors", "yaml"}
# Core torchrl re-exports parts of its LLM package under these names.
RE_EXPORTED = {"History", "TopKRewardSelector", "PromptGroupSampler", "LLMHashingEnv"}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.AST, top_only: bool = False):
    """Yield (line, module, names) of every import, type-checking blocks included."""
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield node.lineno, node.module, tuple(alias.name for alias in node.names)


def _room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _upward(path: Path):
    """Yield each import of ours that the floors forbid."""
    room = _room(path)
    if room not in FLOORS:
        assert room in ROOT_HELPERS | {"__init__", "__main__"}, f"{room} has no floor"
        return
    for line, module, names in _imports(_tree(path)):
        if not (module or "").startswith("torchrl_llm"):
            continue
        if module.startswith(MIXINS) and path.relative_to(PACKAGE).as_posix() in TAKE_MIXINS:
            continue
        parts = module.split(".")
        for target in [parts[1]] if len(parts) > 1 else names:
            if target == room or target in ROOT_HELPERS:
                continue
            allowed = FLOORS[target] < FLOORS[room] or target in SAME_FLOOR.get(room, ())
            if not allowed or target not in EXCEPT.get(room, {target}):
                yield f"{_id(path)}:{line} imports {module}"


def test_a_file_imports_from_lower_floors_or_its_own_room():
    assert not [found for path in FILES for found in _upward(path)]


def test_no_file_imports_itself_through_others():
    """Imports at the top of a file, which are those that make a circle fail."""
    names = {_module(path): path for path in FILES}
    below = {}
    for name, path in names.items():
        found = set()
        for _, module, parts in _imports(_tree(path), top_only=True):
            found |= {m for m in [module, *(f"{module}.{part}" for part in parts)] if m in names}
        # `from room import name` is answered by the file that has the name, not by the room
        below[name] = {m for m in found if names[m].name != "__init__.py"} - {name}
    while leaves := [name for name, on in below.items() if not on]:
        for name in leaves:
            del below[name]
        for on in below.values():
            on -= set(leaves)
    assert not below


def test_root_helpers_import_nothing_of_ours_but_errors_and_what_checks_arguments():
    allowed = {f"torchrl_llm.{name}" for name in ("errors", "_imports", "_checked", "_masking")}
    for name in (
        "errors",
        "_files",
        "_imports",
        "_masking",
        "_parent",
        "_registry",
        "_ray",
        "_redis",
    ):
        ours = {m for _, m, _ in _imports(_tree(PACKAGE / f"{name}.py")) if "torchrl_llm" in m}
        assert ours <= allowed, ours


def test_mixins_of_torchrls_surface_import_nothing_of_ours_but_errors():
    for path in (PACKAGE / "compat" / "mixins").glob("*.py"):
        ours = {m for _, m, _ in _imports(_tree(path)) if m.startswith("torchrl_llm")}
        assert all(m == "torchrl_llm.errors" or m.startswith(MIXINS) for m in ours), ours


def test_what_loads_of_a_folder_says_that_its_code_is_not_run():
    """``GenerationConfig`` and adapters have no class of their own: JSON, and tensors alone."""
    calls = [
        (f"{_id(path)}:{node.lineno}", node)
        for path in [*FILES, *PAGES]
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config", "_from_config")
        and ast.unparse(node.func.value) not in ("GenerationConfig", "AsyncVLLM", "peft.PeftModel")
    ]
    assert len(calls) >= 5
    says = "trust_remote_code=False"
    assert not [at for at, node in calls if says not in map(ast.unparse, node.keywords)]


def test_torchrl_llm_parts_are_never_imported():
    """But for its older data classes, which one stub names and which come when asked for."""
    theirs = re.compile(r"^from torchrl\..*\bllm\b", re.MULTILINE)
    named = [path for path in PACKAGE.rglob("*.pyi") if theirs.search(path.read_text())]
    assert named == [PACKAGE / "compat" / "torchrl_classes.pyi"]
    for path in FILES:
        for line, module, names in _imports(_tree(path)):
            root = (module or "").split(".")
            if root[0] != "torchrl":
                continue
            assert "llm" not in root, f"{_id(path)}:{line}"
            assert not RE_EXPORTED & set(names), f"{_id(path)}:{line}"


def test_no_optional_package_at_module_top():
    for path in OURS:
        for line, module, _ in _imports(_tree(path), top_only=True):
            package = module.partition(".")[0]
            allowed = package in ALWAYS_INSTALLED or package in sys.stdlib_module_names
            assert allowed, f"{_id(path)}:{line} imports {package} at module top"


def test_no_file_imports_what_runs_under_a_python_of_its_own():
    for path in FILES:
        named = [(line, module, *names) for line, module, names in _imports(_tree(path))]
        assert not [each for each in named if "adapters" in f"{each[1:]}"], _id(path)


def test_a_test_that_imports_what_its_extra_does_not_bring_is_skipped_without_it():
    brought_elsewhere = {"datasets", "mlflow", "pandas", "pyarrow", "ray", "redis", "trackio"}
    brought_elsewhere |= {"triton", "trl", "vllm", "wandb"}
    for path in (ROOT / "test").rglob("test_*.py"):
        text = path.read_text()
        imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
        for package in imported & brought_elsewhere:
            skips = (f'importorskip("{package}")', 'importorskip("datasets")', "ImportError")
            assert any(each in text for each in skips), f"{_id(path)} imports {package}"


def test_the_functional_core_uses_torch_and_the_standard_library_only():
    for path in (PACKAGE / "functional").rglob("*.py"):
        for line, module, _ in _imports(_tree(path)):
            package = module.partition(".")[0]
            ours = module.startswith("torchrl_llm.functional")
            ours |= module in ("torchrl_llm._imports", "torchrl_llm.errors")
            # Torch brings triton where there is a GPU.
            fine = package in ("torch", "triton") or package in sys.stdlib_module_names or ours
            assert fine, f"{_id(path)}:{line} imports {module}"


def test_no_python_file_is_longer_than_800_lines():
    folders = ("torchrl_llm", "test", "sota-implementations", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    long = {_id(p): n for p in found if (n := len(p.read_text().splitlines())) > 800}
    assert not long


def _public_definitions(path: Path):
    for node in _tree(path).body:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if not isinstance(node, kinds) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, kinds) and not item.name.startswith("_"):
                    yield f"{node.name}.{item.name}", item


def _needs_no_docstring(node: ast.AST) -> bool:
    """Overrides that only honour the base's contract, and property setters."""
    for decorator in getattr(node, "decorator_list", []):
        if isinstance(decorator, ast.Attribute) and decorator.attr == "setter":
            return True
        if isinstance(decorator, ast.Name) and decorator.id in {"override", "overload"}:
            return True
    return False


def test_every_public_name_is_documented():
    assert not [_id(path) for path in FILES if not ast.get_docstring(_tree(path))]
    missing = [
        f"{_id(path)}: {name}"
        for path in FILES
        for name, node in _public_definitions(path)
        if not ast.get_docstring(node) and not _needs_no_docstring(node)
    ]
    assert not missing


def test_every_file_imports_with_the_base_packages_alone_and_changes_no_global_of_tensordict():
    modules = [_module(path) for path in OURS if path.name != "__main__.py"]
    late = ["matplotlib", "hydra", "omegaconf", "tensorboard"]  # always there, imported at use
    done = run_hidden(
        "import importlib\n"
        "import tensordict, transformers, torchrl.envs, torchrl.collectors, torchrl.objectives\n"
        f"hide({late!r})\n"
        "before = tensordict.list_to_stack()\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for public in getattr(module, '__all__', ()):\n"
        "        getattr(module, public)\n"
        "assert tensordict.list_to_stack() == before\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
