#!/bin/bash
# A recipe as several processes that train one model, on one machine or on several.
#
#     sota-implementations/grpo/cluster/torchrun.sh grpo/grpo-sync.py env=gsm8k model.name=...
#
# On several machines, run the same line on each (or by srun, one task a machine), with
#
#     NODES=4 HEAD=first-machine:29500 sota-implementations/grpo/cluster/torchrun.sh ...
#
# PROCESSES is how many run on each machine: by default one for each of its GPUs. RUN_FOLDER must be
# on a file system that all machines share. The processes get TERM when the job is to end; they
# finish their step, save, and have SHUTDOWN_S for that. The same line goes on with the run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
page=$1
shift
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
where=(--standalone)
if [ "${NODES:-1}" -gt 1 ]; then
    where=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB_ID:-${SLURM_JOB_ID:-run}}")
fi
exec torchrun "${where[@]}" --nproc-per-node "${PROCESSES:-$((gpus > 0 ? gpus : 2))}" \
    --shutdown-timeout "${SHUTDOWN_S:-300}" "$root/$page" \
    train.parallel="${PARALLEL:-fsdp2}" logging.progress=false \
    hydra.run.dir="${RUN_FOLDER:-outputs/$(basename "$page" .py)/${SLURM_JOB_ID:-torchrun}}" \
    checkpoint.resume=auto "$@"
