"""Divergence from a reference policy: measured per row, penalised in the reward."""

from torchrl_llm._imports import lazy

lazy(__name__)
