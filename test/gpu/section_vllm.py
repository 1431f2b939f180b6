"""What needs a vLLM engine on the device: tokens a second, log-probs, and the tests marked so."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch
from results import Section

from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.transformers import TransformersBackend
from torchrl_llm.modules.backends.vllm import VLLMBackend
from torchrl_llm.modules.model_loading import load_model

TEST = Path(__file__).parents[1]


def main() -> None:
    run = Section.from_command_line()
    prompts, tokens = (4, 16) if run.tiny else (256, 256)
    dtype = "bfloat16" if run.device.type == "cuda" else "float32"
    model = load_model(dtype=dtype, device=run.device).eval()
    engine = VLLMBackend(dtype=dtype)
    rows = [torch.tensor([5, 6, 7 + row % 8]) for row in range(prompts)]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    engine.generate(rows, params)
    start = time.perf_counter()
    answers = [answer for (answer,) in engine.generate(rows, params)]
    seconds = time.perf_counter() - start
    run.add(f"vLLM, the embedded model, {prompts} rows", prompts * tokens / seconds, "tokens/s")
    full = [torch.cat(pair) for pair in zip(rows, [a.token_ids for a in answers], strict=True)]
    select = [torch.arange(len(ids)) >= 3 for ids in full]
    scored = TransformersBackend(model).token_scores(full, select).log_probs.detach().cpu()
    sampled = torch.cat([answer.log_probs for answer in answers])
    run.add("largest difference of a log-prob", float((sampled - scored).abs().max()), "nats")
    if run.device.type == "cuda":
        marked = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and vllm", str(TEST)]
        subprocess.run(marked, check=True, cwd=TEST.parent)


if __name__ == "__main__":
    main()
