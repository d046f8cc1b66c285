#!/usr/bin/env bash
# sbatch launch/serve_slurm.sh MODEL KEYS [option …]
#SBATCH --job-name=jaxlm-serve
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@180
#SBATCH --open-mode=append
# A server on all GPUs of a node, for whoever shows one of the KEYS, a file with a key in each line; its address is in the
# job's output. Three minutes before the time is over it takes no more requests, finishes those that it has, and the job
# asks for another turn.
set -uo pipefail
model=$1 keys=$2
shift 2
stopped=
trap 'stopped=yes; kill -TERM $!' TERM
jaxlm serve "$model" --host 0.0.0.0 --port "${PORT:-8000}" --api-key-file "$keys" --drain-seconds 150 "$@" &
wait $!
status=$?
if [ -n "$stopped" ]; then
  wait $!  # the first one ended with the signal
  status=$?
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
