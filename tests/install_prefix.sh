#!/usr/bin/env bash
# `cmake --install` writes below its prefix and nowhere else, and what it installs belongs together:
# attnd reads the settings that came with it, the unit and attn.pc have the real paths, manual pages
# are clean, settings that somebody changed stay.
#
#   tests/install_prefix.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
. "$(dirname "$0")/lib.sh"
src=$1 build=$2
export LC_ALL=C.UTF-8
prefix=$dir/a/prefix
cmake --install "$build" --prefix "$prefix" >"$dir/log" 2>&1 || die "$(cat "$dir/log")"
outside=$(sed -nE 's/^-- (Installing|Up-to-date): //p' "$dir/log" | grep -v "^$prefix/" || true)
[[ -z $outside && $(grep -c '^-- Installing' "$dir/log") -gt 50 ]] || die "outside of the prefix: $outside"
[[ $(ls -A "$dir") == $'a\nlog' && $(ls -A "$dir/a") == prefix ]] || die "beside the prefix: $(ls -A "$dir" "$dir/a")"

# its own settings, also through a link to the program; --config is another's
cd "$prefix"
sed -i 's/^#kv_memory = .*/kv_memory = 77M/' etc/attnd/attnd.conf
ln -s "$prefix/bin/attnd" "$dir/attnd"
for program in bin/attnd "$dir/attnd"; do
  env -i "$program" --print-config --listen "ipc://$dir/s" | grep -A1 "^# from $prefix/etc/attnd/attnd.conf:" |
    grep -qx 'kv_memory = 77M' || die "$program does not read $prefix/etc/attnd/attnd.conf"
done
env -i bin/attnd --print-config --listen "ipc://$dir/s" --config /dev/null | grep -q '^kv_memory = 1G' ||
  die "--config does not replace the installed file"
cmake --install "$build" --prefix "$prefix" >"$dir/log" 2>&1 || die "$(cat "$dir/log")"
grep -qx 'kv_memory = 77M' etc/attnd/attnd.conf || die "an upgrade changed the settings"
# of /usr/bin it is /etc/attnd/attnd.conf: as packages are made
DESTDIR=$dir/stage cmake --install "$build" --prefix /usr >"$dir/log" 2>&1 || die "$(cat "$dir/log")"
[[ -f $dir/stage/etc/attnd/attnd.conf && ! -e $dir/stage/usr/etc ]] || die "not in /etc: $(find "$dir/stage" -name attnd.conf)"
grep -qx 'ExecStart=/usr/bin/attnd' "$dir/stage/usr/lib/systemd/system/attnd.service" || die "the unit of /usr"

# real paths
grep -qx "ExecStart=$prefix/bin/attnd" lib/systemd/system/attnd.service || die "the unit has another path"
documentation=$(sed -n 's/^Documentation=file://p' lib/systemd/system/attnd.service)
[[ -f $documentation ]] || die "the unit's Documentation= is no file: $documentation"
[[ -f lib/systemd/system/attnd-http.socket && -f lib/sysusers.d/attnd.conf ]] || die "no socket unit or user"
pc=$(find "$prefix" -name attn.pc)
export PKG_CONFIG_PATH=${pc%/*}
${CC:-cc} -std=c17 -Wall -Wextra -Werror share/doc/attnd/examples/example.c -o "$dir/example" \
  $(pkg-config --cflags --libs attn) "-Wl,-rpath,$(pkg-config --variable=libdir attn)"

# the README's lines that compile its worker: with the tree and its build, and what is installed
mkdir "$dir/tree"
n_workers=0
ln -s "$src/clients" "$src/proto" "$dir/tree"
ln -s "$build" "$dir/tree/build"
sed -n '/^```c$/,/^```$/p' "$src/README.md" | sed '1d;$d' >"$dir/tree/worker.c"
sed -n 's/^    \(cc .*worker\.c .*\)/\1/p; s/.*`\(cc [^`]*worker\.c [^`]*\)`.*/\1/p' "$src/README.md" >"$dir/lines"
[[ $(wc -l <"$dir/lines") == 2 ]] || die "the README's lines that compile a worker: $(cat "$dir/lines")"
while read -r line; do
  (cd "$dir/tree" && bash -ec "$line") || die "$line"
  mv "$dir/tree/worker" "$dir/tree/worker$((++n_workers))"
done <"$dir/lines"

# the same by CMake's package, wherever the prefix is
mkdir "$dir/worker"
cp share/doc/attnd/examples/example.c "$dir/worker"
cat >"$dir/worker/CMakeLists.txt" <<'EOF'
cmake_minimum_required(VERSION 3.16)
project(worker C)
find_package(attn 0.2 REQUIRED)
add_executable(example example.c)
target_link_libraries(example PRIVATE attn::attn)
EOF
build_worker() { # PREFIX
  rm -rf "$dir/worker/build"
  cmake -S "$dir/worker" -B "$dir/worker/build" -G Ninja "-DCMAKE_PREFIX_PATH=$1" >"$dir/log" 2>&1 &&
    ninja -C "$dir/worker/build" >>"$dir/log" 2>&1 || die "find_package(attn) in $1: $(cat "$dir/log")"
}
build_worker "$prefix"
mv "$dir/worker/build/example" "$dir/example_cmake"

# the daemon, the tools, the C example and Python, all from there
bin/attnd --backend cpu --listen.http off --listen "ipc://$dir/s" >"$dir/log" 2>&1 &
daemon=$!
export ATTND_ENDPOINT=ipc://$dir/s
bin/attnctl --wait 60 ping >/dev/null || die "$(cat "$dir/log")"
bin/attnctl pool create demo --layers 1 --q-heads 8 --kv-heads 2 --head-dim 64 --dtype f32 --blocks 16 >/dev/null
[[ $("$dir/example") == "ok; 10 tokens, out[0] = 3" ]] || die "the example says: $("$dir/example")"
for worker in worker1 worker2; do
  [[ $(LD_LIBRARY_PATH=$(pkg-config --variable=libdir attn) "$dir/tree/$worker") == "ok; 10 tokens, out[0] = 3" ]] || die "the README's $worker"
done
[[ $("$dir/example_cmake") == "ok; 10 tokens, out[0] = 3" ]] || die "the example says: $("$dir/example_cmake")"
python=$(dirname "$(find . -path '*/attnd/__init__.py')")
PYTHONPATH=${python%/*} /usr/bin/python3 -c 'import attnd; print(attnd.connect().pool("demo").spec.head_dim_k)' >"$dir/out" ||
  die "python"
[[ $(cat "$dir/out") == 64 ]] || die "python says: $(cat "$dir/out")"
stop

# the tarball: unpacked anywhere it is an installation of its own, whose unit expects it in /opt
(cd "$dir" && cpack -G TGZ -B "$dir/pack" --config "$build/CPackConfig.cmake" \
  -D CPACK_PRE_BUILD_SCRIPTS="$src/scripts/bundle.cmake" >"$dir/log" 2>&1) || die "$(cat "$dir/log")"
mkdir "$dir/else"
tar -xf "$dir"/pack/attnd-*.tar.gz -C "$dir/else"
tree=$(echo "$dir"/else/attnd-*)
grep -qx "ExecStart=/opt/${tree##*/}/bin/attnd" "$tree/lib/systemd/system/attnd.service" || die "the tarball's unit"
sed -i 's/^#kv_memory = .*/kv_memory = 78M/' "$tree/etc/attnd/attnd.conf"
env -i "$tree/bin/attnd" --print-config --listen "ipc://$dir/s" | grep -qx 'kv_memory = 78M' || die "the tarball's settings"
(
  export PKG_CONFIG_PATH=$tree/lib/pkgconfig
  ${CC:-cc} -std=c17 "$tree/share/doc/attnd/examples/example.c" -o "$dir/example" $(pkg-config --cflags --libs attn)
)
build_worker "$tree"
[[ -z $(grep -rl "$dir/pack" "$tree/lib" "$tree/etc" "$tree/share" || true) ]] || die "the tarball names the folder it was made in"

# what is read
cd "$prefix"
for page in man1/attnctl.1 man1/attnload.1 man1/attnbench.1 man5/attnd.conf.5 man8/attnd.8; do
  file=share/man/$page
  [[ $(grep -c '^\.TP' "$file") -ge 10 ]] || die "$page has few entries"
  for option in $(sed -nE 's/^ {2,4}(--[a-z_.-]+).*/\1/p' <("bin/$(basename "${page%.*}")" --help 2>/dev/null || true)); do
    grep -qF -- "\\fB${option//-/\\-}" "$file" || die "$page lacks $option"
  done
  if command -v mandoc >/dev/null; then mandoc -Tlint "$file" || die "mandoc: $page"; fi
  if command -v groff >/dev/null; then
    said=$(groff -man -ww -z "$file" 2>&1) && [[ -z $said ]] || die "groff: $page: $said"
  fi
done
for section in SIGNALS 'EXIT STATUS' FILES EXAMPLES 'SEE ALSO'; do grep -qx "\.SH $section" share/man/man8/attnd.8 || die "$section"; done
for word in SIGHUP SIGUSR2 75 78 /run/attnd/attnd.sock; do grep -qF "\\fB$word" share/man/man8/attnd.8 || die "attnd(8) lacks $word"; done
for section in device listen cache engine log stats; do grep -qx "\.SS \[$section\]" share/man/man5/attnd.conf.5 || die "$section"; done
bash -n share/bash-completion/completions/attnctl
for file in README.md docs/{operations,tutorial}.md docs/monitoring/alerts.yml examples/bytelm.c examples/serve.py \
  examples/attnd.conf examples/network.conf examples/mps.conf; do
  [[ -s share/doc/attnd/$file ]] || die "no share/doc/attnd/$file"
done
[[ -s share/zsh/site-functions/_attnctl && -s share/fish/vendor_completions.d/attnctl.fish ]] || die "no completions"
echo "what is installed stands alone"
