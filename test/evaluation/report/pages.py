"""Rows made by hand, and pages read back as their script reads them."""

import base64
import gzip
import json
import re

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason, MaskReason, Source
from torchrl_llm.data.history import History
from torchrl_llm.data.views import ChatHistory

HOSTILE = [
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=2</script>",
    "<img src=x onerror=window.pwned=3>",
    "<!--<script>",
    "]]>&lt;b&gt;{{data}}{{script}}",
    '"><svg onload=window.pwned=4>',
    "javascript:window.pwned=5",
    "__proto__",
    "a\x00b\x1b[2Jc\x07\r\nd\te",
    "\u202egnp.exe\u2066\u200b\u2028",
    "half \ud83d of a character",
    "שלום עולם",
    "🤖 é 漢字",
    "x" * 400,
]


def make_row(
    tokenizer, prompt, response, *, step=1, group=0, trajectory=0, reward=1.0, mask=0, **more
):
    """A row as a collector gives it, with an advantage."""

    def encoded(text):
        clean = text.encode("utf-8", "replace").decode()
        return tokenizer.encode(clean, add_special_tokens=False)

    before, after = encoded(prompt), encoded(response) + [tokenizer.eos_token_id]
    ids = torch.tensor(before + after)
    sampled = torch.arange(len(ids)) >= len(before)
    generator = torch.Generator().manual_seed(trajectory)
    log_probs = torch.where(sampled, -3 * torch.rand(len(ids), generator=generator) ** 2, 0.0)
    chat = Chat([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}])
    reason = torch.where(sampled, mask, int(MaskReason.NOT_SAMPLED))
    row = TensorDict(
        {
            "step": torch.tensor(step),
            "group_id": torch.tensor(group),
            "traj_id": torch.tensor(trajectory),
            "turn": torch.tensor(0),
            "tokens": {
                "full": ids,
                "prompt": ids[: len(before)],
                "finish_reason": torch.tensor(int(FinishReason.STOP), dtype=torch.int8),
            },
            "log_probs": {"full": log_probs},
            "trace": {
                "source": torch.where(sampled, int(Source.SAMPLED), int(Source.PROMPT)).to(
                    torch.int8
                ),
                "turn": torch.where(sampled, 0, -1).to(torch.int16),
                "policy_version": torch.where(sampled, step, -1).to(torch.int32),
                "mask_reason": reason.to(torch.int8),
            },
            "advantage": torch.tensor([[reward - 0.5]]),
            "next": {
                "reward": torch.tensor([[reward]]),
                "reward_valid": torch.tensor(reward == reward),
                "done": torch.tensor([True]),
            },
        }
    )
    row["history"] = ChatHistory(full=History(messages=chat))
    row["query"] = prompt
    for name, value in more.items():
        row[name] = value
    return row


def make_rows(tokenizer, count, *, words=40, group_size=8):
    """Rows of groups, of different rewards, lengths and fates."""
    rows = []
    for i in range(count):
        group = i // group_size
        response = f"Answer {i}: " + " ".join(f"{(i * 7 + k * k) % 97}" for k in range(words))
        rows.append(
            make_row(
                tokenizer,
                f"What is {group} + {group % 7}?",
                response,
                step=1 + group // 4,
                group=group,
                trajectory=i,
                reward=(i * 5 % 11) / 10,
                mask=int(MaskReason.TRUNCATED) if i % 50 == 7 else 0,
                fate="truncated" if i % 50 == 7 else "trained",
                answer=str(group + group % 7),
            )
        )
    return rows


def unpacked(page):
    """Header and columns of a page."""
    (text,) = re.findall(r'id="data">([A-Za-z0-9+/=]*)</script>', page)
    whole = gzip.decompress(base64.b64decode(text))
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    columns = {
        name: np.frombuffer(whole, dtype, count, 8 + size + start)
        for name, (dtype, start, count) in header["columns"].items()
    }
    return header, columns
