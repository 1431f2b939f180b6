"""Remote engines: replicas in Ray actors, used as one backend."""

from torchrl_llm._imports import lazy

lazy(__name__)
