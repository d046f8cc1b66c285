#!/usr/bin/env bash
# launch/cloud_tpu.sh TPU_NAME ZONE CONFIG RUN [key=value …]
# One process per host of a slice that has jaxlm installed; RUN, a full path, on storage that every host has mounted. They
# go on without this connection, and each writes to jaxlm/train.log of its host. To watch, and to stop with a checkpoint:
#   gcloud compute tpus tpu-vm ssh TPU_NAME --zone=ZONE --worker=0 --command='tail -f jaxlm/train.log'
#   gcloud compute tpus tpu-vm ssh TPU_NAME --zone=ZONE --worker=0 --command='pkill -TERM -f "[j]axlm train"'
set -euo pipefail
name=$1 zone=$2 config=$3 run=$4
shift 4
train=$(printf '%q ' jaxlm train "$config" --out "$run" "data.cache=$(dirname "$run")/cache" "$@")
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="cd jaxlm && { nohup $train >> train.log 2>&1 < /dev/null & }"
