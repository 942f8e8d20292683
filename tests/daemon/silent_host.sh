#!/usr/bin/env bash
# A worker's host falls silent, as one does that has lost its power or its cable: the daemon's
# packets come to nobody, and nobody refuses them. Connections that wait for something and idle ones
# end at listen.host_timeout. Two network namespaces are the hosts.
#
#   tests/daemon/silent_host.sh BIN_DIR        77: no namespaces or no TUN here
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1 a=attnd-a-$$ b=attnd-b-$$
leave() {
  [[ -z ${link:-} ]] || kill -9 "$link" 2>/dev/null || true
  cleanup
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
}
trap leave EXIT
{ ip netns add "$a" && ip netns add "$b"; } 2>/dev/null || skip "no network namespaces here"
: >"$dir/link"
"$bin/link_emulator" "$a" "$b" 0 0 >>"$dir/link" 2>&1 &
link=$! beside=$!
writes "$link" "$dir/link" ready || skip "no link between them here: $(cat "$dir/link")"
for side in "$a 10.77.0.1" "$b 10.77.0.2"; do
  ip -n "${side% *}" addr add "${side#* }/24" dev link0
  ip -n "${side% *}" link set link0 up
done

"$bin/attnctl" keys "$dir/keys" --host 10.77.0.1 --tenant alpha >/dev/null
export ATTND_CA_FILE=$dir/keys/ca.crt ATTND_KEY_FILE=$dir/keys/alpha.token
launch ip netns exec "$a" "$bin/attnd" --backend cpu --device.kv_memory 64M --listen.http off \
  --listen "ipc://$dir/sock tcp://10.77.0.1:7001 tls+tcp://10.77.0.1:7002" --listen.insecure_tcp yes \
  --listen.tls_cert "$dir/keys/server.crt" --listen.tls_key "$dir/keys/server.key" \
  --listen.tenants "$dir/keys/tenants.conf" --listen.host_timeout 1s --listen.handshake_timeout 1h \
  --listen.write_timeout 1h --listen.body_timeout 1h --engine.lease 1h --engine.drain_timeout 1s
serves || die "attnd does not start"
ctl=(env -u ATTND_KEY_FILE "$bin/attnctl" --endpoint "ipc://$dir/sock" --json)
# peers N: so many there are, beside the one that asks
peers() { "${ctl[@]}" stats >"$dir/out" && grep -qE "\"peers\": ?$(($1 + 1))[,}]" "$dir/out"; }
for url in tcp://10.77.0.1:7001 tls+tcp://10.77.0.1:7002; do
  ip netns exec "$b" "$bin/attnload" --endpoint "$url" --preset bytelm --sequences 1 --duration 3600 \
    >>"$dir/load.log" 2>&1 &
  beside+=" $!"
done
# and one that has shaken hands and says nothing
ip netns exec "$b" python3 -c '
import socket, sys
s = socket.create_connection(("10.77.0.1", 7001))
s.sendall(bytes.fromhex("0053500000300000"))
s.recv(8)
s.recv(1)' &
beside+=" $!"
await peers 5 # an attnload has two
kill -STOP "$link" # packets lie where they are
began=$(date +%s.%N)
await peers 0
echo "five connections of a silent host were gone after $(python3 -c "print(round($(date +%s.%N) - $began, 1))") s, of a limit of 1 s"
stop
