"""Environments of other projects, driven through their own interfaces."""

from torchrl_llm.envs.libs.openenv import OpenEnvClient, OpenEnvEnv
from torchrl_llm.envs.libs.sessions import Observed, Session, SessionEnv

__all__ = ["Observed", "OpenEnvClient", "OpenEnvEnv", "Session", "SessionEnv"]
