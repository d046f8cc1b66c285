#!/usr/bin/env bash
# sbatch --nodes=4 launch/slurm_elastic.sh CONFIG RUN mesh.data=32 checkpoint.memory_every=20 [key=value …]
#SBATCH --job-name=jaxlm
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@300
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
# As slurm.sh, but a node or process that is lost ends neither the job nor the others: they start again without it, on fewer
# mesh.data, from the newest copy in memory or checkpoint. A job that asks for another turn has all its nodes again, and
# mesh.data as given. PORT, and one more port for each start after the first, is free on every node.
set -uo pipefail
config=$1 run=$2
shift 2
coordinator=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${PORT:-9876}
train='JAX_LOCAL_DEVICE_IDS=$SLURM_LOCALID exec jaxlm train "${@:2}" --elastic --process "$SLURM_PROCID/$SLURM_NTASKS@$1"'
ended=$(srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  bash -c "$train" bash "$coordinator" "$config" --out "$run" --json "$@")
status=$?
echo "$ended"
if [[ $ended == *'"stopped": "SIGTERM"'* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
# The first process of the last start printed its result: what was lost before it does not count.
[[ -n $ended ]] || exit "$status"
