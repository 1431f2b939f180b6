"""What the first transfer of a process would import, for seconds; the fork server has it."""

import vllm.distributed.utils
import vllm.distributed.weight_transfer.ipc_engine
import vllm.distributed.weight_transfer.nccl_engine
import vllm.model_executor.model_loader.mtp_validation  # noqa: F401
