"""Train agents in language space: the policies are texts, and the gradients are advice.

    torchrl-llm train langmarl num_iterations=3
    torchrl-llm train langmarl config=calculator        # the embedded model acts
    torchrl-llm train langmarl run_name=global paradigm=central_global
    torchrl-llm train langmarl config=math_central_credit llm=gpt-4o-mini

The first two commands need no network. The models of the first command are scripts, in a world that
has a correct advice to find. config=NAME is a file of the recipe's folder config, config=FILE.json
a file of your own. A value may be JSON: 'actor_llm={"model_string": "local:"}'.

The run is in outputs/langmarl/DATE/TIME/runs/NAME; NAME is run_name, or else exp_name. The same
command with experiment_dir=outputs/langmarl/DATE/TIME resumes it. If you give run_name or exp_name,
the same command resumes the newest run of that name.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_llm._progress import ProgressBar
from torchrl_llm._run_log import RunLog, say, show
from torchrl_llm.errors import ConfigError
from torchrl_llm.langmarl import LanguageTaskConfig, load_config, make_trainer, parse_overrides
from torchrl_llm.langmarl.callbacks import ProgressCallback
from torchrl_llm.langmarl.llm_config import read_object
from torchrl_llm.langmarl.report import account_table, iteration_table, summary
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.flat_settings import new_folder, show_keys

CONFIGS = Path(__file__).parent / "config"


def config_file(name: str) -> Path:
    """Return the file that the key ``config`` names."""
    own = CONFIGS / f"{name}.json"
    if not own.is_file() and not Path(name).is_file():
        ours = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise ConfigError(f"config={name}: there is no such file; the recipe has {ours}")
    return own if own.is_file() else Path(name)


def folder_of(given: Mapping[str, Any]) -> Path:
    """Return the newest folder with a run of the given name, or a new folder."""
    resume = given.get("resume", "latest")
    name = given.get("run_name") or given.get("exp_name")
    name = name if resume in ("latest", "never") else resume
    runs = glob.glob(f"outputs/langmarl/*/*/runs/{glob.escape(str(name))}") if name else []
    return Path(max(runs)).parents[1] if runs and resume != "never" else new_folder("langmarl")


@launch.tells_errors
def main(arguments: list[str]) -> None:
    if {"--help", "-h"} & set(arguments):
        show_keys(LanguageTaskConfig, __doc__)
    given = parse_overrides(arguments)
    file = config_file(str(given.pop("config", "qa_central_credit")))
    if "folder" in given:
        given["experiment_dir"] = given.pop("folder")
    config = load_config(file, given)
    known = read_object(file, "the configuration") | given
    if "experiment_dir" not in known:
        config = replace(config, experiment_dir=str(folder_of(given)))
    if "checkpoint_dir" not in known:
        config = replace(config, checkpoint_dir=f"{config.experiment_dir}/policies")
    trainer = make_trainer(config)
    done = len(trainer.history)
    bar = ProgressBar("iteration", max(config.num_iterations, done), done=done)
    trainer.callbacks.append(ProgressCallback(bar))
    try:
        with RunLog.of(trainer.folder):
            model, name = config.get_actor_llm().name, f"runs/{trainer.run_id}"
            say(f"langmarl: model {model}, env {config.env}, folder {config.experiment_dir}/{name}")
            with bar:
                trainer.train()
            show(iteration_table(trainer.rows))
            show(account_table(trainer.log.account(), reused=trainer.log.num_reused))
            show(summary(trainer))
    finally:
        trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
