#!/usr/bin/env bash
# What an operator sees of a daemon under load, and who may see it: every command that shows or
# changes a running daemon, as people and as programs read it.
#
#   tests/clients/operator.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
# holds PYTHON: true of the JSON in the output, as x
holds() { python3 -c "import json,sys; x=json.load(open('$dir/out')); sys.exit(not ($1))" || die "not $1: $(head -c 2000 "$dir/out")"; }

export ATTND_ENDPOINT=ipc://$dir/attnd.sock
ctl=$bin/attnctl
printf '[cache]\nmax_pools = 9\n[stats]\nslow_step = 1us # all are\n' >"$dir/conf"
start --config "$dir/conf" --listen "$ATTND_ENDPOINT tcp://127.0.0.1:0 shm://$dir/shm"
expect 0 "$ctl" pool list
[[ ! -s $dir/out ]] || die "pools before there is one"
says '^attnctl: no pools$'
for list in slow sequences tenants; do
  expect 0 "$ctl" $list
  says "^attnctl: no ${list/slow/slow steps}\$"
done
expect 0 "$ctl" cache
says '^attnctl: no pools$'
expect 0 "$ctl" --json slow
holds "x == {'slow': []}"

for endpoint in "$ATTND_ENDPOINT" "shm://$dir/shm"; do
  expect 0 "$bin/attnload" --endpoint "$endpoint" --preset bytelm --sequences 3 --context 20 --steps 20
done
# runs of more sizes than there may be pools: each releases its own
for i in {1..12}; do
  expect 0 "$bin/attnload" --preset bytelm --context $((i * 50)) --steps 1
done
expect 0 "$ctl" --json slow
holds "len(x['slow']) > 40 and {s['transport'] for s in x['slow']} == {'ipc', 'shm'}"
# the stages are all of a step's time
holds "all(abs(sum(s['stages'].values()) - s['total_seconds']) <= 0.01 * s['total_seconds'] for s in x['slow'])"
holds "all(s['stages']['device'] > 0 and s['status'] == 'ok' for s in x['slow'])"
grep -qE 'level=warn msg="slow step" total=[0-9.]+ receive=.* device=[0-9.]+ .*transport=ipc' "$log" || die "no slow step in the log"
grep -qE 'msg="session begins" session=[0-9a-f]{8} client="attnload"' "$log" || die "no session in the log"
# when, to the millisecond at least
holds "all(abs(s['unix_seconds'] - __import__('time').time()) < 600 for s in x['slow']) and len({s['unix_seconds'] for s in x['slow']}) > 5"
expect 0 "$ctl" slow
has '^[0-9]+ +1[0-9]{9}[.][0-9]{3} '
has '^number .*receive +queue +wait +launch +device +reply +send'
expect 0 "$ctl" --json latency
holds "x['stages']['device']['count'] > 40 and 0 < x['stages']['device']['p50'] <= x['stages']['device']['p99']"
holds "x['arrival_to_reply']['tcp'] == {'count': 0, 'mean': None, 'p50': None, 'p90': None, 'p99': None}"
expect 0 "$ctl" latency
has '^stages +device +[0-9]+ +[0-9.]+'

expect 0 "$ctl" --json pool create kept --layers 1 --q-heads 8 --kv-heads 2 --head-dim 64 --blocks 4
holds "(x['name'], x['blocks'], x['free_blocks']) == ('kept', 4, 4)"
expect 0 "$ctl" --json status
holds "x['state'] == 'ready' and x['backend'] == 'cpu' and x['up_seconds'] >= 0 and x['blocks_free'] <= x['blocks'] and x['batches_failed_total'] == 0"
expect 0 "$ctl" --json pools
cp "$dir/out" "$dir/pools"
expect 0 "$ctl" --json pool list
holds "[p['name'] for p in x['pools']] == [p['name'] for p in __import__('json').load(open('$dir/pools'))['pools']]"
holds "[p for p in x['pools'] if p['name'] == 'kept'][0]['free_blocks'] == 4"
# programs that have ended have left
expect 0 "$ctl" --json sessions
holds "[s['client'] for s in x['sessions']] == ['attnctl'] and len(x['sessions'][0]['session']) == 8"
expect 0 "$ctl" --json pool resize kept 2
holds "x == {'name': 'kept', 'blocks': 2, 'free_blocks': 2}"
expect 0 "$ctl" pool resize kept 3
has '^blocks +3$'
expect 0 "$ctl" --json pool list
holds "[(p['blocks'], p['free_blocks']) for p in x['pools'] if p['name'] == 'kept'] == [(3, 3)]"
expect 1 "$ctl" pool resize kept 0
says 'n_blocks is 0'
expect 1 "$ctl" pool resize nobody 3
says 'no pool is named "nobody"'
expect 1 "$ctl" pool resize --tenant nobody kept 3
says 'pool_resize.tenant: no tenant is named "nobody"'
expect 1 "$ctl" pool drop --tenant nobody kept
says 'pool_drop.tenant: no tenant is named "nobody"'
expect 2 "$ctl" pool resize kept many
says '"many" is no number of blocks'
expect 2 "$ctl" pool resize kept
expect 0 "$ctl" --json pool drop kept
holds "x == {'dropped': 'kept'}"
expect 1 "$ctl" pool describe kept
expect 1 "$ctl" pool drop kept
says 'no pool is named "kept"'

# a sequence while it lives
"$bin/attnload" --preset bytelm --sequences 2 --context 20 --duration 600 >"$dir/load.log" 2>&1 &
loader=$!
has_tokens() { "$ctl" --json sequences >"$dir/out" && grep -q '"tokens": [1-9]' "$dir/out"; }
await has_tokens
holds "any(s['pool'].startswith('attnload') and s['blocks'] > 0 for s in x['sequences'])"
pool=$(grep -oE 'attnload-[a-z0-9-]+' "$dir/out" | head -1)
is_at_rest() { # a step of the pool may be on its way
  rc=0
  "$ctl" pool drop "$pool" >"$dir/out" 2>"$dir/err.log" || rc=$?
  ! grep -q 'in work' "$dir/err.log"
}
await is_at_rest
[[ $rc == 1 ]] || die "a pool with sequences is dropped"
says 'sequences are open in it'
expect 0 "$ctl" --json top --count 2 --interval 0.2
[[ $(wc -l <"$dir/out") == 2 ]] || die "not a line per look: $(cat "$dir/out")"
has '"steps_per_second": [1-9]'
expect 0 "$ctl" top --count 2 --interval 0.2
[[ $(wc -l <"$dir/out") == 3 ]] || die "not a head and two lines: $(cat "$dir/out")"
grep -q $'\x1b' "$dir/out" && die "escapes in a pipe"
if script -qec true /dev/null >/dev/null 2>&1; then # a terminal, with colours and without
  expect 0 script -qec "$ctl top --count 1 --interval 0.2" /dev/null
  has $'\x1b\\[H.*'
  has $'\x1b\\[32m'
  expect 0 env NO_COLOR=1 script -qec "$ctl top --count 1 --interval 0.2" /dev/null
  has 'device '
  grep -q $'\x1b\\[32m' "$dir/out" && die "colours against NO_COLOR"
fi
# its requests as a trace that can be replayed; the load's own begin before
expect 0 "$ctl" --json trace "$dir/empty" --seconds 0.1
holds "x['requests'] == 0 and x['dropped'] == 0"
"$ctl" --json trace "$dir/trace" --seconds 600 --count 4 --interval 0.1 >"$dir/out" 2>"$dir/err.log" &
tracer=$!
await test -e "$dir/trace"
for i in 1 2 3 4; do "$bin/attnload" --preset bytelm --sequences 1 --context 9 --steps 5 >/dev/null; done
wait "$tracer" || die "trace: $(cat "$dir/err.log")"
holds "x['requests'] == 4"
[[ $(grep -c '"input_length": 9, "output_length": 5}' "$dir/trace") == 4 ]] || die "not what was asked for: $(cat "$dir/trace")"
expect 0 "$bin/attnload" --preset bytelm --trace "$dir/trace" --speed 0 --json
# blocks that a trace names alike are computed once; two layers' outputs are compared
for i in 1 2 3; do echo '{"timestamp": '$i', "input_length": 600, "output_length": 2, "hash_ids": [5, '$((i / 3))']}'; done >"$dir/hashed"
expect 0 "$bin/attnload" --preset bytelm --trace "$dir/hashed" --speed 0 --verify=20 --json
holds "x['requests'] == 3 and x['cached_tokens'] == 592 + 512 and x['prompt_tokens'] == 1800 - 592 - 512"
ln -s empty "$dir/link" # what is there is written into, not replaced
mkfifo "$dir/pipe"
expect 0 "$ctl" trace "$dir/link" --seconds 0.1
cat "$dir/pipe" >/dev/null &
beside+=" $!"
expect 0 "$ctl" trace "$dir/pipe" --seconds 0.1
[[ -L $dir/link && -p $dir/pipe ]] || die "replaced: $(ls -l "$dir")"
expect 1 "$ctl" trace "$dir/no/where"
says 'trace: .*/no/where: No such file'

expect 0 "$ctl" --json cache
holds "all(p['free'] + p['cached'] + p['used'] == p['blocks'] for p in x['cache']) and x['all']['blocks_used'] == sum(p['used'] for p in x['cache']) > 0"
expect 0 "$ctl" cache
has '^name +blocks +free +cached +used +bytes +sequences$'
has '^blocks_shared [0-9]+$'
expect 0 "$ctl" --json tenants
holds "x == {'tenants': []}"

# a sequence of the load's, then the session of another: their next steps say so
expect 1 "$ctl" kill sequence 18446744073709551615
says 'sequence 18446744073709551615 is not open'
expect 2 "$ctl" kill sequence one
expect 1 "$ctl" kill session 00000000
says 'not found: kill.session "00000000": 0 sessions'
"$ctl" --json sequences >"$dir/out"
sequence=$(python3 -c "import json; print(json.load(open('$dir/out'))['sequences'][0]['sequence'])")
session=$(python3 -c "import json; print(json.load(open('$dir/out'))['sequences'][0]['session'])")
expect 0 "$ctl" --complete kill sequence "${sequence:0:5}" # what shells complete
has "^$sequence"
expect 0 "$ctl" --complete kill session "${session:0:4}"
has "^$session"
expect 0 "$ctl" --json kill sequence "$sequence"
holds "x == {'killed_sequence': '$sequence'}"
"$ctl" --json sequences >"$dir/out"
holds "'$sequence' not in {s['sequence'] for s in x['sequences']}"
wait "$loader" && die "the load goes on without its sequence"
"$bin/attnload" --preset bytelm --sequences 2 --context 20 --duration 600 >"$dir/load.log" 2>&1 &
loader=$!
has_session() {
  "$ctl" --json sequences >"$dir/out"
  session=$(python3 -c "import json; print(next(iter(json.load(open('$dir/out'))['sequences']), {}).get('session', ''))")
  [[ -n $session ]]
}
await has_session
expect 0 "$ctl" --json kill session "$session"
holds "x == {'killed_session': '$session'}"
wait "$loader" && die "the load goes on without its session"
"$ctl" --json sessions >"$dir/out"
holds "'$session' not in {s['session'] for s in x['sessions']}"
"$ctl" --json sequences >"$dir/out"
holds "x == {'sequences': []}"
grep -qE "msg=\"admin: end of sequence $sequence, asked for by uid $(id -u), " "$log" || die "no caller in the log"
grep -qE "session=$session client=\"attnload\" why=\"an operator ended it\"" "$log" || die "no end in the log"

# who watches sees what happens next
: >"$dir/events"
"$ctl" --json watch >>"$dir/events" 2>"$dir/watch.log" &
watcher=$!
writes "$watcher" "$dir/events" . || die "watch ended"
expect 0 "$ctl" config set log.level info
writes "$watcher" "$dir/events" 'admin: log.level = info, asked for by uid' || die "watch ended"
kill "$watcher"
rc=0
wait "$watcher" || rc=$?
[[ $rc == 143 ]] || die "watch ends with $rc for SIGTERM" # and has given its session up
expect 0 "$ctl" --json sessions
holds "[s['client'] for s in x['sessions']] == ['attnctl']"

expect 0 "$ctl" --json watch --count 3
[[ $(wc -l <"$dir/out") == 3 ]] || die "not three events: $(cat "$dir/out")"
has '"msg": "'
expect 0 "$ctl" watch --count 1
has '^2[0-9-]+T[0-9:.]+Z (info|warn) +[a-z]'

expect 0 "$ctl" --json config get stats.slow_step
holds "x['value'] == '1us' and x['changes_at_once'] and x['origin'].endswith('conf:4')"
expect 0 "$ctl" --json config set stats.slow_step 5s
has '"stats.slow_step"'
expect 0 "$ctl" config get stats.slow_step
has '^value 5s$'
has '^origin attnctl$'
expect 1 "$ctl" config set stats.slow_step 5
says 'stats.slow_step = 5 is not a time'
expect 1 "$ctl" config set engine.default_timeout 20m
says 'engine.default_timeout = 20m .*is more than engine.max_timeout'
expect 0 "$ctl" config set engine.max_step_items 77
expect 0 "$ctl" config set listen.max_message 1M
expect 0 "$ctl" config set engine.lease 40s
expect 0 "$ctl" --json info
holds "(x['max_step_items'], x['max_message_bytes'], x['lease_us']) == (77, 1 << 20, 40000000)"
expect 1 "$ctl" config set engine.max_step_tokens 20000
says 'engine.max_step_tokens = 20000 .*is more than engine.max_batch_tokens'
expect 1 "$ctl" config set cache.max_pools 5
says 'cache.max_pools needs a restart'
expect 1 "$ctl" config get no.such
says 'no setting is named no.such$'
expect 1 "$ctl" config get engine.leas
says 'no setting is named engine.leas; the nearest is engine.lease$'
expect 1 "$bin/attnload" --trace "$dir"
says 'trace: .*, behind line 0: Is a directory'
sed -i 's/1us/7s/; s/= 9/= 8/' "$dir/conf"
expect 0 "$ctl" --json reload
holds "x == {'changed': 4, 'need_restart': 1}" # three are as the file has them again
expect 0 "$ctl" --json config get stats.slow_step
holds "x['value'] == '7s' and x['origin'].endswith('conf:4')"
expect 0 "$ctl" --json config get engine.lease
holds "x['origin'] == 'default'"
expect 0 "$ctl" config get stats.slow_step
has '^value 7s$'
printf 'nonsense\n' >>"$dir/conf"
expect 1 "$ctl" reload
says 'the settings stay as they are: .*conf:5'
expect 0 "$ctl" --json config list
holds "{'name': 'engine.max_queue', 'value': '128M'}.items() <= next(c for c in x['config'] if c['name'] == 'engine.max_queue').items()"
expect 0 "$ctl" config list
has '^engine.max_queue +128M +default +true$'

expect 0 "$ctl" --json doctor
holds "x['healthy'] and {'daemon', 'operator', 'open files', 'memory'} <= {c['check'] for c in x['checks']}"
# limits are the daemon's, not those of the shell that asks; on the CPU nothing is locked
expect 0 bash -c "ulimit -l 64 -n 99 && exec '$ctl' --json doctor"
holds "[c['found'].startswith('the daemon has') for c in x['checks'] if c['check'] in ('open files', 'locked memory')] == [True]"
grep -q ' 99, ' "$dir/out" && die "the shell's limit: $(cat "$dir/out")"
expect 0 "$ctl" doctor
has '^ok +daemon +attnd '
expect 1 "$ctl" --endpoint "ipc://$dir/nowhere" doctor
has '^fail +daemon +no connection'

# every change is in the log with who asked for it, whether it was made or not
for what in 'drop of pool kept' 'stats.slow_step = 5s' 'cache.max_pools = 5' reload "end of session $session"; do
  grep -qE "msg=\"admin: $what, asked for by uid $(id -u), gid $(id -g), pid [0-9]+" "$log" || die "nobody in the log: $what"
done

# who may open which socket; another user who may open the workers' is no operator there
[[ $(stat -c %a "$dir/attnd.sock" "$dir/shm" "$dir/attnd.sock.admin" | xargs) == '660 660 600' ]] || die "modes: $(ls -l "$dir")"
if [[ $(id -u) == 0 ]] && command -v setpriv >/dev/null; then
  chmod 0711 "$dir"
  other=(setpriv --reuid 12345 --regid 12345 --clear-groups "$ctl")
  expect 1 "${other[@]}" --endpoint "ipc://$dir/attnd.sock.admin" reload
  says 'no permission'
  expect 1 "${other[@]}" pool list
  says 'no permission'
  chgrp 12345 "$dir/attnd.sock"
  expect 0 "${other[@]}" pool list
  for command in drain reload 'kill session 1' 'config set log.level debug'; do
    expect 1 "${other[@]}" $command
    says "uid 12345, gid 12345, pid [0-9]+"
  done
  grep -qE 'level=warn msg="admin: drain refused to uid 12345' "$log" || die "no refusal in the log"
fi

# over tcp nobody knows who asks: pools and counters alone
tcp=$(grep -oE 'tcp://127.0.0.1:[0-9]+' "$log")
for command in 'pool list' pools status stats latency 'top --count 1 --interval 0.1'; do
  expect 0 "$ctl" --endpoint "$tcp" $command
done
for command in 'pool drop p' sessions sequences tenants cache 'kill session 1' 'kill sequence 1' "trace $dir/trace" slow watch 'config list' 'config set log.level debug' reload; do
  expect 1 "$ctl" --endpoint "$tcp" $command
  says "unauthenticated: only root and the daemon's user may ask"
done

for command in top latency slow sessions cache watch 'pool list' 'config list' doctor 'completion bash'; do
  "$ctl" $command --count 1 >/dev/full 2>"$dir/err.log" 2>/dev/null && die "$command writes into a full file"
  [[ $command == top || $command == watch ]] && flags='--count 1' || flags=
  "$ctl" $command $flags >/dev/full 2>"$dir/err.log" && die "$command writes into a full file"
  says 'write to stdout: No space'
done
expect 2 "$ctl" config get
says 'expected config get NAME'
expect 2 "$ctl" ping --count 3
says '--count is an option of top, watch and trace'
expect 2 "$ctl" completion tcsh
for shell in bash zsh fish; do
  expect 0 "$ctl" completion $shell
  ! command -v $shell >/dev/null || $shell -n "$dir/out" || die "$shell does not read its completion"
  has '--complete'
done
# completes OFFERED WORDS: what bash offers after these words of a command line
completes() {
  expect 0 bash -c 'eval "$(attnctl completion bash)"; COMP_LINE="attnctl '"$2"'" COMP_POINT=${#COMP_LINE}; _attnctl; echo "${COMPREPLY[*]}"'
  has "^$1\$"
}
PATH=$bin:$PATH
completes 'ping status .* reload .* completion' ''
completes 'describe drop' 'pool d'
completes 'describe drop' "--json --endpoint ipc:///tmp/s pool d"
completes 'session sequence' 'kill se'
completes '' 'kill sequence e' # not what "sequence" is gone on with
completes '' '--endpoint pi' # the value of an option: a file's name
completes '--split' 'pool create p --sp'
completes 'f16' 'pool create p --dtype f1'
completes 'fp8_e4m3' '--kv-dtype fp'
completes 'mxfp4' '--kv-dtype mx'
completes 'whole' 'pool create p --split w'
completes 'zsh' 'completion z'
expect 0 "$ctl" pool create completed --layers 1 --q-heads 8 --kv-heads 2 --head-dim 64 --blocks 4
completes 'completed' 'pool drop co' # the daemon's: pools and settings
completes 'completed' 'pool resize co'
completes '' 'pool create co'
completes 'engine.max_step_items engine.max_step_tokens' 'config set engine.max_step'
completes 'stats.slow_step' "--endpoint $ATTND_ENDPOINT config get stats.s"
completes '' "--endpoint ipc://$dir/nowhere config get stats.s"
expect 0 "$ctl" --complete pool d
has $'^describe\tgeometry, blocks, free blocks$'

# a daemon that ends waits for nobody who watches
: >"$dir/events"
"$ctl" watch >>"$dir/events" 2>"$dir/watch.log" &
watcher=$!
writes "$watcher" "$dir/events" . || die "watch ended"
kill "$daemon"
wait "$daemon" || die "exit code $? after SIGTERM"
grep -q 'drained' "$log" || die "not drained: $(tail -3 "$log")"
wait "$watcher" && die "watch goes on without a daemon"
daemon=
echo "operators see what happens"
