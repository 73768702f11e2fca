#!/usr/bin/env bash
# What is to be known on a GPU, the most important first: scripts/gpu_check.sh [FOLDER for records and logs].
# Each part has its own limit, and one that fails keeps none of the later ones from running. Needs the extras `test` and
# `bench`, a JAX for CUDA and a torch for CUDA.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:-bench/results}
mkdir -p "$out"
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.6} # transformers needs the rest
device=$(python -c 'import jax; print(jax.devices()[0].device_kind.lower().replace(" ", "-"))') || exit
failed=0

part() { # part NAME SECONDS COMMAND…
  local name=$1 seconds=$2
  shift 2
  printf '\n== %s\n' "$name"
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1
  local code=$?
  tail -n 25 "$out/$name.log" | cut -c1-300
  if ((code)); then
    failed=1
    printf '== %s ended with %s\n' "$name" "$code"
  fi
}
measure() { # measure BENCHMARK SECONDS MODEL OPTION…
  local name=$1 seconds=$2 model=$3
  shift 3
  part "$name" "$seconds" python -m "bench.$name" --model "$model" --json "$out/$name-$model-$device.json" "$@"
}

part kernels 300 pytest -q -m gpu
measure attention 180 llama-3.1-8b
measure compare 420 llama-3.1-8b --rounds 6
measure layouts 240 llama-3.1-8b --rounds 6
measure quantised 240 llama-3.1-8b --rounds 6
part overhead 240 python -m bench.overhead --json "$out/overhead-tiny-$device.json"
part suite 1500 pytest -q -x --deselect tests/test_documents.py
exit $failed
