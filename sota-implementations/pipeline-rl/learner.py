"""Learner of pipeline RL: trains on rows that remote actors put into a Redis.

    redis-server &
    python sota-implementations/pipeline-rl/actor.py &
    python sota-implementations/pipeline-rl/actor.py &
    python sota-implementations/pipeline-rl/learner.py

Needs ``pip install "torchrl_llm[redis]"``. The learner sends weights to the actors through the same
Redis, or for large models through a shared disk (``weight_sync.type=files``). Data from the Redis
cannot run code in the learner. Ctrl-C saves after the step; ``checkpoint.resume=auto`` resumes,
also after a kill, and the actors continue, too. Every key is in config/pipeline-rl.yaml and
config/common.yaml.
"""

from __future__ import annotations

from redis_arguments import check_passwords

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "pipeline-rl", check=check_passwords)

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig
from pipeline_utils import load_config, redis_collection

# The training loop of asynchronous GRPO.
sys.path.append(str(Path(__file__).parents[1] / "grpo"))
from async_loop import train_async


@hydra.main(version_base="1.3", config_path="config", config_name="pipeline-rl")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    train_async(config, redis_collection, lambda collector, model: collector.publish(model))


if __name__ == "__main__":
    main()
