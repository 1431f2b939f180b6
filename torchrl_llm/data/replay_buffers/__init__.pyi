from torchrl_llm.data.replay_buffers.buffer import ReplayBuffer as ReplayBuffer
from torchrl_llm.data.replay_buffers.group_sampler import PromptGroupSampler as PromptGroupSampler
from torchrl_llm.data.replay_buffers.grouping import (
    GroupTransform as GroupTransform,
    Selector as Selector,
    drop_incomplete as drop_incomplete,
    drop_truncated as drop_truncated,
)
from torchrl_llm.data.replay_buffers.join import JoinTurns as JoinTurns
from torchrl_llm.data.replay_buffers.ray_buffer import RayReplayBuffer as RayReplayBuffer
from torchrl_llm.data.replay_buffers.trajectory_queues import (
    GroupQueue as GroupQueue,
    Trajectory as Trajectory,
    TrajectoryQueue as TrajectoryQueue,
)
