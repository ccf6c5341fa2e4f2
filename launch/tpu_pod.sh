#!/usr/bin/env bash
# Train on all hosts of a Cloud TPU that is there: bash launch/tpu_pod.sh [--flag=value ...]
# ats_jax must be installed on each host (pip install 'ats_jax[tpu,gs]'). The processes find each
# other by what the machines say of themselves.
name=debug  # <name>
options=(--zone=us-central2-b)  # <options>
flags=(--config=debug --workdir=gs://bucket/debug)  # <flags>

printf -v command '%q ' ats-jax train "${flags[@]}" "$@"
exec gcloud compute tpus tpu-vm ssh "$name" --worker=all "${options[@]}" --command="ATS_CLUSTER=gcetpu $command"
