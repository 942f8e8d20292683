# lib.sh: what the tests in shell share that start a daemon; they source it.
#
# $dir is a folder of the test's own. When the test ends, the folder is removed and the processes
# are killed that $daemon and $beside name.
dir=$(mktemp -d)
daemon='' beside=''
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
# await COMMAND...: looks again and again until it is true, as long as the daemon lives
await() {
  until "$@"; do
    [[ -z $daemon ]] || kill -0 "$daemon" 2>/dev/null || die "the daemon ended before: $*"
    sleep 0.02
  done
}
# stop: the daemon, which leaves with 0
stop() {
  kill "$daemon"
  wait "$daemon" || die "exit code $? after SIGTERM"
  daemon=
}
# http_port LOG: where the daemon of this log answers HTTP
http_port() { grep -oE 'http://127.0.0.1:[0-9]+' "$1" | grep -oE '[0-9]+$'; }
# page PATH: prints the status that the daemon at $port answers; the reply is in $dir/page
page() {
  exec 3<>"/dev/tcp/127.0.0.1/$port"
  printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3
  cat <&3 >"$dir/page"
  exec 3<&-
  grep -oE '^HTTP/1.[01] [0-9]+' "$dir/page" | cut -d' ' -f2
}
