#!/usr/bin/env bash
# The README's C example is clients/libattn/example.c, which the client tests compile and run.
set -euo pipefail
cd "$(dirname "$0")/.."
diff <(sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d') <(tail -n +2 clients/libattn/example.c)
