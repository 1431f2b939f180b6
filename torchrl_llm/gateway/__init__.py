"""An endpoint over any policy: programs that own their loop are sessions, sessions are rows."""

from torchrl_llm._imports import lazy

lazy(__name__)
