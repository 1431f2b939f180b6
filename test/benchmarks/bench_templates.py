"""256 chats of 6 messages to ids and assistant mask: one call for the batch, against transformers.

Both sides use the same tokenizer, the same template and the same chats, and give ids and mask of
every chat. The text and the way back are shown beside it.

    python test/benchmarks/bench_templates.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from harness import compare, report
from models_helper import make_tokenizer as _make_tokenizer

from torchrl_llm.data.history import History
from torchrl_llm.data.text.templates import resolve_template

WORDS = (
    "the quick brown fox jumps over the lazy dog what is the sum of 3 and 4 ? I am fine .".split()
)
NUM_CHATS, NUM_MESSAGES, NUM_WORDS = 256, 6, 30


def _chats() -> list[list[dict]]:
    draw = random.Random(0)
    return [
        [
            {
                "role": ("user", "assistant")[index % 2],
                "content": " ".join(draw.choices(WORDS, k=NUM_WORDS)),
            }
            for index in range(NUM_MESSAGES)
        ]
        for _ in range(NUM_CHATS)
    ]


def main() -> None:
    tokenizer, chats = _make_tokenizer(), _chats()
    history = History.from_chats(chats)
    rows = []
    for name, template in (
        ("own template", tokenizer.chat_template),
        ("qwen", resolve_template(None, chat_template_name="qwen").template),
    ):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        options |= {"add_generation_prompt": False}

        def ours(name=name, options=options):
            named = {} if name == "own template" else {"chat_template_name": name}
            return history.apply_chat_template(tokenizer=tokenizer, **named, **options)

        def theirs(template=template, options=options):
            return [
                tokenizer.apply_chat_template(chat, chat_template=template, **options)
                for chat in chats
            ]

        for row, other in zip(ours().unbind(0), theirs(), strict=True):
            assert row["input_ids"].tolist() == other["input_ids"]
            assert row["assistant_masks"].tolist() == list(map(bool, other["assistant_masks"]))
        rows.append(compare(f"256 x 6 to ids and mask, {name}", ours, theirs, aim="<= 1.3"))

    texts = history.apply_chat_template(chat_template_name="qwen")
    rows.append(
        compare(
            "256 x 6 from_text (ours) against rendering it (other)",
            lambda: History.from_text(texts, chat_template_name="qwen"),
            lambda: history.apply_chat_template(chat_template_name="qwen"),
            aim="-",
        )
    )
    rows.append(
        compare(
            "256 x 6 from_chats (ours) against copying the dicts (other)",
            lambda: History.from_chats(chats),
            lambda: [[dict(message) for message in chat] for chat in chats],
            aim="-",
            repeats=5,
        )
    )
    report(rows)


if __name__ == "__main__":
    main()
