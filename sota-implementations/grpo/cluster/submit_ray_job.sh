#!/bin/bash
# grpo-async.py as a job of a Ray cluster that runs already (KubeRay, `ray up`, machines by hand).
#
#     RAY_ADDRESS=http://head:8265 sota-implementations/grpo/cluster/submit_ray_job.sh env=gsm8k ...
#
# The arguments are handed on to grpo-async.py. The checkout is sent along; the machines need its
# dependencies (an image with torchrl_llm[ray,vllm]) and, for checkpoints that outlive the head, a
# folder that they share: RUN_FOLDER.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir "$root" \
    --runtime-env-json '{"excludes": ["outputs", ".git"]}' -- \
    python sota-implementations/grpo/grpo-async.py ray.address=auto logging.progress=false \
    hydra.run.dir="${RUN_FOLDER:-outputs/grpo-async/job}" checkpoint.resume=auto "$@"
