"""Text of rows: what is decoded in parts is what is decoded at once."""

from __future__ import annotations

import random

import pytest
import torch
from data.text.tokenizers_of_the_zoo import make_tokenizer

from torchrl_llm.data.text.codec import Codec
from torchrl_llm.modules.policies.row_readers import TextCodec

TEXT = "ab <|im_end|> é\n<think>\U0001f642 user\n\n  x日本</think>"


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "prepend"])
@pytest.mark.parametrize("skip", [False, True])
def test_a_longer_row_has_the_text_that_it_has_at_once(kind, skip):
    tokenizer, draw = make_tokenizer("faithful", kind), random.Random(0)
    codec = TextCodec(tokenizer, skip_special_tokens=skip)
    spelled = Codec(tokenizer).ids(TEXT * 3)
    cuts = 0
    for _ in range(200):
        ids = draw.choices(range(len(tokenizer)), k=8) if draw.random() < 0.5 else spelled
        row, at = torch.tensor(ids), draw.randrange(len(ids) + 1)
        texts = codec.decode([row[:at]])
        cuts += "\ufffd" in texts[0]
        assert codec.decode_longer([row], [row[:at]], texts) == codec.decode([row])
    assert cuts or kind != "bytes"


def test_only_bytes_are_put_together():
    kinds = {
        kind: Codec(make_tokenizer("faithful", kind)).bytewise for kind in ("bytes", "prepend")
    }
    assert kinds == {"bytes": True, "prepend": False}
