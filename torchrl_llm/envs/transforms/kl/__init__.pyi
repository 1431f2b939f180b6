from torchrl_llm.envs.transforms.kl.kl_penalty import (
    KLComputation as KLComputation,
    KLRewardTransform as KLRewardTransform,
    KLTransform as KLTransform,
    RetrieveKL as RetrieveKL,
)
from torchrl_llm.envs.transforms.kl.ray_kl import (
    RayKLRewardTransform as RayKLRewardTransform,
    RayRetrieveKL as RayRetrieveKL,
)
from torchrl_llm.envs.transforms.retrieve_scores import RetrieveLogProb as RetrieveLogProb
