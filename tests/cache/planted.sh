#!/usr/bin/env bash
# The control of the cache's random tests: each bug that plant.cmake plants is found, by those that
# compare with the model and, of a kill, by those that step through operations; and none without
# one.
#   planted.sh TEST_KV_PLANTED [TEST_KV_KILL_PLANTED]
set -euo pipefail
model=$1 kill=${2:-}
said=$(mktemp)
trap 'rm -f "$said"' EXIT
bad=0
"$model" >"$said" 2>&1 || { echo "without a bug:"; cat "$said"; bad=1; }
for bug in $(grep -oE '^plant\([0-9]+' "$(dirname "$0")/plant.cmake" | grep -oE '[0-9]+'); do
  if KV_BUG=$bug "$model" >"$said" 2>&1; then
    echo "bug $bug is not found"
    bad=1
  fi
  echo "bug $bug: $(grep -am1 -E 'ERROR' "$said" | cut -c1-150)"
done
if [[ -n $kill ]]; then
  rc=0
  KV_BUG=281 "$kill" 1 >"$said" 2>&1 || rc=$?
  [[ $rc == 77 ]] || { [[ $rc != 0 ]] && grep -q dropped "$said"; } || { echo "no kill finds bug 281"; bad=1; }
fi
exit $bad
