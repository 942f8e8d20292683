#!/usr/bin/env bash
# The simulation's own control: each bug that plant.cmake plants must be found within a number of
# seeds, and none without one.
#   planted.sh SIM_PLANTED [BUG...]
set -euo pipefail
sim=$1
shift
here=$(dirname "$0")
most=1000
bugs=("$@")
[ $# -gt 0 ] || mapfile -t bugs < <(grep -oE '^plant\([0-9]+' "$here/plant.cmake" | grep -oE '[0-9]+')

bad=0
if ! said=$("$sim" --seeds 1..20 2>&1); then
  echo "without a bug: $said"
  bad=1
fi
for bug in "${bugs[@]}"; do
  if said=$(SIM_BUG=$bug ASAN_OPTIONS=detect_leaks=0 "$sim" --seeds 1..$most 2>&1); then
    echo "bug $bug is not found by seeds 1 to $most"
    bad=1
  else
    printf 'bug %2d: %s\n' "$bug" "$(grep -aE 'FAILED|ERROR|Assertion|runtime error' <<<"$said" | head -1 | cut -c1-150)"
  fi
done
exit $bad
