from torchrl_llm._ray import ActorOptions as ActorOptions, RemoteObject as RemoteObject
from torchrl_llm.modules.remote.balancer import (
    LoadBalancer as LoadBalancer,
    LoadSnapshot as LoadSnapshot,
)
from torchrl_llm.modules.remote.pool import EnginePool as EnginePool
from torchrl_llm.modules.remote.pool_wire import ObjectStoreSource as ObjectStoreSource
from torchrl_llm.modules.remote.replica import Replica as Replica
from torchrl_llm.modules.remote.replica_supervisor import (
    PoolSpec as PoolSpec,
    Supervisor as Supervisor,
)
