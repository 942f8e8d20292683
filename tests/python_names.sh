#!/usr/bin/env bash
# Python uses no name that nothing defines, also where it imports an engine that is not installed.
#   python_names.sh SOURCE
set -euo pipefail
/usr/bin/python3 -c 'import pyflakes' 2>/dev/null || { echo "skipped: no python3-pyflakes"; exit 77; }
undefined() { { /usr/bin/python3 -m pyflakes "$@" || true; } | grep 'undefined name' || true; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
printf 'try:\n    pass\nexcept Nobody:\n    pass\n' >"$dir/control.py"
[ -n "$(undefined "$dir/control.py")" ] || { echo "the control was not found"; exit 1; }
mapfile -t files < <(find "$1"/{clients,docs,scripts,tests} -name '*.py' -not -path '*/build/*')
[ ${#files[@]} -gt 100 ] || { echo "${#files[@]} files in $1"; exit 1; }
found=$(undefined "${files[@]}")
[ -z "$found" ] || { echo "$found"; exit 1; }
