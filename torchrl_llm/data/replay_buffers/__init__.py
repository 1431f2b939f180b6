"""data.replay_buffers."""
