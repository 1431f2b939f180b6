"""Remote engines: replicas in Ray actors behind the port of one backend."""

from torchrl_llm._imports import lazy

lazy(__name__)
