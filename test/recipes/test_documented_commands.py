"""Every command of a recipe that the documentation shows is one that the recipe accepts."""

import importlib.util
import inspect
import re
import shlex
import sys
import textwrap
from pathlib import Path

import hydra
import pytest
from recipes.script import run_alone

from torchrl_llm.cli.train import RECIPES as PAGE_OF
from torchrl_llm.errors import ResourceError
from torchrl_llm.langmarl import load_config
from torchrl_llm.recipes.flat_settings import parse_overrides
from torchrl_llm.recipes.strict_config import from_mapping

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "sota-implementations"
PAGES = [ROOT / "README.rst", *ROOT.glob("docs/source/**/*.rst"), *RECIPES.glob("*/*.py")]
# A script or a recipe by name, and what stands behind it in its line and in the lines that it is
# continued on.
COMMAND = re.compile(
    r"((?:python |torchrun (?:-\S+ (?:\d+ )?)+)sota-implementations/\S+\.py"
    r"|(?:torchrl-llm|torchrun (?:-\S+ (?:\d+ )?)+torchrl_llm)"
    r" (?:(?:train|doctor) [a-z-]+|evaluate))"
    r"((?:[^\n]*\\\n)*[^\n]*)"
)

REWARD_MODEL = """{
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "id2label": {"0": "score"}
}"""
# What the pages have the reader write before; most of them show the file whole.
WRITTEN = {
    "my_rewards.py": "def polite(answer):\n    return 1.0\n",
    "nim.py": (ROOT / "docs/source/howto/programs/nim.py").read_text(),
    "agent.py": "def run(row, client):\n    return 1.0\n",
    "other/bin/python": "",
    "runs/reward/checkpoints/step_000100/config.json": REWARD_MODEL,
    "judge.py": (ROOT / "docs/source/howto/programs/judge.py").read_text(),
    "capitals.py": "from torchrl_llm.envs.datasets.rows_env import RowsEnv as CapitalEnv\n",
}
FILE = re.compile(r"\.\. code-block:: .*\n   :caption: (\S+)\n\n((?:   .*\n|\n)+)")
WRITTEN |= {
    name: textwrap.dedent(text)
    for page in ROOT.glob("docs/source/**/*.rst")
    for name, text in FILE.findall(page.read_text())
}


def documented(flat=False):
    """Script to its arguments, each once; of the recipes with YAML files, or of the flat ones."""
    found = {}
    for page in PAGES:
        for command, rest in COMMAND.findall(page.read_text()):
            script = _script(command)
            words = shlex.split(rest.replace("\\\n", " ").partition("``")[0], comments=True)
            if "-m" in words:  # of a sweep the first run
                words = [re.sub(r"^([\w.]+=[^\[,]+),.*", r"\1", word) for word in words]
            arguments = tuple(word for word in words if "=" in word and "$" not in word)
            if flat == (script.split("/")[1] in ("pico", "langmarl")):
                found.setdefault(script, {})[arguments] = None
    return found


def _script(command):
    """The page that a command runs."""
    name = command.split()[-1]
    if name.endswith(".py"):
        return name
    return "sota-implementations/" + PAGE_OF.get(name, f"{name}/{name}.py")


class Accepted(Exception):
    """The configuration was read."""


@pytest.fixture
def only_reads(monkeypatch):
    """Recipes end when they have read their configuration."""
    real = hydra.main

    def main(**options):
        def wrap(function):
            names = inspect.unwrap(function).__globals__
            load = names["load_config"]

            def load_and_end(*args, **kwargs):
                load(*args, **kwargs)
                raise Accepted

            names["load_config"] = load_and_end
            return real(**options)(function)

        return wrap

    monkeypatch.setattr(hydra, "main", main)


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The files of the pages, in the working folder; their names are free for them."""
    for name, text in WRITTEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = [name.removesuffix(".py") for name in WRITTEN if name.endswith(".py")]
    before = {name: sys.modules.pop(name, None) for name in modules}
    yield
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def test_the_documentation_shows_commands():
    assert sum(map(len, documented().values())) > 30


def test_commands_of_several_processes_are_read_too():
    text = "".join(page.read_text() for page in PAGES)
    read = [command for command, _ in COMMAND.findall(text) if command.startswith("torchrun")]
    assert len(read) == len(re.findall(r"^ *torchrun -", text, re.MULTILINE)) > 5
    assert {_script(command) for command in read} <= set(documented())
    assert ("train.parallel=fsdp2",) in documented()[_script("torchrun -m torchrl_llm train grpo")]


@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("script", documented())
def test_the_documented_commands_are_accepted(
    script, each, only_reads, written, monkeypatch, tmp_path
):
    for arguments in [*documented()[script]][::each]:
        folder = f"hydra.run.dir={tmp_path}"
        # A machine may be without a sandbox, or its image.
        boxed = any(argument.startswith("agent.sandbox=") for argument in arguments)
        with pytest.raises((Accepted, ResourceError) if boxed else Accepted):
            run_alone(monkeypatch, ROOT / script, tmp_path, *arguments, folder)


@pytest.mark.parametrize("script", documented(flat=True))
def test_the_documented_commands_of_flat_recipes_are_accepted(script, monkeypatch):
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    spec = importlib.util.spec_from_file_location("recipe_page", ROOT / script)
    page = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, page)  # its settings' types are looked up there
    spec.loader.exec_module(page)
    for arguments in documented(flat=True)[script]:
        given = parse_overrides(arguments)
        if script.endswith("langmarl/train.py"):
            load_config(page.config_file(given.pop("config", "qa_central_credit")), given)
        else:
            group = page.PicoConfig if "/pico/" in script else page.BothConfig
            from_mapping(group, given)
