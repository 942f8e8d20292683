#!/usr/bin/env bash
# The tracked files alone are enough, without git or its history: they configure, and the client
# library builds from them. And no build that has been made read a file of this folder that is not
# tracked.
#
#   tests/clean_copy.sh BUILD_DIR
set -euo pipefail
build=$1
cd "$(dirname "$0")/.."
if ! why=$(git ls-files --error-unmatch README.md 2>&1); then
  echo "skipped: not a checkout: $why"
  exit 77
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
git ls-files | sort >"$dir/tracked"

# what compilers read, of this folder and not of a build's
(
  root=$PWD
  cd "$build"
  ninja -t deps | sed -n 's|^    ||p' | sort -u | xargs -d '\n' realpath -m --relative-to="$root"
) | sort -u | grep -vE '^(\.\./|build[^/]*/)' >"$dir/read" || true
[[ -s $dir/read ]] || { echo "$build has no record of what its compilers read" >&2; exit 1; }
if missing=$(comm -23 "$dir/read" "$dir/tracked" | grep .); then
  echo "read by a compiler and not tracked:" $missing >&2
  exit 1
fi

mkdir "$dir/copy"
xargs -d '\n' cp -a --parents -t "$dir/copy" <"$dir/tracked"
cd "$dir/copy"
export GIT_CEILING_DIRECTORIES=$dir
cmake -S . -B build -G Ninja -DATTND_CUDA=OFF -DATTND_HIP=OFF >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
ninja -C build attnctl attn_example >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
build/bin/attnctl --help >/dev/null
tests/layers.py .
tests/readme.sh

# the commit that attnd --version names: none here, nor of a checkout around; else git's
commit_is() { # WORDS FOLDER
  cmake "-DSOURCE=$2" -DOUT="$dir/commit.h" -P daemon/process/commit.cmake
  grep -qxE "#define ATTND_COMMIT \"$1\"" "$dir/commit.h" || { echo "commit: $(cat "$dir/commit.h"), not $1" >&2; exit 1; }
}
commit_is unknown .
mkdir -p "$dir/git/inside"
git -C "$dir/git" init -q
echo one >"$dir/git/file"
git -C "$dir/git" add file
git -C "$dir/git" -c user.name=x -c user.email=x@x commit -q -m x
commit_is unknown "$dir/git/inside"
commit_is "$(git -C "$dir/git" rev-parse --short=12 HEAD)" "$dir/git"
touch -d @1 "$dir/commit.h" # what is the same stays, so that nothing is built anew
commit_is '[0-9a-f]{12}' "$dir/git"
[[ $(stat -c %Y "$dir/commit.h") == 1 ]] || { echo "commit.h is written again" >&2; exit 1; }
echo two >"$dir/git/file"
commit_is '[0-9a-f]{12}-dirty' "$dir/git"
echo "the tracked files are enough"
