"""Writes sampled conversations: ``torchrl-llm export RUN --min-reward 1 -o chats.jsonl``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from torchrl_llm._run_log import show
from torchrl_llm._settings import Group, ensure
from torchrl_llm.cli._options import Word, parse
from torchrl_llm.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_llm.data.chat_export import SampledChat


class Options(Group):
    """Write sampled conversations as JSON lines.

    torchrl-llm train sft data=FILE reads them, and with --pairs torchrl-llm train dpo does.
    Conversations without a valid reward are left out.

    Attributes:
        source: folder of a run that kept rollouts (logging.rollouts=all), or of an evaluation; or
            one of its files, answers_TASK.jsonl.
        output: the file.
        min_reward: smallest reward of a conversation; default: any.
        best_of_group: write at most this number of conversations of each prompt, the ones with the
            highest rewards; default: all.
        duplicates: keep equal conversations.
        trust: import tools that the run's config.yaml names; needed if an earlier version wrote the
            rollouts, which then do not describe the tools.
        cut: keep conversations with an answer that a length limit has cut.
        pairs: write a better and a worse answer to each prompt instead: the best and the worst, or
            every two with different rewards.
    """

    source: Annotated[str, Word("RUN")]
    output: Annotated[str, "FILE"] = "chats.jsonl"
    min_reward: Annotated[float | None, "X"] = None
    best_of_group: Annotated[int | None, "N"] = None
    duplicates: bool = False
    trust: bool = False
    cut: bool = False
    pairs: Annotated[str | None, ("best-worst", "all")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("min_reward", "best_of_group") if self.pairs else ():
            ensure(
                getattr(self, name) is None,
                f"--{name.replace('_', '-')} has no effect with --pairs, which compares all "
                "answers to a prompt",
            )


def main(arguments: Sequence[str]) -> int:
    """Write the conversations of a run or an evaluation for supervised training.

    Args:
        arguments: where they are, and options.

    Returns:
        The exit status.
    """
    given = parse(Options, "export", arguments)

    from torchrl_llm.data.chat_export import ChatFilter, read_chats, write_chats
    from torchrl_llm.data.pair_export import PairFilter

    wanted = ChatFilter(
        min_reward=given.min_reward,
        best_of_group=given.best_of_group,
        duplicates=given.duplicates or given.pairs is not None,  # pairs may share answers
        only_whole=not given.cut,
    )
    chats = wanted(_with_tools(read_chats(given.source), given.source, given.trust))
    pairs = None
    if given.pairs is not None:
        pairs = PairFilter(which=given.pairs, duplicates=given.duplicates)
    try:
        number = write_chats(chats if pairs is None else pairs(chats), given.output)
    except OSError as error:
        raise ConfigError(f"{given.output} cannot be written: {error}") from error
    finally:
        counts = wanted.counts if pairs is None else {**wanted.counts, **pairs.counts}
        left_out = {k: n for k, n in counts.items() if n and k not in ("read", "written", "groups")}
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in left_out.items())
        if wanted.counts["read"]:
            told = f"; left out: {reasons}" if reasons else ""
            sys.stderr.write(f"{wanted.counts['read']:,} conversations read{told}\n")
    what = "conversations"
    if pairs is not None:
        what = f"pairs of {pairs.counts['groups']:,} groups"
    show(f"wrote {number:,} {what} to {given.output}")
    return 0


def _with_tools(chats: Iterable[SampledChat], source: str, trusts: bool) -> Iterator[SampledChat]:
    """The conversations of a run with the tools that its prompts describe."""
    from torchrl_llm._registry import importing_only
    from torchrl_llm.data.rollout_store import FOLDER, RolloutStore
    from torchrl_llm.recipes.chat_settings import chat_settings
    from torchrl_llm.trainers.run_folder import read_config

    tools, run = None, Path(source)
    is_run = (run / FOLDER).is_dir()
    if is_run and "tools" not in (store := RolloutStore(run)).about(store.steps()[-1]):
        whose = importing_only((), whose="the run's config.yaml")
        with contextlib.nullcontext([]) if trusts else whose as refused:
            tools = chat_settings(read_config(run)).schemas
        if refused:
            raise ConfigError(refused[0])
    for chat in chats:
        chat.tools = tools or chat.tools
        yield chat
