#!/usr/bin/env bash
# tests/report.py says of every way in which a test can end what it is, and why.
set -euo pipefail
report=$(cd "$(dirname "$0")" && pwd)/report.py
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >CMakeLists.txt <<'EOF'
cmake_minimum_required(VERSION 3.25)
project(ways NONE)
enable_testing()
function(way name command) # PROPERTY VALUE...
  add_test(NAME ${name} COMMAND sh -c "${command}")
  if(ARGN)
    set_tests_properties(${name} PROPERTIES ${ARGN})
  endif()
endfunction()
way(good "echo fine")
way(bad "echo 'output of <bad>'; exit 3")
way(crashes "kill -SEGV $$")
way(hangs "exec sleep 1000" TIMEOUT 1)
way(says_wrong "echo no" PASS_REGULAR_EXPRESSION "two\nlines")
way(by_code "echo 'skipped: no device'; exit 77" SKIP_RETURN_CODE 77)
way(by_word "echo 'skipped: built without it'" SKIP_REGULAR_EXPRESSION skipped)
way(by_pytest "echo 'SKIPPED [1] a.py:3: no such module'; echo '1 skipped in 0.1s'; exit 5" SKIP_RETURN_CODE 5)
way(disabled "true" DISABLED ON)
add_test(NAME missing COMMAND no_such_program)
EOF
cmake -S . -B build -G Ninja >/dev/null
ctest --test-dir build --output-junit "$dir/xml" 2>&1 | "$report" ways "$dir/xml" summary >said || true
cat said summary
has() { grep -qE -e "$1" "$2" || { echo "no \"$1\" in $2" >&2; exit 1; }; }
has '^ok +ways/good +[0-9.]+ s$' said
for name in bad crashes hangs says_wrong missing; do has "^FAILED +ways/$name +[0-9.]+ s\$" said; done
for name in by_code by_word by_pytest disabled; do has "^skipped +ways/$name +[0-9.]+ s\$" said; done
[[ $(grep -cE '^(ok|FAILED|skipped) ' said) == 10 ]]
has '^output of <bad>$' said
has '^-- ways/hangs: Timeout' said
has '^1 passed, 5 failed, 4 skipped$' summary
has '^ways/by_code: skipped: no device$' summary
has '^ways/by_word: skipped: built without it$' summary
has '^ways/by_pytest: SKIPPED \[1\] a.py:3: no such module$' summary
has '^ways/disabled: disabled$' summary
# no tests at all, or no ctest, is no success
"$report" ways nothing summary </dev/null >said
has '^0 passed, 1 failed, 0 skipped$' summary
echo "every way to end has its word"
