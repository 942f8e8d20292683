#!/usr/bin/env bash
# scripts/package --deb makes packages that lintian has no error to tell of, and bare.sh tries them
# on the releases of Debian that are supported.
#
#   tests/package/debs.sh SOURCE_DIR [PART...]    parts: see bare.sh
set -euo pipefail
src=$1
shift
cd "$src"
for tool in dh lintian; do
  command -v $tool >/dev/null || { echo "skipped: no $tool: scripts/install-deps --package" && exit 77; }
done
rm -f dist/*.deb
scripts/package --deb
version=$(sed -nE 's/^project\(attnd VERSION ([0-9.]+) .*/\1/p' CMakeLists.txt)
for name in attnd attnd-tools libattn0 libattn-dev python3-attnd; do
  compgen -G "dist/${name}_${version}_*.deb" >/dev/null || { echo "no package $name of $version" && exit 1; }
done
# systemd refuses to restart a socket whose service runs
if dpkg-deb --ctrl-tarfile dist/attnd_*.deb | tar -xO ./postinst | grep attnd-http.socket; then
  echo "an upgrade restarts attnd-http.socket by itself" && exit 1
fi
lintian --fail-on error --allow-root dist/*.deb
for release in bookworm trixie; do
  tests/package/bare.sh $release "$src" dist "$@"
done
