#!/usr/bin/env bash
# Builds the fuzz targets with clang, libFuzzer and the sanitizers, and runs each for SECONDS_EACH
# (default 60) from the valid inputs and those in tests/*/corpus/TARGET, which name the targets.
# Corpora stay in BUILD_DIR/corpus; a finding ends the script with its input written to
# BUILD_DIR/findings.
#
#   tests/proto/fuzz_long.sh [BUILD_DIR]
set -euo pipefail
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$source_dir/build-fuzz}
seconds=${SECONDS_EACH:-60}

cmake -S "$source_dir" -B "$build" -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DATTND_FUZZ=ON -DATTND_SANITIZE=address -DATTND_CUDA=OFF -DATTND_HIP=OFF >/dev/null
targets=("$source_dir"/tests/*/corpus/*)
targets=("${targets[@]##*/}")
cmake --build "$build" --target "${targets[@]}" "${targets[@]/%/_libfuzzer}" -j 2
mkdir -p "$build/findings"
for target in "${targets[@]}"; do
  mkdir -p "$build/corpus/$target"
  "$build/bin/$target" --write "$build/corpus/$target"
  echo "$target: $seconds seconds"
  "$build/bin/${target}_libfuzzer" -max_total_time="$seconds" -max_len=8192 -timeout=5 \
    -print_final_stats=1 -artifact_prefix="$build/findings/$target-" "$build/corpus/$target" \
    "$source_dir"/tests/*/corpus/"$target" 2>&1 |
    grep -E '^#[0-9]+.*(DONE|INITED)|ERROR|SUMMARY|stat::(number|average|peak)'
  "$build/bin/$target" "$build/corpus/$target" # the replay driver agrees
done
