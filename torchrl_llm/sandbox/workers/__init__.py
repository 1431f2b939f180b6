"""Where slow work runs: threads that can be given up, and processes that can be killed.

Tools and rewards use them; neither knows of conversations or tensordicts.

Next: :mod:`torchrl_llm.sandbox.workers.worker_pool` has both.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
