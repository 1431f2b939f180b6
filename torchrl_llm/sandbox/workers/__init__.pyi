from torchrl_llm.sandbox.workers.worker_pool import (
    DaemonThreads as DaemonThreads,
    RemoteCallError as RemoteCallError,
    RemoteDiedError as RemoteDiedError,
    RemoteRaisedError as RemoteRaisedError,
    RemoteTimeoutError as RemoteTimeoutError,
    WorkerPool as WorkerPool,
)
