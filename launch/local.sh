#!/usr/bin/env bash
# Train with several processes on this machine: bash launch/local.sh [--flag=value ...]
# On a machine with GPUs each process has one of its own. The variables below are all that a process
# needs to know; `ats-jax launch local` sets the same, and starts all again when one dies.
program=(ats-jax)  # <program>
flags=(--config=debug --workdir=runs/local)  # <flags>
processes=2  # <processes>

export JAX_COORDINATOR_ADDRESS=localhost:${PORT:-12355} JAX_NUM_PROCESSES=$processes
pids=()
for ((rank = 0; rank < processes; rank++)); do
  JAX_PROCESS_ID=$rank JAX_LOCAL_DEVICE_IDS=$rank "${program[@]}" train "${flags[@]}" "$@" &
  pids+=($!)
done
trap 'told=1; kill -TERM "${pids[@]}"' INT TERM  # all save, and end with 75

worst=0
for pid in "${pids[@]}"; do
  told=
  wait "$pid"
  code=$?
  if [ -n "$told" ]; then  # it was the trap that ended the wait
    wait "$pid"
    code=$?
  fi
  ((code > worst)) && worst=$code
done
exit "$worst"
