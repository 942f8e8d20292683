#!/usr/bin/env bash
# scripts/oci makes a valid image: every blob has the size and digest that its descriptor says, and
# from its root filesystem alone, in a chroot, attnd serves verified steps as the image's user.
#
#   tests/package/oci.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
src=$1 build=$2
skip() {
  echo "skipped: $*"
  exit 77
}
command -v umoci >/dev/null || skip "no umoci"
[[ $(id -u) == 0 ]] || skip "chroot needs root"
chroot / true 2>/dev/null || skip "chroot is refused"
dir=$(mktemp -d)
daemon=
trap '[[ -z $daemon ]] || kill -9 "$daemon" 2>/dev/null || true; umount "$dir/bundle/rootfs/proc" 2>/dev/null || true
  rm -rf --one-file-system "$dir"' EXIT
"$src/scripts/oci" "$build" "$dir/image"
python3 - "$dir/image" <<'EOF'
import gzip, hashlib, json, pathlib, sys
image = pathlib.Path(sys.argv[1])
seen = set()
def blob(d):
    kind, digest = d["digest"].split(":")
    data = (image / "blobs" / kind / digest).read_bytes()
    assert len(data) == d["size"] and hashlib.sha256(data).hexdigest() == digest, d
    seen.add(digest)
    return data
assert json.loads((image / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
(entry,) = json.loads((image / "index.json").read_text())["manifests"]
manifest = json.loads(blob(entry))
assert manifest["schemaVersion"] == 2, manifest
config = json.loads(blob(manifest["config"]))
ids = [f"sha256:{hashlib.sha256(gzip.decompress(blob(d))).hexdigest()}" for d in manifest["layers"]]
assert ids == config["rootfs"]["diff_ids"] and ids, (ids, config)
assert config["os"] == "linux" and config["config"]["User"] == "10001:10001", config
assert config["config"]["Entrypoint"] == ["/usr/bin/attnd"], config
assert seen == {f.name for f in (image / "blobs" / "sha256").iterdir()}, "blobs that nobody names"
EOF
umoci unpack --image "$dir/image:attnd" "$dir/bundle" >/dev/null
root=$dir/bundle/rootfs
mount -t proc proc "$root/proc" 2>/dev/null || mount --bind /proc "$root/proc" 2>/dev/null || skip "mount is refused"
inside=(env -i PATH="$PATH" RUNTIME_DIRECTORY=/run/attnd chroot --userspec=10001:10001 "$root")
"${inside[@]}" /usr/bin/attnd --listen.http off --device.kv_memory 64M >"$dir/log" 2>&1 &
daemon=$!
"${inside[@]}" /usr/bin/attnctl --wait 60 ping >/dev/null || { cat "$dir/log" && exit 1; }
"${inside[@]}" /usr/bin/attnload --preset bytelm --context 32 --steps 4 --verify >/dev/null
kill "$daemon"
wait "$daemon" || { echo "attnd left with $?" && cat "$dir/log" && exit 1; }
daemon=
echo "the image's files alone serve"
