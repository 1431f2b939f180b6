"""Transports: how rows get from the processes that collect to the one that trains."""

from __future__ import annotations

from torchrl_llm.collectors.transport.channel import (
    ChannelClosedError,
    ChannelState,
    Delivery,
    LocalChannel,
    RowChannel,
    WorkerCounts,
)
from torchrl_llm.collectors.transport.ray_channel import RayChannel
from torchrl_llm.collectors.transport.redis_channel import RedisChannel

__all__ = [
    "ChannelClosedError",
    "ChannelState",
    "Delivery",
    "LocalChannel",
    "RayChannel",
    "RedisChannel",
    "RowChannel",
    "WorkerCounts",
]
