#!/usr/bin/env bash
# The module holds as much code for each device as for the others, and needs nothing that it does
# not name.
#   module.sh MODULE ARCH...
set -euo pipefail
module=$1
shift
expected=
for arch in "$@"; do
  n=$(grep -ao "hipv4-amdgcn-amd-amdhsa--$arch" "$module" | wc -l)
  echo "$arch: $n code objects"
  [ "$n" -gt 0 ] && [ "$n" -eq "${expected:=$n}" ] || { echo "$arch: expected ${expected:-some}"; exit 1; }
done
if missing=$(ldd -r "$module" | grep -E 'undefined symbol|not found'); then
  echo "$missing"
  exit 1
fi
