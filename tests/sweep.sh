#!/usr/bin/env bash
# The grids sweep and ladder on the CPU, one length of one shape each: every cell of the CSV is a
# number, plot-bench draws its pictures from it.
#   tests/sweep.sh ATTNBENCH
set -euo pipefail
bench=$1
root=$(cd "$(dirname "$0")/.." && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

"$bench" --grid sweep --max-tokens 64 --runs 2 --match d64,h12,b1 --threads 2 --csv "$dir/sweep.csv"
"$bench" --grid ladder --max-tokens 64 --runs 2 --threads 2 --csv "$dir/ladder.csv" >"$dir/ladder.txt"
grep -q '^\[BENCH\] tuned .* avg ms/call' "$dir/ladder.txt"
grep -q '^\[LOOP\] tuned .* ms, attention' "$dir/ladder.txt"

python3 - "$dir/sweep.csv" "$dir/ladder.csv" <<'EOF'
import csv, sys
sweep, ladder = ([*csv.DictReader(open(path))] for path in sys.argv[1:])
assert len(sweep) == 8, len(sweep)  # four rungs, two types
assert len(ladder) == 16, len(ladder)  # those alone, and in the encoder
rows = sweep + ladder
assert {r["Tier"] for r in rows} == {"naive", "vectorised", "fused", "tuned"}
for r in rows:
    for name, value in r.items():
        assert value not in ("", "N/A", "nan", "inf"), (name, value)
    for name in ("avg_ms", "min_ms", "Relative_L2_error"):
        assert float(r[name]) > 0, (name, r[name])
    for name in ("TFLOP_per_s", "Share_of_matmul"):  # of a busy machine they are printed as 0
        assert float(r[name]) >= 0, (name, r[name])
EOF
"$root/scripts/plot-bench" --sweep "$dir/sweep.csv" "$dir/picture"
for picture in times speedup scaling; do
  grep -q '</svg>' "$dir/picture_$picture.svg"
done
