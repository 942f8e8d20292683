#!/usr/bin/env bash
# The executor's own control: every bug that plant.cmake plants must be found, and none without one.
#   planted.sh TEST_BACKEND BACKEND FIRST LAST
# A bug counts as found when a run in one of the orders fails.
set -euo pipefail
test_backend=$1 backend=$2 first=$3 last=$4

found() { # BUG: in which order
  local order
  for order in 1 2 0; do
    ATTND_SIMT_PLANT=$1 ATTND_SIMT_ORDER=$order "$test_backend" "$backend" 409 "$order" \
      'every_option*' >/dev/null 2>&1 || { echo "$order" && return; }
  done
  return 1
}

bad=0
if order=$(found 0); then
  echo "no bug: fails in order $order"
  bad=1
fi
for bug in $(seq "$first" "$last"); do
  if order=$(found "$bug"); then
    echo "bug $bug: found in order $order"
  else
    echo "bug $bug: NOT FOUND"
    bad=1
  fi
done
exit $bad
