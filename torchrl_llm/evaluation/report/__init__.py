"""Rollouts for people: a page that a browser opens, and one row in a terminal."""

from __future__ import annotations

from torchrl_llm.evaluation.report.explain import explain
from torchrl_llm.evaluation.report.page import rollout_page

__all__ = ["explain", "rollout_page"]
