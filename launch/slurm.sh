#!/usr/bin/env bash
# sbatch --nodes=4 launch/slurm.sh CONFIG RUN [key=value …]
#SBATCH --job-name=jaxlm
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
# One process per GPU, as JAX expects under Slurm.
# Five minutes before the time is over every process gets SIGTERM and saves; the requeued job resumes.
set -euo pipefail
config=$1 run=$2
shift 2
srun --kill-on-bad-exit=1 jaxlm train "$config" --out "$run" "$@"
