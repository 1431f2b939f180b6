"""Write the files of ``config`` from the dataclasses, which declare each key once.

Run it after a key was added or its sentence changed; ``--check`` lists the files that it would
write, and fails if there are any. A key's comment is its first sentence under ``Attributes`` of its
dataclass (or ``Args`` of the class of a loss, an advantage or an agent), after its allowed words if
they are few. This program does not write the tasks (``config/env``), because they are values.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from torchrl_llm._settings import sentences
from torchrl_llm.recipes import (
    AdvantageConfig,
    AgentConfig,
    LossConfig,
    PreferenceLossConfig,
    launch,
)
from torchrl_llm.recipes.strict_config import Component

_COLUMN, _WIDTH = 28, 110
_ORDER = [
    "seed",
    "env",
    "data",
    "curriculum",
    "model",
    "agents",
    "teacher",
    "player",
    "tasks",
    "data_files",
    "options",
    "train",
    "train_model",
    "inference_model",
    "weight_sync",
    "ref_model",
    "optimizer",
    "loss",
    "advantage",
    "correction",
    "reward",
    "select",
    "filter",
    "ray",
    "redis",
    "logging",
    "checkpoint",
    "eval",
]
_NOTES = {
    "common": "most keys",
    "loss": "the files of config/loss, and their keys",
    "advantage": "those of config/advantage",
    "agent": "those of config/agent: who acts in the task",
    "env": "a task brings its own settings; the command line overrides both",
}
_WRITTEN = "Written by sota-implementations/write_config.py from the class that declares them."
_HYDRA = """
hydra:
  run:
    dir: outputs/{name}/${{now:%Y-%m-%d}}/${{now:%H-%M-%S}}
  job:
    chdir: false
"""


class Recipe(NamedTuple):
    """Declaration of a recipe's keys, and their files.

    Attributes:
        page: its page, below this folder.
        module: module of the class.
        schema: name of the class.
        common: name of a class whose keys are in ``common.yaml``; empty for none.
        task: option of ``config/env``; empty if there are none.
        hidden: keys of the class that the recipe does not use.
    """

    page: str
    module: str
    schema: str
    common: str = ""
    task: str = ""
    hidden: tuple[str, ...] = ()


_GRPO, _CONFIG = "torchrl_llm.recipes.grpo_config", "GRPOGroups"
_SFT = "SFTGroups"
_SAMPLES = ("logging.samples", "logging.rollouts", "reward.on_all_invalid")
_PAIRS = ("logging.samples", "logging.rollouts", "train.kl_to_ref_coeff", "eval.batch_size")
_SCORES = (*_PAIRS, "train_model.logprob_chunk_size")
_TOOLS = ("env.tools", "env.max_tool_turns", "train.kl_to_ref_coeff")
RECIPES = {
    "grpo": Recipe("grpo/grpo-sync.py", _GRPO, "GRPOConfig", _CONFIG, "arithmetic"),
    "grpo-async": Recipe("grpo/grpo-async.py", _GRPO, "AsyncGRPOConfig", _CONFIG, "arithmetic"),
    "self-play": Recipe(
        "self-play/self-play.py",
        "self_play_utils",
        "SelfPlayConfig",
        _CONFIG,
        "tic_tac_toe_for_two",
    ),
    "pipeline-rl": Recipe(
        "pipeline-rl/learner.py", "pipeline_utils", "PipelineConfig", _CONFIG, "arithmetic"
    ),
    "sft": Recipe("sft/sft.py", "sft_utils", "SFTConfig", _SFT, hidden=_SAMPLES),
    "imitate": Recipe(
        "sft/imitate.py", "imitate_utils", "ImitateConfig", "SFTGroups", hidden=_SAMPLES
    ),
    "dpo": Recipe("preference/dpo.py", "preference_utils", "PreferenceConfig", hidden=_PAIRS),
    "reward": Recipe(
        "preference/reward-model.py", "reward_utils", "RewardTrainingConfig", hidden=_SCORES
    ),
    "embedded": Recipe("sft/embedded.py", "embedded_utils", "EmbeddedConfig"),
    "distillation": Recipe(
        "distillation/distillation.py",
        "distillation_utils",
        "DistillationConfig",
        task="arithmetic",
        hidden=_TOOLS,
    ),
    "expert-iteration": Recipe(
        "expert-iteration/expert-iteration.py", "ei_utils", "EIConfig", task="arithmetic"
    ),
    "evaluate": Recipe(
        "evaluate/evaluate.py", "evaluate_config", "EvaluateConfig", hidden=_SAMPLES
    ),
}
"""Name of a recipe to its declaration."""


class Key(NamedTuple):
    """A line of a file; ``value`` is ``MISSING`` for a group of keys."""

    path: str
    value: Any
    about: str


def _first(text: str) -> str:
    """The first sentence, with Python's and Sphinx's notation replaced for YAML."""
    text = re.split(r"(?<!\bDr)\.(?=\s+[A-Z`0-9]|\s*$)", text)[0]
    text = re.sub(r":math:`(.*?)`", lambda found: found[1].replace("\\", ""), text)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    words = {"``None``": "null", "``True``": "true", "``False``": "false"}
    return re.sub("``.*?``", lambda found: words.get(found[0], found[0].strip("`")), text)


def _words(hint: Any) -> list[str]:
    """The allowed words of a value; empty if it may be anything else."""
    parts = get_args(hint) if get_origin(hint) is not Literal else (hint,)
    parts = [part for part in parts if part is not type(None)] or [hint]
    literals = [part for part in parts if get_origin(part) is Literal]
    if len(literals) != len(parts):
        return []
    return [str(word) for part in literals for word in get_args(part)]


def _about(hint: Any, text: str) -> str:
    return ": ".join(filter(None, (" | ".join(_words(hint)), _first(text))))


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a dataclass with its default, groups before their keys.

    Args:
        schema: the dataclass.
        prefix: prefix of its keys.
    """
    hints, said = get_type_hints(schema), sentences(schema)
    place = {name: number for number, name in enumerate(_ORDER if not prefix else ())}
    for entry in sorted(fields(schema), key=lambda each: place.get(each.name, len(place))):
        hint, path = hints[entry.name], f"{prefix}{entry.name}"
        given = getattr(entry.default_factory, "keywords", None) or {}
        if not is_dataclass(hint):
            value = entry.default if entry.default is not MISSING else entry.default_factory()
            yield Key(path, value, _about(hint, said.get(entry.name, "")))
            continue
        head = (hint.__doc__ or "").partition("\n")[0]
        plain = re.match("[A-Z][a-z]*\\b", head)  # names keep their capitals
        yield Key(path, MISSING, _first(head[:1].lower() + head[1:] if plain else head))
        if issubclass(hint, Component):  # its keys are in its options' files
            yield from (Key(f"{path}.{name}", value, "") for name, value in given.items())
        else:
            for key in keys_of(hint, f"{path}."):
                yield key._replace(value=given.get(key.path[len(path) + 1 :], key.value))


def _plain(value: Any) -> str:
    """A value in YAML."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, float) and "e" in repr(value):
        base, _, power = repr(value).partition("e")
        return f"{base}{'' if '.' in base else '.0'}e{int(power)}"
    return yaml.safe_dump(value, allow_unicode=True, width=1000).removesuffix("\n...\n").strip()


def _lines(keys: list[Key]) -> Iterator[str]:
    is_block = False
    for path, value, about in keys:
        *groups, name = path.split(".")
        indent = "  " * len(groups)
        line = f"{indent}{name}:"
        if isinstance(value, dict) and value:
            inner = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        else:
            inner = ""
            line += "" if value is MISSING else f" {_plain(value)}"
        if not groups and (is_block or value is MISSING):
            yield ""
        is_block = bool(groups) or value is MISSING or bool(inner)
        wide = max(_COLUMN, len(line) + 1)
        told = textwrap.wrap(about, _WIDTH - wide - 2)
        yield f"{line:{wide}}# {told[0]}" if told else line
        yield from (f"{'':{wide}}# {more}" for more in told[1:])
        yield from textwrap.indent(inner, f"{indent}  ").splitlines()


def _file(title: str, keys: list[Key], defaults: str = "") -> str:
    """A file of keys; groups without keys are left out."""
    full = {key.path.rpartition(".")[0] for key in keys if key.value is not MISSING}
    full |= {path.rpartition(".")[0] for path in full}
    shown = [key for key in keys if key.value is not MISSING or key.path in full]
    text = "\n".join([f"# {title}", f"# {_WRITTEN}", defaults, "", *_lines(shown), ""])
    return re.sub("\n{3,}", "\n\n", text)


def _defaults(recipe: Recipe, schema: type) -> str:
    hints = get_type_hints(schema)
    groups = {
        name: hints[name].default
        for name in ("loss", "advantage", "agent")
        if name in hints and issubclass(hints[name], Component)
    }
    lines = [*(["common"] if recipe.common else []), *(f"{k}: {v}" for k, v in groups.items())]
    lines += ["_self_", *([f"env: {recipe.task}"] if recipe.task else [])]
    lines += ["override hydra/job_logging: none", "override hydra/hydra_logging: none"]
    notes = _NOTES | {
        "override hydra/job_logging": "loggers write to stderr; all that is said is in run.log"
    }
    noted = [(line, notes.get(line.partition(":")[0], "")) for line in lines]
    shown = [
        f"  - {line:{_COLUMN - 5}} # {note}" if note else f"  - {line}" for line, note in noted
    ]
    return "\n".join(["", "defaults:", *shown])


def _recipe_files(name: str, recipe: Recipe) -> Iterator[tuple[Path, str]]:
    launch.load_page(recipe.page)
    schema = getattr(sys.modules[recipe.module], recipe.schema)
    folder = (launch.PAGES / recipe.page).parent / "config"
    keys = [key for key in keys_of(schema) if key.path not in recipe.hidden]
    if recipe.task:
        keys = [key._replace(value="???") if key.path == "env.dataset" else key for key in keys]
    page = Path(recipe.page).name
    title = f"The keys of {page}. An unknown key is an error that names the nearest one."
    if recipe.common:
        base = next(each for each in inspect.getmro(schema) if each.__name__ == recipe.common)
        common = [key for key in keys_of(base) if key.path not in recipe.hidden + _hidden(base)]
        if recipe.task:
            common = [k._replace(value="???") if k.path == "env.dataset" else k for k in common]
        if not (folder / "common.yaml").is_symlink():
            pages = [Path(r.page).name for r in RECIPES.values() if r.common == recipe.common]
            yield folder / "common.yaml", _file(f"The keys that {', '.join(pages)} share.", common)
        known = {key.path: key.value for key in common}
        groups = {key.path for key in common if key.value is MISSING}
        keys = [
            key
            for key in keys
            if key.path in groups or key.path not in known or known[key.path] != key.value
        ]
        title = f"The keys that {page} alone has, or has other defaults of (common.yaml)."
    text = _file(title, keys, _defaults(recipe, schema))
    yield folder / f"{name}.yaml", text + _HYDRA.format(name=name)


def _hidden(base: type) -> tuple[str, ...]:
    return _SAMPLES if base.__name__ == _SFT else ()


def _option_files(page: str, group: str, kind: type[Component]) -> Iterator[tuple[Path, str]]:
    """A file for each class of a group, and one for the keys that all of them have."""
    folder = launch.PAGES / page / "config" / group
    made = {name: dict(_option_keys(variant)) for name, variant in kind.variants.items()}
    # A loss of pairs does not share keys with the others.
    variants = kind.variants.items()
    apart = {name for name, each in variants if getattr(each(), "compares_pairs", False)}
    alike = [keys for name, keys in made.items() if name not in apart]
    shared = {
        path: key
        for path, key in made[kind.default].items()
        if path != "type" and all(path in keys for keys in alike)
    }
    first = Key("type", "shared", "is none: choose another file")
    yield folder / "shared.yaml", _file(f"What every {group} takes.", [first, *shared.values()])
    for name, keys in made.items():
        base = {} if name in apart else shared
        own = [k for path, k in keys.items() if path not in base or base[path].value != k.value]
        told = kind.variants[name].target.__doc__ or ""
        about = _first(re.split("[,:]? :math:", told.partition("\n\n")[0])[0])
        paper = re.search(r"arXiv:[\d.]+\d", told)
        about += f" ({paper[0]})" if paper and paper[0] not in about else ""
        title = "\n# ".join(textwrap.wrap(" ".join(about.split()), _WIDTH))
        defaults = "" if name in apart else "\ndefaults: [shared, _self_]"
        yield folder / f"{name}.yaml", _file(title, own, defaults)


def _option_keys(variant: type[Component]) -> Iterator[tuple[str, Key]]:
    said, hints = sentences(variant.target), get_type_hints(variant)
    for entry in fields(variant):
        value = entry.default if entry.default is not MISSING else entry.default_factory()
        about = "" if entry.name == "type" else _about(hints[entry.name], said.get(entry.name, ""))
        yield entry.name, Key(entry.name, value, about)


def files() -> dict[Path, str]:
    """All files to write, with their text."""
    found: dict[Path, str] = {}
    for name, recipe in RECIPES.items():
        found |= dict(_recipe_files(name, recipe))
    for page, group, kind in (
        ("grpo", "loss", LossConfig),
        ("grpo", "advantage", AdvantageConfig),
        ("grpo", "agent", AgentConfig),
        ("preference", "loss", PreferenceLossConfig),
    ):
        found |= dict(_option_files(page, group, kind))
    return found


def main() -> None:
    """Write changed files, or with ``--check`` end with a list of them."""
    changed = {path: text for path, text in files().items() if _text(path) != text}
    if "--check" in sys.argv[1:]:
        if changed:
            raise SystemExit(f"out of date: {', '.join(map(str, changed))}")
        return
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    main()
