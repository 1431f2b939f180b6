"""The chat environment that a transform was appended to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl.envs import Transform, TransformedEnv

if TYPE_CHECKING:
    from torchrl_llm.envs.chat_env import ChatEnv


def chat_env_of(transform: Transform) -> ChatEnv | None:
    """The chat environment under all transforms; ``None`` where there is none (yet).

    Args:
        transform: in an environment, in a ``Compose``, or alone.
    """
    from torchrl_llm.envs.chat_env import ChatEnv

    try:
        env = transform.container
    except ValueError:  # a Compose that is in no environment yet
        return None
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env if isinstance(env, ChatEnv) else None
