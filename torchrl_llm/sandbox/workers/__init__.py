"""Where slow work runs: threads that can be given up, and processes that can be killed.

Tools and rewards use them; neither knows of conversations or tensordicts.

Next: :mod:`torchrl_llm.sandbox.workers.daemon_threads` for what waits,
:mod:`torchrl_llm.sandbox.workers.worker_pool` for what computes, or may never end.
"""

from torchrl_llm.sandbox.workers.daemon_threads import DaemonThreads
from torchrl_llm.sandbox.workers.worker_pool import (
    RemoteCallError,
    RemoteDiedError,
    RemoteRaisedError,
    RemoteTimeoutError,
    WorkerPool,
)

__all__ = [
    "DaemonThreads",
    "RemoteCallError",
    "RemoteDiedError",
    "RemoteRaisedError",
    "RemoteTimeoutError",
    "WorkerPool",
]
