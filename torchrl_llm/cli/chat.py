"""Talks to a model: ``torchrl-llm chat FOLDER``, of a run or a checkpoint; or a hub name."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._run_log import printable
from torchrl_llm._settings import Group, several
from torchrl_llm.cli._options import Word, parse
from torchrl_llm.errors import ConfigError, OverlongError

_FAILED = 1
_HELP = "/reset begins anew, /system TEXT does so with another system prompt, /quit ends"


class Options(Group):
    """Talk to a model.

    If the input is not a terminal, each of its lines is a turn, and only answers are printed. In
    the conversation: {signs} (as Ctrl-D and Ctrl-C do).

    Attributes:
        model: folder of a run (its newest checkpoint), of a checkpoint or a model, or a hub name;
            default: the model that ships with the package.
        system: system prompt; default: the system prompt of the run.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: maximum number of tokens of an answer; default: the run's, or 256.
        seed: random seed of sampling.
        trust: import the objects that the run's config.yaml names (its tools).
        tool: a tool in addition to the run's tools, by name or as module:function; may be repeated.
    """

    model: Annotated[str | None, Word("FOLDER")] = None
    system: Annotated[str | None, "TEXT"] = None
    temperature: Annotated[float, "T"] = 0.0
    max_tokens: Annotated[int | None, "N"] = None
    seed: Annotated[int, "N"] = 0
    trust: bool = False
    tool: Annotated[list[str], "NAME"] = several()


def main(arguments: Sequence[str]) -> int:
    """Talk to a model in a terminal, or answer the lines of a file.

    Args:
        arguments: the model, and options.

    Returns:
        The exit status.
    """
    given = parse(Options, "chat", arguments, signs=_HELP)
    with _conversation(given) as conversation:
        return _talk(conversation, is_terminal=sys.stdin.isatty())


def _conversation(given: Options) -> Any:
    import torch

    from torchrl_llm._registry import importing_only
    from torchrl_llm.recipes.chat_settings import check_types, group_of, make_conversation

    name, config = model_and_config(given.model)
    check_types(config)
    env = group_of(config, "env")
    config = {**config, "env": {**env, "tools": [*(env.get("tools") or ()), *given.tool]}}
    make = partial(
        make_conversation,
        *load(name),
        system_prompt=given.system,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
    )
    whose = importing_only(given.tool, whose="the run's config.yaml")
    with contextlib.nullcontext([]) if given.trust else whose as refused:
        try:
            conversation = make(config)
        except ConfigError:
            if not refused:
                raise
            own = {"system_prompt": env.get("system_prompt"), "tools": given.tool}
            kept = {key: config.get(key) for key in ("model", "inference_model")}
            conversation = make({**kept, "env": own})
    if refused:
        _tell(f"{refused[0]}. The conversation begins without what it adds to the prompt.")
    torch.manual_seed(given.seed)
    if sys.stdin.isatty():
        _tell(f"{name or 'the model that ships with the package'}; {_HELP}")
    return conversation


def model_and_config(name: str | None) -> tuple[Any, dict[str, Any]]:
    """Place of a model, and the configuration of the run that made it.

    Args:
        name: folder of a run, of a checkpoint or a model, or a hub name; ``None`` for the model
            that ships with the package.
    """
    from torchrl_llm.trainers.run_folder import model_folder, read_config, run_of

    if name is None or not Path(name).is_dir():
        return name, {} if name is None else {"model": {"name": name}}
    folder = model_folder(Path(name))
    run = run_of(folder)
    return folder, {} if run is None else read_config(run)


def load(name: Any) -> tuple[Any, Any]:
    """Load a model on the available device, and its tokenizer.

    Args:
        name: as returned by :func:`model_and_config`.
    """
    from torchrl_llm import modules
    from torchrl_llm.recipes.builders import present_device, spare_threads

    spare_threads(name)
    device = present_device("auto", "device")
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return modules.load_model(name, dtype=dtype, device=device), modules.load_tokenizer(name)


def _talk(conversation: Any, *, is_terminal: bool) -> int:
    for line in _lines(is_terminal):
        command, _, rest = line.strip().partition(" ")
        if not command:
            continue
        if command == "/quit":
            break
        if command in ("/reset", "/system"):
            conversation.system_prompt = rest or conversation.system_prompt
            conversation.reset()
        elif command.startswith("/"):
            _tell(f"there is no command {command}: {_HELP}")
        else:
            before = len(conversation.messages)
            try:
                answer = conversation.say(line.strip())
            except OverlongError as error:
                _tell(f"The conversation is full: {error.args[0].partition(';')[0]}. {_HELP}.")
                if not is_terminal:
                    return _FAILED
                continue
            _tell_calls(conversation.messages[before:-1])
            # A model may write half a surrogate pair, which a stream does not accept.
            sys.stdout.write(printable(answer).encode(errors="replace").decode() + "\n")
            sys.stdout.flush()
            if conversation.was_cut:
                _tell("(cut: --max-tokens, or the end of the context)")
    return 0


def _lines(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)
    while True:
        try:
            yield input("> ")
        except EOFError:
            _tell("")
            return


def _tell_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Print the called tools and their answers."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
            _tell(f"[{function.get('name')} {arguments}]")
        if message["role"] == "tool":
            _tell(f"[{message.get('name', 'tool')} -> {message['content']}]")


def _tell(text: str) -> None:
    """Print a message that is not an answer."""
    sys.stderr.write(f"{printable(text)}\n")
