from torchrl_llm.gateway.calls import (
    Answer as Answer,
    Call as Call,
    Port as Port,
    RefusedCallError as RefusedCallError,
)
from torchrl_llm.gateway.policy_engine import PolicyEngine as PolicyEngine
from torchrl_llm.gateway.program_env import ProgramEnv as ProgramEnv
from torchrl_llm.gateway.program_runner import ProgramRunner as ProgramRunner
from torchrl_llm.gateway.session import (
    Engine as Engine,
    EngineLimits as EngineLimits,
    Formatters as Formatters,
    GatewaySession as GatewaySession,
)
