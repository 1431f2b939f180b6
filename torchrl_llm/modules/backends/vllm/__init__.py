"""vLLM as a backend: token ids in, token ids and log-probs out."""

from __future__ import annotations
