"""Prints the memory that a run needs: ``torchrl-llm memory model.name=...``; reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torchrl_llm._checked import Ge, check
from torchrl_llm._run_log import show
from torchrl_llm._settings import Group, several
from torchrl_llm.cli import train
from torchrl_llm.cli._options import Word, make_parser
from torchrl_llm.errors import ConfigError

RECIPES = ("grpo", "grpo-async")
"""Recipes whose memory can be counted; each has the name of the file that composes its keys."""

_PROMPT = 512


class Options(Group):
    """Print the memory that a run needs, by formula.

    The model (model.name) may be a folder that contains only config.json.

    Attributes:
        words: {recipes} (default: grpo), and its keys as for torchrl-llm train.
        prompt_tokens: tokens of a prompt; default: env.max_prompt_length, or {tokens}.
        processes: processes that train together, with train.parallel=ddp or fsdp2; default:
            WORLD_SIZE if torchrun sets it, or the GPUs of this machine.
    """

    words: Annotated[list[str], Word("RECIPE KEY=VALUE")] = several()
    prompt_tokens: Annotated[int | None, "N"] = None
    processes: Annotated[int | None, "N"] = None


def main(arguments: Sequence[str]) -> int:
    """Print a table of the memory of a run by parts, from formulas; no weights are read.

    Args:
        arguments: a recipe, overrides of its keys, and options.

    Returns:
        The exit status.

    Raises:
        ConfigError: the recipe, the key or the model does not exist.
    """
    usage = "torchrl-llm memory [RECIPE] [KEY=VALUE ...] [--prompt-tokens N] [--processes N]"
    recipes = " or ".join(RECIPES)
    parser = make_parser(Options, "memory", usage=usage, recipes=recipes, tokens=str(_PROMPT))
    given = Options(**vars(parser.parse_intermixed_args(arguments)))
    name, overrides = "grpo", given.words
    if overrides and "=" not in overrides[0]:
        name, *overrides = overrides
    if name not in RECIPES:
        raise ConfigError(f"memory is counted for {' and '.join(RECIPES)}, not for {name!r}")
    check("--prompt-tokens", given.prompt_tokens, Annotated[int, Ge(1)] | None)
    check("--processes", given.processes, Annotated[int, Ge(1)] | None)

    from torchrl_llm.recipes.doctor.compose import compose

    config, _ = compose(name, train.RECIPES[name], overrides)

    if given.processes is not None and config.train.parallel == "none":
        raise ConfigError(
            "--processes has no effect with train.parallel=none: choose train.parallel=ddp or fsdp2"
        )

    from torchrl_llm.recipes import memory
    from torchrl_llm.trainers.results import text_table

    prompt = given.prompt_tokens or config.env.max_prompt_length or _PROMPT
    number = given.processes or memory.num_processes(config)
    parts = memory.memory_parts(config, prompt_tokens=prompt, processes=number)
    shown = [(part.name, memory.show_bytes(part.num_bytes), part.note) for part in parts]
    is_async = name == "grpo-async"
    for where, what in {
        "sample": "all collectors" if is_async else "while it samples",
        "train": "the trainer" if is_async else "while it trains",
    }.items():
        shown.append((what, memory.show_bytes(memory.peak_bytes(parts, where)), "the most at once"))
    if on_host := memory.peak_bytes(parts, "host"):
        shown.append(("next to the GPU", memory.show_bytes(on_host), "in the memory of the CPU"))
    of = f"prompts of {prompt} tokens (--prompt-tokens, env.max_prompt_length)"
    if config.train.parallel != "none":
        of += f", for each of {number} processes (--processes, WORLD_SIZE, or the GPUs here)"
    show(
        f"{config.model.name or 'the model that ships with the package'}\n"
        f"{text_table(shown)}\n"
        f"by formula, with {of}; what torch and CUDA take for themselves comes on top"
    )
    return 0
