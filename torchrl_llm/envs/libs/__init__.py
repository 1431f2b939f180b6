"""Environments of other projects, driven through their own interfaces."""

from torchrl_llm.envs.libs.mlgym import MLGymWrapper, make_mlgym
from torchrl_llm.envs.libs.openenv import OpenEnvClient, OpenEnvEnv
from torchrl_llm.envs.libs.sessions import Observed, Session, SessionEnv

__all__ = [
    "MLGymWrapper",
    "Observed",
    "OpenEnvClient",
    "OpenEnvEnv",
    "Session",
    "SessionEnv",
    "make_mlgym",
]
