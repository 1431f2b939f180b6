"""64 prompts x 64 tokens: our policies against raw ``generate`` that also returns log-probs.

python test/benchmarks/bench_generation.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from harness import compare, report
from models_helper import make_tiny_model as _make_tiny_model
from models_helper import make_tokenizer as _make_tokenizer
from tensordict import TensorDict

from torchrl_llm.data import Chat, ChatHistory
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import pad_rows, ragged_rows, read_rows
from torchrl_llm.modules import TransformersWrapper

PROMPTS, TOKENS = 64, 64
# An id that is not sampled: no row of the raw side ends before the others, as on our side.
NEVER = -1


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = _make_tokenizer()
    model = _make_tiny_model(
        len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3
    )
    words = "the quick brown fox jumps over the lazy dog and says hello to me".split()
    chats = [
        Chat([{"role": "user", "content": " ".join(words[: 3 + row % 12]) + f" {row}?"}])
        for row in range(PROMPTS)
    ]
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    by_history = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs=sampling, inplace=False
    )
    by_tokens = by_history.get_new_version(input_mode="tokens")
    history_td = TensorDict(
        history=ChatHistory(prompt=History.of(chats), batch_size=[PROMPTS]), batch_size=[PROMPTS]
    )
    rows = read_rows(by_history(history_td), ("tokens", "prompt"))
    tokens_td = TensorDict(tokens=ragged_rows({"prompt": rows}), batch_size=[PROMPTS])
    input_ids = pad_rows(rows, 0, side="left")
    mask = pad_rows([torch.ones_like(row) for row in rows], 0, side="left")

    def raw() -> tuple[torch.Tensor, torch.Tensor]:
        out = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=TOKENS,
            eos_token_id=NEVER,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        new = out.sequences[:, input_ids.shape[1] :]
        log_probs = [
            logits.log_softmax(-1).gather(-1, ids[:, None])
            for logits, ids in zip(out.logits, new.T, strict=True)
        ]
        return new, torch.cat(log_probs, dim=1)

    report(
        [
            compare("tokens mode / raw generate", lambda: by_tokens(tokens_td), raw, aim="<= 1.05"),
            compare(
                "history mode / raw generate", lambda: by_history(history_td), raw, aim="<= 1.15"
            ),
        ]
    )


if __name__ == "__main__":
    main()
