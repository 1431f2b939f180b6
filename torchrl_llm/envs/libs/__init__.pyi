from torchrl_llm.envs.libs.mlgym import MLGymWrapper as MLGymWrapper, make_mlgym as make_mlgym
from torchrl_llm.envs.libs.openenv import OpenEnvClient as OpenEnvClient, OpenEnvEnv as OpenEnvEnv
from torchrl_llm.envs.libs.sessions import (
    Observed as Observed,
    Session as Session,
    SessionEnv as SessionEnv,
)
