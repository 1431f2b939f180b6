"""Where slow work runs: threads that can be given up, and processes that can be killed.

Tools and rewards use them; neither knows of conversations or tensordicts.

Next: :mod:`torchrl_llm.envs.workers.threads` for what waits,
:mod:`torchrl_llm.envs.workers.processes` for what computes, or may never end.
"""

from torchrl_llm.envs.workers.processes import (
    RemoteCallError,
    RemoteDiedError,
    RemoteRaisedError,
    RemoteTimeoutError,
    WorkerPool,
)
from torchrl_llm.envs.workers.threads import DaemonThreads

__all__ = [
    "DaemonThreads",
    "RemoteCallError",
    "RemoteDiedError",
    "RemoteRaisedError",
    "RemoteTimeoutError",
    "WorkerPool",
]
