#!/usr/bin/env bash
# attnd that cannot start says why in one sentence that names the setting or the path, with the exit
# code that docs/operations.md gives it.
#
#   tests/daemon/start.sh BIN_DIR
set -euo pipefail
bin=$1
dir=$(mktemp -d)
daemon=
cleanup() {
  [[ -z $daemon ]] || kill -9 "$daemon" 2>/dev/null || true
  rm -rf "$dir"
}
trap cleanup EXIT
die() {
  echo "FAILED: $*" >&2
  exit 1
}
# fails CODE WORDS FLAG...: attnd with these flags leaves with CODE and says WORDS as an error
fails() {
  local want=$1 words=$2 rc=0
  shift 2
  timeout 30 "$bin/attnd" --backend cpu --listen.http off "$@" >"$dir/log" 2>&1 || rc=$?
  [[ $rc == "$want" ]] || die "exit code $rc, not $want: $* $(cat "$dir/log")"
  grep -E 'error: ' "$dir/log" | grep -qE -e "$words" || die "no \"$words\" in: $(cat "$dir/log")"
}

fails 64 'engine.lease = 3 ' --engine.lease 3
printf '[engine]\nleese = 3s\n' >"$dir/conf"
fails 78 'conf:2: .*engine.leese.*lease' --config "$dir/conf"
fails 69 'device.kv_memory: .*65970697666560' --device.kv_memory 60T --listen "ipc://$dir/s"
fails 71 'max_sequences 1000000' --cache.max_sequences 1000000 --cache.max_seq_tokens 268435456 \
  --device.kv_memory 16M --listen "ipc://$dir/s"
fails 73 "directory $dir/a/b" --device.kv_memory 16M --listen "ipc://$dir/a/b/s"
touch "$dir/file"
for transport in ipc shm; do
  fails 73 "$transport://$dir/file: .*no socket" --device.kv_memory 16M --listen "$transport://$dir/file"
  # what another one serves is refused, what a dead one left is taken over
  start() {
    "$bin/attnd" --backend cpu --device.kv_memory 16M --listen "$transport://$dir/$transport" \
      --listen.http "$1" >"$dir/log.first" 2>&1 &
    daemon=$!
    "$bin/attnctl" --endpoint "$transport://$dir/$transport" --wait 60 ping >/dev/null || die "no ping"
  }
  start 127.0.0.1:0
  fails 73 "$transport://$dir/$transport: .*in use" --device.kv_memory 16M --listen "$transport://$dir/$transport"
  port=$(grep -oE 'http://127.0.0.1:[0-9]+' "$dir/log.first")
  fails 73 'listen.http' --device.kv_memory 16M --listen "ipc://$dir/s" --listen.http "${port#http://}"
  kill -9 "$daemon"
  wait "$daemon" 2>/dev/null || true
  [[ -S $dir/$transport ]] || die "a killed daemon took its socket along"
  start off
  kill "$daemon"
  wait "$daemon" || die "exit code $? after SIGTERM"
  daemon=
  [[ ! -e $dir/$transport ]] || die "the socket is left"
done
echo "attnd says why it does not start"
