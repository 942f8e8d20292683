#!/usr/bin/env bash
# Names in the documentation are real: settings, metrics, commands' options, functions and paths.
# And scripts that install and build say what they do first, if asked.
#
#   tests/docs.sh BIN_DIR
set -euo pipefail
bin=$1
cd "$(dirname "$0")/.."
pages=(README.md CONTRIBUTING.md CHANGELOG.md docs/*.md docs/{benchmarks,protocol}/*.md clients/{python,vllm,sglang}/*.md)
folders=(daemon kernels cache proto clients tests scripts systemd deploy docs)
names=$(mktemp)
trap 'rm -f "$names"' EXIT
rc=0

# check KIND PATTERN [PART]: what the pages say that matches PATTERN (and in that PART) must be a
# line of $names
check() {
  local unknown
  unknown=$(grep -oEh -e "$2" "${pages[@]}" | grep -oE -e "${3:-.*}" | sort -u | grep -vxFf "$names" || true)
  [[ -z $unknown ]] && return
  echo "no such $1: "$unknown >&2
  rc=1
}

"$bin/attnd" --help | grep -oE -- '--[a-z-]+(\.[a-z_]+)?' | sed 's/^--//' >"$names"
settings='\b(device|listen|cache|engine|log|stats)\.[a-z_]+\b'
check setting "$settings"

# and those in what programs and libraries say
unknown=$(grep -rh --include='*.c' --include='*.py' '"' daemon cache kernels proto clients/{lib,attn}* clients/{python,vllm,sglang,cluster}/src |
  grep -v '^ *#' | grep -oE '"([^"\\]|\\.)*"' | grep -oE "$settings" | sort -u | grep -vxFf "$names" || true)
[[ -z $unknown ]] || { echo "said, and no setting: "$unknown >&2; rc=1; }

{
  "$bin/attnd" --help
  "$bin/attnctl" --help
  "$bin/attnload" --help
} | grep -oE -- '--[a-z][a-z._-]*' >"$names"
check option '^ *(build/bin/)?(attnd|attnctl|attnload) .*' '--[a-z][a-z._-]*'

# steps are timed in histograms of three names
{
  grep -ohE '[a-z_]+' daemon/base/stats.[ch] | sed 's/^/attnd_/'
  printf 'attnd_step_%s_seconds\n' queue device total stage
} | sort -u >"$names"
check metric '\battnd_(steps|step|pool|oldest|io|peers|blocks|sequences|sessions|queue|leases|batch|batches|kv|device|sent|received|requests|messages|engine|loop)[a-z_]*'

grep -rohE --include='*.[ch]' '\b(kv|backend|wire|attn|reference|op|decode)_[a-z_0-9]+' "${folders[@]}" |
  sed 's/$/()/' | sort -u >"$names"
check function '\b[a-z]+_[a-z_0-9]+\(\)'

find "${folders[@]}" >"$names"
printf 'systemd/system/%s\n' attnd.service attnd-http.socket attnd.service.d >>"$names" # as installed
check path "\\b($(IFS='|'; echo "${folders[*]}"))/[A-Za-z0-9_./-]*[A-Za-z0-9_]"

# docs/kernels-tried.csv: every row has as many figures as cells, a date, and yes, no or partly
python3 - docs/kernels-tried.csv <<'EOF' || rc=1
import csv, re, sys
bad = []
with open(sys.argv[1], newline="") as f:
    rows = list(csv.DictReader(f, strict=True))
for n, row in enumerate(rows, 2):
    cells = row["cell"].split("; ")
    counts = {len(group.split("; ")) for what in ("before", "after") if row[what]
              for group in row[what].split(" | ")}
    if counts != {len(cells)}:
        bad.append(f"line {n}: {len(cells)} cells, groups of {sorted(counts)} figures")
    if not re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"]) or row["kept"] not in ("yes", "no", "partly"):
        bad.append(f"line {n}: date '{row['date']}', kept '{row['kept']}'")
    if None in row or None in row.values() or not row["change"] or not row["kernel"] or not row["after"]:
        bad.append(f"line {n}: a column is missing or empty")
with open("docs/kernels-tried.md") as f:
    said = int(re.search(r"(\d+) rows", f.read()).group(1))
if said != len(rows):
    bad.append(f"docs/kernels-tried.md says {said} rows, there are {len(rows)}")
print(*bad, sep="\n", end="\n" if bad else "", file=sys.stderr)
sys.exit(bool(bad))
EOF

# the tables of the kernels are the file's
while read -r line; do
  [[ -z $line ]] || grep -qxF -e "$line" docs/benchmarks/decode.md || { echo "not in docs/benchmarks/decode.md: $line" >&2; rc=1; }
done < <(scripts/plot-bench --table docs/figures/h200_long.csv)
cmp <(scripts/plot-bench docs/figures/h200_long.csv /dev/stdout | grep '^<') <(grep '^<' docs/figures/h200_long.svg) || rc=1

# a page of figures answers one question, on one sitting, and is found from the front page
for page in docs/benchmarks/*.md; do
  [[ $(wc -w <"$page") -le 1200 ]] || { echo "$page has over 1,200 words" >&2; rc=1; }
  grep -qF "(${page#docs/})" docs/benchmarks.md || { echo "docs/benchmarks.md does not name $page" >&2; rc=1; }
done

# and so is one of the protocol
for page in docs/protocol/*.md; do
  [[ $(wc -w <"$page") -le 1800 ]] || { echo "$page has over 1,800 words" >&2; rc=1; }
  grep -qF "(${page#docs/})" docs/protocol.md || { echo "docs/protocol.md does not name $page" >&2; rc=1; }
done

# prose within 120 columns, tables within 300; no commit's name where figures and rules are
awk '/^```/ { fence = !fence } !fence && length($0) > (/^[|]/ ? 300 : /^    / ? 140 : 120) {
  print FILENAME ":" FNR ": " length($0) " columns"; bad = 1 } END { exit bad }' "${pages[@]}" >&2 || rc=1
if grep -nP '\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b' docs/{design,kernels,kernels-tried,benchmarks}.md docs/benchmarks/*.md >&2; then
  rc=1
fi

# one version everywhere; the newest release in CHANGELOG.md has it
version=$(sed -nE 's/^project\(attnd VERSION ([0-9.]+) .*/\1/p' CMakeLists.txt)
for said in "$(sed -nE '1s/^attnd \(([^)]*)\).*/\1/p' debian/changelog)" "$(sed -nE 's/^version = "(.*)"/\1/p' clients/python/pyproject.toml)" \
  "$(sed -nE 's/^version = "(.*)"/\1/p' clients/vllm/pyproject.toml)" \
  "$(sed -nE 's/^version = "(.*)"/\1/p' clients/sglang/pyproject.toml)" \
  "$(sed -nE 's/^version = "(.*)"/\1/p' clients/cluster/pyproject.toml)" \
  "$(sed -nE 's/^__version__ = "(.*)"/\1/p' clients/cluster/src/attnd_cluster/__init__.py)" \
  "$(sed -nE 's/^__version__ = "(.*)"/\1/p' clients/python/src/attnd/__init__.py)" \
  "$(sed -nE 's/^## \[([0-9][^]]*)\] - .*/\1/p' CHANGELOG.md | head -1)" "$("$bin/attnd" --version | cut -d' ' -f2)"; do
  [[ $said == "$version" ]] || { echo "version '$said', CMakeLists.txt has '$version'" >&2; rc=1; }
done
# and one licence
for file in README.md debian/copyright clients/python/setup.py clients/{vllm,sglang,cluster}/pyproject.toml; do
  grep -q 'Apache-2.0' "$file" || { echo "$file does not name the licence" >&2; rc=1; }
done

# who asks a script for help gets it, and nothing else happens
for script in quickstart test package install-deps oci; do
  timeout 10 "scripts/$script" --help | grep -qE 'Installs|Makes' || { echo "scripts/$script --help" >&2; rc=1; }
done
for script in quickstart test install-deps; do
  ! timeout 10 "scripts/$script" nonsense >/dev/null 2>&1 || { echo "scripts/$script nonsense" >&2; rc=1; }
done
exit $rc
