#!/usr/bin/env bash
# On a bare Debian, in a chroot: the .debs with the tutorial's first steps, scripts/quickstart, the
# whole tutorial, and the start of scripts/test. Needs root, debootstrap, mount and Debian's mirror;
# skipped (77) without them.
#
#   tests/package/bare.sh RELEASE SOURCE_DIR DEB_DIR [PART...]
#
# RELEASE: bookworm or trixie. PART: debs, quickstart, tutorial, test; all.
# $BARE_BASE: a folder that debootstrap has made, instead of a new one.
set -euo pipefail
release=$1 src=$2 debs=$(realpath "$3")
shift 3
parts=${*:-debs quickstart tutorial test}
skip() {
  echo "skipped: $*"
  exit 77
}
[[ $(id -u) == 0 ]] || skip "not root"
[[ -n ${BARE_BASE-} ]] || command -v debootstrap >/dev/null || skip "no debootstrap"
compgen -G "$debs/attnd_*.deb" >/dev/null || skip "no packages in $debs: scripts/package --deb makes them"
# mounts of its own: they are gone with this process
if [[ -z ${BARE_INSIDE-} ]]; then
  unshare --mount true 2>/dev/null || skip "unshare --mount is refused"
  BARE_INSIDE=1 exec unshare --mount --propagation private "$0" "$release" "$src" "$debs" $parts
fi

dir=$(mktemp -d)
root=$dir/root
trap 'umount -lR "$root/proc" "$root/dev" 2>/dev/null || true; rm -rf --one-file-system "$dir"' EXIT
if [[ -n ${BARE_BASE-} ]]; then
  cp -a "$BARE_BASE" "$root"
else
  debootstrap --variant=minbase "$release" "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$dir/log" ||
    skip "debootstrap: $(tail -n 1 "$dir/log")"
fi
mount -t proc proc "$root/proc" 2>/dev/null || mount --bind /proc "$root/proc" || skip "mount is refused"
mount --rbind /dev "$root/dev"
cp /etc/resolv.conf "$root/etc/"
# where this machine reaches its package index through others, their certificates come along
cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/machine-ca.crt"
mkdir "$root/debs" "$root/attnd"
cp "$debs"/*.deb "$root/debs"
(cd "$src" && git ls-files -co --exclude-standard | xargs -d '\n' cp -a --parents -t "$root/attnd")

# bare WHAT: the commands of stdin, in the chroot, in a new environment
bare() {
  local start=$SECONDS rc=0
  env -i HOME=/root PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 TERM=dumb PIP_CERT=/etc/machine-ca.crt \
    DEBIAN_FRONTEND=noninteractive chroot "$root" bash -euo pipefail -s \
    < <(echo 'not() { ! "$@"; }' && cat) >"$dir/log" 2>&1 || rc=$? # "! x" alone ends no shell
  [[ $rc == 0 ]] || { tail -n 60 "$dir/log" >&2; echo "FAILED ($rc) on $release: $1" >&2; exit 1; }
  echo "ok on $release: $1 ($((SECONDS - start)) s)"
}

if [[ $parts == *debs* ]]; then
  bare "the packages install, serve, and go" <<'EOF'
apt-get update -qq
apt-get install -y -qq --no-install-recommends /debs/*.deb
getent passwd attnd
test -f /lib/systemd/system/attnd.service -a -f /lib/systemd/system/attnd-http.socket
grep -qx 'ExecStart=/usr/bin/attnd' /lib/systemd/system/attnd.service
sed -i 's/^#kv_memory = .*/kv_memory = 77M/' /etc/attnd/attnd.conf
install -d -o attnd -g attnd /run/attnd
RUNTIME_DIRECTORY=/run/attnd setpriv --reuid attnd --regid attnd --clear-groups --no-new-privs attnd &
attnctl --wait 60 ping
attnctl config get device.kv_memory | grep 77M
attnload --preset bytelm --context 32 --steps 4 --verify
sed -n '/^## 2\./,/^## 4\./p' /usr/share/doc/attnd/docs/tutorial.md 2>/dev/null >/tmp/page || true
[ -s /tmp/page ] || { sed -n '/^## 2\./,/^## 4\./p' /attnd/docs/tutorial.md >/tmp/page; }
sed -n '/^```python$/,/^```$/{/^```/!p}' /tmp/page | sed 's#ipc:///tmp/attnd-tutorial.sock#ipc:///run/attnd/attnd.sock#' >/tmp/page.py
python3 /tmp/page.py | tee /tmp/said
grep -q 'same as numpy: True' /tmp/said
apt-get install -y -qq --no-install-recommends gcc libc6-dev pkg-config
cc -std=c17 /attnd/clients/examples/example.c -o /tmp/example $(pkg-config --cflags --libs attn)
attnctl pool create demo --layers 1 --q-heads 8 --kv-heads 2 --head-dim 64 --dtype f32 --blocks 16
/tmp/example | grep 'ok; 10 tokens'
kill %1
wait %1
apt-get install -y -qq --reinstall -o Dpkg::Options::=--force-confold /debs/attnd_*.deb
grep -qx 'kv_memory = 77M' /etc/attnd/attnd.conf
documentation=$(sed -n 's/^Documentation=.*file://p' /lib/systemd/system/attnd.service)
[ -s "$documentation" ]
apt-get remove -y -qq attnd attnd-tools
not command -v attnd
grep -qx 'kv_memory = 77M' /etc/attnd/attnd.conf # settings stay until they are purged
apt-get purge -y -qq attnd attnd-tools libattn0 libattn-dev python3-attnd
not test -e /etc/attnd
EOF
fi
if [[ $parts == *quickstart* ]]; then
  bare "scripts/quickstart, from nothing" <<'EOF'
apt-get update -qq
cd /attnd
scripts/quickstart </dev/null | tee /tmp/quick
grep -q 'attnd left with exit code 0' /tmp/quick
not grep -q $'\r' /tmp/quick
[ "$(wc -l </tmp/quick)" -le 100 ] # quiet off a terminal
EOF
fi
if [[ $parts == *tutorial* ]]; then
  bare "the tutorial, word for word, in its virtual environment and out of it" <<'EOF'
cd /attnd
[ -x build/bin/attnd ]
python3 - <<'PAGE'
import re
shell, program, expected, is_skipped = ["set -e\n"], "", "", False
page = open("docs/tutorial.md").read()
# fenced blocks, and the commands that are indented
for kind, block, command in re.findall(r"^```([a-z ]+)\n(.*?)^```$|^    (\S.*?\n)", page, re.M | re.S):
    if kind == "python":
        program += block
    elif kind == "text" and not is_skipped:
        expected += block
    elif kind == "sh" and program:
        shell += ["venv/bin/python /tmp/page.py >/tmp/said.venv\n", "python3 /tmp/page.py >/tmp/said.path\n", block]
    elif kind == "sh" or command:
        shell.append(block + command)
    is_skipped = kind == "python torch"  # torch is not installed here
for path, text in ("/tmp/page.sh", "".join(shell)), ("/tmp/page.py", program), ("/tmp/expected", expected):
    open(path, "w").write(text)
PAGE
grep -q 'pip install' /tmp/page.sh
bash -x /tmp/page.sh
diff /tmp/expected /tmp/said.venv
diff /tmp/expected /tmp/said.path
cd /
/attnd/venv/bin/python -c '
import attnd
with attnd.Daemon() as daemon, daemon.connect() as client:
    print(attnd.__file__, client.info)'
EOF
fi
if [[ $parts == *test* ]]; then
  bare "scripts/test begins: packages are installed, the first build is under way (not waited for)" <<'EOF'
cd /attnd
setsid scripts/test >/tmp/test.log 2>&1 </dev/null &
while kill -0 $! && ! [ -e build-thread/build.ninja ]; do sleep 1; done
grep -q '^ok  *packages' /tmp/test.log || { cat /tmp/test.log; exit 1; }
[ -e build-thread/build.ninja ]
kill -- -$!
EOF
fi
