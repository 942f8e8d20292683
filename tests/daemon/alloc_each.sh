#!/usr/bin/env bash
# Allocations of a life of attnd fail one by one, each in a process of its own: of requests of all
# kinds at two listeners, of settings that are read again, of the drain (of its start:
# alloc_failure.sh). No request hangs, and the process ends as if nothing had been.
# usage: alloc_each.sh BIN LIBRARY [STEP [FIRST]]
#   each STEP-th of them (1: all, 8,500 or so; 0.4 s each), the first of them FIRST (165): STEP runs
#   at once, from 165, 166 and so on, share the work
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1 library=$2 step=${3:-1} first=${4:-165}

control() { # attnctl and what it is asked
  local rc=0
  timeout 20 "$bin/attnctl" --endpoint "$url" --timeout 2 "$@" >/dev/null 2>&1 || rc=$?
  [[ $rc != 124 ]] || die "allocation $at: attnctl $* hangs"
}
requests() {
  local words rc=0
  timeout 60 "$bin/attnload" --endpoint "$url" --preset bytelm --sequences 4 --workers 2 \
    --context 8 --steps 4 --timeout 2 >/dev/null 2>&1 || rc=$?
  [[ $rc != 124 ]] || die "allocation $at: attnload hangs"
  control pool create p --layers 2 --q-heads 4 --kv-heads 2 --head-dim 32 --dtype f32 --blocks 16
  for words in ping info stats "pool describe p" sessions sequences cache pools latency slow \
    "kill sequence 1" "config set stats.slow_step 5ms" reload "pool drop p"; do
    # shellcheck disable=SC2086
    control $words
  done
}
life() { # the allocation that fails in $at; how many there were in $dir/count
  local rc=0
  rm -f "$dir"/s*
  launch env LD_PRELOAD="$library" FAIL_MALLOC_AT="$at" FAIL_MALLOC_COUNT="$dir/count" "$bin/attnd" \
    --backend cpu --device.threads 1 --device.kv_memory 16M --cache.io_memory 4M \
    --listen.max_message 1M --cache.max_sequences 64 --engine.max_sessions 64 \
    --cache.max_seq_tokens 1024 --listen.shm_client 1M --listen "ipc://$dir/s shm://$dir/shm" \
    --listen.http off
  serves || die "allocation $at: it does not start: $(tail -1 "$log")"
  for url in "ipc://$dir/s" "shm://$dir/shm"; do requests; done
  kill -HUP "$daemon" || die "allocation $at: it is gone: $(tail -1 "$dir/log")"
  kill -TERM "$daemon" || die "allocation $at: it is gone: $(tail -1 "$dir/log")"
  wait "$daemon" || rc=$?
  daemon=
  [[ $rc == 0 ]] || die "allocation $at: exit code $rc: $(tail -1 "$dir/log")"
}

at=0
life
n=$(cat "$dir/count") n_failed=0
for ((at = first; at <= n; at += step)); do
  life
  n_failed=$((n_failed + 1))
  ((n_failed % 100)) || echo "$n_failed failed, up to allocation $at of $n"
done
echo "$n_failed of $n allocations failed, each alone: nothing hangs, exit code 0"
