#!/usr/bin/env bash
# launch/cloud_tpu.sh TPU_NAME ZONE CONFIG RUN [key=value …]
# One process per host of a slice that has jaxlm installed; RUN on storage that every host has mounted.
set -euo pipefail
name=$1 zone=$2 config=$3 run=$4
shift 4
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="cd jaxlm && jaxlm train $(printf '%q ' "$config" --out "$run" "$@")"
