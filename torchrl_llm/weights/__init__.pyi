from torchrl_llm.compat.vllm_weight_sync import (
    VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver as VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender as VLLMDoubleBufferWeightSender,
    VLLMWeightReceiver as VLLMWeightReceiver,
    VLLMWeightSender as VLLMWeightSender,
    VLLMWeightSyncScheme as VLLMWeightSyncScheme,
    WeightSender as WeightSender,
)
from torchrl_llm.weights.canary import CanaryCheck as CanaryCheck
from torchrl_llm.weights.canary_rule import (
    CanaryJudge as CanaryJudge,
    CanaryReport as CanaryReport,
    CanaryTarget as CanaryTarget,
)
from torchrl_llm.weights.engine_updaters import (
    AdapterWeights as AdapterWeights,
    DeltaWeights as DeltaWeights,
    EngineWeights as EngineWeights,
)
from torchrl_llm.weights.fingerprint import WeightLedger as WeightLedger
from torchrl_llm.weights.redis_weights import (
    RedisWeightReader as RedisWeightReader,
    RedisWeightSource as RedisWeightSource,
    RedisWeightWriter as RedisWeightWriter,
)
from torchrl_llm.weights.shared_engine import SharedEngineWeights as SharedEngineWeights
from torchrl_llm.weights.shared_files import (
    FileSource as FileSource,
    FileWeights as FileWeights,
    FileWriter as FileWriter,
)
from torchrl_llm.weights.sleeping_engine import SleepingEngineWeights as SleepingEngineWeights
from torchrl_llm.weights.transfer import (
    TransferSource as TransferSource,
    TransferWeights as TransferWeights,
    VLLMTransfer as VLLMTransfer,
)
from torchrl_llm.weights.weight_names import (
    engine_weights as engine_weights,
    get_model_metadata as get_model_metadata,
    normalized_name as normalized_name,
)
from torchrl_llm.weights.weight_updater import (
    InProcessWeights as InProcessWeights,
    JointWeights as JointWeights,
    WeightUpdater as WeightUpdater,
    named_weights as named_weights,
)
