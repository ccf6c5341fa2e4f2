#!/usr/bin/env bash
# Two machines: gradients between them in 8 bits, experts over both, and a machine that is lost.
# It was not run on two machines. --toy runs it as two processes with virtual devices of a CPU.
#   salloc --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 bash lab/two_hosts.sh FOLDER
#   bash lab/two_hosts.sh FOLDER --toy
# FOLDER is on a file system that both see. It gets results.txt (a line a run: the median tokens/s
# of its last half, and the last loss), and for each run a workdir and a log. RUNS chooses runs.
set -u
out=$(realpath -m "${1:?FOLDER}") toy=${2:-} gpus=${GPUS:-8} python=${PYTHON:-python}
mkdir -p "$out/pids"
trap 'kill $(jobs -p) 2> /dev/null' EXIT
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$out/cache}
if [ "$toy" = --toy ]; then
  gpus=4 config=configs/debug.py
  export JAX_PLATFORMS=cpu JAX_NUM_PROCESSES=2
  export XLA_FLAGS="--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
  dense=(model.vocab_size=512 data.seq_len=64 data.max_segments=16 data.batch_size=16)
  experts=("${dense[@]}" moe.num_experts=8 moe.top_k=2 moe.d_ff=64)
else
  config=configs/dense_1_5b.py
  dense=(precision.param_dtype=bfloat16)
  experts=("${dense[@]}" model.num_layers=16 model.num_heads=16 model.num_kv_heads=4 step.remat=names
    moe.num_experts=16 moe.top_k=2 moe.d_ff=7168 ops.strict=false
    step.compiler_options=xla_gpu_enable_triton_gemm=false)
fi
all=$((2 * gpus)) steps=${STEPS:-40}
common=(data.batch_size=$((8 * all)) data.tokenizer=bytes data.validation_fraction=0.0 num_steps=100000
  eval.every_steps=0 eval.bigram_baseline=false optimizer.schedule=constant heartbeat_secs=10
  optimizer.warmup_steps=20 log.every_steps=1 log.writers=jsonl,console log.progress=false
  sample.max_tokens=0 checkpoint.every_steps=100000)

# A process on each machine, which notes its number; $! is then that of the one that waits for both.
start() {  # NAME SETTING...
  local name=$1 flags=()
  shift
  for setting in "${common[@]}" "$@"; do flags+=("--config.$setting"); done
  local own='echo $$ > "$0/pids/${SLURM_PROCID:-$JAX_PROCESS_ID}"; exec "$@"'
  local command=(bash -c "$own" "$out" "$python" -m ats_jax train "--config=$config"
    "--workdir=$out/$name" "${flags[@]}")
  if [ "$toy" = --toy ]; then
    export JAX_COORDINATOR_ADDRESS=localhost:$((20000 + RANDOM % 10000))
    (
      trap 'kill "$first" "$second"' TERM  # with the script
      JAX_PROCESS_ID=0 "${command[@]}" & first=$!
      JAX_PROCESS_ID=1 "${command[@]}" & second=$!
      wait "$first"; code=$?
      wait "$second" && exit "$code"
    ) >> "$out/$name.log" 2>&1 &
  else
    srun --wait=30 --kill-on-bad-exit=0 --cpu-bind=none "${command[@]}" >> "$out/$name.log" 2>&1 &
  fi
}

rate() {  # NAME
  "$python" - "$1" "$out/$1/metrics.jsonl" >> "$out/results.txt" << 'END'
import json, pathlib, statistics, sys
rows = [json.loads(line) for line in pathlib.Path(sys.argv[2]).read_text().splitlines()]
rows = [row for row in rows if "train/tokens_per_sec" in row]
speed = statistics.median(row["train/tokens_per_sec"] for row in rows[len(rows) // 2 :])
print(f"{sys.argv[1]}: {speed:.0f} tokens/s, loss {rows[-1]['train/loss']:.4f}, {len(rows)} steps")
END
}

runs=" ${RUNS:-fsdp replicas replicas_fp8 experts_fsdp experts_allgather experts_hierarchical lost} "

timed() {  # NAME SETTING...
  [[ $runs == *" $1 "* ]] || return
  start "$@" "num_steps=$steps"
  if wait $!; then rate "$1"; else echo "$1: ended with $?" >> "$out/results.txt"; fi
}

until_line() {  # NAME FIRST_LINE PATTERN JOB: wait while the job runs
  until tail -n "+$2" "$out/$1.log" 2> /dev/null | grep -qE "$3"; do
    kill -0 "$4" 2> /dev/null || return 1
    sleep 0.1
  done
}

lost() {  # NAME SETTING...: process 1 is killed once there is a checkpoint; all start again
  [[ $runs == *" $1 "* ]] || return
  start "$@" checkpoint.every_steps=10 "num_steps=$steps"
  local job=$! pid
  until_line "$1" 1 '^step +1[2-9] +train ' $job || { echo "$1: ended early" >> "$out/results.txt"; return; }
  pid=$(cat "$out/pids/1")
  local killed=$SECONDS lines
  lines=$(($(wc -l < "$out/$1.log") + 1))
  if [ "$toy" = --toy ]; then kill -9 "$pid"; else
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$(scontrol show hostnames | tail -n 1)" kill -9 "$pid"
  fi
  wait $job
  echo "$1: all had ended $((SECONDS - killed)) s after the kill, with $?" >> "$out/results.txt"
  start "$@" checkpoint.every_steps=10 "num_steps=$steps"
  job=$!
  until_line "$1" "$lines" '^step +[0-9]+ +train ' $job
  grep -oE 'resuming .* from step.*' "$out/$1.log" | tail -n 1 >> "$out/results.txt"
  echo "$1: the next step came $((SECONDS - killed)) s after the kill" >> "$out/results.txt"
  wait $job
  rate "$1"
}

hybrid=("${dense[@]}" mesh.data=2 "mesh.fsdp=$gpus")
timed fsdp "${dense[@]}" "mesh.fsdp=$all"
timed replicas "${hybrid[@]}"
timed replicas_fp8 "${hybrid[@]}" mesh.compress_gradients=fp8
timed experts_fsdp "${experts[@]}" "mesh.fsdp=$all"
timed experts_allgather "${experts[@]}" "mesh.expert=$all" moe.exchange=allgather
timed experts_hierarchical "${experts[@]}" "mesh.expert=$all" moe.exchange=hierarchical
lost lost "${hybrid[@]}"
cat "$out/results.txt"
