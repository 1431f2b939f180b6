"""``python -m torchrl_llm``: see :mod:`torchrl_llm.cli`."""

from __future__ import annotations

import sys

from torchrl_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
