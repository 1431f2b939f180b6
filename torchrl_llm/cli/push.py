"""Pushes a model to a hub: ``torchrl-llm push FOLDER OWNER/NAME``; private if not ``--public``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Push the newest checkpoint of a run, a checkpoint or a model.

    Args:
        arguments: the folder, the repository, and options.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="torchrl-llm push",
        description="push model, tokenizer, adapter and a card to a repository of the hub, in one "
        "commit; the token is that of `hf auth login`, or HF_TOKEN",
    )
    parser.add_argument("folder", metavar="FOLDER", help="of a run, of a checkpoint or of a model")
    parser.add_argument("name", metavar="OWNER/NAME", help="the repository; made if there is none")
    parser.add_argument(
        "--public", action="store_true", help="a repository that is made is for everybody"
    )
    parser.add_argument(
        "--revision", default="main", help="a branch; made from main if there is none (%(default)s)"
    )
    given = parser.parse_args(arguments)

    from torchrl_llm.trainers.hub import push_to_hub

    url = push_to_hub(given.folder, given.name, private=not given.public, revision=given.revision)
    sys.stdout.write(f"{url}\n")
    return 0
