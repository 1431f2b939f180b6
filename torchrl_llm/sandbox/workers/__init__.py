"""Workers for slow functions: threads that can be abandoned, and processes that can be killed.

Tools and rewards use them; the workers do not depend on conversations or tensordicts.

Next: :mod:`torchrl_llm.sandbox.workers.worker_pool` has both kinds.
"""

from torchrl_llm._imports import lazy

lazy(__name__)
