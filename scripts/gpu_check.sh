#!/usr/bin/env bash
# What is to be known on a GPU, the most important first: scripts/gpu_check.sh [FOLDER].
# Records and logs go to FOLDER; without it, records to bench/results and logs to bench/out.
# Each part has its own limit, and one that fails keeps none of the later ones from running. Needs the extras `test` and
# `bench`, a JAX for CUDA and a torch for CUDA. `kernels` and `compare` take three minutes together on an H200.
set -uo pipefail
cd "$(dirname "$0")/.."

device=$(python -c 'import jax; print(jax.devices("gpu")[0].device_kind)') || exit # fails without a GPU
device=${device,,} device=${device#nvidia } device=${device// /-} # as h200
out=${1:-bench/results} logs=${1:-bench/out}
mkdir -p "$out" "$logs"
failed=0

part() { # part NAME SECONDS COMMAND…
  local name=$1 seconds=$2
  shift 2
  printf '\n== %s\n' "$name"
  timeout "$seconds" "$@" >"$logs/$name.log" 2>&1
  local code=$?
  tail -n 25 "$logs/$name.log" | cut -c1-300
  if ((code)); then
    failed=1
    printf '== %s ended with %s\n' "$name" "$code"
  fi
}
measure() { # measure BENCHMARK SECONDS MODEL OPTION…
  local name=$1 seconds=$2 model=$3
  shift 3
  part "$name" "$seconds" env "XLA_PYTHON_CLIENT_MEM_FRACTION=${fraction:-0.75}" \
    python -m "bench.$name" --model "$model" --json "$out/$name-$model-$device.json" "$@"
}
tests() { # tests NAME SECONDS OPTION…: several processes on the one GPU, small programs that need no tuning
  local name=$1 seconds=$2
  shift 2
  part "$name" "$seconds" env KERNELS=0 XLA_PYTHON_CLIENT_PREALLOCATE=false \
    XLA_FLAGS="--xla_backend_optimization_level=3 --xla_gpu_autotune_level=0" pytest -q -n 8 --dist loadfile "$@"
}

tests kernels 180 -m gpu tests/ops
part torch 60 python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch has no GPU to compare with")'
fraction=0.42 measure compare 240 llama-3.1-8b --rounds 6 --most-rows 32 # transformers needs the rest
part overhead 240 python -m bench.overhead --json "$out/overhead-tiny-$device.json"
part moe 180 python -m bench.moe --json "$out/moe-qwen3-30b-a3b-$device.json"
tests engine 540 tests/executor tests/generate
fraction=0.42 measure requests 240 llama-3.1-8b --rounds 4
measure attention 300 llama-3.1-8b
measure layouts 240 llama-3.1-8b --rounds 6
measure quantised 240 llama-3.1-8b --rounds 6
tests suite 1500 --maxfail=20 --deselect tests/test_documents.py
exit $failed
