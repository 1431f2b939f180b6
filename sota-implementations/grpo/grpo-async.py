"""Asynchronous GRPO: while one batch is trained, the next ones are collected.

    python sota-implementations/grpo/grpo-async.py
    python sota-implementations/grpo/grpo-async.py train.max_policy_age=2 train.on_stale=drop
    python sota-implementations/grpo/grpo-async.py ray.address=auto ray.num_collectors=8

Collectors are actors of Ray (``pip install -e ".[ray]"``), each with environments and a sampler of
its own; new weights reach them through Ray's object store. Every key is in config/common.yaml,
config/grpo-async.yaml, and the files of config/loss, config/advantage and config/env. Ctrl-C saves
after the step; ``checkpoint.resume=auto`` goes on.
"""

from __future__ import annotations

import sys

import hydra
from async_loop import train_async
from omegaconf import DictConfig

from torchrl_llm.recipes.builders import seed_everything, set_threads
from torchrl_llm.recipes.ray_collection import ray_collection
from torchrl_llm.trainers import AsyncGRPOConfig, check_arguments, load_config


@hydra.main(version_base="1.3", config_path="config", config_name="grpo-async")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg, AsyncGRPOConfig)
    set_threads(config)
    seed_everything(config.seed)
    train_async(config, ray_collection, lambda collector, model: collector.start(model))


if __name__ == "__main__":
    sys.argv[1:] = check_arguments(sys.argv[1:], AsyncGRPOConfig)
    main()
