#!/usr/bin/env bash
# The first call of the runtime fails and all after it, then the second, and so on until none is
# left: tests may fail then, never crash, hang, or touch memory that is not theirs.
#   failures.sh TEST ARGUMENT...
set -euo pipefail
for ((n = 1; n < 3000; n += n < 40 ? 1 : n < 400 ? 17 : 101)); do # most later calls write blocks
  code=0
  out=$(ATTND_SIMT_FAIL=$n timeout 600 "$@" 2>&1) || code=$?
  # 0 passed, 77 could not be opened, else the count of failed tests; 23: leaks of the failed test
  # itself
  case $code in
  0 | 1 | 23 | 77) ;;
  *) echo "call $n: exit code $code" && echo "$out" && exit 1 ;;
  esac
  if [[ $out == *"ERROR: AddressSanitizer"* || $out == *"runtime error:"* ]]; then
    echo "call $n:" && echo "$out" && exit 1
  fi
  if [ "$code" -eq 0 ]; then
    echo "$n calls and more do not fail"
    exit 0
  fi
done
echo "call 3000 still fails"
exit 1
