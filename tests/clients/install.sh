#!/usr/bin/env bash
# Installs libattn into a scratch prefix and builds the example from there, shared and static.
#
#   tests/clients/install.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
src=$1 build=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
DESTDIR=$dir cmake -P "$build/clients/libattn/cmake_install.cmake" >/dev/null
pc=$(find "$dir" -name attn.pc)
export PKG_CONFIG_PATH=${pc%/*} PKG_CONFIG_SYSROOT_DIR=$dir
[[ $(objdump -p "$(find "$dir" -name 'libattn.so.0')" | awk '/SONAME/ {print $2}') == libattn.so.0 ]]
cc=${CC:-cc}
$cc -std=c17 -Wall -Wextra -Werror "$src/clients/examples/example.c" -o "$dir/shared" \
  $(pkg-config --cflags --libs attn)
$cc -std=c17 "$src/clients/examples/example.c" -o "$dir/static" $(pkg-config --cflags attn) \
  "$(find "$dir" -name libattn.a)" -lprotobuf-c -lssl -lcrypto -pthread
if ATTND_ENDPOINT=ipc:///nowhere/attnd.sock "$dir/static" >"$dir/out"; then exit 1; fi
grep -q /nowhere/attnd.sock "$dir/out"
# nothing is exported but the library's own names
nm -D --defined-only "$(find "$dir" -name 'libattn.so.0')" | awk '$2 != "A" {print $3}' |
  grep -vE '^attn_' && exit 1
# the library over several daemons, where it was built
if [[ -e $build/lib/libattn-cluster.so.0 ]]; then
  DESTDIR=$dir cmake -P "$build/clients/libattn-cluster/cmake_install.cmake" >/dev/null
  $cc -std=c17 -Wall -Wextra -Werror -D_GNU_SOURCE "$src/tests/clients/cluster_worker.c" -o "$dir/cluster" \
    $(pkg-config --cflags --libs attn) -lattn-cluster -lm
  nm -D --defined-only "$(find "$dir" -name 'libattn-cluster.so.0')" | awk '$2 != "A" {print $3}' |
    grep -vE '^attn_cluster_' && exit 1
fi
echo "installed library builds the example"
