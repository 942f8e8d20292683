#!/usr/bin/env bash
# The canary on the real daemon: outputs that are right pass, of every kind of model there is a
# preset for; a backend that is wrong is found out: one that is told to corrupt, and one that was
# built with a bug in its kernel.
#
#   tests/daemon/canary.sh BIN_DIR FOLDER_OF_THE_MODULE_WITH_A_BUG
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
planted=$2
attnd=$bin/attnd
export ATTND_ENDPOINT=ipc://$dir/s
start_with() { # FLAG...
  launch "$attnd" --listen "$ATTND_ENDPOINT" --listen.http 127.0.0.1:0 --device.kv_memory 256M --stats.canary 1 "$@"
  serves || die "no daemon"
  port=$(http_port)
}
counter() { "$bin/attnctl" stats | sed -n "s/^canary_$1_total //p"; }
# above NAME N: the counter is; the load goes on meanwhile
above() {
  kill -0 "$beside" || die "the load ended: $(cat "$dir/load")"
  [[ $(counter "$1") -gt $2 ]]
}
run_load() { # FLAG...: in the background
  "$bin/attnload" --duration 600 "$@" >"$dir/load" 2>&1 &
  beside=$!
}
end_load() {
  kill "$beside"
  wait "$beside" || true
  beside=
}

start_with --backend cpu
n=0
for flags in '--preset bytelm --dtype f32' '--preset bytelm --kv-dtype int8' '--preset bytelm --kv-dtype nvfp4' \
  '--preset bytelm --choose-blocks 8 --context 400' \
  '--preset deepseek-v3 --layers 1 --heads --dtype bf16 --context 60' \
  '--preset gemma3-27b --layers 6 --context 1100' '--preset llama3-8b --layers 2 --dtype f16'; do
  # shellcheck disable=SC2086
  run_load $flags --sequences 2
  await above items $((n + 20))
  end_load
  n=$(counter items)
  [[ $(counter wrong) == 0 ]] || die "a right output is called wrong, with $flags: $(grep canary "$dir/log")"
done
[[ $(page /healthz) == 200 ]] || die "$(cat "$dir/page")"
page /metrics >/dev/null
grep -qE '^attnd_canary_error_ratio_bucket\{le="1"\} [1-9]' "$dir/page" || die "no histogram"
"$bin/attnctl" config set stats.canary 0 >/dev/null
stop

caught() { # what is wrong has been noticed: in the log and by /healthz
  await above wrong 0
  end_load
  grep -qE 'level=error msg="canary: an output is wrong" pool="?[a-z].* sequence=[0-9]+ layer=[0-9]+ head=[0-9]+ pos=[0-9]+ element=[0-9]+ got=.* expected=.* times_the_bound=' "$dir/log" || die "nothing in the log"
  [[ $(page /healthz) == 503 ]] && grep -q 'the canary has found [1-9][0-9]* outputs wrong' "$dir/page" || die "$(cat "$dir/page")"
  page '/healthz?verbose' >/dev/null
  grep -qE '^\[-\] canary: [1-9][0-9]* of [1-9][0-9]* outputs wrong' "$dir/page" || die "$(cat "$dir/page")"
  [[ $(page /readyz) == 503 ]] || die "ready with wrong outputs"
  stop
}
start_with --danger-inject-faults --backend 'cpu+faults:corrupt%1'
run_load --preset bytelm --sequences 1
caught
start_with --danger-inject-faults --backend 'cpu+faults:corrupt%1' # one element of one of 128 heads
run_load --preset deepseek-v3 --layers 1 --heads --dtype bf16 --sequences 1 --context 6
caught

# as a module beside which no other lies
mkdir "$dir/bin"
cp "$bin/attnd" "$dir/bin/"
export ATTND_MODULE_DIR=$planted
attnd=$dir/bin/attnd
start_with --backend hip
run_load --preset bytelm --sequences 2 --context 40
caught

start_with --backend hip
run_load --preset deepseek-v3 --layers 1 --heads --dtype bf16 --sequences 2 --context 6
caught
echo "wrong outputs are found out"
