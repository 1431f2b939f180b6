"""GRPO in which an actor samples while the learner trains; one command starts both, and a Redis.

    torchrl-llm train pipeline-rl
    torchrl-llm train pipeline-rl redis.url=redis://127.0.0.1:6379/0

Needs ``pip install "torchrl_llm[redis]"`` and the program redis-server. The Redis listens on a free
port of this machine; with ``redis.url`` the run uses that Redis instead. At the end, at an error
and at Ctrl-C all processes are stopped. ``actor.log`` and ``redis.log`` are in the run's folder.

On several machines start learner.py and any number of actor.py yourself.
"""

from __future__ import annotations

from redis_arguments import check_passwords

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "pipeline-rl", check=check_passwords)

import sys
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from local_processes import local_actor, local_redis
from omegaconf import DictConfig
from pipeline_utils import RedisConfig, load_config, redis_collection

from torchrl_llm._imports import require
from torchrl_llm.trainers import say

# The training loop of asynchronous GRPO.
sys.path.append(str(Path(__file__).parents[1] / "grpo"))
from async_loop import train_async


@hydra.main(version_base="1.3", config_path="config", config_name="pipeline-rl")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    require("redis", extra="redis", feature="pipeline-rl")
    told, folder = HydraConfig.get(), Path(HydraConfig.get().runtime.output_dir)
    typed = [argument.lstrip("+") for argument in told.overrides.task]
    keys = [argument for argument in typed if not argument.startswith("redis.url=")]
    given = len(keys) < len(typed) or config.redis.url != RedisConfig().url
    with local_redis(folder, config.redis.url if given else None) as (url, check_redis):
        config.redis.url = url
        with local_actor(folder, [*keys, f"redis.url={url}"]) as check_actor:
            say(f"actor and learner share a Redis; the actor writes {folder / 'actor.log'}")
            train_async(
                config,
                partial(redis_collection, checks=(check_redis, check_actor)),
                lambda collector, model: collector.publish(model),
            )


if __name__ == "__main__":
    main()
