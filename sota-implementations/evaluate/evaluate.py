"""Score a model on GSM8K, IFEval, HumanEval or any other task; write answers, figures, a table.

    python sota-implementations/evaluate/evaluate.py model.name=outputs/grpo/... \
        tasks=[gsm8k] data_files.gsm8k=test.jsonl
    python sota-implementations/evaluate/evaluate.py model.name=Qwen/Qwen2.5-0.5B-Instruct \
        inference_model.backend=vllm data_files.humaneval=HumanEval.jsonl.gz \
        data_files.ifeval=input_data.jsonl data_files.gsm8k=test.jsonl

The run's folder gets ``answers_<task>.jsonl``, one line per answer, and ``metrics.json``. Every key
is in config/evaluate.yaml.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "evaluate", open_keys=("data_files", "options"))

import json
from pathlib import Path

import hydra
import torch
from evaluate_config import EvaluateConfig, load_config
from evaluate_utils import answer_task, figures, make_policy, table
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from torchrl_llm.errors import RewardError
from torchrl_llm.recipes.builders import spare_threads
from torchrl_llm.trainers import show
from torchrl_llm.trainers.checkpoint import lock_folder


@hydra.main(version_base="1.3", config_path="config", config_name="evaluate")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    config = load_config(OmegaConf.to_container(cfg, resolve=True))
    spare_threads(config.model.name)
    torch.manual_seed(config.seed)
    folder = Path(HydraConfig.get().runtime.output_dir)
    with lock_folder(folder):  # two runs of the same second have the same folder
        results, errors = answer_all(config, folder)
    show(f"{table(results)}\n\nanswers and metrics in {folder}")
    show(f"to read them: torchrl-llm view {folder}")
    if errors:
        raise RewardError("; ".join(errors))


def answer_all(config: EvaluateConfig, folder: Path) -> tuple[dict[str, dict], list[str]]:
    """The figures of each task, and errors of whole tasks."""
    policy = make_policy(config)
    results, errors = {}, []
    for task in config.tasks:
        records = answer_task(config, task, policy, folder / f"answers_{task}.jsonl")
        results[task] = figures(records, config.eval.figures)
        # Written after each task, so that a run that ends early keeps its results.
        (folder / "metrics.json").write_text(json.dumps(results, indent=2) + "\n")
        if not any(record["valid"] for record in records):
            errors.append(
                f"{task}: none of the {len(records)} answers has a valid reward, the first "
                f"because of {records[0]['error']}"
            )
    return results, errors


if __name__ == "__main__":
    main()
