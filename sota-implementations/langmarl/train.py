"""Training in language space: agents whose policies are texts, and whose gradients are advice.

    python sota-implementations/langmarl/train.py
    python sota-implementations/langmarl/train.py run_name=global paradigm=central_global
    python sota-implementations/langmarl/train.py run_name=a 'actor_llm={"model_string": "local:"}'

The first command needs no network: its models are scripted, in a world in which the right advice
can be found. ``--config`` names another configuration; keys are replaced behind it. The same
command goes on where it ended; docs/source/howto/train_in_language.rst says how.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchrl_llm._run_log import show
from torchrl_llm.langmarl import LoggingCallback, load_config, make_trainer, parse_overrides
from torchrl_llm.langmarl.report import account_table, iteration_table
from torchrl_llm.recipes import launch

CONFIG = Path(__file__).parent / "config" / "qa_central_credit.json"


@launch.tells_errors
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default=CONFIG, help="a JSON file (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replace its values")
    given = parser.parse_intermixed_args(arguments)
    config = load_config(given.config, parse_overrides(given.overrides))
    trainer = make_trainer(config, callbacks=[LoggingCallback()])
    try:
        trainer.train()
        show(iteration_table(trainer.rows))
        show(account_table(trainer.log.account(), reused=trainer.log.num_reused))
        show(f"policies: {config.checkpoint_dir}   run: {trainer.folder}")
        if trainer.ended_by:
            show(f"ended early: {trainer.ended_by}")
    finally:
        trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
