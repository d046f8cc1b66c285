#!/usr/bin/env bash
# sbatch --nodes=4 launch/slurm.sh CONFIG RUN [key=value …]
#SBATCH --job-name=jaxlm
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# One process per GPU, as JAX expects under Slurm, each with its cores: since 22.05 srun does not take them over.
# Five minutes before the time is over every process gets SIGTERM, saves, and ends with status 0. --requeue alone starts
# the job again only where a node failed or another job had precedence, so the job asks for it; then it resumes, and its
# output goes behind what is there. A checkpoint of hundreds of GB wants more than five minutes: its bytes at the speed of
# the storage, twice, because it is read again for its checksums.
set -euo pipefail
config=$1 run=$2
shift 2
ended=$(srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" jaxlm train "$config" --out "$run" --json "$@")
echo "$ended"
if [[ $ended == *'"stopped": "SIGTERM"'* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
