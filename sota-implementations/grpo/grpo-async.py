"""Asynchronous GRPO: while one batch is trained, the next ones are collected.

    python sota-implementations/grpo/grpo-async.py
    python sota-implementations/grpo/grpo-async.py train.max_policy_age=2 train.on_stale=drop
    python sota-implementations/grpo/grpo-async.py ray.address=auto ray.num_collectors=8

Collectors are actors of Ray (``pip install "torchrl_llm[ray]"``), each with its own environments
and sampler; new weights reach them through Ray's object store. Every key is in config/common.yaml,
config/grpo-async.yaml, and the files of config/loss, config/advantage and config/env. Ctrl-C saves
after the step; ``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "grpo-async", siblings={"grpo": "grpo-sync.py"})

import hydra
from async_loop import train_async
from omegaconf import DictConfig

from torchrl_llm.recipes import AsyncGRPOConfig, load_config
from torchrl_llm.recipes.ray_collection import ray_collection


@hydra.main(version_base="1.3", config_path="config", config_name="grpo-async")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    config = load_config(cfg, AsyncGRPOConfig)
    train_async(config, ray_collection, lambda collector, model: collector.start(model))


if __name__ == "__main__":
    main()
