#!/usr/bin/env bash
# The README's commands work when they are pasted in order: each indented line, in one shell, but
# for its two commands that install packages and take minutes: tests/package/bare.sh runs those.
#
#   tests/paste.sh SOURCE_DIR BIN_DIR
set -euo pipefail
src=$1 bin=$2
dir=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$dir"' EXIT
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# of this test's own: the socket, the port, the build, a home folder
sed -nE 's/^    ((export|build|curl|scripts).*)/\1/p' "$src/README.md" |
  sed -e "s#/tmp/attnd.sock#$dir/s#; s#:9470#:$port#; s#build/bin/#$bin/#; s#curl -s #curl -sf --noproxy '*' #" >"$dir/all"
grep -vE '^scripts/(quickstart|test) ' "$dir/all" >"$dir/commands"
[[ $(wc -l <"$dir/commands") -ge 6 && $(($(wc -l <"$dir/all") - $(wc -l <"$dir/commands"))) == 2 ]] ||
  { echo "other commands than expected:" && cat "$dir/all" && exit 1; }
{
  echo 'set -e'
  cat "$dir/commands"
  echo 'kill %1; wait %1'
} >"$dir/script"
cd "$src"
env -i PATH="$PATH" HOME="$dir" ATTND_LISTEN_HTTP="127.0.0.1:$port" bash -x "$dir/script" >"$dir/out" 2>"$dir/log" ||
  { tail -n 30 "$dir/log" "$dir/out" >&2 && exit 1; }
for what in '^steps_received_total' '^ok; 10 tokens'; do
  grep -qE "$what" "$dir/out" || { echo "no $what was printed" && cat "$dir/out" && exit 1; }
done
echo "pasted: $(wc -l <"$dir/commands") commands, 2 left to tests/package/bare.sh"
