#!/usr/bin/env bash
# Names in the documentation are real: settings, metrics, commands' options, functions and paths. And
# scripts that install and build say what they do first, if asked.
#
#   tests/docs.sh BIN_DIR
set -euo pipefail
bin=$1
cd "$(dirname "$0")/.."
pages=(README.md docs/*.md clients/python/README.md)
folders=(daemon kernels cache proto clients tests scripts systemd docs)
names=$(mktemp)
trap 'rm -f "$names"' EXIT
rc=0

# check KIND PATTERN [PART]: what the pages say that matches PATTERN (and in that PART) must be a line of
# $names
check() {
  local unknown
  unknown=$(grep -oEh -e "$2" "${pages[@]}" | grep -oE -e "${3:-.*}" | sort -u | grep -vxFf "$names" || true)
  [[ -z $unknown ]] && return
  echo "no such $1: "$unknown >&2
  rc=1
}

"$bin/attnd" --help | grep -oE -- '--[a-z-]+(\.[a-z_]+)?' | sed 's/^--//' >"$names"
check setting '\b(device|listen|cache|engine|log)\.[a-z_]+\b'

{
  "$bin/attnd" --help
  "$bin/attnctl" --help
  "$bin/attnload" --help
} | grep -oE -- '--[a-z][a-z._-]*' >"$names"
check option '^ *(build/bin/)?(attnd|attnctl|attnload) .*' '--[a-z][a-z._-]*'

# steps are timed in histograms of three names
{
  grep -ohE '[a-z_]+' daemon/stats.[ch] | sed 's/^/attnd_/'
  printf 'attnd_step_%s_seconds\n' queue device total
} | sort -u >"$names"
check metric '\battnd_(steps|step|peers|blocks|sequences|sessions|queue|leases|batch|batches|kv|device|sent|received|requests|messages|engine|loop)[a-z_]*'

grep -rohE --include='*.[ch]' '\b(kv|backend|wire|attn|reference|op)_[a-z_0-9]+' "${folders[@]}" |
  sed 's/$/()/' | sort -u >"$names"
check function '\b[a-z]+_[a-z_0-9]+\(\)'

find "${folders[@]}" >"$names"
check path "\\b($(IFS='|'; echo "${folders[*]}"))/[A-Za-z0-9_./-]*[A-Za-z0-9_]"
# who asks a script for help gets it, and nothing else happens
for script in quickstart test package install-deps; do
  timeout 10 "scripts/$script" --help | grep -qE 'Installs|Makes' || { echo "scripts/$script --help" >&2; rc=1; }
done
for script in quickstart test install-deps; do
  ! timeout 10 "scripts/$script" nonsense >/dev/null 2>&1 || { echo "scripts/$script nonsense" >&2; rc=1; }
done
exit $rc
