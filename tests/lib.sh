# lib.sh: what the tests in shell share that start a daemon; they source it.
#
# $dir is a folder of the test's own. When the test ends, the folder is removed and the processes
# are killed that $daemon and $beside name.
dir=$(mktemp -d)
daemon='' beside=''
log=$dir/log # the daemon's
cleanup() {
  local pid
  for pid in $daemon $beside; do kill -9 "$pid" 2>/dev/null || true; done
  rm -rf "$dir"
}
trap cleanup EXIT
# die WORDS...: the test has failed; with the last lines of all logs
die() {
  echo "FAILED: $*" >&2
  find "$dir" -maxdepth 1 -name '*log*' -type f -exec tail -v -n 5 {} + >&2
  exit 1
}
skip() {
  echo "skipped: $*"
  exit 77
}
# expect CODE COMMAND...: what it says is in $dir/out and $dir/err.log
expect() {
  local want=$1 rc=0
  shift
  "$@" >"$dir/out" 2>"$dir/err.log" || rc=$?
  [[ $rc == "$want" ]] || die "exit code $rc, not $want: $* $(cat "$dir/out")"
}
has() { grep -qE -e "$1" "$dir/out" || die "no \"$1\" in: $(cat "$dir/out")"; }
says() { grep -qE -e "$1" "$dir/err.log" || die "no \"$1\" in: $(cat "$dir/err.log")"; }
# await COMMAND...: looks again and again until it is true, five minutes at most and as long as the
# daemon lives; for what the daemon is asked. What it writes: writes, serves.
await() {
  local until=$((SECONDS + 300))
  until "$@"; do
    [[ -z $daemon ]] || kill -0 "$daemon" 2>/dev/null || die "the daemon ended before: $*"
    ((SECONDS < until)) || die "not within five minutes: $*"
  done
}
# writes PID FILE WORDS: waits until the file, which is there, has a line with these words. False:
# the process that writes it has ended, or five minutes have passed.
writes() { grep -qE -e "$3" < <(exec timeout 300 tail -n +1 -f -s 0.02 --pid="$1" "$2"); }
# launch COMMAND...: a daemon in the background; what it says is in $log
launch() {
  : >"$log"
  "$@" >>"$log" 2>&1 &
  daemon=$!
}
serves() { writes "$daemon" "$log" 'is ready'; } # waits; false: it has ended
# start FLAG...: $bin/attnd on the CPU, small and without HTTP if the flags do not say otherwise;
# returns when it serves
start() {
  launch "$bin/attnd" --backend cpu --device.kv_memory 16M --listen.http off "$@"
  serves || die "attnd does not start: $*"
}
# stop: the daemon, which leaves with 0
stop() {
  kill "$daemon"
  wait "$daemon" || die "exit code $? after SIGTERM"
  daemon=
}
# where the daemon answers HTTP
http_port() { grep -oE 'http://127.0.0.1:[0-9]+' "$log" | grep -oE '[0-9]+$'; }
# page PATH: prints the status that the daemon at $port answers; the reply is in $dir/page
page() {
  exec 3<>"/dev/tcp/127.0.0.1/$port"
  printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3
  cat <&3 >"$dir/page"
  exec 3<&-
  grep -oE '^HTTP/1.[01] [0-9]+' "$dir/page" | cut -d' ' -f2
}
