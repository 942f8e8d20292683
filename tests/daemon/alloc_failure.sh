#!/usr/bin/env bash
# Each allocation of attnd's start fails once; then every 2nd, 7th and 31st of
# what it allocates while it answers requests of all kinds, reads its settings again and drains. It
# never crashes: a start ends with a sentence or serves, a request gets an answer.
# usage: alloc_failure.sh BIN LIBRARY
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1 library=$2

# attnd NAME=VALUE...: starts it with the library
attnd() {
  launch env LD_PRELOAD="$library" "$@" "$bin/attnd" --backend cpu --device.threads 1 \
    --device.kv_memory 2M --cache.io_memory 4M --listen.max_message 1M --cache.max_sequences 64 \
    --engine.max_sessions 64 --cache.max_seq_tokens 1024 --listen.shm_client 1M \
    --listen "ipc://$dir/s shm://$dir/shm" --listen.http 127.0.0.1:0
}
ended() { # its exit code in $rc
  rc=0
  wait "$daemon" || rc=$?
  daemon=
}

attnd FAIL_MALLOC_COUNT="$dir/count"
serves || die "it does not start"
kill -TERM "$daemon"
ended
n=$(cat "$dir/count")
[[ $n -gt 50 ]] || die "$n allocations are too few to be all"
for ((i = 1; i <= n; i++)); do
  attnd FAIL_MALLOC_AT=$i
  if serves; then
    kill -TERM "$daemon"
    ended
    [[ $rc == 0 ]] || die "allocation $i of $n: exit code $rc after SIGTERM"
  else
    ended
    case $rc in
      64 | 69 | 71 | 73 | 78) grep -q level=error "$dir/log" || die "allocation $i of $n: no sentence" ;;
      *) die "allocation $i of $n: exit code $rc" ;;
    esac
  fi
done
echo "start: each of $n allocations failed once"

for every in 2 7 31; do
  attnd FAIL_MALLOC_EVERY=$every FAIL_MALLOC_FROM="$dir/now"
  serves || die "it does not start"
  "$bin/attnctl" --endpoint "ipc://$dir/s" pool create p --layers 2 --q-heads 4 --kv-heads 2 \
    --head-dim 32 --dtype f32 --blocks 16 >/dev/null || die "no pool"
  touch "$dir/now"
  for url in "ipc://$dir/s" "shm://$dir/shm"; do
    timeout 60 "$bin/attnload" --endpoint "$url" --preset bytelm --sequences 8 --workers 4 \
      --context 20 --steps 60 --timeout 2 >/dev/null 2>&1 || [[ $? != 124 ]] || die "attnload hangs"
    for words in ping info stats "pool describe p" latency slow sessions sequences cache pools \
      "pool create q$every --layers 1 --q-heads 1 --kv-heads 1 --head-dim 8" "pool drop q$every" \
      "sequence export 1 $dir/file" "sequence import $dir/file" "kill sequence 1" "kill session 1" \
      "config list" "config set stats.slow_step 5ms" "trace $dir/trace --seconds 1" reload; do
      # shellcheck disable=SC2086
      timeout 20 "$bin/attnctl" --endpoint "$url" --timeout 2 $words >/dev/null 2>&1 || [[ $? != 124 ]] ||
        die "attnctl $words hangs"
    done
    kill -HUP "$daemon"
  done
  kill -0 "$daemon" || die "every allocation number $every fails: it is gone"
  rm "$dir/now"
  kill -TERM "$daemon"
  ended
  [[ $rc == 0 ]] || die "every allocation number $every fails: exit code $rc"
done
echo "requests, settings, drain: every 2nd, 7th and 31st allocation failed"
