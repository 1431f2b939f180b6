"""A GRPO loss, forward and backward, on rows of very different length.

32 rows, log-normal lengths of 32 to 512 tokens, the first 16 the prompt; hidden 256, 4 layers, 4
heads, vocabulary 8,192, tied head. Ours in each layout against

- the same rows one at a time: 32 forwards and backwards without any padding;
- one call with the linear layers over all tokens and attention run row by row, which is how packing
  is written by hand (``PackedByHand``, with the same head and loss);
- the same with the block-causal mask written out over all tokens;
- ``GRPOLoss`` of TorchRL, padded and packed.

Then a group: 2 prompts of 256 tokens with 8 responses each of 32 to 128 tokens.

    python test/benchmarks/bench_ragged.py [pairs]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from harness import compare, report
from tensordict import LazyStackedTensorDict, TensorDict, set_list_to_stack
from transformers import AttentionInterface

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.scoring import TokenScorer
from torchrl_llm.functional import AttentionBlock, block_mask
from torchrl_llm.modules.backends.head import LMHead
from torchrl_llm.modules.backends.token_scorer import CausalScorer, score_hidden
from torchrl_llm.objectives import GRPOLoss

sys.path.insert(0, str(Path(__file__).parents[1]))
VOCABULARY = 8192


def make_model() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def make_rows(prompts: list[torch.Tensor], lengths: list[list[int]]) -> LazyStackedTensorDict:
    """Rows of random tokens behind prompts, with the columns of a GRPO loss."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for prompt, group in zip(prompts, lengths, strict=True):
        for length in group:
            response = torch.randint(3, VOCABULARY, (length,), generator=generator)
            ids = torch.cat([prompt, response])
            ones = torch.ones(len(ids), dtype=torch.bool)
            rows.append(
                TensorDict(
                    tokens=TensorDict(full=ids, prompt=prompt, response=response),
                    log_probs=TensorDict(full=torch.full((len(ids),), -9.0)),
                    masks=TensorDict(all_attention_mask=ones, all_assistant_mask=ones),
                    advantage=torch.tensor([[1.0 - 2.0 * (len(rows) % 2)]]),
                )
            )
    return lazy_rows(rows)


def ragged() -> LazyStackedTensorDict:
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(32, generator=generator) * 0.8 + 4.85).exp().clamp(32, 512).int()
    prompts = [torch.randint(3, VOCABULARY, (16,), generator=generator) for _ in lengths]
    return make_rows(prompts, [[int(length) - 16] for length in lengths])


def groups() -> LazyStackedTensorDict:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY, (256,), generator=generator) for _ in range(2)]
    lengths = torch.randint(32, 129, (2, 8), generator=generator).tolist()
    return make_rows(prompts, lengths)


@cache
def _loss() -> GRPOLoss:
    return GRPOLoss(CausalScorer(make_model()))


def ours(rows: LazyStackedTensorDict, layout: str) -> Callable[[], object]:
    loss = _loss()

    def work() -> None:
        loss.actor_network.layout = layout
        loss(rows).total_loss().backward()

    return work


def one_at_a_time(rows: LazyStackedTensorDict) -> Callable[[], object]:
    loss, pieces = _loss(), [lazy_rows([row]) for row in rows.unbind(0)]

    def work() -> None:
        loss.actor_network.layout = "padded"
        normalizer = loss.normalizer(rows)
        for piece in pieces:
            loss(piece, normalizer=normalizer).total_loss().backward()

    return work


def _attend_row_by_row(module, query, key, value, attention_mask, lengths=(), **_):
    """Attention of rows behind each other, a call for each."""
    parts = [x.split(lengths, dim=2) for x in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    out = [attend(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


class PackedByHand(torch.nn.Module, TokenScorer):
    """Rows behind each other, attended row by row or under a mask that is written out."""

    def __init__(self, model: torch.nn.Module, *, attention: str) -> None:
        super().__init__()
        AttentionInterface.register("row_by_row", _attend_row_by_row)
        if attention == "row by row":
            model.config._attn_implementation = "row_by_row"
        self.model, self.attention, self.head = model, attention, LMHead(model.lm_head)

    def token_scores(self, sequences, select, *, temperature=1.0, entropy=False, extras=None):
        lengths = [len(ids) for ids in sequences]
        flat = torch.cat(sequences)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        settings = {"lengths": lengths}
        if self.attention == "mask":
            mask = block_mask([AttentionBlock(1, n) for n in lengths])
            settings = {"attention_mask": mask[None, None]}
        body = self.model.model
        states = body(input_ids=flat[None], position_ids=positions, use_cache=False, **settings)[0]
        chosen = torch.cat(select).nonzero()[:, 0]
        return score_hidden(
            self.head, states[0].index_select(0, chosen - 1), flat[chosen], entropy=entropy
        )


def by_hand(rows: LazyStackedTensorDict, attention: str) -> Callable[[], object]:
    loss = GRPOLoss(PackedByHand(make_model(), attention=attention))
    return lambda: loss(rows).total_loss().backward()


def torchrl_side(rows: LazyStackedTensorDict, padded: bool) -> Callable[[], object]:
    set_list_to_stack(True).set()
    from models_helper import make_tokenizer as _make_tokenizer
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss as TorchRLLoss

    policy = TransformersWrapper(
        make_model(),
        tokenizer=_make_tokenizer(),
        input_mode="tokens",
        generate=False,
        pad_model_input=padded,
    )
    loss = TorchRLLoss(policy, entropy_bonus=False)
    return lambda: loss(rows).loss_objective.backward()


def main() -> None:
    torch.set_num_threads(1)
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows, results = ragged(), []

    def add(name: str, left: Callable, right: Callable, aim: str = "", count: int = pairs) -> None:
        results.append(compare(name, left, right, aim=aim, pairs=count))
        print(results[-1], file=sys.stderr, flush=True)

    auto = ours(rows, "auto")
    add("ragged: ours / attention row by row", auto, by_hand(rows, "row by row"), "1.0")
    add("ragged: ours / rows one at a time", auto, one_at_a_time(rows), "1.0")
    add("ragged: ours / mask over the stream", auto, by_hand(rows, "mask"))
    add("ragged: ours / TorchRL, padded", auto, torchrl_side(rows, padded=True), "0.2", 3)
    add("ragged: ours / TorchRL, packed", auto, torchrl_side(rows, padded=False), "", 3)
    for layout in ("bucketed", "packed"):
        add(f"ragged: {layout} / padded", ours(rows, layout), ours(rows, "padded"))
    pair = groups()
    add("groups: shared / packed", ours(pair, "shared"), ours(pair, "packed"))
    add(
        "groups: ours / TorchRL, padded", ours(pair, "auto"), torchrl_side(pair, padded=True), "", 3
    )
    report(results)


if __name__ == "__main__":
    main()
