"""vLLM as a backend: token ids in, token ids and log-probs out.

Nothing here imports vLLM before an engine is built.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
