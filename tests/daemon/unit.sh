#!/usr/bin/env bash
# The packaged unit says nothing that systemd does not understand. Skipped without systemd-analyze.
#
#   unit.sh SOURCE_DIR BIN_DIR
set -euo pipefail
source=$1 bin=$2
command -v systemd-analyze >/dev/null || exit 77
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
sed "s#^ExecStart=/usr/bin/attnd#ExecStart=$bin/attnd#" "$source/systemd/attnd.service" >"$dir/attnd.service"
said=$(systemd-analyze verify --man=no "$dir/attnd.service" 2>&1) || { echo "$said" >&2; exit 1; }
# of other units of this machine it may say what it likes
! grep attnd <<<"$said" >&2 || exit 1
# what the daemon keeps of it, and what lets it do so
for line in FileDescriptorStoreMax= Environment=FDSTORE= RuntimeDirectoryPreserve=restart; do
  grep -q "^$line" "$source/systemd/attnd.service" || { echo "the unit has no $line" >&2; exit 1; }
done
