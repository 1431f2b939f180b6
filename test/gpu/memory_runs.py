"""Peak memory of steps of the GRPO recipe next to what ``torchrl-llm memory`` says by formula.

    export PYTHONPATH=.:test
    python -P test/gpu/memory_runs.py --device cuda --out FILE.json full
    python -P test/gpu/memory_runs.py --device cpu --tiny --out FILE.json full checkpointing lora

Two steps of a model of Qwen2.5-0.5B's shape with random weights, cut into three micro-batches each,
so that gradients are there while activations are. Nothing is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from models_helper import make_tokenizer as _make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm.cli.train import RECIPES
from torchrl_llm.recipes import launch, memory
from torchrl_llm.recipes.doctor.compose import compose
from torchrl_llm.trainers import TrainingRun

KINDS = {
    "full": [],
    "checkpointing": ["train_model.gradient_checkpointing=true"],
    "lora": ["train_model.lora.enabled=true"],
    "offload": ["train_model.offload_activations=true"],
    "on_cpu": ["optimizer.on_cpu=true"],
}
# Qwen2.5-0.5B; prompts of equal length, and a model that ends no answer.
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
TINY = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = 2


def reward(response: str, answer: str) -> float:
    """Differs between the answers of a group, so that there is something to learn."""
    return float(len(response) % 7)


def save_model(folder: Path, shape: dict[str, int], device: str) -> int:
    """Write random weights, a tokenizer and a file of rows; the tokens of a prompt."""
    config = Qwen2Config(**shape, eos_token_id=2, bos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer = _make_tokenizer()
    tokenizer.save_pretrained(folder)
    rows = [{"question": f"What is {number:03d}?", "answer": "7"} for number in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat = [{"role": "user", "content": rows[0]["question"]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text).input_ids)


@contextmanager
def peaks_by_part(peaks: dict[str, int]):
    """Note the most bytes that tensors take in each part of the steps."""
    timed = TrainingRun.timed

    @contextmanager
    def measured(self, name):
        torch.cuda.reset_peak_memory_stats()
        with timed(self, name):
            yield
        peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())

    TrainingRun.timed = measured
    try:
        yield
    finally:
        TrainingRun.timed = timed


def run(folder: Path, kind: str, prompt_tokens: int, *, device: str, tiny: bool) -> dict:
    """Two steps; bytes by formula and measured, of sampling and of training."""
    tokens, repeats, budget = (8, 2, 64) if tiny else (128, 8, 4096)
    config, _ = compose(
        "grpo",
        RECIPES["grpo"],
        [
            f"model.name={folder}",
            f"data={folder / 'rows.jsonl'}",
            "data.prompt=question",
            "data.answer=answer",
            f"reward={Path(__file__).resolve()}:reward",
            f"env.repeats={repeats}",
            "train.prompts_per_batch=8",
            f"train.max_steps={STEPS + 1}",
            f"train.micro_token_budget={budget}",
            "train.packing=padded",
            f"train.device={device}",
            f"inference_model.max_tokens={tokens}",
            "eval.num_prompts=0",
            "logging.progress=false",
            "logging.samples=null",
            "logging.rollouts=none",
            "checkpoint.interval=null",
            *KINDS[kind],
        ],
    )
    parts = memory.memory_parts(config, prompt_tokens=prompt_tokens)
    found = {where: {"formula": memory.peak_bytes(parts, where)} for where in ("sample", "train")}
    peaks: dict[str, int] = {}
    on_cuda = device == "cuda"
    page = launch.load_page("grpo/grpo-sync.py")
    with peaks_by_part(peaks) if on_cuda else tempfile.TemporaryDirectory():
        steps = page.train(config, folder / f"run of {kind}")
        for state in steps:
            if state.step == STEPS and "train/loss_objective" in state.metrics:
                trained = state.metrics["train/tokens_trained"]
                break
    rows = 8 * repeats
    found["tokens"] = {"told": rows * (prompt_tokens + tokens), "sampled": int(trained)}
    for where, part in found.items():
        if where != "tokens":
            part["measured"] = peaks.get(where)
    found["parts"] = {part.name: part.num_bytes for part in parts if part.where != ("disk",)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+", choices=list(KINDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prompt_tokens = save_model(place, TINY if given.tiny else SHAPE, given.device)
        if given.device == "cuda":
            torch.cuda.empty_cache()
        for kind in given.kinds:
            options = {"device": given.device, "tiny": given.tiny}
            found[kind] = run(place, kind, prompt_tokens, **options)
            given.out.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the runs are left in the middle: nothing is to be saved


if __name__ == "__main__":
    main()
