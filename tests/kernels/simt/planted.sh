#!/usr/bin/env bash
# The executor's own control: every bug that plant.cmake plants must be found, and none without one.
#   planted.sh TEST_BACKEND BACKEND EVERY BUG...
#   planted.sh TEST_GPU_QUEUE BACKEND TESTS BUG...
# A bug counts as found when a run fails, in one of the orders and on 4 processors or 7 (which cut
# the work into more parts, and into three). TEST_GPU_VALUES lies beside TEST_BACKEND.
set -euo pipefail
test=$1 backend=$2 every=$3
shift 3

found() { # BUG: in which order
  local order n numbers='4 7' orders='1 2 0' tests='every_option*'
  case $every in [!0-9]*) tests='' ;; esac
  case $1 in
    0) # in larger steps: other tests walk without a bug, and further
      numbers=4 orders=1
      case $every in *[!0-9]*) ;; *) every=$((every * 4 + 1)) ;; esac
      ;;
    105 | 106 | 107 | 108) numbers='5 12' tests='few*' ;; # idle processors: keys are cut
    99) tests='nan*' ;;
    129) tests='tokens*' numbers=4 ;;
    143) numbers=60 ;; # keys are cut
    121 | 122 | 123 | 124 | 125) tests='blocks*' numbers=4 ;;
    40 | 41) numbers=132 orders='1 0' ;; # clusters of 8, and more than one, take many processors
    58 | 59 | 60 | 69 | 70 | 73) numbers=132 orders='0 1' ;;
    # the others are looked for first where they were found
    21 | 30 | 32 | 45 | 46 | 48 | 49 | 50 | 51) orders='2 1 0' ;;
    31) orders='0 1 2' ;;
    23 | 24 | 25) numbers='7 4' ;;
    38) numbers='7 4' orders='2 1 0' ;;
    42 | 56 | 57) numbers='7 4' orders='0 1 2' ;;
  esac
  for n in $numbers; do
    for order in $orders; do
      local run=("$test" "$backend" "$every" ${tests:+"$order" "$tests"})
      [ "$n" != 132 ] || run=("$(dirname "$test")/test_gpu_values" "$backend" 'nan_and_inf*')
      ATTND_SIMT_PLANT=$1 ATTND_SIMT_ORDER=$order ATTND_SIMT_PROCESSORS=$n "${run[@]}" \
        >/dev/null 2>&1 ||
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
