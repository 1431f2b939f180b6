"""Replay buffers of rows: the buffer, joined turns, and the queues behind grouping transforms."""

from __future__ import annotations

from torchrl_llm.data.replay_buffers.buffer import ReplayBuffer
from torchrl_llm.data.replay_buffers.group_sampler import PromptGroupSampler
from torchrl_llm.data.replay_buffers.grouping import (
    GroupTransform,
    Selector,
    drop_incomplete,
    drop_truncated,
)
from torchrl_llm.data.replay_buffers.join import JoinTurns
from torchrl_llm.data.replay_buffers.ray_buffer import RayReplayBuffer
from torchrl_llm.data.replay_buffers.trajectory_queues import (
    GroupQueue,
    Trajectory,
    TrajectoryQueue,
)

__all__ = [
    "GroupQueue",
    "GroupTransform",
    "JoinTurns",
    "PromptGroupSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "Selector",
    "Trajectory",
    "TrajectoryQueue",
    "drop_incomplete",
    "drop_truncated",
]
