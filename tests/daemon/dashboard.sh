#!/usr/bin/env bash
# The page at /: what is served is the file, it asks nobody but its own daemon, and, if there is a
# Chromium, it shows what the daemon does.
#
#   tests/daemon/dashboard.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
here=$(cd "$(dirname "$0")" && pwd)
html=$here/../../daemon/dashboard.html
grep -nE 'https?:|//[a-z]+\.|@import|url\(|src=' "$html" | grep -v 'http://www.w3.org/2000/svg' && die "the page asks others"

export ATTND_ENDPOINT=ipc://$dir/s
printf '[research]\nusers = %s\n' "$(id -u)" >"$dir/tenants"
chmod 600 "$dir/tenants"
"$bin/attnd" --backend cpu --device.kv_memory 64M --listen "$ATTND_ENDPOINT" --listen.tenants "$dir/tenants" --listen.http 127.0.0.1:0 >"$dir/log" 2>&1 &
daemon=$!
"$bin/attnctl" --wait 60 pool create '<b>shown</b>' --layers 1 --q-heads 2 --kv-heads 2 --head-dim 8 --blocks 9 >/dev/null
port=$(http_port "$dir/log")
page / >/dev/null
sed '1,/^\r$/d' "$dir/page" | cmp - "$html" || die "the page is not the file"
grep -q "^Content-Security-Policy: default-src 'none'" "$dir/page" || die "no policy"

chromium=$(command -v chromium || command -v chromium-browser || true)
[[ -n $chromium ]] || skip "no chromium to look at the page with"
"$bin/attnload" --preset bytelm --sequences 2 --context 20 --duration 600 >/dev/null 2>&1 &
beside=$!
for look in 1 2 3; do # a browser on a busy machine may have seen one answer only
  timeout 120 "$chromium" --headless=new --no-sandbox --disable-gpu --user-data-dir="$dir/profile" \
    --virtual-time-budget=8000 --dump-dom "http://127.0.0.1:$port/" >"$dir/dom" 2>/dev/null || die "the browser: $?"
  grep -q 'id="card-steps"' "$dir/dom" && break
done
kill "$beside"
wait "$beside" || true
beside=
for text in '>serving<' '&lt;b&gt;shown&lt;/b&gt;' 'id="card-steps"' '<polyline points="[0-9]' 'id="card-total-ipc"' 'id="card-fill"' '<td>device</td>' '<td>research</td>'; do
  grep -qE -e "$text" "$dir/dom" || die "no $text in the page: $(head -c 3000 "$dir/dom")"
done
grep -q '<b>shown' "$dir/dom" && die "a pool's name is taken for HTML"
stop
echo "the page shows what the daemon does"
