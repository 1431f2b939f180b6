"""Remote engines: replicas in Ray actors behind the port of one backend."""

from __future__ import annotations

from torchrl_llm._ray import ActorOptions, RemoteObject
from torchrl_llm.modules.remote.balancer import LoadBalancer, LoadSnapshot
from torchrl_llm.modules.remote.pool import EnginePool
from torchrl_llm.modules.remote.pool_wire import ObjectStoreSource
from torchrl_llm.modules.remote.replica import Replica
from torchrl_llm.modules.remote.replica_supervisor import PoolSpec, Supervisor

__all__ = [
    "ActorOptions",
    "EnginePool",
    "LoadBalancer",
    "LoadSnapshot",
    "ObjectStoreSource",
    "PoolSpec",
    "RemoteObject",
    "Replica",
    "Supervisor",
]
