#!/usr/bin/env bash
# What an operator sees of a daemon with several cards: lists are of all of them, top and /metrics
# show each; load is computed right, whatever card it is on.
#
#   tests/clients/cards.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
holds() { python3 -c "import json,sys; x=json.load(open('$dir/out')); sys.exit(not ($1))" || die "not $1: $(head -c 2000 "$dir/out")"; }

export ATTND_ENDPOINT=ipc://$dir/attnd.sock
ctl=$bin/attnctl
start --device.index 0,3 --listen "$ATTND_ENDPOINT shm://$dir/shm" --listen.http 127.0.0.1:0 \
  --device.threads 1 --device.balance 0
port=$(http_port)
for endpoint in "$ATTND_ENDPOINT" "shm://$dir/shm"; do
  expect 0 "$bin/attnload" --endpoint "$endpoint" --preset bytelm --workers 2 --sequences 3 --context 40 --steps 20 --verify=5
  # over both cards, every one of which computes
  for split in heads tokens; do
    expect 0 "$bin/attnload" --endpoint "$endpoint" --preset bytelm --split $split --block-tokens 32 --workers 2 \
      --sequences 3 --context 200 --prompt attend --chunk 60 --steps 20 --verify=50
    expect 0 "$bin/attnload" --endpoint "$endpoint" --preset bytelm --split $split --block-tokens 32 --workers 2 \
      --sequences 3 --context 200 --prompt attend --chunk 60 --steps 20 --top-k 30 --rate 2000 --verify=50
    has '^sparse    a query visits 30 tokens$'
  done
done
expect 0 "$ctl" pool create over --layers 1 --q-heads 8 --kv-heads 2 --head-dim 64 --blocks 4 --split heads
has '^split heads$'
expect 0 "$ctl" --json pool list
holds "[p['split'] for p in x['pools'] if p['name'] == 'over'] == ['heads']"

# while sequences are open
"$bin/attnload" --preset bytelm --sequences 6 --context 40 --steps 60 --duration 600 >"$dir/load.log" 2>&1 &
beside=$!
has_six() { kill -0 "$beside" 2>/dev/null || die "no load: $(cat "$dir/load.log")"; "$ctl" --json sequences >"$dir/out" 2>"$dir/err.log" && holds_six; }
holds_six() { python3 -c "import json,sys; x=json.load(open('$dir/out')); sys.exit(len([s for s in x['sequences'] if s['tokens'] > 0]) != 6)"; }
await has_six
holds "sorted(s['card'] for s in x['sequences']) == [0, 0, 0, 1, 1, 1]"
expect 0 "$ctl" --json pool list
holds "x['pools'][-1]['sequences'] == 6 and x['pools'][-1]['free_blocks'] < x['pools'][-1]['blocks']"
expect 0 "$ctl" --json cache
holds "x['all']['sequences'] == 6 and x['all']['blocks_used'] > 0"
expect 0 "$ctl" --json top --count 1 --interval 0.3
holds "[c['device'] for c in x['cards']] == [0, 3] and all(c['sequences'] == 3 and not c['is_lost'] for c in x['cards'])"
holds "all(c['batches_per_second'] > 0 and c['blocks_free'] < c['blocks'] for c in x['cards'])"
holds "x['sequences'] == 6 and x['blocks'] == sum(c['blocks'] for c in x['cards'])"
expect 0 "$ctl" top --count 1 --interval 0.2
has '^ +card +3 .* 3 +[0-9]+$'
[[ $(page /metrics) == 200 ]] || die "no /metrics"
for device in 0 3; do
  grep -qE "^attnd_card_sequences\{device=\"$device\"\} 3" "$dir/page" || die "no sequences of $device: $(grep card "$dir/page")"
  grep -qE "^attnd_card_device_seconds_total\{device=\"$device\"\} [0-9.]*[1-9]" "$dir/page" || die "no time of $device"
  grep -qE "^attnd_card_lost\{device=\"$device\"\} 0" "$dir/page" || die "device $device is lost"
done
grep -qE '^attnd_sequences 6' "$dir/page" || die "no sum"
[[ $(page '/healthz?verbose') == 200 ]] || die "not healthy: $(cat "$dir/page")"

# by hand to one card, while they are used; the sum is what it was
for name in $("$ctl" --json sequences | python3 -c "import json,sys; print(*[s['sequence'] for s in json.load(sys.stdin)['sequences']])"); do
  expect 0 "$ctl" sequence place "$name" 1
done
expect 1 "$ctl" sequence place "$name" 2
says 'move.card is 2, there are 2 cards'
expect 2 "$ctl" sequence place "$name" x
expect 0 "$ctl" --json top --count 1 --interval 0.3
holds "[c['sequences'] for c in x['cards']] == [0, 6] and x['sequences'] == 6"
[[ $(page /metrics) == 200 ]] || die "no /metrics"
grep -qE '^attnd_card_moves_in_total\{device="3"\} 3' "$dir/page" || die "no moves: $(grep card_mov "$dir/page")"

# the end of one session frees what it has on all cards; its worker is gone, and makes no other
kill -9 "$beside"
wait "$beside" 2>/dev/null || true
beside=
expect 0 "$ctl" --json sessions
sessions=$(python3 -c "import json; print(*[s['session'] for s in json.load(open('$dir/out'))['sessions'] if s['client'] == 'attnload'])")
for session in $sessions; do "$ctl" kill session "$session" || true; done # those of before may just have ended
is_empty() { "$ctl" --json sequences >"$dir/out" 2>"$dir/err.log" && python3 -c "import json,sys; sys.exit(json.load(open('$dir/out'))['sequences'] != [])"; }
await is_empty
stop

# all: the cpu backend is one device
start --device.index all --listen "$ATTND_ENDPOINT"
expect 0 "$ctl" --json top --count 1 --interval 0.1
holds "x['cards'] == []"
stop
