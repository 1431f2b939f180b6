"""Actor of pipeline RL: samples responses for a remote learner, with its newest weights.

    python sota-implementations/pipeline-rl/actor.py
    python sota-implementations/pipeline-rl/actor.py redis.url=redis://learner:6379/0

Start one per machine or core, before or after the learner, with the learner's arguments. If one
dies, the others take over its rows. Actors end with the run. Every key is in
config/pipeline-rl.yaml and config/common.yaml.
"""

from __future__ import annotations

from redis_arguments import check_passwords

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "pipeline-rl", check=check_passwords)

import sys

import hydra
from omegaconf import DictConfig
from pipeline_utils import load_config, run_actor


@hydra.main(version_base="1.3", config_path="config", config_name="pipeline-rl")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    run_actor(load_config(cfg))


if __name__ == "__main__":
    # An actor writes no run folder.
    sys.argv += ["hydra.output_subdir=null", "hydra.run.dir=."]
    main()
