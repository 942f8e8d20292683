#!/usr/bin/env bash
# The packaged units say nothing that systemd does not understand, leave little of the machine open,
# and attnd lives with that: it serves /metrics on a socket that it was handed, without a network of
# its own, and makes no system call that the unit forbids.
#
#   unit.sh SOURCE_DIR BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
source=$1 bin=$2
# what the daemon keeps of it, and what lets it do so
for line in FileDescriptorStoreMax= Environment=FDSTORE= RuntimeDirectoryPreserve=restart; do
  grep -q "^$line" "$source/systemd/attnd.service" || die "the unit has no $line"
done

# a socket unit's socket, which blocks, and no network: the process id stays that of python
trace=()
if command -v strace >/dev/null; then
  trace=(strace -D -f -qq -o "$dir/calls")
  export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0 # LeakSanitizer ends what is traced
fi
alone=(unshare --net)
[[ $(id -u) == 0 ]] || alone=(unshare --map-root-user --net)
"${alone[@]}" true 2>/dev/null || alone=()
cat >"$dir/hand_in.py" <<'EOF'
import os, socket, sys
s = socket.create_server(("127.0.0.1", 0))
port = s.getsockname()[1]
os.dup2(s.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES=f"http=//127.0.0.1={port}")
with open(sys.argv[1], "w") as f:
    f.write(str(port))
os.execvp(sys.argv[2], sys.argv[2:] + ["--listen.http", f"127.0.0.1:{port}"])
EOF
# what systemd is told, a line each
cat >"$dir/systemd.py" <<'EOF'
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1])
print("bound", flush=True)
while True:
    print(s.recv(4096).decode(), flush=True)
EOF
: >"$dir/told"
python3 "$dir/systemd.py" "$dir/notify" >>"$dir/told" &
beside=$!
writes "$beside" "$dir/told" bound || die "nobody can be told"
# strace -D: attnd stays the process that was started
NOTIFY_SOCKET=$dir/notify launch python3 "$dir/hand_in.py" "$dir/port" "${alone[@]}" "${trace[@]}" "$bin/attnd" --backend cpu \
  --device.kv_memory 64M --cache.io_memory 64M --listen "ipc://$dir/s shm://$dir/m"
for url in "ipc://$dir/s" "shm://$dir/m"; do
  "$bin/attnload" --wait 60 --endpoint "$url" --preset bytelm --context 16 --steps 2 --verify >/dev/null ||
    die "$(cat "$dir/log")"
done
curl -sf --noproxy '*' "http://127.0.0.1:$(cat "$dir/port")/metrics" >"$dir/metrics" || die "no /metrics: $(cat "$dir/log")"
grep -q ^attnd_steps_received_total "$dir/metrics" || die "no counters"
kill -HUP "$daemon"
stop
# a device that takes long to open is not a start that hangs: more time is asked for before it is;
# the last that is told may still be on its way
writes "$beside" "$dir/told" STOPPING=1 || die "systemd was told: $(cat "$dir/told")"
[[ $(grep -oE '^(EXTEND_TIMEOUT_USEC=[1-9]|READY=1|STOPPING=1)' "$dir/told" | head -3 | tr '\n' ' ') == \
  'EXTEND_TIMEOUT_USEC='[1-9]' READY=1 STOPPING=1 ' ]] || die "systemd was told: $(cat "$dir/told")"
[[ ${#alone[@]} -gt 0 ]] || echo "not tried: a network of its own, unshare --net is refused"

command -v systemd-analyze >/dev/null || skip "no systemd-analyze here"
# calls NAME...: the system calls of groups, by name
calls() {
  local name
  for name in $(systemd-analyze syscall-filter "$@" | sed -n 's/^ \+\([^# ]\+\).*/\1/p'); do
    case $name in
      @*) calls "$name" ;;
      *) echo "$name" ;;
    esac
  done
}
if [[ -s $dir/calls ]]; then
  calls @system-service | sort -u >"$dir/service"
  calls @privileged @resources | sort -u | comm -23 "$dir/service" - >"$dir/allowed"
  [[ $(wc -l <"$dir/allowed") -gt 200 ]] || die "systemd allows $(wc -l <"$dir/allowed") system calls"
  sed -nE 's/^[0-9]+ +([a-z0-9_]+)\(.*/\1/p' "$dir/calls" | sort -u >"$dir/made"
  grep -qx openat "$dir/made" || die "strace saw nothing: $(head -n 3 "$dir/calls")"
  forbidden=$(comm -23 "$dir/made" "$dir/allowed" | tr '\n' ' ')
  [[ -z $forbidden ]] || die "forbidden by the unit: $forbidden"
  # MemoryDenyWriteExecute, RestrictAddressFamilies
  ! grep -E 'PROT_WRITE\|PROT_EXEC|socket\(AF_(INET|NETLINK)' "$dir/calls" >&2 || exit 1
else
  echo "system calls were not compared: no strace here"
fi

# unit NAME WORST DROP_IN...: clean, and exposed at most so much
unit() {
  local name=$1 worst=$2 said exposure
  shift 2
  mkdir -p "$dir/$name"
  sed "s#^ExecStart=/usr/bin/attnd#ExecStart=$bin/attnd#" "$source/systemd/attnd.service" >"$dir/$name/attnd.service"
  cp "$source/systemd/attnd-http.socket" "$dir/$name"
  for drop_in in "$@"; do # --offline reads none
    cat "$source/systemd/$drop_in" >>"$dir/$name/attnd.service"
  done
  said=$(systemd-analyze verify --man=no "$dir/$name"/attnd.service "$dir/$name"/attnd-http.socket 2>&1) ||
    die "$said"
  # of other units of this machine it may say what it likes
  ! grep attnd <<<"$said" >&2 || exit 1
  exposure=$(systemd-analyze security --offline=yes --no-pager "$dir/$name/attnd.service" |
    sed -nE 's/.*exposure level for [^ ]+: ([0-9.]+) .*/\1/p')
  awk -v e="$exposure" -v worst="$worst" 'BEGIN { exit !(e != "" && e <= worst) }' ||
    die "$name: exposure is '$exposure', at most $worst is wanted"
  echo "$name: exposure $exposure"
}
unit cpu 0.5
unit gpu 1.0 gpu.conf
unit network 1.9 network.conf
unit mps 1.0 gpu.conf mps.conf

# that of MPS, whose program need not be here
mkdir -p "$dir/mps-control"
sed 's#/usr/bin/nvidia-cuda-mps-control#/bin/true#' "$source/systemd/attnd-mps.service" >"$dir/mps-control/attnd-mps.service"
said=$(systemd-analyze verify --man=no "$dir/mps-control/attnd-mps.service" 2>&1) || die "$said"
! grep attnd-mps <<<"$said" >&2 || exit 1
