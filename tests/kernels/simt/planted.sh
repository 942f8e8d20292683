#!/usr/bin/env bash
# The executor's own control: every bug that plant.cmake plants must be found, and none without one.
#   planted.sh TEST_BACKEND BACKEND EVERY BUG...
#   planted.sh TEST_GPU_QUEUE BACKEND TESTS BUG...
# A bug counts as found when a run fails, in one of the orders and on 4 processors or 7 (which cut
# the work into more parts, and into three). TEST_GPU_VALUES and TEST_POOLS lie beside TEST_BACKEND.
set -euo pipefail
test=$1 backend=$2 every=$3
shift 3
said=$(mktemp)
trap 'rm -f "$said"' EXIT

# Where in their walks bugs were found last, if not at once: that case alone is looked at first. If
# it does not show the bug any more, all of the walk is walked.
declare -A at=(
  [planted32:1]=1258 [planted32:2]=9736 [planted32:3]=420 [planted32:4]=18822 [planted32:5]=9736
  [planted32:7]=420 [planted32:8]=2597 [planted32:9]=14928 [planted32:10]=9087 [planted32:14]=9087
  [planted32:16]=14928 [planted32:86]=2332 [planted32:87]=7487 [planted32:88]=2669
  [planted32:100]=356 [planted32:127]=2135 [planted32:131]=1810 [planted32:132]=337
  [planted32:134]=68
  [planted32:135]=537 [planted32:138]=202 [planted32:139]=1207 [planted32:140]=269
  [planted32:152]=1689 [planted32:160]=390 [planted32:162]=390 [planted32:165]=2335
  [planted32:166]=390 [planted32:172]=805 [planted32:181]=107 [planted32:182]=107
  [planted32:192]=3008 [planted32:210]=1168 [planted32:261]=4839 [planted32:262]=4839
  [planted64:4]=18822 [planted64:5]=3895 [planted64:8]=2597 [planted64:9]=14928 [planted64:10]=9087
  [planted64:14]=9087 [planted64:16]=14928
  [planted90:32]=318 [planted90:38]=318 [planted90:47]=739 [planted90:49]=781 [planted90:51]=781
  [planted90:52]=739 [planted90:53]=739 [planted90:54]=159 [planted90:74]=2 [planted90:76]=3588
  [planted90:83]=2533 [planted90:91]=276 [planted90:102]=423 [planted90:104]=2533
  [planted90:220]=1267 [planted90:266]=3493
)

fails() { # BUG ORDER PROCESSORS TEST ARGUMENT...
  ! ATTND_SIMT_PLANT=$1 ATTND_SIMT_ORDER=$2 ATTND_SIMT_PROCESSORS=$3 "${@:4}" >"$said" 2>&1
}

found() { # BUG: in which order
  local order n numbers='4 7' orders='1 2 0' tests='every_option*'
  case $every in [!0-9]*) tests='' ;; esac
  case $1 in
    0) # in larger steps: other tests walk without a bug, and further
      numbers=4 orders=1
      case $every in *[!0-9]*) ;; *) every=$((every * 16 + 1)) ;; esac
      case " $bugs " in *" 190 "*) tests='sequences_that_begin*' ;; esac
      case " $bugs " in *" 223 "*) tests='choices*' ;; esac
      case " $bugs " in *" 285 "*) tests='projected*' ;; esac
      ;;
    105 | 107 | 108) numbers='5 12' tests='few*' ;; # idle processors: keys are cut
    106) numbers='5 12' tests='few*' orders='2 1 0' ;;
    99 | 185 | 186 | 267) tests='nan*' ;;
    129) tests='tokens*' numbers=4 ;;
    253) tests='branches*' numbers=4 ;;
    168) tests='a_choice*' numbers=4 ;;
    223 | 224 | 225) tests='choices*' numbers=4 orders=1 ;;
    285) tests='projected*' numbers=4 orders=1 ;;
    270) tests='nothing*' numbers=4 orders=1 ;;
    274) tests='a_choice*' numbers=4 orders=1 ;;
    275) tests='summaries*' numbers=4 orders=1 ;;
    278 | 279) tests='what*' numbers=4 orders=1 ;;
    190 | 191 | 193 | 194 | 195 | 196) tests='sequences_that_begin*' orders=1 ;;
    143 | 251 | 252) numbers=60 ;; # keys are cut, units have few rows
    111) every='merges*' orders='0 1 2' ;; # the one that has words
    116 | 221) orders='2 1 0' tests='every_option_of_dilated_layers_by_tokens' ;;
    234) every='bytes*' ;; # which has items of two layers in a batch
    212) numbers=4 orders='2 0' ;; # where copies come late
    213 | 214 | 215) numbers=4 orders='1 2' ;;
    121 | 122 | 123 | 125) tests='blocks_move_out*' numbers=4 ;;
    124) tests='blocks_of_every_size*' numbers=4 ;;
    40 | 41) numbers=132 orders='1 0' ;; # clusters of 8, and more than one, take many processors
    58 | 59 | 60 | 69 | 70 | 73) numbers=132 orders='0 1' ;;
    # the others are looked for first where they were found
    21 | 30 | 32 | 74 | 45 | 46 | 48 | 49 | 50 | 51) orders='2 1 0' ;;
    31) orders='0 1 2' ;;
    132 | 163) orders='2 1 0' ;;
    23 | 24 | 25) numbers='7 4' ;;
    38) numbers='7 4' orders='2 1 0' ;;
    42 | 56 | 57) numbers='7 4' orders='0 1 2' ;;
  esac
  local one=${at[$backend:$1]:-}
  if [ -n "$one" ] && fails "$1" "${orders%% *}" "${numbers%% *}" "$test" "$backend" 4000000007 \
    "$one" "$tests" && grep -aq ", at $one:" "$said"; then
    echo "the case at $one"
    return
  fi
  for n in $numbers; do
    for order in $orders; do
      local run=("$test" "$backend" "$every" ${tests:+"$order" "$tests"})
      [ "$n" != 132 ] || run=("$(dirname "$test")/test_gpu_values" "$backend" 'nan_and_inf*')
      [ "${tests#blocks_}" = "$tests" ] || run[0]=$(dirname "$test")/test_pools
      if fails "$1" "$order" "$n" "${run[@]}"; then
        echo "order $order on $n processors$(grep -aoE -m 1 ', at [0-9]+' "$said" || true)"
        return
      fi
    done
  done
  return 1
}

export ATTND_TEST_FAIL_FAST=1
bad=0 bugs="$*"
if order=$(found 0); then
  echo "no bug: fails in $order"
  cat "$said"
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
