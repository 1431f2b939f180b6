"""Pushes a model to a hub: ``torchrl-llm push FOLDER OWNER/NAME``; private if not ``--public``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from torchrl_llm._settings import Group
from torchrl_llm.cli._options import Word, parse


class Options(Group):
    """Push model, tokenizer, adapter and a card to a repository of the hub, in one commit.

    The token comes from `hf auth login` or HF_TOKEN.

    Attributes:
        folder: folder of a run, of a checkpoint or of a model.
        name: the repository; created if it does not exist.
        public: make a new repository public; by default it is private.
        revision: a branch; created from main if it does not exist.
    """

    folder: Annotated[str, Word("FOLDER")]
    name: Annotated[str, Word("OWNER/NAME")]
    public: bool = False
    revision: str = "main"


def main(arguments: Sequence[str]) -> int:
    """Push the newest checkpoint of a run, a checkpoint or a model.

    Args:
        arguments: the folder, the repository, and options.

    Returns:
        The exit status.
    """
    given = parse(Options, "push", arguments)

    from torchrl_llm.trainers.hub import push_to_hub

    url = push_to_hub(given.folder, given.name, private=not given.public, revision=given.revision)
    sys.stdout.write(f"{url}\n")
    return 0
