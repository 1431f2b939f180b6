"""Chat templates: rendering, continuing and parsing conversations as text and token ids.

:class:`ChatFormatter` is the public class: it turns conversations into token ids and never encodes
a sampled token again.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
