"""Pushes a trained model to a hub: only model, tokenizer, adapter and a card.

Files that a run needs to resume (``trainer_state`` with the optimizer, ``metrics.csv``) are not
pushed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchrl_llm._masking import masked
from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.trainers.run_folder import model_folder, read_config, run_of

_CARD = "README.md"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_BRANCH = re.compile(r"(?!.*(?:\.\.|\.lock$|//))\w[\w./-]*(?<![./])")
# Files of a model, a tokenizer and an adapter. Only files in this list are pushed, so that notes or
# keys in such a folder are not published.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_FOLDERS = (".", "adapter")


def check_repository(name: str) -> None:
    """Reject an invalid name of a repository.

    Args:
        name: as ``owner/name``.

    Raises:
        ConfigError: the name does not have this form.

    Example:
        >>> check_repository("ann/adder")
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"a repository is OWNER/NAME, as ann/adder, of letters, digits, - _ and .; got {name!r}"
        )


def push_to_hub(
    folder: str | Path,
    name: str,
    *,
    private: bool = True,
    command: str | None = None,
    revision: str = "main",
) -> str:
    """Push a model to a repository, in one commit.

    The token comes from ``hf auth login`` or the environment variable ``HF_TOKEN``. Files with the
    same names are replaced; other files stay.

    Args:
        folder: folder of a run (its newest checkpoint), of a checkpoint or of a model.
        name: the repository, ``owner/name``; it is created if it does not exist.
        private: whether a new repository is private. An existing one does not change.
        command: the command that started the run, for the card.
        revision: a branch, such as ``step-100``, to store several checkpoints; it is created from
            ``main`` if it does not exist.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: a name without owner, a folder without a model, or an invalid name of a branch.
        CheckpointError: the hub rejected the push, or could not be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    check_repository(name)
    if not isinstance(revision, str) or not _BRANCH.fullmatch(revision):
        raise ConfigError(f"a revision is the name of a branch, as step-100; got {revision!r}")
    model = model_folder(Path(folder))
    run = run_of(model)
    kinds = json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures")
    is_classifier = any(kind.endswith("SequenceClassification") for kind in kinds or ())
    config = {} if run is None else read_config(run)
    card = model_card(config, name=name, command=command, is_classifier=is_classifier)
    additions = [CommitOperationAdd(_CARD, card.encode())]
    additions += [CommitOperationAdd(path, model / path) for path in pushed_files(model)]
    disable_progress_bars()
    api = HfApi(library_name="torchrl_llm")
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        if revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        api.create_commit(name, additions, commit_message="Push by torchrl_llm", revision=revision)
    except Exception as error:  # of the client, of its connection, of the file system
        raise CheckpointError(_failure(model, name, error, revision)) from None
    return str(url) if revision == "main" else f"{url}/tree/{revision}"


def pushed_files(model: Path) -> list[str]:
    """Paths of the files to push, without the card.

    Args:
        model: folder of the model.
    """
    found = (file for folder in _FOLDERS for each in _FILES for file in (model / folder).glob(each))
    return sorted(str(file.relative_to(model)) for file in found if file.is_file())


def model_card(
    config: Mapping[str, Any], *, name: str, command: str | None = None, is_classifier: bool = False
) -> str:
    """Text of the repository's front page.

    Args:
        config: nested configuration of the run; empty if unknown. Passwords in URLs are left out.
        name: the repository.
        command: the command that started the run.
        is_classifier: whether the model is a reward model.

    Example:
        >>> print(model_card({}, name="ann/adder").split("---")[1])
        <BLANKLINE>
        library_name: transformers
        pipeline_tag: text-generation
        tags:
        - torchrl_llm
        <BLANKLINE>
    """
    does, opens = "text-generation", "AutoModelForCausalLM"
    if is_classifier:
        does, opens = "text-classification", "AutoModelForSequenceClassification"
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": does}
    base = (config.get("model") or {}).get("name")
    if isinstance(base, str) and _NAME.fullmatch(base) and not Path(base).exists():
        facts["base_model"] = base
    facts["tags"] = ["torchrl_llm"]
    parts = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False)}---",
        f"# {name.partition('/')[2]}",
        f"Trained with torchrl_llm. `transformers.{opens}.from_pretrained` opens it"
        + (f"; it began as {base}." if "base_model" in facts else "."),
    ]
    if command is not None:
        parts.append(f"## Command\n\n```\n{masked(command)}\n```")
    if config:
        written = yaml.safe_dump(masked(dict(config)), sort_keys=False, allow_unicode=True)
        parts.append(f"## Configuration\n\n```yaml\n{written}```")
    return "\n\n".join(parts) + "\n"


def _failure(model: Path, name: str, error: BaseException, revision: str) -> str:
    """Description of the failure, with advice and without the token."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import OfflineModeIsEnabled

    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    answers = [each.response for each in chain if getattr(each, "response", None) is not None]
    status = answers[0].status_code if answers else None
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    token = get_token()
    if status == 401:
        which = "no token was found" if token is None else "the hub does not know the token"
        why = f"{which} (401); log in with `hf auth login`, or set HF_TOKEN"
    elif status == 403:
        why = f"the token may not write to {name} (403); make one with write access to it"
    elif isinstance(error, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set"
    elif "TransportError" in kinds:  # of httpx, or of httpx2 with later clients
        why = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error})"
    else:
        why = f"{type(error).__name__}: {str(error).partition(os.linesep)[0]}"
    why = why if token is None else why.replace(token, "***")
    return f"{model} was not pushed to {name}: {why}. To try again:\n  " + (
        shlex.join(["torchrl-llm", "push", str(model), name])
        + ("" if revision == "main" else f" --revision {revision}")
    )
