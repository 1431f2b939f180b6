"""One stack for text: renders, continues and reads what each chat template writes.

:class:`ChatFormatter` is the public class: conversations to token ids, without ever encoding a
sampled token again. Each module below it holds one idea.
"""

from torchrl_llm.data.text.continuation import Extension, ForkCause, OnRewrite
from torchrl_llm.data.text.formatter import ChatFormatter, Encoded, assistant_mask

__all__ = ["ChatFormatter", "Encoded", "Extension", "ForkCause", "OnRewrite", "assistant_mask"]
