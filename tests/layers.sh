#!/usr/bin/env bash
# Holds the rule of docs/design.md, section 2: who may include whom.
#
#   tests/layers.sh [SOURCE_DIR]       checks the tree; every breach is named, exit 1
#   tests/layers.sh --self-check       plants breaches in a scratch tree and expects each to be
#   named
#
# An include is judged by its first folder: "cache/kv.h" is cache's. Quoted includes without a
# folder are the file's own folder's, angle brackets are the system's unless they name one of our
# folders.
set -euo pipefail

areas='cache|kernels|proto|clients|daemon|tests'

# may_include FILE INCLUDED: true if the rule allows it
may_include() {
  local file=$1 included=$2 from to
  from=${file%%/*}
  to=${included%%/*}
  [[ $from == "$to" || $included == proto/attn_t@(ypes|ime).h ]] && return 0
  case $from in
  cache | kernels | proto) return 1 ;;
  daemon) [[ $to == cache || $to == kernels || $to == proto ]] ;;
  clients)
    [[ $to == proto ]] && return 0
    # attnload verifies what it got against the float64 reference
    [[ $file == clients/attnload* && $included == kernels/reference.h ]]
    ;;
  esac
}

# check_tree DIR: prints the breaches
check_tree() {
  local line file included folder
  cd "$1"
  grep -rnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<]' cache kernels proto clients daemon \
    --include='*.c' --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' \
    --include='*.hip' |
    while IFS= read -r line; do
      file=${line%%:*}
      included=$(sed -E 's/.*include[[:space:]]*["<]([^">]*)[">].*/\1/' <<<"$line")
      [[ $included == attnd.pb-c.h ]] && included=proto/attnd.pb-c.h # generated from proto/
      if [[ $included == ../* || $included == */../* ]]; then # where does it really go?
        folder=$(realpath -m --relative-to=. "$(dirname "$file")/$included")
        included=$folder
      fi
      [[ ${included%%/*} =~ ^($areas)$ && $included == */* ]] || continue
      may_include "$file" "$included" || echo "${line%%:*}:$(cut -d: -f2 <<<"$line"): includes $included"
    done
}

plant() { # DIR FILE TEXT
  mkdir -p "$1/$(dirname "$2")"
  printf '/* planted */\n%s\n' "$3" >"$1/$2"
}

self_check() {
  local breaches
  dir=$(mktemp -d) # the trap outlives this function
  trap 'rm -rf "$dir"' EXIT
  mkdir -p "$dir"/{cache,kernels,proto,clients,daemon}
  # allowed
  plant "$dir" daemon/a.c '#include "cache/kv.h"'
  plant "$dir" daemon/b.c '#include "proto/wire.h"'
  plant "$dir" cache/a.c '#include "proto/attn_types.h"'
  plant "$dir" cache/b.c '#include <stdio.h>'
  plant "$dir" kernels/b.c '#include "proto/attn_time.h"'
  plant "$dir" kernels/gpu/a.cu '#include "kernels/gpu/vendor/gpu.h"'
  plant "$dir" clients/a.c '#include "proto/wire.h"'
  plant "$dir" clients/attnload_verify.c '#include "kernels/reference.h"'
  # not allowed, nine
  plant "$dir" cache/bad1.c '#include "kernels/backend.h"'
  plant "$dir" kernels/bad2.h '#include "cache/kv.h"'
  plant "$dir" kernels/gpu/bad3.cu '  #  include <daemon/engine.h>'
  plant "$dir" proto/bad4.c '#include "cache/kv.h"'
  plant "$dir" clients/bad5.c '#include "daemon/log.h"'
  plant "$dir" clients/bad6.c '#include "kernels/reference.h"'
  plant "$dir" daemon/bad7.c '#include "clients/attn.h"'
  plant "$dir" cache/sub/bad8.c '#include "../../proto/wire.h"'
  plant "$dir" kernels/bad9.c '#include "attnd.pb-c.h"'
  breaches=$(check_tree "$dir")
  for i in {1..9}; do
    grep -q "bad$i\." <<<"$breaches" || { echo "planted breach $i was not found"; return 1; }
  done
  [[ $(wc -l <<<"$breaches") == 9 ]] || { echo "more than was planted:"; echo "$breaches"; return 1; }
  echo "all 9 planted breaches were found, nothing else"
}

if [[ ${1:-} == --self-check ]]; then
  self_check
  exit
fi
tree=${1:-$(dirname "$0")/..}
[[ -d $tree/proto ]] || { echo "$tree is not the source tree" >&2; exit 2; }
breaches=$(check_tree "$tree")
if [[ -n $breaches ]]; then
  echo "$breaches"
  exit 1
fi
echo "every include keeps to its layer"
