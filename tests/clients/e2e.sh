#!/usr/bin/env bash
# The client programs against the real daemon on the cpu backend: every preset, the open loop and a
# trace with verified outputs; attnctl's commands; the example; and the exit codes when things fail.
#
#   tests/clients/e2e.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
here=$(cd "$(dirname "$0")" && pwd)
# refuses WORDS COMMAND...: wrong usage, the option and the value named
refuses() {
  local words=$1
  shift
  expect 2 "$@"
  grep -qE -e "$words" "$dir/err.log" || die "no \"$words\" in: $(cat "$dir/err.log")"
}

export ATTND_ENDPOINT=ipc://$dir/attnd.sock
ctl=$bin/attnctl load=$bin/attnload

# why there is no connection, said at once: an hour's patience with answers does not matter
touch "$dir/file"
for run in "$ctl ping" "$load"; do
  expect 1 timeout 60 $run --timeout 3600
  says "no connection to $ATTND_ENDPOINT: no such path"
  for case in "ipc://$dir/file not a socket" "shm://$dir/file not a socket" \
    'tcp://127.0.0.1:1 nobody listens there' 'shm:///nowhere/x no such path'; do
    expect 1 timeout 60 $run --timeout 3600 --endpoint "${case%% *}"
    says "no connection to ${case%% *}: ${case#* }"
  done
done
expect 1 "$ctl" --wait 0.1 ping
says 'no connection to .*: no such path'
expect 1 "$ctl" --wait 0.1 --endpoint tcp://127.0.0.1:1 ping
says 'no connection to .* within [0-9]+ ms: nobody listens there'
for command in "$ctl --help" "$ctl --version" "$load --help" "$load --version"; do
  $command >/dev/full 2>"$dir/err.log" && die "$command writes into a full file"
  says 'write to stdout: No space'
done
refuses 'missing command' "$ctl"
refuses 'unknown command: fly' "$ctl" fly
refuses 'pool create NAME' "$ctl" pool
refuses 'ping takes no argument: now' "$ctl" ping now
refuses '--dtype: "fp16" is not f32, f16 or bf16 ' "$ctl" pool create p --dtype fp16
refuses '--dtype: "int8" is not f32, f16 or bf16 ' "$ctl" pool create p --dtype int8
refuses '--kv-dtype: "fp8" is not f32, f16, bf16, fp8_e4m3, int8, nvfp4 or mxfp4 ' "$ctl" pool create p --kv-dtype fp8
refuses '--split: "even" is not auto, whole, heads or tokens ' "$ctl" pool create p --split even
refuses '--soft-cap: "-1" is not a number from 0 to 1000000 ' "$ctl" pool create p --soft-cap -1
refuses '--timeout: "0" is not a number of seconds above 0' "$ctl" --timeout 0 ping
refuses '--wait: "nan" is not a number of seconds from 0' "$ctl" --wait nan ping
refuses '--as: "two" is not a whole number from 0 ' "$ctl" sequence import f --as two
for option in layers q-heads kv-heads head-dim block-tokens blocks count; do
  for value in 0 -1 1.5 4294967296 many; do
    refuses "--$option: \"$value\" is not a whole number from 1 " "$ctl" pool create p --$option $value
  done
done
refuses 'pool create needs --kv-heads ' "$ctl" pool create p --layers 2 --q-heads 8
refuses '--layers .*pool create' "$ctl" ping --layers 2
refuses '--preset: "gpt-17"' "$load" --preset gpt-17
refuses '--workers: "0" is not a whole number from 1 to 1024' "$load" --workers 0
refuses '--rate: "x" is not a number from' "$load" --rate x
refuses '--steps: "1.5"' "$load" --steps 1.5
refuses '--dtype: "int8" is not f32, f16 or bf16' "$load" --dtype int8
refuses '"5".*--verify=N' "$load" --verify 5
refuses '--arrivals: "often" is not poisson' "$load" --arrivals often
refuses '--slo: "p99" is not' "$load" --slo p99
refuses '--slo: "p99=5" is not' "$load" --slo p99=5
refuses '--slo needs --rate' "$load" --slo p99=5ms
refuses '--arrivals needs --rate' "$load" --arrivals poisson
refuses '--json and --csv' "$load" --json --csv
refuses '--speed.* need --trace' "$load" --speed 1
refuses '--trace goes without --context' "$load" --trace x --context 5
refuses '--layers' "$load" --preset bytelm --layers 5
refuses '--heads: the preset has no latents' "$load" --preset bytelm --heads
refuses '--pool-blocks: "0" is not a whole number from 1' "$load" --pool-blocks 0
expect 0 "$load" --help
has gemma3-27b

start --listen "$ATTND_ENDPOINT shm://$dir/shm.sock" --listen.http 127.0.0.1:0 --device.kv_memory 512M \
  --cache.max_pools 64
expect 0 "$ctl" ping
has '^backend cpu$'
expect 0 "$ctl" info
has 'max_step_items [1-9]'
expect 0 "$ctl" pool create p --layers 2 --q-heads 8 --kv-heads 2 --head-dim 64 --blocks 10 --dtype f16
has 'free_blocks 10'
expect 0 "$ctl" --json pool describe p
has '^\{.*"free_blocks": 10,.*\}$'
expect 0 "$ctl" --json ping
has '^\{.*"backend": "cpu".*\}$'
expect 0 "$ctl" --json info
has '^\{.*"max_step_items": [1-9].*\}$'
for command in ping info stats 'pool describe p' '--json stats'; do
  "$ctl" $command >/dev/full 2>"$dir/err.log" && die "$command writes into a full file"
  says 'write to stdout: No space'
done
expect 0 "$ctl" pool describe p
has 'dtype f16'
expect 1 "$ctl" pool describe nothing
expect 1 "$ctl" pool create p --layers 3 --q-heads 8 --kv-heads 2 --head-dim 64 --blocks 10
expect 0 "$ctl" stats
has '^steps_received_total [0-9]+'
has '^steps_answered_total.out_of_blocks 0'
grep -qvE '^[^ ]+ [^ ]+$' "$dir/out" && die "not a name and a value: $(cat "$dir/out")"
expect 0 "$ctl" --json stats
has '^\{.*"steps_received_total":'
expect 1 "$bin/attn_example"
has 'demo'
# the README's own line makes the example's pool
eval "expect 0 $(sed -n 's|^    build/bin/attnctl pool create|"$ctl" pool create|p' "$here/../../README.md")"
for _ in 1 2; do
  expect 0 "$bin/attn_example"
  has '^ok; 10 tokens, out\[0\] = 3$'
done

verified() { has '"verified": [1-9]' && has '"mismatched": 0,'; }
small="--workers 2 --sequences 2 --context 70 --chunk 32 --steps 4 --json --verify=32"
for preset in llama3-8b llama3-70b qwen3-32b gemma3-27b bytelm; do
  expect 0 "$load" --preset $preset --layers 2 --prompt attend $small
  verified
done
expect 0 "$load" --preset bytelm --layers all $small --dtype f32
verified
expect 0 "$load" --preset bytelm --layers all $small --dtype f16
verified
expect 0 "$load" --endpoint "shm://$dir/shm.sock" $small
verified
expect 0 "$load" --endpoint "shm://$dir/shm.sock" --preset bytelm --layers all --sequences 3 \
  --context 20 --steps 10 --rate 2000 --json --verify
verified
expect 0 "$ctl" --endpoint "shm://$dir/shm.sock" ping
# heads of a model of latents, which attnd projects
expect 0 "$load" --preset kimi-k2 --heads --context 20 --steps 3 --json --verify=8
verified
# past gemma's window, in a layer that slides and in one that does not
expect 0 "$load" --preset gemma3-27b --layers 6 --context 1100 --steps 3 --json --verify
verified
expect 0 "$load" --preset bytelm --layers all --sequences 3 --context 20 --steps 10 --rate 2000 \
  --json --verify
verified
has '"steps": 120,'
has '"late_share": '
for kind in constant gamma=2 burst=5; do
  expect 0 "$load" --preset bytelm --sequences 4 --context 20 --steps 5 --rate 300 --arrivals $kind --json --verify
  verified
  has '"steps": 20,'
  has "\"arrivals\": \"$kind\""
done
expect 0 "$load" --preset bytelm --sequences 4 --context 20 --steps 5 --rate 300 --arrivals gamma=2
has '^arrivals  gamma=2, 300 tokens/s, seed 1$'
# a bound that every answer keeps, so the rate that can be sent is found; then one that nothing
# keeps
expect 0 "$load" --preset bytelm --sequences 4 --context 20 --steps 5 --rate 200 --duration 0.2 --slo p50=1000s --json
has '"percentile": "p50"'
has '"good_rate": [1-9]'
has '"bad_rate": [1-9]'
expect 1 "$load" --preset bytelm --sequences 4 --context 20 --steps 5 --rate 0.004 --duration 0.05 --slo p50=0.001us
has 'failed .*--slo: no rate tried keeps p50'
# more than can be sent in time: the slowest of what was planned are not told
expect 0 "$load" --preset bytelm --sequences 2 --context 20 --steps 100 --rate 1e6 --json
has '"p99": null'
has '"p50": [0-9.e-]+,'
cp "$dir/out" "$dir/old.json"
expect 0 "$load" --preset bytelm --sequences 2 --context 20 --steps 100 --rate 1e6
has 'n/a .* sends were 1 ms late or more'
expect 0 "$load" --preset bytelm --context 20 --steps 10 --compare "$dir/old.json"
has '^differs   sequences: 1, before 2$'
has '^compare   times.total.p50 .* %$'
grep -q 'compare .*p99' "$dir/out" && die "a figure that was not told is compared"
expect 0 "$load" --preset bytelm --context 20 --steps 10 --json --compare "$dir/old.json"
has '"change": '
expect 1 "$load" --compare "$here/e2e.sh"
says 'compare: .*e2e.sh: '
expect 0 "$load" --preset bytelm --context 20 --steps 10 --csv
has '^mode,.*,times.total.p50,'
[[ $(head -1 "$dir/out" | tr -cd , | wc -c) == $(tail -1 "$dir/out" | tr -cd , | wc -c) ]] || die "columns: $(cat "$dir/out")"
head -1 "$dir/out" >"$dir/columns"
expect 0 "$load" --preset bytelm --sequences 2 --context 20 --steps 5 --rate 1e6 --duration 0.2 --slo p50=1000s --csv
head -1 "$dir/out" | cmp - "$dir/columns" || die "columns that differ between runs"
expect 0 "$load" --preset bytelm --sequences 2 --context 20 --steps 5 --duration 0.3 --json --verify
verified
# every output of sequences that begin again at different steps: 7 x 5 tokens in 4 layers
expect 0 "$load" --preset bytelm --layers all --sequences 7 --context 20 --steps 5 --json --verify=1000
verified
has '"verified": 140,'
expect 0 "$load" --preset bytelm --layers all --trace "$here/trace20.jsonl" --sequences 4 --workers 2 \
  --speed 10 --chunk 100 --json --verify
verified
has '"requests": 20,'
has '"ttft": '

admin=${ATTND_ENDPOINT#ipc://}.admin
[[ $(stat -c %a:%F "$admin") == 600:socket ]] || die "the admin socket: $(stat "$admin")"
expect 0 "$ctl" --json drain
has '^\{"draining": true\}$'
wait "$daemon" || die "attnd's exit code after drain"
grep -q "admin: drain, asked for by uid $(id -u), gid .*, pid [0-9]" "$log" || die "no word of who drained"
[ ! -e "$admin" ] || die "the admin socket is left"
daemon=

# a daemon that dies under load: every sequence is given up together, not one timeout after another
start --listen "$ATTND_ENDPOINT"
"$load" --preset bytelm --sequences 100 --context 10 --duration 600 --timeout 10 --json \
  >"$dir/out" 2>"$dir/err.log" &
loader=$!
has_steps() { "$ctl" stats | grep -qE "^steps_received_total [0-9]{$1}"; }
await has_steps 4
kill -9 "$daemon"
wait "$daemon" || true
daemon=
rc=0
timeout 300 tail --pid="$loader" -f /dev/null || die "attnload goes on without a daemon"
wait "$loader" || rc=$?
[[ $rc == 1 ]] || die "attnload's exit code without a daemon: $rc"
has '"failure": "worker 0, .*connection lost'

# --duration ends the run whatever the daemon does: stopped, its steps are given up; gone, that is a
# failure
for signal in STOP KILL; do
  for way in '' '--rate 100'; do
    start --listen "$ATTND_ENDPOINT"
    "$load" --preset bytelm --context 10 --duration 3 --timeout 3600 --json $way \
      >"$dir/out" 2>"$dir/err.log" &
    loader=$!
    await has_steps 2
    kill -$signal "$daemon"
    timeout 60 tail --pid="$loader" -f /dev/null || die "attnload $way goes on after its time ($signal)"
    rc=0
    wait "$loader" || rc=$?
    kill -9 "$daemon" 2>/dev/null || true # gone already, if the signal was KILL
    wait "$daemon" || true
    daemon=
    [[ $signal == KILL ]] && { [[ $rc == 1 ]] && has '"failure": "worker 0, .*no connection to' || die "exit code $rc, killed"; }
    [[ $signal == STOP ]] && { [[ $rc == 0 ]] && has '"unfinished": [1-9]' || die "exit code $rc, stopped"; }
  done
done

# a daemon that computes something else is found out
"$bin/fake_attnd" "$ATTND_ENDPOINT" >"$dir/fake.log" 2>&1 &
daemon=$!
expect 1 "$load" --wait 60 --preset bytelm --dtype f32 --context 10 --chunk 10 --steps 5 --json --verify
has '"mismatched": [1-9]'
expect 0 "$load" --preset bytelm --dtype f32 --context 10 --chunk 10 --steps 5 --json
kill "$daemon"
wait "$daemon" || die "fake_attnd's exit code"
daemon=
echo "client programs work"
