#!/usr/bin/env bash
# attnd that cannot start says why in one sentence that names the setting or the path, with the exit
# code that docs/operations.md gives it.
#
#   tests/daemon/start.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
# refused CODE WORDS FLAG...: attnd with these flags leaves with CODE and says WORDS as an error
refused() {
  local want=$1 words=$2 rc=0
  shift 2
  timeout 30 "$bin/attnd" --backend cpu --listen.http off "$@" >"$dir/log" 2>&1 || rc=$?
  [[ $rc == "$want" ]] || die "exit code $rc, not $want: $* $(cat "$dir/log")"
  grep -E 'level=error ' "$dir/log" | grep -qE -e "$words" || die "no \"$words\" in: $(cat "$dir/log")"
}
# fails CODE WORDS FLAG...: the same, and --check-config says so before
fails() {
  refused "$@" --check-config
  refused "$@"
}

fails 64 'engine.lease = 3 ' --engine.lease 3
# modules are looked for beside the binary, so one of its own has none
mkdir "$dir/bin"
cp "$bin/attnd" "$dir/bin"
for flags in '--backend cuda' '--backend hip' '--device.index 0,cuda:1'; do
  bin=$dir/bin fails 69 "backend (cuda|hip) can't be used: attnd-(cuda|hip).so is neither" $flags \
    --device.kv_memory 16M --listen "ipc://$dir/s"
done
# what is wrong together has the exit code of what is wrong alone
fails 64 'engine.default_timeout = 20m \(flag .*is more than engine.max_timeout = 10m' --engine.default_timeout 20m
printf '[engine]\ndefault_timeout = 20m\n' >"$dir/conf"
fails 78 'engine.default_timeout = 20m .*is more than engine.max_timeout = 10m' --config "$dir/conf"
fails 64 'engine.max_timeout = 1m \(flag ' --config "$dir/conf" --engine.max_timeout 1m
printf '[engine]\nleese = 3s\n' >"$dir/conf"
fails 78 'conf:2: .*engine.leese.*lease' --config "$dir/conf"
fails 69 'device.kv_memory 62914560 MiB, cache.io_memory 256 MiB, .* do not fit: there are' \
  --device.kv_memory 60T --listen "ipc://$dir/s"
fails 69 'tables \(cache.max_sequences, table_memory\) [0-9]{6,} MiB' --cache.max_sequences 16777216 \
  --cache.max_layers 512 --device.kv_memory 16M --listen "ipc://$dir/s"
fails 78 'max_sequences 1000000' --cache.max_sequences 1000000 --cache.max_seq_tokens 268435456 \
  --device.kv_memory 16M --listen "ipc://$dir/s"
fails 73 "directory $dir/a/b" --device.kv_memory 16M --listen "ipc://$dir/a/b/s"
fails 78 "listen.tenants: $dir/no_tenants: No such file" --listen "ipc://$dir/s" --listen.tenants "$dir/no_tenants"
(umask 077 && printf '[good]\nusers = root\n' >"$dir/tenants")
fails 73 'tcp://192.0.2.1:7471: cannot listen' --device.kv_memory 16M --listen tcp://192.0.2.1:7471 \
  --listen.insecure_tcp yes --listen.tenants "$dir/tenants"
(umask 077 && printf '[bad name]\nusers = root\n' >"$dir/tenants")
fails 78 "listen.tenants: $dir/tenants:2: " --listen "ipc://$dir/s" --listen.tenants "$dir/tenants"
fails 78 "cache.disk_path = $dir/no_folder: No such file" --cache.disk_path "$dir/no_folder" --cache.disk_size 1M \
  --listen "ipc://$dir/s"
fails 78 "cache.disk_path = $dir/tenants: Not a directory" --cache.disk_path "$dir/tenants" --cache.disk_size 1M \
  --listen "ipc://$dir/s"
fails 78 "cache.disk_size: 16777216 MiB, .* $dir has" --cache.disk_path "$dir" --cache.disk_size 16T --listen "ipc://$dir/s"
touch "$dir/file"
for transport in ipc shm; do
  fails 73 "$transport://$dir/file: .*no socket" --device.kv_memory 16M --listen "$transport://$dir/file"
  # what another one serves is refused, what a dead one left is taken over
  log=$dir/log.first
  start --listen "$transport://$dir/$transport" --listen.http 127.0.0.1:0
  for name in attnd attnd-http attnd-engine0; do # as docs/running.md has them
    await grep -qx "$name" "/proc/$daemon"/task/*/comm # a thread names itself as it begins
  done
  # settings are not wrong because a daemon has them
  "$bin/attnd" --check-config --backend cpu --device.kv_memory 16M --listen "$transport://$dir/$transport" \
    --listen.http "127.0.0.1:$(http_port)" 2>"$dir/err.log" || die "refused beside a daemon: $(cat "$dir/err.log")"
  refused 73 "$transport://$dir/$transport: .*in use" --device.kv_memory 16M --listen "$transport://$dir/$transport"
  refused 73 'listen.http' --device.kv_memory 16M --listen "ipc://$dir/s" --listen.http "127.0.0.1:$(http_port)"
  kill -9 "$daemon"
  wait "$daemon" 2>/dev/null || true
  [[ -S $dir/$transport ]] || die "a killed daemon took its socket along"
  start --listen "$transport://$dir/$transport"
  stop
  log=$dir/log
  [[ ! -e $dir/$transport ]] || die "the socket is left"
done
# nobody needs to listen to what it says: standard descriptors closed, a reader of stderr that left
for way in '2>&-' '<&- >&- 2>&-' '2> >(head -c 1 >/dev/null)'; do
  eval "\"$bin/attnd\" --backend cpu --device.kv_memory 16M --listen ipc://$dir/s --listen.http off $way &"
  daemon=$!
  "$bin/attnctl" --endpoint "ipc://$dir/s" --wait 60 ping >/dev/null || die "no ping with $way"
  kill -HUP "$daemon" # it has something to say
  "$bin/attnctl" --endpoint "ipc://$dir/s" drain >/dev/null || die "no drain with $way"
  wait "$daemon" || die "exit code $? with $way"
done
daemon=
for flag in --help --version --print-config; do
  rc=0
  "$bin/attnd" $flag >/dev/full 2>"$dir/log" || rc=$?
  [[ $rc == 74 ]] && grep -q 'write to stdout: No space' "$dir/log" || die "$flag writes into a full file: $rc"
done
# a balancer sees that the daemon is about to go; listeners stay open until a second signal shuts
# them
start --device.kv_memory 16M --listen "ipc://$dir/s" --listen.http 127.0.0.1:0 --engine.drain_delay 1h
port=$(http_port)
for path in /readyz /livez '/healthz?verbose'; do
  [[ $(page "$path") == 200 ]] || die "$path: $(cat "$dir/page")"
done
shape='--layers 1 --q-heads 2 --kv-heads 2 --head-dim 8 --blocks 9'
"$bin/attnctl" --endpoint "ipc://$dir/s" pool create p $shape >/dev/null
has_blocks() { page /metrics >/dev/null && grep -q '^attnd_pool_blocks{pool="p"} 9' "$dir/page"; }
await has_blocks
grep -qE '^attnd_kv_memory_bytes 16777216' "$dir/page" || die "no KV memory in: $(cat "$dir/page")"
kill "$daemon"
is_leaving() { [[ $(page /readyz) == 503 ]]; }
await is_leaving
grep -q 'not ready' "$dir/page" || die "readyz: $(cat "$dir/page")"
[[ $(page /livez) == 200 ]] || die "not alive while it waits"
"$bin/attnctl" --endpoint "ipc://$dir/s" pool create q $shape >/dev/null ||
  die "the listeners are shut before the delay is over"
kill "$daemon"
wait "$daemon" || die "exit code $? after two signals"
daemon=
# signals that come when all is done do not end it before it has cleaned up, nor keep it from that
for _ in {1..8}; do
  start --listen "ipc://$dir/s" --listen.http off
  "$bin/attnctl" --endpoint "ipc://$dir/s" drain >/dev/null
  while kill -TERM "$daemon" && kill -HUP "$daemon" && kill -USR2 "$daemon"; do :; done 2>/dev/null
  wait "$daemon" || die "exit code $? after a drain and signals"
  grep -q 'msg="stopped"' "$log" || die "not stopped in order"
  sed -n '/stopping now\|msg="drained"/,$p' "$log" | grep 'settings are read' && die "a reload after the end"
done
daemon=
# sockets listen before what may take long
start --listen "ipc://$dir/s" --listen.admin off --listen.http 127.0.0.1:0
"$bin/attnctl" --endpoint "ipc://$dir/s" drain >/dev/null
wait "$daemon"
daemon=
order=$(grep -nE 'listening on|backend cpu on|stats on' "$dir/log" | sed 's/.*msg="//; s/ on.*//' | paste -sd,)
[[ $order == stats,listening,'backend cpu' ]] || die "order: $order"
# workers on a network are added, as operations.md says: operators find the daemon where they did
# before
"$bin/attnctl" keys "$dir/net" --host localhost --tenant research >/dev/null
"$bin/attnctl" keys "$dir/net" --tenant research | sed -n '/^\[listen\]/,/^tenants/p' |
  sed 's/^address = .*/address = tls+tcp:\/\/127.0.0.1:0/' >"$dir/conf"
grep -q ^address "$dir/conf" || die "no address of: $(cat "$dir/conf")"
# of an earlier daemon there is only the file
python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$dir/attnd.sock"
operator() { "$bin/attnctl" --endpoint "ipc://$dir/attnd.sock" "$@"; } # where RUNTIME_DIRECTORY is the default's
RUNTIME_DIRECTORY=$dir start --config "$dir/conf"
for command in ping status 'pool list' reload; do expect 0 operator $command; done
expect 0 operator doctor
has '^ok +operator '
# that a second daemon can't have it stops neither
first=$daemon
beside=$daemon log=$dir/log.second
RUNTIME_DIRECTORY=$dir start --config "$dir/conf"
grep -q "level=warn .*$dir/attnd.sock.admin: .*in use" "$log" || die "not told: $(cat "$log")"
grep -q 'level=warn .*no socket for operators' "$log" || die "not told: $(cat "$log")"
stop
daemon=$first beside='' log=$dir/log
expect 0 operator ping
stop
start --config "$dir/conf" --listen.admin off
grep -q 'level=warn .*no socket for operators' "$log" || die "not told: $(cat "$log")"
expect 1 operator doctor
has '^fail +daemon .* but attnd runs, as process [0-9]+'
has 'listen.admin'
stop
# a variable that is none of attnd's is told, not refused
ATTND_PORT_7471_TCP=tcp://10.0.0.7:7471 ATTND_ENGINE_LEESE=1s start --listen "ipc://$dir/s"
grep -q 'level=warn .*ATTND_ENGINE_LEESE is no setting.* ATTND_ENGINE_LEASE' "$dir/log" || die "no warning"
grep -q 'level=warn .*ATTND_PORT_7471_TCP is no setting' "$dir/log" || die "no warning"
stop
# a mistake in the file costs no cache: a child that a supervisor starts has the last good settings.
# /metrics says whether the latest are good; attnctl status, too
printf '[engine]\nlease = 31s\n' >"$dir/conf"
start --supervise --config "$dir/conf" --listen "ipc://$dir/s" --listen.http 127.0.0.1:0
port=$(http_port)
ctl() { "$bin/attnctl" --endpoint "ipc://$dir/s" --wait 60 "$@"; }
is_good() { page /metrics >/dev/null && grep -qx "attnd_config_last_load_successful $1" "$dir/page"; }
child() { cat "/proc/$daemon/task/$daemon/children"; }
kill_child() {
  local dead
  dead=$(child)
  kill -9 "$dead"
  is_another() { [[ $(child) != "$dead" ]]; }
  await is_another
}
await is_good 1
ctl pool create p $shape >/dev/null
# nobody else can send to the supervisor: its sockets have no names
for fd in "/proc/$daemon"/fd/*; do
  inode=$(readlink "$fd" | sed -n 's/^socket:\[\(.*\)\]$/\1/p')
  [[ -z $inode ]] || ! grep -E " 0002 +[0-9]+ +$inode +." /proc/net/unix || die "a datagram socket with a name"
done
printf '[engine]\nleese = 32s\n' >"$dir/conf"
kill_child
ctl pool list >"$dir/out"
has '^p '
ctl config get engine.lease >"$dir/out"
has 31s
ctl status >"$dir/out"
has 'config_last_load_successful *0'
writes "$daemon" "$log" 'level=error .*THE SETTINGS ARE REFUSED' || die "not told"
port=$(grep -oE 'stats on http://127.0.0.1:[0-9]+' "$log" | tail -n 1 | grep -oE '[0-9]+$')
await is_good 0
[[ $(page '/healthz?verbose') == 200 ]] && grep -qF '[-] settings' "$dir/page" || die "not in: $(cat "$dir/page")"
printf '[engine]\nlease = 33s\n' >"$dir/conf"
kill -HUP "$daemon"
await is_good 1
printf '[engine]\nlease = 33\n' >"$dir/conf"
kill -HUP "$daemon"
await is_good 0
stop
# a control group's limit, where this test may make one
for root in /sys/fs/cgroup/memory /sys/fs/cgroup; do
  group=$root/attnd_start_$$
  mkdir "$group" 2>/dev/null || continue
  file=memory.max
  [ "$root" = /sys/fs/cgroup ] || file=memory.limit_in_bytes
  if echo 128M >"$group/$file" 2>/dev/null; then
    rc=0
    (echo $BASHPID >"$group/cgroup.procs" && exec "$bin/attnd" --backend cpu --device.kv_memory 256M \
      --listen "ipc://$dir/s" --listen.http off) >"$dir/log" 2>&1 || rc=$?
    [[ $rc == 69 ]] && grep -q "device.kv_memory 256 MiB, .* there are 128 MiB .*$file" "$dir/log" ||
      die "in a group of 128 MiB: $rc"
  fi
  rmdir "$group"
  break
done
echo "attnd says why it does not start"
