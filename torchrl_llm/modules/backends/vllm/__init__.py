"""vLLM as a backend: token ids in, token ids and log-probs out.

vLLM is only imported when an engine is built.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
