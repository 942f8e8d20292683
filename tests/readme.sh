#!/usr/bin/env bash
# The README's C example is clients/examples/example.c, which the client tests compile and run, and
# has 20 lines.
set -euo pipefail
cd "$(dirname "$0")/.."
example() { tail -n +2 clients/examples/example.c; }
diff <(sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d') <(example)
[[ $(example | grep -c .) -le 20 ]]
