"""Shows a run: ``torchrl-llm view RUN`` writes one HTML page of its curves and its rollouts."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._checked import Ge, check
from torchrl_llm._files import replacing
from torchrl_llm._run_log import printable, show
from torchrl_llm._settings import Group
from torchrl_llm.cli._options import Word, parse
from torchrl_llm.errors import ConfigError, DataError

_MOST_ROWS = 2000
_FACTS = ("model.name", "env.dataset", "loss.type", "advantage.type", "optimizer.lr", "seed")


class Options(Group):
    """Write one HTML page of a run, which any browser opens without a network.

    It has the run's curves, and its rollouts token by token; of language-space training the
    policies, the credit that each agent got, and the episodes.

    Attributes:
        run: folder of a run.
        output: the page; default: view.html in RUN.
        steps: rollouts of these steps only, as 40:60 or 40; default: all.
        rows: at most so many rollouts, of steps evenly over the run.
        open: open the page in a browser.
    """

    run: Annotated[str, Word("RUN")]
    output: Annotated[Path | None, "FILE"] = None
    steps: Annotated[str | None, "A:B"] = None
    rows: Annotated[int, "N"] = _MOST_ROWS
    open: bool = False


def main(arguments: Sequence[str]) -> int:
    """Write the page of a run.

    Args:
        arguments: folder of the run, and options.

    Returns:
        The exit status.

    Raises:
        ConfigError: an impossible option, or a page that cannot be written.
        DataError: no run is there, or what it wrote is damaged.
    """
    given = parse(Options, "view", arguments)
    wanted = _span(given.steps)

    from torchrl_llm.trainers.run_comparison import find_runs

    runs, _ = find_runs([given.run])
    if len(runs) > 1:
        names = ", ".join(str(run.folder) for run in runs[:3])
        raise ConfigError(f"{given.run} stands for {len(runs)} runs, name one of them: {names} ...")
    run = runs[0]

    from torchrl_llm.evaluation.report import rollout_page
    from torchrl_llm.evaluation.report.language_run import read_language_run

    language = read_language_run(run.folder, given.rows)
    rows, notices = ([], []) if language else _rollouts(run.folder, wanted, given.rows)
    tokenizer = _tokenizer(run, notices) if rows else None
    page = rollout_page(
        rows,
        tokenizer=tokenizer,
        metrics=run.metrics,
        title=run.folder.resolve().name,
        facts=language["facts"]
        if language
        else {key: run.config[key] for key in _FACTS if run.config.get(key) is not None},
        notices=notices,
        language=language,
    )
    path = given.output or run.folder / "view.html"
    try:
        with replacing(path) as draft:
            draft.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: of a path without a name
        raise ConfigError(
            f"the page {path} cannot be written: {error}; name another place with --output FILE"
        ) from error
    sys.stderr.writelines(f"{printable(notice)}\n" for notice in notices)
    count = sum(len(each["episodes"]) for each in language["iterations"]) if language else len(rows)
    shown = f"{count:,} {'episodes' if language else 'rollouts'}"
    show(f"page {path}, {shown}, {len(page) / 1e6:.1f} MB")
    if given.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _span(text: str | None) -> tuple[float, float]:
    low, colon, high = (text or ":").partition(":")
    try:
        first = int(low or 0)
        return first, int(high) if high else float("inf") if colon else first
    except ValueError:
        raise ConfigError(f"--steps takes A:B, as 40:60, :60, 40: or 40, got {text!r}") from None


def _rollouts(run: Path, wanted: tuple[float, float], most: int) -> tuple[list[Any], list[str]]:
    """Rows to show, and what to say of those that are not shown."""
    from torchrl_llm.data.rollout_store import FOLDER, RolloutStore

    check("--rows", most, Annotated[int, Ge(0)])
    if not (run / FOLDER).is_dir():
        told = "This run kept no rollouts. The next one does with logging.rollouts=sample, or all."
        return [], [told]
    store = RolloutStore(run)
    steps = [step for step in store.steps() if wanted[0] <= step <= wanted[1]]
    if not steps:
        known = f"{store.steps()[0]} to {store.steps()[-1]}"
        raise DataError(f"no rollouts are of such steps; {run / FOLDER} has steps {known}")
    count = max(1, min(len(steps), most * len(store.steps()) // len(store)))
    even = [steps[at * (len(steps) - 1) // max(1, count - 1)] for at in range(count)]
    rows = list(islice(store.iterate(even), most))
    if len(rows) == len(store):
        return rows, []
    of = f"step {even[0]}" if count == 1 else f"{count} steps from {even[0]} to {even[-1]}"
    told = f"{len(rows):,} of {len(store):,} rollouts are shown, of {of}. "
    return rows, [told + "--steps A:B and --rows N of torchrl-llm view choose others."]


def _tokenizer(run: Any, notices: list[str]) -> Any:
    """That of the newest checkpoint, or of the model that the run began with."""
    from torchrl_llm.modules import load_tokenizer
    from torchrl_llm.trainers.run_folder import model_folder

    try:
        return load_tokenizer(str(model_folder(run.folder)))
    except ConfigError as error:
        if "model.name" in run.config:
            try:
                return load_tokenizer(run.config["model.name"])
            except ConfigError:
                pass
        notices.append(f"Tokens are shown as ids, for there is no tokenizer: {error}.")
        return None
