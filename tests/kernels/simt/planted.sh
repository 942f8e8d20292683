#!/usr/bin/env bash
# The executor's own control: every bug that plant.cmake plants must be found, and none without one.
#   planted.sh TEST_BACKEND BACKEND EVERY BUG...
# A bug counts as found when a run fails, in one of the orders and on 4 processors or 7 (which cut the work
# into more parts, and into three).
set -euo pipefail
test_backend=$1 backend=$2 every=$3
shift 3

found() { # BUG: in which order
  local order n tests='every_option*'
  [ "$1" != 13 ] || tests='blocks_are*' # scrubbing is no option
  for n in 4 7; do
    [ "$1 $n" != "0 7" ] || return 1 # other tests walk more without a bug
    for order in 1 2 0; do
      ATTND_SIMT_PLANT=$1 ATTND_SIMT_ORDER=$order ATTND_SIMT_PROCESSORS=$n "$test_backend" \
        "$backend" "$every" "$order" "$tests" >/dev/null 2>&1 ||
        { echo "order $order on $n processors" && return; }
    done
  done
  return 1
}

export ATTND_TEST_FAIL_FAST=1
bad=0
if order=$(found 0); then
  echo "no bug: fails in $order"
  bad=1
fi
for bug in "$@"; do
  if order=$(found "$bug"); then
    echo "bug $bug: found in $order"
  else
    echo "bug $bug: NOT FOUND"
    bad=1
  fi
done
exit $bad
