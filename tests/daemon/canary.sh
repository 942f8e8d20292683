#!/usr/bin/env bash
# The canary on the real daemon: outputs that are right pass, of every kind of model there is a
# preset for; a backend that is wrong is found out: one that is told to corrupt, and one that was
# built with a bug in its kernel.
#
#   tests/daemon/canary.sh BIN_DIR FOLDER_OF_THE_MODULE_WITH_A_BUG
set -euo pipefail
bin=$1
planted=$2
attnd=$bin/attnd
dir=$(mktemp -d)
daemon=
loader=
cleanup() {
  for pid in $daemon $loader; do kill -9 "$pid" 2>/dev/null || true; done
  rm -rf "$dir"
}
trap cleanup EXIT
die() {
  echo "FAILED: $*" >&2
  tail -n 3 "$dir/log" >&2 || true
  exit 1
}
export ATTND_ENDPOINT=ipc://$dir/s
start() { # FLAG...
  : >"$dir/log"
  "$attnd" --listen "$ATTND_ENDPOINT" --listen.http 127.0.0.1:0 --device.kv_memory 256M --stats.canary 1 "$@" >"$dir/log" 2>&1 &
  daemon=$!
  "$bin/attnctl" --wait 20 ping >/dev/null || die "no daemon"
  port=$(grep -oE 'http://127.0.0.1:[0-9]+' "$dir/log" | grep -oE '[0-9]+$')
}
stop() {
  kill "$daemon"
  wait "$daemon" || die "exit code $?"
  daemon=
}
counter() { "$bin/attnctl" stats | sed -n "s/^canary_$1_total //p"; }
page() { # PATH
  exec 3<>"/dev/tcp/127.0.0.1/$port"
  printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3
  cat <&3
}
# until_above NAME N: looks again until the counter is; the load goes on meanwhile
until_above() {
  until [[ $(counter "$1") -gt $2 ]]; do
    kill -0 "$loader" || die "the load ended: $(cat "$dir/load")"
  done
}
run_load() { # FLAG...: in the background
  "$bin/attnload" --duration 600 "$@" >"$dir/load" 2>&1 &
  loader=$!
}
end_load() {
  kill "$loader"
  wait "$loader" || true
  loader=
}

start --backend cpu
n=0
for flags in '--preset bytelm --dtype f32' '--preset bytelm --kv-dtype int8' '--preset bytelm --kv-dtype fp8_e4m3' \
  '--preset gemma3-27b --layers 6 --context 1100' '--preset llama3-8b --layers 2 --dtype f16'; do
  # shellcheck disable=SC2086
  run_load $flags --sequences 2
  until_above items $((n + 20))
  end_load
  n=$(counter items)
  [[ $(counter wrong) == 0 ]] || die "a right output is called wrong, with $flags: $(grep canary "$dir/log")"
done
page /healthz >"$dir/page"
grep -q '200 OK' "$dir/page" || die "$(cat "$dir/page")"
page /metrics >"$dir/page"
grep -qE '^attnd_canary_error_ratio_bucket\{le="1"\} [1-9]' "$dir/page" || die "no histogram"
"$bin/attnctl" config set stats.canary 0 >/dev/null
stop

caught() { # what is wrong has been noticed: in the log and by /healthz
  until_above wrong 0
  end_load
  grep -qE 'level=error msg="canary: an output is wrong" pool="?[a-z].* sequence=[0-9]+ layer=[0-9]+ head=[0-9]+ pos=[0-9]+ element=[0-9]+ got=.* expected=.* times_the_bound=' "$dir/log" || die "nothing in the log"
  page /healthz >"$dir/page"
  grep -q '503 ' "$dir/page" && grep -q 'the canary has found [1-9][0-9]* outputs wrong' "$dir/page" || die "$(cat "$dir/page")"
  page '/healthz?verbose' >"$dir/page"
  grep -qE '^\[-\] canary: [1-9][0-9]* of [1-9][0-9]* outputs wrong' "$dir/page" || die "$(cat "$dir/page")"
  page /readyz >"$dir/page"
  grep -q '503 ' "$dir/page" || die "ready with wrong outputs"
  stop
}
start --danger-inject-faults --backend 'cpu+faults:corrupt%1'
run_load --preset bytelm --sequences 1
caught

# as a module beside which no other lies
mkdir "$dir/bin"
cp "$bin/attnd" "$dir/bin/"
export ATTND_MODULE_DIR=$planted
attnd=$dir/bin/attnd
start --backend hip
run_load --preset bytelm --sequences 2 --context 40
caught
echo "wrong outputs are found out"
