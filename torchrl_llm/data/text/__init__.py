"""One stack for text: renders, continues and reads what each chat template writes.

:class:`ChatFormatter` is the public class: conversations to token ids, without ever encoding a
sampled token again. Each module below it holds one idea.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
