from torchrl_llm.collectors.transport.channel import (
    ChannelClosedError as ChannelClosedError,
    ChannelState as ChannelState,
    Delivery as Delivery,
    LocalChannel as LocalChannel,
    RowChannel as RowChannel,
    WorkerCounts as WorkerCounts,
)
from torchrl_llm.collectors.transport.ray_channel import RayChannel as RayChannel
from torchrl_llm.collectors.transport.redis_channel import RedisChannel as RedisChannel
