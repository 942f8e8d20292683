#!/usr/bin/env bash
# What scripts/install-deps does with packages that are here, that apt-get brings, that it does not
# bring, and without apt-get; with commands in their places that only tell what they were asked.
set -euo pipefail
script=$(cd "$(dirname "$0")/.." && pwd)/scripts/install-deps
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/bin"
for tool in bash cat env grep mktemp rm sed uname; do ln -s "$(command -v $tool)" "$dir/bin/$tool"; done
command_says() { # command_says NAME EXIT_CODE TEXT
  printf '#!/usr/bin/env bash\necho "$0 $*" >>"%s"\necho "%s"\nexit %s\n' "$dir/asked" "$3" "$2" \
    >"$dir/bin/$1"
  chmod +x "$dir/bin/$1"
}
# expect CODE: of install-deps, whose words are in $dir/out
expect() {
  local rc=0
  : >"$dir/asked"
  PATH=$dir/bin "$script" --test >"$dir/out" 2>&1 || rc=$?
  [[ $rc == "$1" ]] || { echo "exit code $rc, not $1:" && cat "$dir/out" && exit 1; }
}
has() { grep -qE -e "$1" "$2" || { echo "no \"$1\" in:" && cat "$2" && exit 1; }; }

expect 0
has 'no apt-get here' "$dir/out"
has 'libcmocka-dev' "$dir/out"

command_says dpkg-query 0 'install ok installed'
command_says apt-get 1 'E: Unable to fetch some archives'
command_says id 0 0
expect 0
[[ ! -s $dir/out ]] || { cat "$dir/out" && exit 1; } # all is there: no word
[[ $(cat "$dir/asked") != *apt-get* ]] || { cat "$dir/asked" && exit 1; }

command_says dpkg-query 1 ''
expect 1
has 'Unable to fetch' "$dir/out"
has 'cannot install: .*libcmocka-dev' "$dir/out"

command_says apt-get 0 ''
expect 0
has '^installing: .*libcmocka-dev' "$dir/out"
has 'apt-get install .*--no-install-recommends .*libcmocka-dev' "$dir/asked"

command_says id 0 1000
expect 1
has 'needs root or sudo' "$dir/out"
echo "packages are asked for where they can be had"
